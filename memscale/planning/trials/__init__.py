"""The costs of candidates in bytes and seconds, from simulated steps in which many candidates are tried at once."""
