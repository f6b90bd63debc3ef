"""`Profile`: the memory and the time of a training step, as frozen data."""

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
    """A storage that lives at the peak.

    Attributes:
        nbytes: the bytes of the storage.
        category: the purpose of the storage, a member of `CATEGORIES`.
        path: the module that made the storage, or the parameter or buffer that it belongs to.
        op: the operator that made the storage; ``""`` if it lived before the step.
        phase: the phase of the step that made the storage; ``""`` if it lived before the step.
        shape: the shape of the first tensor over the storage.
        dtype: the dtype of the first tensor over the storage.
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
    """The moment of the peak: the operator, its module, and the phase of the step."""

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
        unit: ``"seconds"`` (estimated or measured), or ``"operators"`` where the hardware's speed is unknown.
        live_bytes: category -> live bytes, int64 of the shape of `position`.
        phases: (name, position at which it begins) of each phase of the step.
    """

    position: npt.NDArray[np.float64]
    unit: str
    live_bytes: Mapping[str, npt.NDArray[np.int64]]
    phases: tuple[tuple[str, float], ...]

    @property
    def total_bytes(self) -> npt.NDArray[np.int64]:
        """The live bytes of all categories together, int64 of shape (events + 1,)."""
        total: npt.NDArray[np.int64] = np.sum(list(self.live_bytes.values()), axis=0, dtype=np.int64)
        return total


@dataclass(frozen=True)
class Profile:
    """The memory of a training step. Prints as a table; `plot` and `html` draw it.

    Attributes:
        method: ``"static"``, simulated without running, or ``"empirical"``, measured on real steps.
        notes: the assumptions of the numbers, and the reason why the step was measured if it was.
        hardware: the device that the numbers are for.
        peak_bytes: the most bytes that PyTorch's allocator hands out at once, in a step after the first (when optimizer
            states exist). The memory of the CUDA context is not counted; see ``Hardware.usable_bytes``.
        first_step_peak_bytes: the most bytes that the allocator hands out at once in the first step.
        reserved_peak_bytes: the most bytes of the device that the caching allocator reserves; None without a caching
            allocator (CPU). Cached memory is given back when the device is full, so a value above
            ``hardware.usable_bytes`` means that the step does not fit.
        moment: the moment of the peak.
        by_category: category -> bytes at the peak; ``"rounding"`` is the bytes of the allocator's blocks minus the
            bytes of the tensors in them.
        categories_by_module: module path -> category -> bytes at the peak; empty if unknown.
        by_tier: tier below the device -> the most bytes that it holds; empty without offloading.
        holdings: the largest storages at the peak, the largest first.
        flops: the FLOPs of the step in products, convolutions and attention.
        step_seconds: the scheduled or measured seconds of the step. Operators take the time of the hardware's roofline
            (a lower bound in practice), or their own measured times on a probed CPU; copies take the time of the links,
            and wait for their inputs. None if the hardware's speed is unknown.
        exposed_seconds: cause -> seconds of the step that the device waits: ``"input"`` for a copy that brings an
            operator's input; ``"room"`` for a copy out of memory that is used again; ``"disk"`` for such a copy to or
            from the disk; ``"host"`` for the host; ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``,
            ``"all-to-all"`` and ``"other collectives"`` for a collective; ``"stream"`` for another stream of the
            device. In the rest of the step the device computes. Empty if unknown.
        prefetch_depth: the smallest depth at which copies hide behind the compute as far as they can
            (`AsyncOffloadConfig.prefetch_depth`); None without copies, or if unknown.
        seconds_by_module: module path -> seconds of its operators, with the waits before them; empty if unknown.
        changes: (index in ``CATEGORIES``, bytes) of each event of the steady step, preceded by the bytes alive before
            the step, summed by category.
        positions: the position of each of `changes`, in `position_unit`.
        phases: see `MemoryTimeline`.
        schedule: the times of operators and copies, and their waits; None if unknown.

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
        """The bytes that the device must have free for the step: reserved with a caching allocator, else allocated.

        The first step counts too: it begins without optimizer states, but making these can take more memory than using
        them. With ``hardware.unified_memory``, tensors on the host's tiers count too.

        >>> import torch, memscale as ms
        >>> step = {"batch": torch.ones(8, 64), "loss": lambda y, _: y.sum()}
        >>> box, card = (ms.profile(torch.nn.Linear(64, 64), hardware=name, **step) for name in ("cpu", "t4"))
        >>> box.taken_bytes == box.peak_bytes, card.taken_bytes == card.reserved_peak_bytes
        (True, True)
        """
        on_host = (
            sum(self.by_tier.get(tier, 0) for tier in ("pinned", "pageable")) if self.hardware.unified_memory else 0
        )
        if self.reserved_peak_bytes is not None:
            return self.reserved_peak_bytes + on_host  # over all steps
        return max(self.first_step_peak_bytes, self.peak_bytes) + on_host

    @property
    def fragmentation_bytes(self) -> int | None:
        """The peak of reserved bytes minus the peak of allocated bytes; None without a caching allocator."""
        return None if self.reserved_peak_bytes is None else self.reserved_peak_bytes - self.peak_bytes

    @property
    def pinned_bytes(self) -> int:
        """The bytes of pinned host memory that the step needs: the most that are in use at once."""
        return self.by_tier.get("pinned", 0)

    def runtime(self, *, max_cpu_offload_gb: float | None = None) -> Runtime:
        """Returns a runtime with pinned memory and a prefetch depth for this step, to pass to `transform`.

        Args:
            max_cpu_offload_gb: the most host memory that the runtime may take, in GB of 10**9 bytes, as in `Config`.

        >>> import torch, memscale as ms
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(6)])
        >>> batch, plan = torch.ones(4096, 2048), {"*": ms.offload()}
        >>> profile = ms.profile(model, batch, loss=lambda y, _: y.sum(), plan=plan, hardware="h100")
        >>> profile.runtime().config.prefetch_depth == profile.prefetch_depth
        True
        """
        usual = AsyncOffloadConfig().prefetch_depth
        depth = usual if self.prefetch_depth is None else self.prefetch_depth
        # In each direction up to `usual` real copies may be later than simulated, and stay in pinned memory meanwhile.
        copies = () if self.schedule is None else self.schedule.copies
        largest = max((copy.nbytes for copy in copies), default=0)
        config = AsyncOffloadConfig.sized(self.pinned_bytes + 2 * usual * largest, prefetch_depth=depth)
        return Runtime(config, host_bytes=Config(max_cpu_offload_gb=max_cpu_offload_gb).host_bytes)

    @property
    def by_module(self) -> dict[str, int]:
        """Module path -> bytes at the peak; ``""`` is the model itself and the step around it."""
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
        """Returns the profile as JSON text, with a schema version."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["hardware"] = json.loads(self.hardware.to_json())
        fields["moment"] = dataclasses.asdict(self.moment)
        fields["holdings"] = [dataclasses.asdict(holding) for holding in self.holdings]
        fields["schedule"] = None if self.schedule is None else self.schedule.to_data()
        return _DOCUMENT.write(fields)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Returns the profile that `to_json` wrote.

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
        """Returns the change from this profile to `other`; negative bytes are bytes that `other` saves."""
        return ProfileDiff(self, other)

    def table(self, *, by: str = "bytes", rows: int = 10) -> str:
        """Returns a text table of each module's bytes at the peak and seconds, with equal layers in one row.

        >>> import torch, memscale as ms
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 1))
        >>> profile = ms.profile(model, torch.ones(8, 64), loss=lambda y, _: y.sum(), hardware="t4")
        >>> [line.split()[0] for line in profile.table(by="time").splitlines()]
        ['by', '2', '0', '1', '(top', '(the']

        Args:
            by: the sort key of the rows, the largest first: ``"bytes"`` or ``"time"``.
            rows: the approximate number of rows; all other modules are in a last row, "(the rest)".

        Raises:
            ConfigError: `by` or `rows` is invalid, or ``by="time"`` and the profile has no times.
        """
        return str(_reports().module_text(self, by, rows))

    def trace(self, path: str | PathLike[str]) -> None:
        """Writes the schedule, with live bytes over it, as JSON that ``chrome://tracing`` and Perfetto open.

        Raises:
            ConfigError: the step has no schedule, the suffix is not ``.json``, or the folder does not exist.
        """
        _reports().write_trace(self, path)

    def plot(self, path: str | PathLike[str], *, budget_bytes: int | None = None) -> None:
        """Draws live bytes over the step, stacked by category with the peak marked, as PNG or SVG by the suffix.

        Args:
            path: the path of the picture, with the suffix ``.png`` or ``.svg``.
            budget_bytes: the budget of the step in bytes, drawn as a line.

        Raises:
            ConfigError: the suffix is neither of these, or the folder does not exist.
            RuntimeUnavailable: matplotlib is not installed.
        """
        _reports().plot_profile(self, path, budget_bytes)

    def html(self, path: str | PathLike[str]) -> None:
        """Writes a report as one self-contained HTML file, which loads nothing from the network or from disk.

        The report shows the step as a picture with the numbers under the pointer; the bytes at the peak by category, by
        module (a tree with sums) and by tensor; the notes and the hardware.

        Raises:
            ConfigError: the suffix is not ``.html``, or the folder does not exist.
        """
        _reports().write_html(self, path)

    def __str__(self) -> str:
        return str(_reports().profile_text(self))


@dataclass(frozen=True)
class ProfileDiff:
    """The change from one profile to another. Prints as a table.

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
        """The change of the peak in bytes."""
        return self.after.peak_bytes - self.before.peak_bytes

    @property
    def by_category(self) -> dict[str, int]:
        """Category -> change in bytes between the two peaks."""
        return differences(self.before.by_category, self.after.by_category)

    @property
    def by_module(self) -> dict[str, int]:
        """Module path -> change in bytes between the two peaks, without unchanged modules."""
        changes = differences(self.before.by_module, self.after.by_module)
        return {path: nbytes for path, nbytes in changes.items() if nbytes}

    def __str__(self) -> str:
        return str(_reports().diff_text(self))


def differences(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Returns ``after[key] - before[key]`` for each key of either; a missing key counts as 0."""
    return {key: after.get(key, 0) - before.get(key, 0) for key in {**before, **after}}


def _reports() -> ModuleType:
    """Returns the module `memscale.reports`, imported at the first use: `reports` itself imports profiles.

    This import is the only one against the direction of the layers; the architecture test lists it.
    """
    from memscale import reports

    return reports
