"""What goes around an optimizer: the loss scale of float16 training."""

from memscale.optimizers.loss_scale import LossScale

__all__ = [
    "LossScale",
]
