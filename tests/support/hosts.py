"""Hosts of cards, for steps so small that they would otherwise wait for their host and for nothing else."""

#: One that is quick, for `Hardware(call_seconds=...)`.
QUICK_HOST = dict.fromkeys(("operator", "backward", "view", "module"), 1e-6)
