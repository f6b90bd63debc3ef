"""The CUDA streams of a region: a recompute runs on the same streams, and synchronizes them if it ends early.

A region may launch kernels on streams of its own and synchronize them at its end. A recompute that stops before that
end leaves memory that one stream owns and another still reads, and values that no other stream waits for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from memscale.core import pytrees, simulating
from memscale.regions.uncompiled import OperatorWatch

# Maps a device index to the current stream's handle, in a tenth of the time of `torch.cuda.current_stream`.
_current: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Streams:
    """The streams that a run used, beginning with the current streams of `devices`.

    Attributes:
        are_seen: whether streams are tracked, which requires an initialized CUDA.
        are_several: whether one device has more than one of these streams.
        index: the first of `devices`, by its index; -2 without one.
        handle: the current stream of that device at the beginning.
        current: maps the index of a device to the handle of its current stream. Calls of `see` may be left out for
            tensors on device `index`, while its current stream is `handle`.
    """

    current = _current

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._known: dict[tuple[int, int], torch.cuda.Stream] | None = None
        self._begun: list[torch.cuda.Stream] = []
        self.are_several = False
        self.are_seen = _current is not None and torch.cuda.is_initialized() and not simulating()
        self.index, self.handle = -2, 0
        if self.are_seen:
            self._known = {}
            for device in devices:
                if device.type == "cuda":
                    self._add(device.index, _current(device.index))
            self._begun = list(self._known.values())
            self.index, self.handle = next(iter(self._known), (-2, 0))

    def see(self, tensor: torch.Tensor) -> None:
        """Adds the current stream of the device of `tensor`, which an operator is using."""
        if self._known is not None and tensor.is_cuda:
            index = tensor.get_device()
            if (index, handle := _current(index)) not in self._known:
                self._add(index, handle)

    def _add(self, index: int, handle: int) -> None:
        assert self._known is not None
        self.are_several = self.are_several or any(other == index for other, _ in self._known)
        self._known[index, handle] = _stream(index, handle)

    def enter(self, undo: list[Callable[[], Any]]) -> Streams:
        """Switches to the streams on which the run began. Returns the streams of the run and of the caller.

        Appends to `undo` the calls that switch back, to be run in reverse.
        """
        known = self._known
        if not known or (len(known) == 1 and all(_current(index) == stream for index, stream in known)):
            return self
        then = Streams(stream.device for stream in self._begun)  # the current streams of the caller
        then._known = {**known, **(then._known or {})}
        devices = [index for index, _ in then._known]
        then.are_several = len(set(devices)) < len(devices)
        elsewhere = [stream for stream in self._begun if stream not in then._begun]
        if elsewhere:
            back = partial(torch.cuda.set_device, torch.cuda.current_device())
            undo.append(back)
            for stream in elsewhere:
                context = torch.cuda.stream(stream)
                context.__enter__()
                undo.append(partial(context.__exit__, None, None, None))
            back()
        return then

    def meet(self) -> None:
        """Makes every stream of a device wait for the work launched so far on its other streams."""
        if not self.are_several or self._known is None:
            return
        for device in {index for index, _ in self._known}:
            first, *others = [stream for (index, _), stream in self._known.items() if index == device]
            for other in others:
                first.wait_stream(other)
            for other in others:
                other.wait_stream(first)

    def lend_to_current(self, tensor: torch.Tensor) -> None:
        """Records the current stream as a user of `tensor`, so that the allocator waits before reusing its memory."""
        if self.are_several and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records all streams as users of `tensors`: the allocator keeps the memory until their work so far is done."""
        if self.are_several and self._known is not None:
            for tensor in tensors:
                for (index, _), stream in self._known.items():
                    if tensor.is_cuda and tensor.get_device() == index:
                        tensor.record_stream(stream)

    def watching(self) -> AbstractContextManager[Any]:
        """Returns a context that adds the stream of each operator, at a cost of microseconds per operator."""
        return nullcontext() if self._known is None else _Watch(self)


@functools.lru_cache(maxsize=256)
def _stream(index: int, _: int) -> torch.cuda.Stream:
    """Returns the current stream of a device, whose handle is the second argument. PyTorch destroys no stream."""
    return torch.cuda.current_stream(index)


class _Watch(OperatorWatch):
    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        for tensor in pytrees.tensors((args, kwargs)):
            self._streams.see(tensor)
        return func(*args, **kwargs)
