"""The transforms: one file each, and the policies they take."""

from memscale.transforms.cast.factory import cast
from memscale.transforms.checkpoint import checkpoint
from memscale.transforms.labels import listeners, name
from memscale.transforms.offload.factory import offload
from memscale.transforms.tile.factory import tile

__all__ = [
    "cast",
    "checkpoint",
    "listeners",
    "name",
    "offload",
    "tile",
]
