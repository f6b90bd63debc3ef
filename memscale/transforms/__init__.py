"""The transforms of functions and modules: `cast`, `checkpoint`, `name`, `offload` and `tile`."""

from memscale.transforms.cast.factory import cast
from memscale.transforms.checkpoint import Cut, checkpoint, layers
from memscale.transforms.labels import listeners, name
from memscale.transforms.offload.factory import offload
from memscale.transforms.tile.factory import tile
from memscale.transforms.tile.independence import may_be_proven, proven_rows
