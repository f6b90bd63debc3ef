"""`Gradients`: copies gradients to the tier where their parameters live."""

from __future__ import annotations

import math
from collections import deque

import torch

from memscale.core import found_once
from memscale.runtime.engine.entry import is_unshared
from memscale.runtime.engine.link import Copy
from memscale.runtime.engine.offload_engine import Engine
from memscale.runtime.parameters.mapped import MappedTensors, shaped

_CPU = torch.device("cpu")


class _Gradient:
    """A gradient in a copy: its bytes on the device until the copy is done, and the memory on the tier."""

    __slots__ = ("copy", "source", "target")

    def __init__(self, source: torch.Tensor, target: torch.Tensor, copy: Copy) -> None:
        self.source: torch.Tensor | None = source
        self.target = target
        self.copy = copy


class Gradients:
    """Copies gradients from one engine's device to its tiers."""

    def __init__(self, engine: Engine, memory: MappedTensors) -> None:
        self._engine = engine
        self._memory = memory
        self._leaving: deque[_Gradient] = deque()
        self._arriving: dict[int, _Gradient] = {}  # by the address of the storage on the tier

    def send(self, parameter: torch.Tensor | None, tier: str, gradient: torch.Tensor) -> torch.Tensor:
        """Returns `gradient` as a tensor on the parameter's tier; its values are valid after `received`."""
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
            gradient = gradient.clone()  # another owner may change the gradient in place during the copy
        with engine.lock:
            engine.follow_backward()
            found = self._memory.take(gradient.nbytes, tier)
            if found is None:
                engine.warn_of(gradient.nbytes)
                return gradient.to(_CPU)
            mapped, target = found
            source = gradient.detach().as_strided((gradient.numel(),), (1,)).view(torch.uint8)
            # Deadline infinity: gradients are read after backward at the earliest, so other copies out go first.
            assert mapped.buffer is not None
            copy = engine.transfers.ask_out([source], mapped.buffer, seconds=math.inf)
            mapped.copies.append(copy)
            self._leaving.append(_Gradient(source, target, copy))
            self._arriving[target.untyped_storage()._cdata] = self._leaving[-1]
            engine.transfers.pump()
            while len(self._leaving) > engine.depth:
                self._retire_first()
        self._let_go()
        engine.go_on()
        sent = shaped(target, parameter)
        # Anomaly mode reads what each node returns.
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            self.received(sent)
        return sent

    def received(self, gradient: torch.Tensor) -> None:
        """Waits for the values of a tensor that `send` returned; any other tensor is valid already."""
        if not _has_memory(gradient):
            return
        with self._engine.lock:
            arriving = self._arriving.pop(gradient.untyped_storage()._cdata, None)
            if arriving is None:
                return
            arriving.copy.need()
        # The host waits before `_retire` makes the compute stream wait: autograd calls this in its CPU thread while the
        # device's thread goes on, and a compute stream that waits for each copy from its start would lose the overlap.
        self._engine.transfers.synchronize(arriving.copy.need())
        with self._engine.lock:
            if arriving.source is not None:
                self._retire(arriving)
                self._leaving.remove(arriving)

    def _let_go(self) -> None:
        """Frees the device memory of gradients whose copies are done, without waiting for `received`."""
        with self._engine.lock:
            events = [(each, each.copy.event) for each in self._leaving]
            for leaving in [each for each, event in events if event is not None and event.done()]:
                self._retire(leaving)
                self._leaving.remove(leaving)

    def arrive(self) -> None:
        """Waits for all copies. The engine's lock is held.

        After a backward no copy is in flight, unless the backward ended with an exception.
        """
        while self._leaving:
            self._retire_first()
        for gradient in self._arriving.values():
            self._engine.transfers.synchronize(gradient.copy.need())
        self._arriving.clear()

    def _retire_first(self) -> None:
        self._retire(self._leaving[0])
        self._leaving.popleft()  # last, so that an exception leaves the gradient in the queue

    def _retire(self, gradient: _Gradient) -> None:
        """Frees the device memory of a gradient for the stream that computed it."""
        if gradient.source is None:
            return
        transfers = self._engine.transfers
        if transfers.release(gradient.copy).error() is not None:
            transfers.follow_owners(gradient.copy)
            gradient.target.copy_(gradient.source)
        gradient.source = None


def is_alone(gradient: torch.Tensor) -> bool:
    """Whether nobody else, neither the caller nor another edge of the graph, refers to `gradient` or to its memory."""
    return gradient._use_count() == _uses_by_python() and is_unshared(gradient)  # type: ignore[attr-defined]


@found_once
def _uses_by_python() -> int:
    """Returns PyTorch's use count of a tensor that only Python refers to."""
    return int(torch.empty(0)._use_count())  # type: ignore[attr-defined]


def _has_memory(gradient: torch.Tensor) -> bool:
    """Whether `gradient` is a dense strided tensor: neither sparse nor a batch of tensors under `vmap`."""
    functorch = torch._C._functorch
    return (
        type(gradient) is torch.Tensor
        and gradient.layout is torch.strided
        and not functorch.is_functorch_wrapped_tensor(gradient)
        and not functorch.is_legacy_batchedtensor(gradient)  # made by `autograd.grad(..., is_grads_batched=True)`
    )


def _is_plain(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    return _has_memory(gradient) and gradient.dtype == parameter.dtype and gradient.size() == parameter.size()
