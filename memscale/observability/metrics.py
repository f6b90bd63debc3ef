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
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memscale.algebra import Plan, chain
from memscale.hardware import Hardware
from memscale.observability.ranks import rank
from memscale.runtime import Runtime
from memscale.transforms.checkpoint import recomputed_regions

_GIB = 1 << 30
_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds
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


@dataclass(frozen=True)
class Family:
    """Samples of one name.

    Attributes:
        name: the name, without the suffix of its kind.
        kind: ``"gauge"``, ``"counter"``, ``"histogram"`` or ``"info"``.
        help: a description in one line.
        samples: the labels and value of each sample; a histogram's value is (bounds with cumulative counts, sum).
    """

    name: str
    kind: str
    help: str
    samples: tuple[tuple[Labels, Any], ...]


class Metrics:
    """The metrics of one executor, to which it refers weakly.

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

    def collect(self) -> Iterator[Family]:
        """Yields every metric with its present value."""
        executor = self._executor()
        if executor is None:
            return
        own = {"rank": str(rank())}
        device = {**own, "device": str(executor.device)}

        def family(name: str, kind: str, text: str, *samples: tuple[Labels, Any]) -> Family:
            return Family(f"memscale_{name}", kind, text, samples)

        versions = {"version": sys.modules["memscale"].__version__, "torch": str(torch.__version__)}
        yield family("build", "info", "Versions.", ({**own, **versions}, 1))
        yield family("steps", "counter", "Steps of the optimizer.", (own, self._steps))
        cumulative = [sum(self._counts[: at + 1]) for at in range(len(self._counts))]
        buckets = [(str(bound), count) for bound, count in zip((*_BOUNDS, "+Inf"), cumulative, strict=True)]
        yield family("step_duration_seconds", "histogram", "Time between two steps.", (own, (buckets, self._seconds)))
        yield family(
            "recomputed_regions", "counter", "Regions that backward has run again.", (own, recomputed_regions())
        )
        counts = dict.fromkeys(("checkpoint", "offload", "tile", "cast"), 0)
        for path in executor.regions:
            rules = [rule.transform for rule in executor.plan if rule.matches(path)]
            for name in {getattr(each, "spelling", "") for how in rules for each in chain(how)} & counts.keys():
                counts[name] += 1
        yield family(
            "plan_regions",
            "gauge",
            "Regions of the plan that holds.",
            *(({**own, "transform": name}, count) for name, count in counts.items()),
        )
        yield family(
            "device_capacity_bytes", "gauge", "Memory of the device.", (device, executor.hardware.memory_bytes)
        )
        predicted = [({**device, "kind": kind}, nbytes) for kind, nbytes in executor.predicted.items()]
        yield family("predicted_step_peak_bytes", "gauge", "Peak of a step, as simulated.", *predicted)
        yield from self._allocator(executor.device, device, family)
        yield from self._moved(executor.runtime, own, family)

    def _allocator(self, where: torch.device, labels: Labels, family: Any) -> Iterator[Family]:
        if where.type != "cuda" or not torch.cuda.is_initialized():
            return
        stats = torch.cuda.memory_stats(where)
        gauges = (
            ("allocated_bytes", "allocated_bytes.all.current", "Memory in tensors."),
            ("reserved_bytes", "reserved_bytes.all.current", "Memory that the allocator holds."),
            ("step_peak_allocated_bytes", "allocated_bytes.all.peak", "The most memory in tensors since a reset."),
            ("step_peak_reserved_bytes", "reserved_bytes.all.peak", "The most that the allocator held since a reset."),
        )
        for name, key, text in gauges:
            yield family(name, "gauge", text, (labels, stats.get(key, 0)))
        yield family(
            "allocation_retries", "counter", "Times the cache was emptied.", (labels, stats.get("num_alloc_retries", 0))
        )
        yield family("out_of_memory_errors", "counter", "Allocations that failed.", (labels, stats.get("num_ooms", 0)))

    def _moved(self, runtime: Runtime | None, own: Labels, family: Any) -> Iterator[Family]:
        moved = {} if runtime is None else runtime.stats()
        held, copied, exposed = [], [], []
        for device, stats in moved.items():
            if device.startswith("fake "):  # a simulated device moves nothing
                continue
            labels = {**own, "device": device}
            held += [({**labels, "tier": tier}, nbytes) for tier, nbytes in stats.live_bytes.items()]
            for direction, tiers in (("out", stats.out_bytes), ("in", stats.in_bytes)):
                copied += [({**labels, "direction": direction, "tier": tier}, n) for tier, n in tiers.items()]
            exposed.append((labels, stats.exposed_seconds))
        yield family("offload_held_bytes", "gauge", "Memory on other tiers.", *held)
        yield family("offload_copied_bytes", "counter", "Bytes moved between tiers.", *copied)
        yield family("offload_exposed_seconds", "counter", "Time that callers waited for copies.", *exposed)


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
