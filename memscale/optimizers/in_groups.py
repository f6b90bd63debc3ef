"""`step_in_groups`: steps a few parameters at a time, so that the step's temporaries are those of a few parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import torch

from memscale.core import budget_bytes, by_name, device_type
from memscale.optimizers.step_parts import Group, PartedOptimizer, StepPart, in_turn
from memscale.optimizers.transformed import OptimizerTransform


@dataclasses.dataclass(frozen=True, repr=False)
class StepInGroups(OptimizerTransform):
    """See `step_in_groups`."""

    spelling: ClassVar[str] = "step_in_groups"

    group_bytes: int

    def part(self, optimizer: PartedOptimizer, inner: StepPart) -> StepPart:
        return _InGroups(self, optimizer, inner)


@by_name
def step_in_groups(*, group_bytes: int | str) -> OptimizerTransform:
    """An optimizer transform whose `step` goes over at most `group_bytes` of parameters at a time.

    A ``foreach`` optimizer, the default on CUDA, makes its temporaries for all parameters at once: as many bytes as
    the weights have, or several times that. With groups the temporaries are those of one group. The numbers stay the
    same:

    >>> import torch, memscale as ms
    >>> parameters = [torch.nn.Parameter(torch.ones(1024)) for _ in range(64)]
    >>> for parameter in parameters:
    ...     parameter.grad = torch.ones_like(parameter)
    >>> optimizer = torch.optim.AdamW(parameters, foreach=True)
    >>> optimizer.step()
    >>> ms.measure(optimizer.step).growth_bytes // 2**10
    256
    >>> optimizer = ms.step_in_groups(group_bytes="16KiB")(optimizer)
    >>> ms.measure(optimizer.step).growth_bytes // 2**10
    16

    Args:
        group_bytes: the most bytes of parameters that step at once, such as ``2**26`` or ``"64MiB"``. A larger
            parameter steps alone; parameters that stream and parameters on the device step in separate groups. A
            ``fused`` optimizer has no temporaries, and a ``foreach=False`` one has those of a single parameter: both
            gain nothing.

    Raises:
        ConfigError: `group_bytes` is not a positive number of bytes.
        TransformError: on application, if the optimizer does not treat each parameter alone (LBFGS).

    Cost: saves temporaries; pays one call of the optimizer per group.
    """
    return StepInGroups(budget_bytes(group_bytes, 0, argument="step_in_groups: group_bytes"))


class _InGroups(StepPart):
    def advance(self, group: Group) -> None:
        for now in in_turn(group, at_most(self.how.group_bytes, group["params"])):
            self.inner.advance(now)


def at_most(nbytes: int, parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields `parameters` in order, in lists of at most `nbytes` bytes; a larger parameter is a list of its own.

    Each list is of one device: PyTorch's foreach steps fall back to one parameter at a time if any is on a CPU.
    """
    few: list[torch.Tensor] = []
    total = 0
    for parameter in parameters:
        if few and (total + parameter.nbytes > nbytes or device_type(parameter) != device_type(few[-1])):
            yield few
            few, total = [], 0
        few.append(parameter)
        total += parameter.nbytes
    if few:
        yield few
