"""Parameters that live on a tier below the device, and their gradients; built on the engine."""

from memscale.runtime.parameters.host_copy import HostCopy
from memscale.runtime.parameters.mapped import Mapped, MappedTensors
from memscale.runtime.parameters.movable import is_movable
