"""`Metrics`: the memory figures of a wrapped model's process, as named samples.

Names, units and types follow Prometheus: one prefix, base units, ``_total`` for counters. Reading the metrics launches
nothing on a device, contacts no other process and resets no peak. A peak is since the start of the process, or since
other code reset it.
"""

from __future__ import annotations

import bisect
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch

from memscale.algebra import Plan, chain
from memscale.hardware import Hardware
from memscale.observability.ranks import rank
from memscale.runtime import Runtime
from memscale.transforms.checkpoint import recomputed_regions

if TYPE_CHECKING:
    from prometheus_client import Metric

_GIB = 1 << 30
_PREFIX = "memscale_"
_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds
# The figures of PyTorch's CUDA allocator: kind, name, key in `torch.cuda.memory_stats`, and meaning.
_ALLOCATOR = (
    ("gauge", "allocated_bytes", "allocated_bytes.all.current", "Memory in tensors."),
    ("gauge", "reserved_bytes", "reserved_bytes.all.current", "Memory that the allocator holds."),
    ("gauge", "step_peak_allocated_bytes", "allocated_bytes.all.peak", "The most memory in tensors since a reset."),
    ("gauge", "step_peak_reserved_bytes", "reserved_bytes.all.peak", "The most that the allocator held since a reset."),
    ("counter", "allocation_retries", "num_alloc_retries", "Times the cache was emptied."),
    ("counter", "out_of_memory_errors", "num_ooms", "Allocations that failed."),
)
Labels = Mapping[str, str]


class Watched(Protocol):
    """The part of an executor that `Metrics` reads."""

    @property
    def plan(self) -> Plan:
        """The plan that the model trains under."""

    @property
    def hardware(self) -> Hardware:
        """The model's device."""

    @property
    def runtime(self) -> Runtime | None:
        """The runtime that moves the model's tensors."""

    @property
    def device(self) -> torch.device:
        """The device of the model."""

    @property
    def predicted(self) -> Mapping[str, int]:
        """The predicted peak of a step, by kind."""

    @property
    def regions(self) -> Sequence[str]:
        """The paths of the plan's regions."""


class Metrics:
    """The metrics of one executor, to which it refers weakly, as a collector of prometheus-client.

    Args:
        executor: the executor of a model that `wrap` returned.
    """

    def __init__(self, executor: Watched) -> None:
        self._executor = weakref.ref(executor)
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._seconds = 0.0
        self._steps = 0
        self._last: float | None = None

    def after_step(self) -> None:
        """Counts a step of the optimizer, with the seconds since the previous step."""
        now = time.perf_counter()
        self._steps += 1
        if self._last is not None:
            self._counts[bisect.bisect_left(_BOUNDS, now - self._last)] += 1
            self._seconds += now - self._last
        self._last = now

    def describe(self) -> list[Metric]:
        """Returns no descriptions, since the set of metrics depends on the device."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yields every metric that has a value now."""
        executor = self._executor()
        if executor is None:
            return
        own = {"rank": str(rank())}
        device = {**own, "device": str(executor.device)}
        versions = {"version": sys.modules["memscale"].__version__, "torch": str(torch.__version__)}
        yield from _family("gauge", "build_info", "Versions.", ({**own, **versions}, 1))
        yield from _family("counter", "steps", "Steps of the optimizer.", (own, self._steps))
        yield self._durations(own)
        yield from _family(
            "counter", "recomputed_regions", "Regions that backward has run again.", (own, recomputed_regions())
        )
        counts = dict.fromkeys(("checkpoint", "offload", "tile", "cast"), 0)
        for path in executor.regions:
            rules = [rule.transform for rule in executor.plan if rule.matches(path)]
            for name in {getattr(each, "spelling", "") for how in rules for each in chain(how)} & counts.keys():
                counts[name] += 1
        regions = [({**own, "transform": name}, count) for name, count in counts.items()]
        yield from _family("gauge", "plan_regions", "Regions of the plan that holds.", *regions)
        memory_bytes = executor.hardware.memory_bytes
        yield from _family("gauge", "device_capacity_bytes", "Memory of the device.", (device, memory_bytes))
        predicted = [({**device, "kind": kind}, nbytes) for kind, nbytes in executor.predicted.items()]
        yield from _family("gauge", "predicted_step_peak_bytes", "Peak of a step, as simulated.", *predicted)
        if executor.device.type == "cuda" and torch.cuda.is_initialized():
            stats = torch.cuda.memory_stats(executor.device)
            for kind, name, key, text in _ALLOCATOR:
                yield from _family(kind, name, text, (device, stats.get(key, 0)))
        if executor.runtime is not None:
            yield from _moved(executor.runtime, own)

    def _durations(self, own: Labels) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        found = HistogramMetricFamily(f"{_PREFIX}step_duration_seconds", "Time between two steps.", labels=[*own])
        counts = zip((*map(str, _BOUNDS), "+Inf"), accumulate(self._counts), strict=True)
        found.add_metric([*own.values()], [*counts], self._seconds)
        return found


def _moved(runtime: Runtime, own: Labels) -> Iterator[Metric]:
    held, copied, exposed = [], [], []
    for device, stats in runtime.stats().items():
        if device.startswith("fake "):  # a simulated device moves nothing
            continue
        labels = {**own, "device": device}
        held += [({**labels, "tier": tier}, nbytes) for tier, nbytes in stats.live_bytes.items()]
        for direction, tiers in (("out", stats.out_bytes), ("in", stats.in_bytes)):
            copied += [({**labels, "direction": direction, "tier": tier}, n) for tier, n in tiers.items()]
        exposed.append((labels, stats.exposed_seconds))
    yield from _family("gauge", "offload_held_bytes", "Memory on other tiers.", *held)
    yield from _family("counter", "offload_copied_bytes", "Bytes moved between tiers.", *copied)
    yield from _family("counter", "offload_exposed_seconds", "Time that callers waited for copies.", *exposed)


def _family(kind: str, name: str, text: str, *samples: tuple[Labels, float]) -> Iterator[Metric]:
    """Yields the samples of a metric as a family of prometheus-client; nothing without samples."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    if samples:
        made = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        found = made(f"{_PREFIX}{name}", text, labels=[*samples[0][0]])
        for labels, value in samples:
            found.add_metric([*labels.values()], value)
        yield found


def memory_keys(executor: Watched) -> dict[str, float]:
    """Returns the known values that trainers log, in GiB, by key, without resetting peaks."""
    found: dict[str, int] = {}
    if executor.device.type == "cuda" and torch.cuda.is_initialized():
        found["memory/peak_allocated_gib"] = torch.cuda.max_memory_allocated(executor.device)
        found["memory/peak_reserved_gib"] = torch.cuda.max_memory_reserved(executor.device)
    if "allocated" in executor.predicted:
        found["memory/predicted_gib"] = executor.predicted["allocated"]
    if executor.runtime is not None:
        moved = executor.runtime.stats().values()
        found["memory/offloaded_gib"] = sum(sum(stats.live_bytes.values()) for stats in moved)
    return {name: round(nbytes / _GIB, 6) for name, nbytes in found.items()}
