"""`compensate_rounding`: keeps the 16 bits that rounding to bfloat16 cuts off, and uses them in the next step."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from memscale.algebra import Numbers
from memscale.core import by_name
from memscale.optimizers.in_float32 import StepInFloat32
from memscale.optimizers.step_parts import PartedOptimizer, StepPart
from memscale.optimizers.transformed import OptimizerTransform

_LOW = "low_bits"  # the lower half of the float32 number whose upper half is the parameter


@dataclasses.dataclass(frozen=True, repr=False)
class CompensateRounding(OptimizerTransform):
    """See `compensate_rounding`."""

    spelling: ClassVar[str] = "compensate_rounding"
    own_numbers: ClassVar[Numbers] = "rounds"
    innermost: ClassVar[bool] = True

    def part(self, optimizer: PartedOptimizer, inner: StepPart) -> StepPart:
        return _Compensated(self, optimizer, inner)


@by_name
def compensate_rounding() -> OptimizerTransform:
    """An optimizer transform that trains bfloat16 parameters to the numbers of float32 ones, for two more bytes each.

    A step is often less than half of a bfloat16's last place, and rounding then loses all of it. This transform keeps
    the 16 bits that rounding cuts off as a state, so that no step is lost:

    >>> import torch, memscale as ms
    >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    >>> optimizer = ms.compensate_rounding()(torch.optim.SGD([weight], lr=1.0))
    >>> for _ in range(100):
    ...     weight.grad = torch.full_like(weight, 2.0**-12)
    ...     optimizer.step()
    >>> weight[0].item(), 1 - 100 * 2.0**-12  # plain bfloat16 would still be 1
    (0.9765625, 0.9755859375)

    The contract: each parameter is the nearest bfloat16 (ties away from zero) of a float32 number. These float32
    numbers and the states of the optimizer are, bit for bit, those of the same optimizer over float32 parameters with
    the same gradients in float32. Parameters of other types step as usual. If other code writes to a parameter between
    steps, training goes on from the written value, to less than half of its last place.

    The method is Kahan summation with an exact remainder: a float32 weight stored in two halves.

    Raises:
        TransformError: on application, if the optimizer does not treat each parameter alone (LBFGS), or is already
            under `round_stochastically`.

    Cost: saves the float32 weights and autocast's casts of them; pays two bytes per number, moments in float32
    (`quantize_states` makes them small), and one pass over the parameters in each step.

    Source: Zamirai et al., "Revisiting BFloat16 Training" (2020), section 3, where the remainder is a bfloat16.
    """
    return CompensateRounding()


class _Compensated(StepInFloat32):
    own_states: ClassVar[frozenset[str]] = frozenset([_LOW])

    def states_like(self, parameter: torch.Tensor) -> torch.dtype:
        return torch.float32 if parameter.dtype == torch.bfloat16 else parameter.dtype

    def widened(self, parameter: torch.Tensor, of: Any) -> torch.Tensor:
        bits: torch.Tensor = of(parameter).view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
        if _LOW in self.optimizer.state.get(parameter, {}):
            low = of(self.optimizer.state[parameter][_LOW]).to(torch.int32)
            # Code may have set the parameter to zero since: a negative remainder of zero has no bit pattern.
            bits += torch.where(bits.bitwise_and(0x7FFFFFFF) == 0, low.clamp(min=0), low)
        return bits.view(torch.float32)

    def narrow(self, parameter: torch.Tensor, of: Any, values: torch.Tensor) -> None:
        bits = values.view(torch.int32)
        upper = (bits + 0x8000).bitwise_right_shift_(16).to(torch.int16)
        # Adding 0x8000 to the bits of a NaN would wrap around to zero.
        upper = torch.where(values.isnan(), values.to(torch.bfloat16).view(torch.int16), upper)
        low = bits - upper.to(torch.int32).bitwise_left_shift_(16)
        of(self.room(parameter, _LOW, torch.int16)).copy_(low)
        of(parameter).view(torch.int16).copy_(upper)

    def keep(self, parameter: torch.Tensor, of: Any, name: str, values: torch.Tensor) -> None:
        of(self.room(parameter, name, values.dtype)).copy_(values)
