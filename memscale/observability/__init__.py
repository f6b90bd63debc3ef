"""Live metrics of a process with a wrapped model, for Prometheus and for training logs."""

from memscale.observability.metrics import Metrics, memory_keys
from memscale.observability.ranks import local_rank, rank
from memscale.observability.server import Server, check_can_serve, serve
