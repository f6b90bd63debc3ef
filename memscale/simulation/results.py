"""`Profile`: what a training step holds in memory, when, and for how long, as frozen data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from types import ModuleType

import numpy as np
import numpy.typing as npt

from memscale.config import Config
from memscale.core import ConfigError, Document
from memscale.hardware import Hardware
from memscale.runtime import AsyncOffloadConfig, Runtime
from memscale.simulation.schedule.schedule import Schedule
from memscale.simulation.trace import CATEGORIES

_DOCUMENT = Document("profile", version=1, writer="Profile.to_json()", error=ConfigError)


@dataclass(frozen=True)
class Holding:
    """One storage that lives at the peak.

    Attributes:
        nbytes: its size in bytes.
        category: what it is for, one of `CATEGORIES`.
        path: the module that made it, or the parameter or buffer that it belongs to.
        op: the operator that made it, ``""`` for what was there before the step.
        phase: the part of the step in which it was made, ``""`` likewise.
        shape: of the first tensor over it.
        dtype: of that tensor.
    """

    nbytes: int
    category: str
    path: str
    op: str
    phase: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Moment:
    """When the peak is: during which operator, in which module and part of the step."""

    op: str
    path: str
    phase: str

    def __str__(self) -> str:
        return f"in {self.phase}{f', {self.op}' if self.op else ''}{f' of {self.path}' if self.path else ''}"


@dataclass(frozen=True)
class MemoryTimeline:
    """Live bytes after each allocation and release of the steady step.

    Attributes:
        position: float64 of shape (events + 1,), from 0, in `unit`.
        unit: ``"seconds"`` (estimated or measured), or ``"operators"`` where the hardware's speed is not known.
        live_bytes: for each category an int64 array of the same shape.
        phases: the parts of the step, each with the position at which it begins.
    """

    position: npt.NDArray[np.float64]
    unit: str
    live_bytes: Mapping[str, npt.NDArray[np.int64]]
    phases: tuple[tuple[str, float], ...]

    @property
    def total_bytes(self) -> npt.NDArray[np.int64]:
        """The sum over the categories, int64 of shape (events + 1,)."""
        total: npt.NDArray[np.int64] = np.sum(list(self.live_bytes.values()), axis=0, dtype=np.int64)
        return total


@dataclass(frozen=True)
class Profile:
    """The memory of a training step. Prints as a table; `plot` and `html` draw it.

    Attributes:
        method: ``"static"``, simulated without running, or ``"empirical"``, measured on real steps.
        notes: what was assumed, and why the step was measured if it was.
        hardware: the device that the numbers are for.
        peak_bytes: the most that PyTorch's allocator has handed out at once, in a step after the first (when optimizer
            states exist). What the CUDA context takes beside that is not in it; see ``Hardware.usable_bytes``.
        first_step_peak_bytes: the same for the first step.
        reserved_peak_bytes: what the caching allocator holds of the device at its most; None where there is none (CPU).
            Above ``hardware.usable_bytes`` only if the step does not fit: what is only cached is given back before.
        moment: when the peak is.
        by_category: bytes at the peak by what they are for; ``"rounding"`` is what the allocator's blocks have above
            the tensors in them.
        categories_by_module: bytes at the peak by module path and category; empty if not known.
        by_tier: the most bytes that each tier below the device held, by its name; empty without offloading.
        holdings: the largest storages at the peak, the largest first.
        flops: floating point operations of the step in products, convolutions and attention.
        step_seconds: the step's time as it is scheduled: operators by the roofline of the hardware (a lower bound in
            practice) or, on a CPU that was probed, by their own times; copies by its links, each waiting for what it
            has to; or as measured. None if the hardware's speed is not known.
        exposed_seconds: what of it the device stands still, by cause: ``"input"``, something that an operator reads is
            not back yet; ``"room"``, memory that is used again is not out yet; ``"disk"``, either of them because of
            the disk; ``"host"``, the host is behind; ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``,
            ``"all-to-all"``, ``"other collectives"``, one of these is not over; ``"stream"``, another stream of the
            device is behind. The rest of the step the device computes. Empty if not known.
        prefetch_depth: how far ahead copies have to be asked for, and how many may leave at once, to hide behind the
            compute as far as they can (`AsyncOffloadConfig.prefetch_depth`); None if nothing moves, or not known.
        seconds_by_module: its parts by module path, each with the waits before its operators; empty if not known.
        changes: (index in ``CATEGORIES``, bytes) of each event of the steady step; what is there before it, summed by
            category, comes first.
        positions: when each of them was, in `position_unit`.
        phases: see `MemoryTimeline`.
        schedule: when each operator and each copy runs, and what waits for what; None if not known.

    >>> import torch, memscale as ms
    >>> layer = torch.nn.Linear(256, 256)
    >>> profile = ms.profile(layer, torch.ones(64, 256), loss=lambda y, _: y.sum())
    >>> profile.method, profile.by_category["parameter"]
    ('static', 263168)
    >>> Profile.from_json(profile.to_json()) == profile
    True
    """

    method: str
    notes: tuple[str, ...]
    hardware: Hardware
    peak_bytes: int
    first_step_peak_bytes: int
    reserved_peak_bytes: int | None
    moment: Moment
    by_category: Mapping[str, int]
    categories_by_module: Mapping[str, Mapping[str, int]]
    by_tier: Mapping[str, int]
    holdings: tuple[Holding, ...]
    flops: int
    step_seconds: float | None
    exposed_seconds: Mapping[str, float]
    prefetch_depth: int | None
    seconds_by_module: Mapping[str, float]
    changes: tuple[tuple[int, int], ...] = dataclasses.field(repr=False)
    positions: tuple[float, ...] = dataclasses.field(repr=False)
    position_unit: str
    phases: tuple[tuple[str, float], ...]
    schedule: Schedule | None = dataclasses.field(repr=False)

    @property
    def taken_bytes(self) -> int:
        """What the device has to give for this profile's steps: what its caching allocator reserves where it has one.

        The first step counts as well as the later ones: it begins without optimizer states, but making them can take
        more than using them. Where ``hardware.unified_memory``, tensors on the host's tiers count as well.

        >>> import torch, memscale as ms
        >>> step = {"batch": torch.ones(8, 64), "loss": lambda y, _: y.sum()}
        >>> box, card = (ms.profile(torch.nn.Linear(64, 64), hardware=name, **step) for name in ("cpu", "t4"))
        >>> box.taken_bytes == box.peak_bytes, card.taken_bytes == card.reserved_peak_bytes
        (True, True)
        """
        beside = (
            sum(self.by_tier.get(tier, 0) for tier in ("pinned", "pageable")) if self.hardware.unified_memory else 0
        )
        if self.reserved_peak_bytes is not None:
            return self.reserved_peak_bytes + beside  # over all steps
        return max(self.first_step_peak_bytes, self.peak_bytes) + beside

    @property
    def fragmentation_bytes(self) -> int | None:
        """What the caching allocator holds at its most above the most it has handed out; None without one."""
        return None if self.reserved_peak_bytes is None else self.reserved_peak_bytes - self.peak_bytes

    @property
    def pinned_bytes(self) -> int:
        """The pinned memory of the host that the step needs: the most that lies there at once."""
        return self.by_tier.get("pinned", 0)

    def runtime(self, *, max_cpu_offload_gb: float | None = None) -> Runtime:
        """A runtime with pinned memory and a prefetch depth for this step, to give to `transform`.

        Args:
            max_cpu_offload_gb: as in `Config`: the most host memory that it may take, in GB of 10**9 bytes.

        >>> import torch, memscale as ms
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)])
        >>> batch, plan = torch.ones(4096, 2048), {"*": ms.offload()}
        >>> profile = ms.profile(model, batch, loss=lambda y, _: y.sum(), plan=plan, hardware="h100")
        >>> profile.runtime().config.prefetch_depth == profile.prefetch_depth
        True
        """
        usual = AsyncOffloadConfig().prefetch_depth
        depth = usual if self.prefetch_depth is None else self.prefetch_depth
        # As many as are in flight fewer may be so in truth, in each direction, and lie there instead.
        copies = () if self.schedule is None else self.schedule.copies
        largest = max((copy.nbytes for copy in copies), default=0)
        config = AsyncOffloadConfig.sized(self.pinned_bytes + 2 * usual * largest, prefetch_depth=depth)
        return Runtime(config, host_bytes=Config(max_cpu_offload_gb=max_cpu_offload_gb).host_bytes)

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes at the peak by module path; ``""`` is the model itself and the step around it."""
        return {path: sum(parts.values()) for path, parts in self.categories_by_module.items()}

    @property
    def timeline(self) -> MemoryTimeline:
        """Live bytes by category over the steady step."""
        deltas = np.zeros((len(CATEGORIES), len(self.changes) + 1), dtype=np.int64)
        for at, (category, nbytes) in enumerate(self.changes):
            deltas[category, at + 1] = nbytes
        live_bytes = dict(zip(CATEGORIES, deltas.cumsum(axis=1), strict=True))
        position = np.array([0.0, *self.positions], dtype=np.float64)
        return MemoryTimeline(position, self.position_unit, live_bytes, self.phases)

    def to_json(self) -> str:
        """The profile as JSON text, with a schema version."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["hardware"] = json.loads(self.hardware.to_json())
        fields["moment"] = dataclasses.asdict(self.moment)
        fields["holdings"] = [dataclasses.asdict(holding) for holding in self.holdings]
        fields["schedule"] = None if self.schedule is None else self.schedule.to_data()
        return _DOCUMENT.write(fields)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that `to_json` wrote.

        Raises:
            ConfigError: the text is not JSON, is of another schema version, or lacks a field.
        """
        data = _DOCUMENT.read(text)
        with _DOCUMENT.parts():
            data["hardware"] = Hardware.from_json(json.dumps(data["hardware"]))
            data["moment"] = Moment(**data["moment"])
            data["holdings"] = tuple(
                Holding(**{**holding, "shape": tuple(holding["shape"])}) for holding in data["holdings"]
            )
            for name in ("changes", "phases"):
                data[name] = tuple((first, second) for first, second in data[name])
            for name in ("notes", "positions"):
                data[name] = tuple(data[name])
            data["schedule"] = None if data["schedule"] is None else Schedule.from_data(data["schedule"])
            return cls(**data)

    def diff(self, other: Profile) -> ProfileDiff:
        """How `other` differs from this profile: negative bytes are saved by it."""
        return ProfileDiff(self, other)

    def table(self, *, by: str = "bytes", rows: int = 10) -> str:
        """What each module holds at the peak and how long its operators take, layers that are alike taken together.

        >>> import torch, memscale as ms
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 1))
        >>> profile = ms.profile(model, torch.ones(8, 64), loss=lambda y, _: y.sum(), hardware="t4")
        >>> [line.split()[0] for line in profile.table(by="time").splitlines()]
        ['by', '2', '0', '1', '(top', '(the']

        Args:
            by: what the rows are sorted by, the largest first: ``"bytes"`` or ``"time"``.
            rows: about how many of them; what else there is, is in a last one, "(the rest)".

        Raises:
            ConfigError: an argument is none of these, or there are no times.
        """
        return str(_reports().module_text(self, by, rows))

    def trace(self, path: str | PathLike[str]) -> None:
        """Write the schedule, with live bytes over it, as JSON that ``chrome://tracing`` and Perfetto open.

        Raises:
            ConfigError: the step has no schedule, the suffix is not ``.json``, or the folder does not exist.
        """
        _reports().write_trace(self, path)

    def plot(self, path: str | PathLike[str], *, budget_bytes: int | None = None) -> None:
        """Draw live bytes over the step, stacked by category with the peak marked, as PNG or SVG by the suffix.

        Args:
            path: of the picture.
            budget_bytes: what the step may take, a line of its own.

        Raises:
            ConfigError: the suffix is neither, or the folder does not exist.
            RuntimeUnavailable: matplotlib is not installed.
        """
        _reports().plot_profile(self, path, budget_bytes)

    def html(self, path: str | PathLike[str]) -> None:
        """Write a report as one HTML file that needs nothing else, from the network or from disk.

        The step as a picture with the numbers under the pointer; what is at the peak by category, by module (a tree
        with sums) and by tensor; the notes and the hardware.

        Raises:
            ConfigError: the suffix is not ``.html``, or the folder does not exist.
        """
        _reports().write_html(self, path)

    def __str__(self) -> str:
        return str(_reports().profile_text(self))


@dataclass(frozen=True)
class ProfileDiff:
    """What changes from one profile to another. Prints as a table.

    >>> import torch, memscale as ms
    >>> def block():
    ...     return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    >>> model = torch.nn.Sequential(*[block() for _ in range(4)])
    >>> step = {"batch": torch.ones(512, 64), "loss": lambda y, _: y.square().mean()}
    >>> plain = ms.profile(model, **step)
    >>> plain.diff(ms.profile(model, plan={"*": ms.checkpoint()}, **step)).by_category["activation"] < 0
    True
    """

    before: Profile
    after: Profile

    @property
    def peak_bytes(self) -> int:
        """The change of the peak."""
        return self.after.peak_bytes - self.before.peak_bytes

    @property
    def by_category(self) -> dict[str, int]:
        """The change at the peaks by category."""
        return differences(self.before.by_category, self.after.by_category)

    @property
    def by_module(self) -> dict[str, int]:
        """The change at the peaks by module path, without those that stay."""
        changes = differences(self.before.by_module, self.after.by_module)
        return {path: nbytes for path, nbytes in changes.items() if nbytes}

    def __str__(self) -> str:
        return str(_reports().diff_text(self))


def differences(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What each of `before` must change by to be what it is in `after`."""
    return {key: after.get(key, 0) - before.get(key, 0) for key in {**before, **after}}


def _reports() -> ModuleType:
    """The reports, which are written for profiles: loaded when the first is asked to print or to draw itself.

    The one import that points up, as the test of the architecture says.
    """
    from memscale import reports

    return reports
