"""`round_stochastically`: parameters in bfloat16 that are rounded up or down by chance, right on average."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from memscale.algebra import Numbers
from memscale.core import ConfigError, Misfit, by_name, integer
from memscale.optimizers.in_float32 import StepInFloat32
from memscale.optimizers.parts import PartedOptimizer, StepPart, check_whole
from memscale.optimizers.transformed import OptimizerTransform

_COUNT = "roundings"  # steps of the parameter: with the seed and its place, what its random numbers come from


@dataclasses.dataclass(frozen=True, repr=False)
class RoundStochastically(OptimizerTransform):
    """See `round_stochastically`."""

    spelling: ClassVar[str] = "round_stochastically"
    own_numbers: ClassVar[Numbers] = "rounds"
    innermost: ClassVar[bool] = True

    seed: int = 0

    def part(self, optimizer: PartedOptimizer, inner: StepPart) -> StepPart:
        return _Stochastic(self, optimizer, inner)


@by_name
def round_stochastically(*, seed: int = 0) -> OptimizerTransform:
    """An optimizer transform: what steps in bfloat16 is rounded by chance, so that small steps count on average.

    A step is often less than half of a bfloat16's last place, and rounding to the nearest then loses all of it. Here a
    number is rounded up with the probability that is its share of the way up:

    >>> import torch, memscale as ms
    >>> weight = torch.nn.Parameter(torch.ones(10000, dtype=torch.bfloat16))
    >>> optimizer = ms.round_stochastically()(torch.optim.SGD([weight], lr=1.0))
    >>> for _ in range(100):
    ...     weight.grad = torch.full_like(weight, 2.0**-12)
    ...     optimizer.step()
    >>> (weight.float().mean() - (1 - 100 * 2.0**-12)).abs() < 0.0005  # plain bfloat16 would still be 1
    tensor(True)

    The contract: each step is the optimizer's own in float32, over the numbers in bfloat16; then parameters, and those
    moments that the optimizer keeps in bfloat16, are rounded to one of the two bfloat16 on either side, whose mean is
    the number in float32. What bfloat16 can say is not changed, nor are infinity and NaN. The random numbers come from
    `seed`, the place of the parameter in the optimizer and its count of steps alone: PyTorch's generators are left as
    they are, and a run that goes on from a `state_dict` is the run that was not interrupted, bit for bit. Parameters of
    other types step as ever.

    Args:
        seed: of the random numbers; runs on several processes with whole parameters on each must have the same.

    Raises:
        ConfigError: `seed` is not an int of at least 0.
        TransformError: when it is applied, if the optimizer does not treat each parameter alone (LBFGS), or rounds by
            `compensate_rounding` already.

    Cost: no memory that stays; random numbers and a pass over parameters and moments in each step. Of all that was
    computed 8 bits are left: `compensate_rounding` keeps 16 more, in two bytes.

    Source: Zamirai et al., "Revisiting BFloat16 Training" (2020), section 3.
    """
    try:
        return RoundStochastically(integer(0)(seed))
    except Misfit as misfit:
        raise ConfigError(f"round_stochastically(seed={seed!r}) {misfit}") from None


class _Stochastic(StepInFloat32):
    own_states: ClassVar[frozenset[str]] = frozenset([_COUNT])

    def __init__(self, how: RoundStochastically, optimizer: PartedOptimizer, inner: StepPart) -> None:
        super().__init__(how, optimizer, inner)
        self._seed = how.seed
        self._orders: dict[int, int] = {}
        self._random: dict[int, torch.Generator] = {}  # of the parameters that step just now

    def attend(self, parameters: list[torch.Tensor]) -> None:
        check_whole(repr(self.how), parameters)
        super().attend(parameters)
        self._orders = {key: order for order, key in enumerate(self.optimizer._places())}

    def widened(self, parameter: torch.Tensor, of: Any) -> torch.Tensor:
        return of(parameter).to(torch.float32)  # type: ignore[no-any-return]

    def begin(self, parameter: torch.Tensor) -> None:
        states = self.optimizer.state[parameter]
        count = states[_COUNT] = states.get(_COUNT, 0) + 1
        place = self._orders[id(self.optimizer._twins.get(id(parameter), parameter))]
        seed = 0
        for part in (self._seed, place, count):
            seed = ((seed ^ part) * 0x9E3779B97F4A7C15 + 1) % 2**64
            seed ^= seed >> 29
        self._random[id(parameter)] = torch.Generator(parameter.device).manual_seed(seed % 2**63)

    def narrow(self, parameter: torch.Tensor, of: Any, values: torch.Tensor) -> None:
        of(parameter).copy_(self._rounded(parameter, values))

    def keep(self, parameter: torch.Tensor, of: Any, name: str, values: torch.Tensor) -> None:
        known = {
            moment.dtype
            for moment in self.optimizer._evidence.moments
            if (moment.dims, moment.of, moment.name) == (parameter.dim(), parameter.dtype, name)
        }
        if known == {torch.bfloat16}:
            of(self.room(parameter, name, torch.bfloat16)).copy_(self._rounded(parameter, values))
        else:
            of(self.room(parameter, name, values.dtype)).copy_(values)

    def _rounded(self, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """To one of the two bfloat16 on either side of each number."""
        random = self._random[id(parameter)]
        noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=random)
        # The bits of a number grow with its magnitude: what is added to the lower half carries as often as it should.
        noise.add_(values.view(torch.int32)).bitwise_and_(-(2**16))
        # Infinity has the largest bits that a number has, and adding to them makes NaN of it.
        return torch.where(values.abs() < torch.inf, noise.view(torch.float32), values).to(torch.bfloat16)
