"""The transforms: one file each, and the policies they take."""

from memscale.transforms._cast import cast
from memscale.transforms._checkpoint import checkpoint
from memscale.transforms._name import name
from memscale.transforms._offload import offload
from memscale.transforms._residuals import Residual, saved_residuals
from memscale.transforms._tile import tile

__all__ = ["Residual", "cast", "checkpoint", "name", "offload", "saved_residuals", "tile"]
