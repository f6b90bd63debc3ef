"""A training loop written out by hand, and what it really takes by the allocator: the truth for `profile`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import memscale as ms
from memscale.simulation.measured.allocator_trace import measure, training_roles

# Autograd keeps the 8 bytes of a Python number beside a tensor until backward. These are not recorded: a few of them,
# less than the smallest tensor of any test.
NUMBERS_BYTES = 32

# A region that may draw random numbers keeps the generator's state, which no operator allocates.
RANDOM_STATE_BYTES = 5056

_MARK_BYTES = 13  # of an allocation that shows where a step begins


@dataclass
class Training:
    """What a user hands to `memscale.profile`, and the user's loop; `held` are tensors that no argument mentions.

    The loop lets go of the model's output before backward, unless it `keeps` the output until the next one.
    """

    model: nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer | None = None
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    accumulate: int = 1
    plan: Any = None
    keeps: bool = False
    held: Callable[[], Iterable[torch.Tensor]] = tuple

    def profile(self) -> ms.Profile:
        options = {"optimizer": self.optimizer, "loss": self.loss, "plan": self.plan, "accumulate": self.accumulate}
        return ms.profile(self.model, self.batch, keeps_output=self.keeps, **options)

    def step(self) -> None:
        model = self._transformed
        for _ in range(self.accumulate):
            if self.keeps:
                self._output = self._called(model)
                self._of(self._output).backward()
            else:
                self._of(self._called(model)).backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        model.zero_grad()

    @functools.cached_property
    def _transformed(self) -> nn.Module:
        return self.model if self.plan is None else ms.transform(self.model, self.plan)

    def _called(self, model: nn.Module) -> Any:
        if isinstance(self.batch, Mapping):
            return model(**self.batch)
        return model(self.batch) if isinstance(self.batch, torch.Tensor) else model(*self.batch)

    def _of(self, output: Any) -> torch.Tensor:
        if self.loss is not None:
            return self.loss(output, self.batch)
        return output if isinstance(output, torch.Tensor) else output["loss"]


def real_peaks(
    step: Callable[[], object],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    batch: Any = None,
    held: Callable[[], Iterable[torch.Tensor]] = tuple,
) -> tuple[int, int]:
    """The peak bytes of the first and of the third step, by PyTorch's allocator."""
    named = training_roles(model, optimizer, dict(batch) if isinstance(batch, Mapping) else batch)

    def roles():
        found = named()
        found["input"] += held()
        return {role: list(_plain(tensors)) for role, tensors in found.items()}

    def three_steps():
        # In one recording, since the allocator does not report the release of what was there when one began.
        for _ in range(3):
            torch.empty(_MARK_BYTES, dtype=torch.uint8)
            step()

    total = measure(three_steps, roles=roles).timeline.total_bytes
    changes = np.diff(total)
    marks = np.flatnonzero((changes[:-1] == _MARK_BYTES) & (changes[1:] == -_MARK_BYTES))
    assert len(marks) == 3
    return int(total[marks[0] + 2 : marks[1] + 1].max()), int(total[marks[2] + 2 :].max())


def _plain(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors that have a storage: a wrapper subclass has those that it holds."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and hasattr(tensor, "__tensor_flatten__"):
            yield from _plain([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        else:
            yield tensor


def assert_exact(training: Training) -> ms.Profile:
    """Profile first, then train for real: the bytes must be equal, and nothing may keep the model from running."""
    profile = training.profile()
    first, steady = real_peaks(training.step, training.model, training.optimizer, training.batch, held=training.held)
    assert profile.method == "static", profile.notes
    assert_equal_bytes(profile, first, steady)
    return profile


def assert_equal_bytes(profile: ms.Profile, first_step_bytes: int, steady_bytes: int) -> None:
    missed = first_step_bytes - profile.first_step_peak_bytes, steady_bytes - profile.peak_bytes
    assert all(-NUMBERS_BYTES <= bytes_ <= NUMBERS_BYTES for bytes_ in missed), (
        f"missed {missed} of {first_step_bytes, steady_bytes}"
    )


def mean(output: torch.Tensor, _: Any) -> torch.Tensor:
    return output.square().mean()
