"""What each candidate holds and takes: steps are simulated in which many are tried at once."""
