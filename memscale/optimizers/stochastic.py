"""`round_stochastically`: rounds bfloat16 parameters up or down at random, so that the mean is exact."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from memscale.algebra import Numbers
from memscale.core import ConfigError, Misfit, by_name, integer
from memscale.optimizers.in_float32 import StepInFloat32
from memscale.optimizers.step_parts import PartedOptimizer, StepPart, check_whole
from memscale.optimizers.transformed import OptimizerTransform

_COUNT = "roundings"  # how often the parameter has stepped; with the seed and its index, the seed of its generator


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
    """An optimizer transform that rounds bfloat16 parameters at random, so that small steps count on average.

    A step is often less than half of a bfloat16's last place, and rounding to the nearest then loses all of it. This
    transform rounds a number up with a probability equal to its distance from the lower neighbour, as a share of the
    gap:

    >>> import torch, memscale as ms
    >>> weight = torch.nn.Parameter(torch.ones(10000, dtype=torch.bfloat16))
    >>> optimizer = ms.round_stochastically()(torch.optim.SGD([weight], lr=1.0))
    >>> for _ in range(100):
    ...     weight.grad = torch.full_like(weight, 2.0**-12)
    ...     optimizer.step()
    >>> (weight.float().mean() - (1 - 100 * 2.0**-12)).abs() < 0.0005  # plain bfloat16 would still be 1
    tensor(True)

    The contract: each step is the optimizer's own in float32, over the bfloat16 numbers. Afterwards parameters, and
    moments that the optimizer keeps in bfloat16, are rounded to one of their two bfloat16 neighbours; the mean of the
    result is the float32 number. Numbers that bfloat16 represents exactly, infinity and NaN stay unchanged. The
    random numbers depend only on `seed`, the index of the parameter in the optimizer and its number of steps: PyTorch's
    generators are untouched, and a run resumed from a `state_dict` equals the uninterrupted run, bit for bit.
    Parameters of other types step as usual.

    Args:
        seed: the seed of the random numbers; data-parallel processes with whole parameters must use the same seed.

    Raises:
        ConfigError: `seed` is not an int of at least 0.
        TransformError: on application, if the optimizer does not treat each parameter alone (LBFGS), or is already
            under `compensate_rounding`.

    Cost: no lasting memory; pays random numbers and a pass over parameters and moments in each step. The parameter
    keeps 8 significant bits; `compensate_rounding` keeps 24, for two more bytes.

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
        self._random: dict[int, torch.Generator] = {}  # by the id of a parameter in this step

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
        moment = self.optimizer._evidence.moments_of(parameter, parameter.dtype).get(name)
        if moment is not None and moment.dtype == torch.bfloat16:
            of(self.room(parameter, name, torch.bfloat16)).copy_(self._rounded(parameter, values))
        else:
            of(self.room(parameter, name, values.dtype)).copy_(values)

    def _rounded(self, parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Rounds each of `values` at random to one of its two bfloat16 neighbours."""
        random = self._random[id(parameter)]
        noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=random)
        # A float's bits, read as an integer, grow with its magnitude: the carry out of the lower 16 rounds away from
        # zero.
        noise.add_(values.view(torch.int32)).bitwise_and_(-(2**16))
        # Infinity has the largest exponent; adding to its lower bits would make it NaN.
        return torch.where(values.abs() < torch.inf, noise.view(torch.float32), values).to(torch.bfloat16)
