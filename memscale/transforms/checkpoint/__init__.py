"""`checkpoint`: keep a region's inputs, recompute the rest. The policies that keep more are in `memscale.policies`."""

from memscale.transforms.checkpoint.factory import Checkpoint, Checkpointed, checkpoint
from memscale.transforms.checkpoint.recompute import recomputed_regions
from memscale.transforms.checkpoint.selective import is_view

__all__ = ["Checkpoint", "Checkpointed", "checkpoint", "is_view", "recomputed_regions"]
