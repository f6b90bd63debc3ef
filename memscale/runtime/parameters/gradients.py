"""Gradients of parameters that live on another tier, on their way there."""

from __future__ import annotations

import math
from collections import deque

import torch

from memscale.core import found_once
from memscale.runtime.engine.engine import Engine
from memscale.runtime.engine.entry import is_unshared
from memscale.runtime.engine.link import Copy
from memscale.runtime.parameters.mapped import MappedTensors, shaped

_CPU = torch.device("cpu")


class _Gradient:
    """One of them: its bytes on the device, until they are out, and where they go."""

    __slots__ = ("copy", "source", "target")

    def __init__(self, source: torch.Tensor, target: torch.Tensor, copy: Copy) -> None:
        self.source: torch.Tensor | None = source
        self.target = target
        self.copy = copy


class Gradients:
    """The gradients that one engine moves."""

    def __init__(self, engine: Engine, memory: MappedTensors) -> None:
        self._engine = engine
        self._memory = memory
        self._leaving: deque[_Gradient] = deque()
        self._arriving: dict[int, _Gradient] = {}  # by the storage on the tier

    def send(self, parameter: torch.Tensor | None, tier: str, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient` as a tensor where `parameter` lives; its values are there after `received`."""
        engine = self._engine
        if parameter is None or torch.is_grad_enabled() or not _is_plain(gradient, parameter):
            return gradient.to(_CPU)
        self._let_go()
        if gradient.stride() != parameter.stride():
            ordered = torch.empty_strided(
                parameter.size(), parameter.stride(), dtype=gradient.dtype, device=gradient.device
            )
            gradient = ordered.copy_(gradient)
        elif not is_alone(gradient):
            gradient = gradient.clone()  # others may change theirs in place while ours is on its way
        with engine.lock:
            engine.follow_backward()
            found = self._memory.take(gradient.nbytes, tier)
            if found is None:
                engine.warn_of(gradient.nbytes)
                return gradient.to(_CPU)
            mapped, target = found
            source = gradient.detach().as_strided((gradient.numel(),), (1,)).view(torch.uint8)
            # Nobody asks for it before the end of backward: whatever else leaves the device goes first.
            assert mapped.buffer is not None
            copy = engine.transfers.ask_out(source, mapped.buffer, seconds=math.inf)
            mapped.copies.append(copy)
            self._leaving.append(_Gradient(source, target, copy))
            self._arriving[target.untyped_storage()._cdata] = self._leaving[-1]
            engine.transfers.pump()
            while len(self._leaving) > engine.depth:
                self._retire_first()
        self._let_go()
        engine.go_on()
        sent = shaped(target, parameter)
        # Autograd looks at what each node returns.
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            self.received(sent)
        return sent

    def received(self, gradient: torch.Tensor) -> None:
        """Wait until the values of what `send` returned are there; any other tensor has its values."""
        if not _has_memory(gradient):
            return
        with self._engine.lock:
            arriving = self._arriving.pop(gradient.untyped_storage()._cdata, None)
            if arriving is None:
                return
            arriving.copy.need()
        # First: autograd runs what waits for a gradient on the CPU in the thread of the CPU, while that of the device
        # goes on, and the compute stream would wait for each copy as soon as it is under way.
        self._engine.transfers.synchronize(arriving.copy.need())
        with self._engine.lock:
            if arriving.source is not None:
                self._retire(arriving)
                self._leaving.remove(arriving)

    def _let_go(self) -> None:
        """Free the device's memory of what has left it: `received`, in another thread, may be long in coming."""
        with self._engine.lock:
            events = [(each, each.copy.event) for each in self._leaving]
            for leaving in [each for each, event in events if event is not None and event.done()]:
                self._retire(leaving)
                self._leaving.remove(leaving)

    def arrive(self) -> None:
        """Let everything arrive. The engine's lock is held.

        After a backward nothing is under way, unless it ended with an exception.
        """
        while self._leaving:
            self._retire_first()
        for gradient in self._arriving.values():
            self._engine.transfers.synchronize(gradient.copy.need())
        self._arriving.clear()

    def _retire_first(self) -> None:
        self._retire(self._leaving[0])
        self._leaving.popleft()  # only now: what an exception stops is taken up again

    def _retire(self, gradient: _Gradient) -> None:
        """Free the device's memory of a gradient, which the stream that computed it may use from here on."""
        if gradient.source is None:
            return
        transfers = self._engine.transfers
        if transfers.release(gradient.copy).error() is not None:
            transfers.follow_owners(gradient.copy)
            gradient.target.copy_(gradient.source)
        gradient.source = None


def is_alone(gradient: torch.Tensor) -> bool:
    """Whether nobody else has `gradient`, or a view of its memory: not the caller, nor another edge of the graph."""
    return gradient._use_count() == _uses_by_python() and is_unshared(gradient)  # type: ignore[attr-defined]


@found_once
def _uses_by_python() -> int:
    """What PyTorch counts for a tensor that only Python refers to."""
    return int(torch.empty(0)._use_count())  # type: ignore[attr-defined]


def _has_memory(gradient: torch.Tensor) -> bool:
    """Whether `gradient` is an array, and no stand-in for several of them, as under `vmap`, nor a sparse one."""
    functorch = torch._C._functorch
    return (
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and not functorch.is_functorch_wrapped_tensor(gradient)
        and not functorch.is_legacy_batchedtensor(gradient)  # of `autograd.grad(..., is_grads_batched=True)`
    )


def _is_plain(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    return _has_memory(gradient) and gradient.dtype == parameter.dtype and gradient.size() == parameter.size()
