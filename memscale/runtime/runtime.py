"""A runtime: the engines of one process's devices, made when they are first needed."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memscale.core import ConfigError, RuntimeUnavailable, internals, is_own_thread, own_threads
from memscale.runtime.backends.host import HostBackend
from memscale.runtime.backends.protocol import Backend
from memscale.runtime.config import AsyncOffloadConfig
from memscale.runtime.engine.engine import Engine
from memscale.runtime.engine.locks import new_lock
from memscale.runtime.parameters.home import AT_HOME, Home
from memscale.runtime.parameters.homes import Homes
from memscale.runtime.stats import CopyTimeline, DeviceStats
from memscale.runtime.storage.budget import KEPT_FREE_BYTES, HostBudget
from memscale.runtime.storage.tiers import at_or_below


class Runtime:
    """Where `offload` moves tensors to, and what it has moved. One for a process is usual, and `None` means that one.

    >>> import torch, memscale as ms
    >>> from memscale.runtime import Runtime
    >>> runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=4096, prefetch_depth=0), disk_bytes=2**20)
    >>> f = ms.offload().on(runtime)(lambda x: (x * 2).sin().exp())
    >>> out = f(torch.ones(2048, requires_grad=True))
    >>> runtime.stats()["cpu"].live_bytes  # the sine's input; its result is what `exp` returned, and the caller has it
    {'disk': 8192}
    >>> del out
    >>> runtime.stats()["cpu"].live_bytes
    {'disk': 0}

    Args:
        config: sizes of the engine; `None` is the defaults of `AsyncOffloadConfig`.
        disk_directory: where the file of the disk tier is, which has no name there; `None` is the first directory for
            temporary files that is not in RAM.
        disk_bytes: the most bytes on disk; `None` is as much as there is.
        host_bytes: the most bytes of RAM that tensors of accelerators may take, pinned and pageable together; `None`
            is as much as there is. Pinned are at most ``config.pool_bytes`` of them, for each device, where that is
            given.
        backend: what moves the tensors of every device, in place of the one that fits the device.

    Raises:
        ConfigError: a value is of the wrong type or out of range.
    """

    def __init__(
        self,
        config: AsyncOffloadConfig | None = None,
        *,
        disk_directory: str | os.PathLike[str] | None = None,
        disk_bytes: int | None = None,
        host_bytes: int | None = None,
        backend: Backend | None = None,
    ) -> None:
        if config is not None and not isinstance(config, AsyncOffloadConfig):
            raise ConfigError(f"Runtime(config={config!r}) must be an AsyncOffloadConfig; build one, or pass None")
        for name, nbytes in (("disk_bytes", disk_bytes), ("host_bytes", host_bytes)):
            if nbytes is not None and (type(nbytes) is not int or nbytes < 0):
                raise ConfigError(f"Runtime({name}={nbytes!r}) must be an int of at least 0; None is no limit")
        self.config = config or AsyncOffloadConfig()
        self._disk_directory = disk_directory
        self._disk_bytes = disk_bytes
        self.host_bytes = host_bytes
        self._budget = None if host_bytes is None else HostBudget(host_bytes)  # one for all devices
        self._backend = backend
        self._lock = new_lock()
        self._engines: dict[torch.device, Engine] = {}
        self._homes: dict[Engine, Homes] = {}
        # One for each mode of fake tensors: what it counts is about that one, and ends with it.
        self._fake: weakref.WeakKeyDictionary[Any, dict[torch.device, Engine]] = weakref.WeakKeyDictionary()
        self._timeline: CopyTimeline | None = None
        self._told: set[str] = set()

    def engine(self, tensor: torch.Tensor) -> Engine:
        """The engine that moves `tensor`.

        Raises:
            RuntimeUnavailable: no backend here moves tensors of that device.
        """
        device = tensor.device
        with self._lock:
            engines = self._engines
            if isinstance(tensor, internals.FakeTensor):
                engines = self._fake.setdefault(tensor.fake_mode, {})
            engine = engines.get(device)
            if engine is None:
                engine = engines[device] = self._new_engine(tensor)
            return engine

    def homes(self, tensor: torch.Tensor) -> Homes:
        """What moves parameters between the tiers and the device of `tensor`.

        Raises:
            RuntimeUnavailable: no backend here moves tensors of that device.
        """
        engine = self.engine(tensor)
        with self._lock:
            homes = self._homes.get(engine)
            if homes is None:
                homes = self._homes[engine] = self._new_homes(engine)
            return homes

    @property
    def at_home(self) -> dict[int, Home]:
        """The homes that this runtime knows of: all of this process."""
        return AT_HOME

    def stats(self) -> DeviceStats:
        """What was moved and what is held, by device; those of fake tensors are called ``"fake cuda"`` and the like."""
        with self._lock:
            found = {str(device): engine for device, engine in self._engines.items()}
            for engines in self._fake.values():
                found.update({f"fake {device}": engine for device, engine in engines.items()})
        return DeviceStats({name: engine.stats() for name, engine in found.items()})

    def tell_of_tier(self, engine: Engine, tier: str) -> None:
        """Say once that a device has no such tier, and which one takes its place."""
        tiers = engine.backend.tiers
        if tier == "auto" or tier in tiers or tier in self._told:
            return
        self._told.add(tier)
        instead = next(iter(at_or_below(tiers, tier)), None)
        place = f"goes to {instead}" if instead else "stays where it is"
        self.tell(f"offload(tier={tier!r}): this device has only {', '.join(tiers)} below it, so what moves {place}")

    def tell(self, what: str) -> None:
        """Say something once that the caller may not have meant."""
        warnings.warn(f"{what}; this is said once", RuntimeWarning, stacklevel=2)

    def settle(self) -> None:
        """Move all that nobody else keeps by now, and wait for every copy that is on its way out."""
        with self._lock:
            engines = list(self._engines.values())
        for engine in engines:
            engine.settle()

    @contextmanager
    def record(self) -> Iterator[CopyTimeline]:
        """Note the copies and waits of the body in a `CopyTimeline`, which writes them for a trace viewer."""
        timeline = CopyTimeline()
        self._note_in(timeline)
        try:
            yield timeline
        finally:
            self._note_in(None)

    def _note_in(self, timeline: CopyTimeline | None) -> None:
        with self._lock:
            self._timeline = timeline
            for engine in self._engines.values():
                engine.transfers.timeline = timeline

    def _new_engine(self, tensor: torch.Tensor) -> Engine:
        return self.engine_over(self._backend or self._new_backend(tensor))

    def engine_over(self, backend: Backend) -> Engine:
        """A new engine that moves tensors by `backend`, as the runtime's config says."""
        return Engine(backend, depth=self.config.prefetch_depth, timeline=self._timeline)

    def _new_backend(self, tensor: torch.Tensor) -> Backend:
        kind = tensor.device.type
        if isinstance(tensor, internals.FakeTensor) or kind == "meta":
            from memscale.runtime.backends.trace import TraceBackend

            return TraceBackend(self.caps(kind))
        if kind == "cpu":
            return HostBackend(self._disk_directory, disk_bytes=self._disk_bytes, threads=self.config.streams)
        if kind == "cuda":
            from memscale.runtime.backends.cuda import CudaBackend  # the only module that loads CuPy

            return CudaBackend(
                tensor.device,
                pinned_bytes=self.caps(kind)["pinned"],
                budget=self._budget,
                disk_bytes=self._disk_bytes,
                disk_directory=self._disk_directory,
            )
        raise RuntimeUnavailable(
            f"offload() cannot move tensors of device {str(tensor.device)!r}: there is no backend for {kind!r} here; "
            "leave offload() out of the plan on this device"
        )

    def caps(self, device_type: str, *, ram_bytes: int | None = None) -> dict[str, int | None]:
        """The most bytes on each tier below a device of this type, nearest first; `None` for no cap.

        `ram_bytes` is what the host has, where that is known and its free memory is not looked at.
        """
        if device_type == "cpu":
            return {"disk": self._disk_bytes}
        pinned, pageable = self.config.pool_bytes, None
        free_bytes = None if ram_bytes is None else max(0, ram_bytes - KEPT_FREE_BYTES)
        limits = [each for each in (self.host_bytes, free_bytes) if each is not None]
        if (host := min(limits, default=None)) is not None:
            pinned = host if pinned is None else min(pinned, host)
            pageable = host - pinned
        return {"pinned": pinned, "pageable": pageable, "disk": self._disk_bytes}

    def _new_homes(self, engine: Engine) -> Homes:
        return Homes(engine, AT_HOME)

    def __reduce__(self) -> Any:
        # The process's own runtime becomes that of the process that a pickled region wakes up in. Any other takes its
        # settings along, for a cap must not get lost. A backend does not travel: its device is this process's.
        if self is default_runtime():
            return (default_runtime, ())
        make = functools.partial(
            Runtime, disk_directory=self._disk_directory, disk_bytes=self._disk_bytes, host_bytes=self.host_bytes
        )
        return (make, (self.config,))

    def __deepcopy__(self, memo: Any) -> Runtime:
        return self  # a resource: copies of a model share the link


@functools.cache
def default_runtime() -> Runtime:
    """The runtime of this process."""
    return Runtime()


# A step that is simulated runs the model as it is, whose regions name runtimes or none.
_instead: list[Callable[[Runtime], Runtime]] = []


def runtime_for(own: Runtime | None) -> Runtime:
    """The runtime of a region that was given `own`, or none, unless a simulation puts another one in its place."""
    runtime = own or default_runtime()
    return _instead[-1](runtime) if _instead and is_own_thread() else runtime


@contextmanager
def runtimes_replaced(instead: Callable[[Runtime], Runtime]) -> Iterator[None]:
    """Let regions use ``instead(runtime)`` for the body, in the threads of the simulation that it is."""
    with own_threads():
        _instead.append(instead)
        try:
            yield
        finally:
            _instead.pop()


os.register_at_fork(after_in_child=default_runtime.cache_clear)
