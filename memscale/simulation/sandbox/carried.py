"""What is known of values whose bytes lie on another tier: as much as before they went there, once they are back."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memscale.runtime.backends import Buffer
from memscale.simulation.dispatch.lazy_values import LazyValue
from memscale.simulation.dispatch.live_storages import LiveStorages, is_small


@dataclass(frozen=True)
class _Left:
    """What was known when the bytes left: as in a `StorageRecord`, and the bytes if they were real."""

    guess: str
    later: LazyValue | None
    values: torch.Tensor | None


class CarriedValues:
    """Follows what the runtimes of a simulation move; they move no byte themselves.

    Without it what comes back would have whatever the memory had that it comes back to, and a step that reads it (an
    index, a mask, which expert) would go another way each time.
    """

    def __init__(self, storages: LiveStorages) -> None:
        self._storages = storages
        self._left: weakref.WeakKeyDictionary[Buffer, _Left] = weakref.WeakKeyDictionary()

    def copied(self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer) -> None:
        """A copy is made, between a tensor of bytes and a buffer."""
        if isinstance(source, torch.Tensor):
            assert not isinstance(target, torch.Tensor)
            self._leave(source, target)
        else:
            assert isinstance(target, torch.Tensor)
            self._come_back(source, target)

    def _leave(self, tensor: torch.Tensor, buffer: Buffer) -> None:
        record = self._storages.record(tensor)
        whole = tensor.nbytes == tensor.untyped_storage().nbytes()
        values = None
        if record.known and record.later is None and is_small(tensor):
            with _disable_current_modes():
                values = tensor.clone()
        self._left[buffer] = _Left(record.guess, record.later if whole else None, values)

    def _come_back(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        record = self._storages.record(tensor)
        left = self._left.get(buffer)
        is_real = record.known
        record.known, record.later, record.guess = False, None, ""
        if left is None:
            return
        if left.values is not None and is_real:
            with _disable_current_modes():
                tensor[: left.values.numel()].copy_(left.values)
            record.known = True
        elif left.later is not None and tensor.nbytes == tensor.untyped_storage().nbytes():
            record.later = left.later
        record.guess = left.guess
