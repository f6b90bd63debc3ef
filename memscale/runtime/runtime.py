"""`Runtime`: the offload engines of one process, one per device, made when they are first needed."""

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
from memscale.runtime.backends.protocol import TOGETHER_BYTES, Backend
from memscale.runtime.engine.locks import new_lock
from memscale.runtime.engine.offload_engine import Engine
from memscale.runtime.offload_config import AsyncOffloadConfig
from memscale.runtime.parameters.host_parameter import HOST_PARAMETERS, HostParameter
from memscale.runtime.parameters.host_parameters import HostParameters
from memscale.runtime.stats import CopyTimeline, DeviceStats
from memscale.runtime.storage.budget import KEPT_FREE_BYTES, HostBudget
from memscale.runtime.storage.tiers import at_or_below


class Runtime:
    """The resource that `offload` uses: tiers with caps, engines, and statistics. A process usually has one only.

    >>> import torch, memscale as ms
    >>> from memscale.runtime import Runtime
    >>> runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=4096, prefetch_depth=0), disk_bytes=2**20)
    >>> f = ms.offload().on(runtime)(lambda x: (x * 2).sin().exp())
    >>> out = f(torch.ones(2048, requires_grad=True))
    >>> runtime.stats()["cpu"].live_bytes  # the sine's input; the result of `exp`, which the caller has, stays
    {'disk': 8192}
    >>> del out
    >>> runtime.stats()["cpu"].live_bytes
    {'disk': 0}

    Args:
        config: sizes of the engine; None is ``AsyncOffloadConfig()``.
        disk_directory: the directory of the disk tier's unnamed file; None is the first temporary directory that is not
            in RAM.
        disk_bytes: the most bytes on disk; None is all that the disk has.
        host_bytes: the most bytes of RAM for tensors of accelerators, pinned and pageable together; None is the RAM
            that is available. At most ``config.pool_bytes`` of them are pinned for each device, if that is given.
        backend: replaces the backend that fits the device, for all devices.

    Raises:
        ConfigError: a value has a wrong type or is out of range.
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
        self._movers: dict[Engine, HostParameters] = {}
        # Engines of fake tensors, by fake mode: their counts belong to one simulation and end with it.
        self._fake: weakref.WeakKeyDictionary[Any, dict[torch.device, Engine]] = weakref.WeakKeyDictionary()
        self._timeline: CopyTimeline | None = None
        self._warned_tiers: set[str] = set()

    def engine(self, tensor: torch.Tensor) -> Engine:
        """Returns the engine that moves `tensor`, made on first use.

        Raises:
            RuntimeUnavailable: no backend moves tensors of that device.
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

    def mover(self, tensor: torch.Tensor) -> HostParameters:
        """Returns the object that moves parameters between the tiers and the device of `tensor`.

        Raises:
            RuntimeUnavailable: no backend moves tensors of that device.
        """
        engine = self.engine(tensor)
        with self._lock:
            mover = self._movers.get(engine)
            if mover is None:
                mover = self._movers[engine] = self._new_mover(engine)
            return mover

    @property
    def by_storage(self) -> dict[int, HostParameter]:
        """The host parameters of this process, by the address of their storage."""
        return HOST_PARAMETERS

    def stats(self) -> DeviceStats:
        """Returns what was moved and what the tiers hold, by device; those of fake tensors are ``"fake cuda"`` etc."""
        with self._lock:
            found = {str(device): engine for device, engine in self._engines.items()}
            for engines in self._fake.values():
                found.update({f"fake {device}": engine for device, engine in engines.items()})
        return DeviceStats({name: engine.stats() for name, engine in found.items()})

    def warn_of_tier(self, engine: Engine, tier: str) -> None:
        """Warns once that a device lacks the requested tier, and which tier is used instead."""
        tiers = engine.backend.tiers
        if tier == "auto" or tier in tiers or tier in self._warned_tiers:
            return
        self._warned_tiers.add(tier)
        instead = next(iter(at_or_below(tiers, tier)), None)
        place = f"goes to {instead}" if instead else "stays where it is"
        self.warn(f"offload(tier={tier!r}): this device has only {', '.join(tiers)} below it, so what moves {place}")

    def warn(self, what: str) -> None:
        """Warns about a setting that the caller may not have meant."""
        warnings.warn(f"{what}; this is said once", RuntimeWarning, stacklevel=2)

    def settle(self) -> None:
        """Moves all tensors that only handles refer to, and waits for every copy out."""
        with self._lock:
            engines = list(self._engines.values())
        for engine in engines:
            engine.settle()

    @contextmanager
    def record(self) -> Iterator[CopyTimeline]:
        """Records the copies and waits of the body in a `CopyTimeline`, which can be written for a trace viewer."""
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
        """Returns a new engine over `backend`, with the sizes of the runtime's config."""
        return Engine(backend, depth=self.config.prefetch_depth, timeline=self._timeline)

    def _new_backend(self, tensor: torch.Tensor) -> Backend:
        kind = tensor.device.type
        if isinstance(tensor, internals.FakeTensor) or kind == "meta":
            from memscale.runtime.backends.trace_backend import TraceBackend

            return TraceBackend(self.caps(kind), together_bytes=TOGETHER_BYTES if kind == "cuda" else 0)
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
        """Returns the most bytes on each tier below a device of this type, nearest first; None for no cap.

        Args:
            device_type: for example ``"cuda"``.
            ram_bytes: the RAM of the host to plan for; None takes no account of the host's RAM.
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

    def _new_mover(self, engine: Engine) -> HostParameters:
        return HostParameters(engine, HOST_PARAMETERS)

    def __reduce__(self) -> Any:
        # The process's own runtime unpickles as the own runtime of the other process. Other runtimes take their
        # settings along, so that no cap is lost. A backend is not pickled: its device belongs to this process.
        if self is default_runtime():
            return (default_runtime, ())
        make = functools.partial(
            Runtime, disk_directory=self._disk_directory, disk_bytes=self._disk_bytes, host_bytes=self.host_bytes
        )
        return (make, (self.config,))

    def __deepcopy__(self, memo: Any) -> Runtime:
        return self  # a resource: copies of a model share it


@functools.cache
def default_runtime() -> Runtime:
    """Returns the runtime of this process, which `offload` uses unless another one is given."""
    return Runtime()


# Replacements that simulations have installed; a simulated step runs regions that name their runtimes or the default.
_instead: list[Callable[[Runtime], Runtime]] = []


def runtime_for(own: Runtime | None) -> Runtime:
    """Returns the runtime of a region: its own, else the default, or what a simulation puts in its place."""
    runtime = own or default_runtime()
    return _instead[-1](runtime) if _instead and is_own_thread() else runtime


@contextmanager
def runtimes_replaced(instead: Callable[[Runtime], Runtime]) -> Iterator[None]:
    """Replaces each region's runtime by ``instead(runtime)`` in the body, for the simulation's own threads."""
    with own_threads():
        _instead.append(instead)
        try:
            yield
        finally:
            _instead.pop()


os.register_at_fork(after_in_child=default_runtime.cache_clear)
