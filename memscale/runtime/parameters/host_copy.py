"""A tensor of a device that the host works on for a moment: out to memory of a tier, and back, by the engine's link."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from typing import NamedTuple

import torch

from memscale.runtime.engine.engine import Engine
from memscale.runtime.engine.link import Copy
from memscale.runtime.parameters.mapped import Mapped
from memscale.runtime.parameters.movable import is_dense


class _Moving(NamedTuple):
    """Memory of the device, and the copy that reads or writes it."""

    memory: torch.Tensor
    copy: Copy

    def is_moving(self) -> bool:
        return self.copy.is_under_way()


class HostCopy:
    """`tensor` of a device in memory of a tier. It is on its way there from the beginning.

    Args:
        engine: of that device.
        mapped, contents: the memory, of as many bytes as the tensor's numbers have.
        tensor: which the caller leaves as it is until `arrived`.

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
            copy = engine.transfers.ask_out(source, mapped.buffer, seconds=0.0)
            self._out = _Moving(source, copy)
            mapped.copies.append(copy)
            copy.need()  # now: the host may compute for long, and until then nobody would start what waits its turn
        engine.go_on()

    def arrived(self) -> torch.Tensor:
        """The values, which the host waits for. What they are a copy of may be freed from here on."""
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
        """Begin to bring the values, as they are now, to `tensor`, of the device.

        Args:
            tensor: a tensor like the first one, or that itself.
            at_once: into its own memory, which nobody reads or writes before `bring_back`; into other memory else.
            group: of others that are asked for with it. What is needed sooner goes before all of them.
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
        """Give `tensor` what was asked for. What it is used for next comes after that; no host waits."""
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
        # Of a step that an exception ended: the device's memory must not go to somebody else before the copy is over.
        for moving in (getattr(self, "_out", None), getattr(self, "_in", None)):
            if moving is not None:
                self._engine.finalized.add(moving, functools.partial(_end, self._engine))


def _flat(dense: torch.Tensor) -> torch.Tensor:
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _end(engine: Engine, moving: _Moving) -> None:
    engine.transfers.no_longer(moving.copy)


def _nothing(event: object) -> None:
    """What is to be done once the copy is under way."""
