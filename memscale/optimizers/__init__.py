"""Transforms of optimizers (offload, quantize, step in backward or in groups, round), and `LossScale` for float16."""

from memscale.core import factory
from memscale.optimizers.compensated import compensate_rounding
from memscale.optimizers.in_backward import step_in_backward
from memscale.optimizers.in_groups import step_in_groups
from memscale.optimizers.in_place import InPlace, counts_on_host
from memscale.optimizers.loss_scale import LossScale
from memscale.optimizers.offloaded import offload_states
from memscale.optimizers.quantized import quantize_states
from memscale.optimizers.stochastic import round_stochastically
from memscale.optimizers.transformed import (
    OptimizerTransform,
    TransformedOptimizer,
    as_plain,
    transformed,
    without_states,
)

for _make in (
    compensate_rounding, offload_states, quantize_states, round_stochastically, step_in_backward, step_in_groups
):  # fmt: skip
    factory(_make.__name__, _make)
