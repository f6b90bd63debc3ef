"""`checkpoint`: keep a region's inputs, recompute the rest. Policies that also keep results: `memscale.policies`."""

from memscale.transforms.checkpoint.cuts import Cut, layers
from memscale.transforms.checkpoint.factory import Checkpoint, Checkpointed, checkpoint
from memscale.transforms.checkpoint.recompute import recomputed_regions
from memscale.transforms.checkpoint.selective import is_view
