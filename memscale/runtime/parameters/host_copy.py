"""`HostCopy`: copies a device tensor to the host, where the CPU changes it, and copies it back."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import NamedTuple

import torch

from memscale.runtime.engine.link import Copy
from memscale.runtime.engine.offload_engine import Engine
from memscale.runtime.parameters.mapped import Mapped
from memscale.runtime.parameters.movable import is_dense


class _Moving(NamedTuple):
    """Memory of the device, and the copy that reads or writes it."""

    memory: torch.Tensor
    copy: Copy

    def is_moving(self) -> bool:
        return self.copy.is_under_way()


class HostCopy:
    """A copy of a device tensor in memory of a tier. The constructor starts the copy.

    Args:
        engine: the engine of that device.
        mapped: the memory on the tier.
        contents: the same memory as a uint8 CPU tensor, of as many bytes as the tensor's numbers have.
        tensor: the device tensor, which the caller leaves unchanged until `arrived`.

    Attributes:
        values: the numbers on the host, a CPU tensor.
    """

    def __init__(self, engine: Engine, mapped: Mapped, contents: torch.Tensor, tensor: torch.Tensor) -> None:
        dense = tensor.detach()
        if not is_dense(dense) or dense.is_conj() or dense.is_neg():
            dense = torch.empty_like(dense).copy_(dense)
        self._engine, self._mapped = engine, mapped
        self._in: _Moving | None = None
        self._out: _Moving | None = None
        self.values = contents.view(dense.dtype).as_strided(dense.shape, dense.stride()).detach()
        source = _flat(dense)
        assert mapped.buffer is not None
        with engine.lock:
            copy = engine.transfers.ask_out([source], mapped.buffer, seconds=0.0)
            self._out = _Moving(source, copy)
            mapped.copies.append(copy)
            copy.need()  # start now: the host may compute for long without a call that would start waiting copies
        engine.go_on()

    def arrived(self) -> torch.Tensor:
        """Waits for the copy and returns the values; the device tensor may be freed afterwards."""
        if self._out is not None:
            transfers, (source, copy) = self._engine.transfers, self._out
            with self._engine.lock:
                event = copy.need()
            transfers.synchronize(event)
            with self._engine.lock:
                if transfers.release(copy).error() is not None:
                    transfers.follow_owners(copy)
                    _flat(self.values).copy_(source)
            self._out = None
        return self.values

    def ask_back(self, tensor: torch.Tensor, *, at_once: bool, group: Hashable) -> None:
        """Begins to copy the present values to the device.

        Args:
            tensor: the original device tensor, or one of the same shape and type.
            at_once: True copies into the memory of `tensor`, which nobody may use before `bring_back`; False copies to
                new memory first.
            group: the copies requested together. Copies that are needed sooner overtake the whole group.
        """
        engine = self._engine
        assert self._mapped.buffer is not None
        with torch.inference_mode(False), engine.lock:
            is_alike = is_dense(tensor) and tensor.stride() == self.values.stride()
            self._is_its_own = at_once and is_alike and not (tensor.is_conj() or tensor.is_neg())
            if self._is_its_own:
                memory = _flat(tensor.detach())
            else:
                memory = engine.backend.empty(self.values.nbytes, tensor.new_empty(0, dtype=torch.uint8))
            after = [engine.backend.record()]
            copy = engine.transfers.ask_in(
                self._mapped.buffer, memory, after=after, seconds=math.inf, started=_nothing, group=group
            )
            self._in = _Moving(memory, copy)
            self._mapped.copies.append(copy)
            engine.transfers.pump()
        engine.go_on()

    def bring_back(self, tensor: torch.Tensor) -> None:
        """Gives `tensor` the requested values. Later device work waits for them; the host does not."""
        assert self._in is not None
        memory, copy = self._in
        with self._engine.lock:
            failed = self._engine.transfers.arrive(copy, memory).error() is not None
        if failed:
            tensor.copy_(self.values)
        elif self._is_its_own:
            torch.autograd.graph.increment_version(tensor)
        else:
            tensor.copy_(memory.view(self.values.dtype).as_strided(self.values.shape, self.values.stride()))
        self._in = None

    def __del__(self) -> None:
        # After an exception in a step a copy may be in flight: its device memory is freed only afterwards.
        for moving in (getattr(self, "_out", None), getattr(self, "_in", None)):
            if moving is not None:
                self._engine.finalized.add(moving, functools.partial(_end, self._engine))


def _flat(dense: torch.Tensor) -> torch.Tensor:
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _end(engine: Engine, moving: _Moving) -> None:
    engine.transfers.no_longer(moving.copy)


def _nothing(event: object) -> None:
    """Does nothing when a copy starts."""
