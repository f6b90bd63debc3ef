"""Live metrics of a process with a wrapped model, for Prometheus and for training logs."""

from memscale.observability.metrics import Metrics, memory_keys
from memscale.observability.ranks import local_rank, rank
from memscale.observability.server import Server, check_can_serve, serve

__all__ = ["Metrics", "Server", "check_can_serve", "local_rank", "memory_keys", "rank", "serve"]
