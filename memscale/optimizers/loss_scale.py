"""`LossScale`: an immutable loss scale for float16 gradients, with the semantics of `torch.amp.GradScaler`.

`GradScaler` keeps hidden state for each optimizer, so it cannot be printed, compared, or used with the gradients that
`torch.func.grad` returns. `LossScale` is a plain value, and reads one number from the device per step as well.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from numbers import Real
from typing import TypeVar

import torch

from memscale.core import ConfigError, CorrectnessError, pytrees, shown

T = TypeVar("T")

# Below this scale no float32 gradient overflows, so a further decrease could only lose small gradients.
_SMALLEST = 2.0**-40


@dataclasses.dataclass(frozen=True)
class LossScale:
    """A factor for the loss, as an immutable value; `step` returns the value for the next step.

    >>> import torch, memscale as ms
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> scale = ms.LossScale(factor=1024.0, interval_steps=1)
    >>> scale.scale(weight.sum()).backward()
    >>> weight.grad.tolist()
    [1024.0, 1024.0]
    >>> scale = scale.step(optimizer)
    >>> weight.tolist(), scale.factor
    ([0.5, 0.5], 2048.0)

    A step with an infinite or NaN gradient is skipped, and lowers the factor:

    >>> weight.grad[0] = float("inf")
    >>> scale = scale.step(optimizer)
    >>> weight.tolist(), scale.factor
    ([0.5, 0.5], 1024.0)

    Args:
        factor: the number that the loss is multiplied by.
        growth: multiplies the factor after `interval_steps` steps in a row without an overflow.
        backoff: multiplies the factor after an overflow.
        interval_steps: see `growth`.
        clean_steps: the steps without an overflow so far; part of the state, as `factor` is.

    Raises:
        ConfigError: a value is not a number, the factor is not positive and finite, `growth` is below 1, `backoff` is
            not in (0, 1), the interval is below 1, or the count is negative.

    Cost: one pass over the gradients, and one synchronization with the device per step.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.2; the defaults are those of
    ``torch.amp.GradScaler``.
    """

    factor: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval_steps: int = 2000
    clean_steps: int = 0

    def __post_init__(self) -> None:
        given = dataclasses.asdict(self)
        if wrong := [name for name, value in given.items() if isinstance(value, bool) or not isinstance(value, Real)]:
            raise ConfigError(f"LossScale: {wrong[0]} must be a number, got {given[wrong[0]]!r}")
        rules = {
            "factor": (0 < self.factor < math.inf, "positive and finite"),
            "growth": (1 <= self.growth < math.inf, "at least 1 and finite"),
            "backoff": (0 < self.backoff < 1, "between 0 and 1"),
            "interval_steps": (self.interval_steps >= 1, "at least 1"),
            "clean_steps": (self.clean_steps >= 0, "at least 0"),
        }
        wrong = [
            f"{name} must be {rule}, got {getattr(self, name)!r}" for name, (holds, rule) in rules.items() if not holds
        ]
        if wrong:
            raise ConfigError(f"LossScale: {'; '.join(wrong)}")

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns `loss * factor`, to call `backward` on or to return to `torch.func.grad`."""
        return loss * self.factor

    def unscale(self, gradients: T) -> tuple[T, bool]:
        """Returns the gradients of the loss itself, and whether one of them is infinite or NaN.

        Args:
            gradients: a tensor or any pytree of tensors, such as `torch.func.grad` returns; left unchanged.
        Raises:
            ConfigError: a gradient is float16, in which dividing by the factor underflows.
        """
        leaves, spec = pytrees.flatten(gradients)
        leaves = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        found_inf = self._divide([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return pytrees.unflatten(spec, leaves), found_inf

    def unscale_(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divides the gradients of an optimizer's parameters by the factor, in place, for example to clip them next.

        Returns:
            Whether one of them is infinite or NaN. Processes that shard parameters must agree on this before `update`.

        Raises:
            ConfigError: a gradient is float16, in which dividing by the factor underflows; or `optimizer` is none.
        """
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(f"LossScale takes an optimizer, got {shown(optimizer)}; write scale.step(optimizer)")
        parameters: Iterable[torch.Tensor] = (p for group in optimizer.param_groups for p in group["params"])
        return self._divide([parameter.grad for parameter in parameters if parameter.grad is not None])

    def update(self, found_inf: bool) -> LossScale:
        """Returns the loss scale for the next step, given whether this step found an overflow.

        Raises:
            CorrectnessError: the factor is so small that an infinite gradient cannot be an overflow.
        """
        if found_inf:
            factor = self.factor * self.backoff
            if factor < _SMALLEST:
                raise CorrectnessError(
                    f"gradients are infinite or not a number at a loss scale of {self.factor:g}, where none can "
                    "overflow: the model or its data has produced one. torch.autograd.set_detect_anomaly(True) "
                    "finds where"
                )
            return dataclasses.replace(self, factor=factor, clean_steps=0)
        if self.clean_steps + 1 < self.interval_steps:
            return dataclasses.replace(self, clean_steps=self.clean_steps + 1)
        # Beyond float32's range the scaled loss itself would be infinite.
        grown = self.factor * self.growth
        factor = grown if grown <= torch.finfo(torch.float32).max else self.factor
        return dataclasses.replace(self, factor=factor, clean_steps=0)

    def step(self, optimizer: torch.optim.Optimizer) -> LossScale:
        """Unscales the gradients, lets the optimizer step unless one overflowed, and returns the next loss scale.

        Call it once per step, after the last `backward` of a scaled loss: ``scale = scale.step(optimizer)``.

        Raises:
            ConfigError: as `unscale_`.
            CorrectnessError: as `update`.
        """
        found_inf = self.unscale_(optimizer)
        following = self.update(found_inf)
        if not found_inf:
            optimizer.step()
        return following

    def _divide(self, gradients: list[torch.Tensor]) -> bool:
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for gradient in gradients:
            if gradient.dtype == torch.float16:
                raise ConfigError(
                    f"LossScale: a gradient of shape {list(gradient.shape)} is float16, and dividing it by "
                    f"{self.factor:g} would underflow; keep the parameters in float32 and compute with "
                    "cast(compute=torch.float16)"
                )
            dense = gradient._values() if gradient.is_sparse else gradient
            groups.setdefault((dense.device, dense.dtype), []).append(dense)
        found = []
        with torch.no_grad():
            for (device, _), tensors in groups.items():
                found.append(torch.zeros((), device=device))
                inverse = torch.full((), 1.0 / self.factor, device=device)
                torch._amp_foreach_non_finite_check_and_unscale_(tensors, found[-1], inverse)
        return any(flag.item() > 0 for flag in found)
