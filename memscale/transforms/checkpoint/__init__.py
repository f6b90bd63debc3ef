"""`checkpoint`: keep a region's inputs, recompute the rest; and the policies that keep more."""

from memscale.transforms.checkpoint.factory import Checkpoint, Checkpointed, checkpoint
from memscale.transforms.checkpoint.policies import everything_saveable, nothing_saveable
from memscale.transforms.checkpoint.selective import is_view

__all__ = ["Checkpoint", "Checkpointed", "checkpoint", "everything_saveable", "is_view", "nothing_saveable"]
