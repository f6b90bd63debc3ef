"""`Tuning`: the best size of a batch, the plan for a step of that size, and all sizes tried, as frozen data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from types import ModuleType
from typing import Any

from memscale.core import ConfigError, Document, format_bytes, format_count, format_seconds, table_lines, wrapped
from memscale.planning.evidence.curve import Point
from memscale.planning.evidence.proven import ProvenPlan

_DOCUMENT = Document("tuning", version=1, writer="Tuning.to_json()", error=ConfigError)


@dataclass(frozen=True)
class SizeTrial:
    """A size that was simulated, with the figures of its step under the best plan found.

    Attributes:
        size: the size of the batch.
        taken_bytes: device memory that the step takes under the best plan; if no plan fits, under the smallest found.
        fits: whether `taken_bytes` is within the budget.
        step_seconds: the time of the step; 0 if no plan fits.
        per_second: the rate in the unit of the tuning; 0 if no plan fits.
        done: the plan in a line; "" if no plan fits.
    """

    size: int
    taken_bytes: int
    fits: bool
    step_seconds: float
    per_second: float
    done: str


@dataclass(frozen=True)
class Confirmation:
    """The measurement of a real step under the plan, with the best size.

    Attributes:
        peak_bytes: the most bytes that the step held, by the device's own allocator.
        step_seconds: the time of the step.
    """

    peak_bytes: int
    step_seconds: float


@dataclass(frozen=True, repr=False)
class Tuning:
    """The best size and its plan. Prints as a table; `plot` draws it.

    >>> import torch, memscale as ms
    >>> tuner = ms.AutoTuner(torch.nn.Linear(64, 64), loss=lambda y, _: y.mean(), hardware="cpu")
    >>> best = tuner.tune(lambda rows: torch.empty(rows, 64, device="meta"), objective="batch", budget="1MiB")
    >>> best.size, best.too_large, ms.Tuning.from_json(best.to_json()) == best
    (1321, 1322, True)

    Attributes:
        objective: the objective of the search: ``"throughput"``, ``"batch"`` or ``"sequence"``.
        size: the best size.
        plan: the plan for a step of this size, with its evidence.
        per_second: the rate of the step, in `unit` per second.
        bound_per_second: an upper bound of the rate of every size, extrapolated from the simulated sizes; None if no
            bound is known, or for another objective than ``"throughput"``.
        unit: ``"samples"``, ``"tokens"``, or ``"counted"`` if the caller counts.
        budget_bytes: bytes that a step may take.
        trials: the simulated sizes, each with the best plan found for that size.
        too_large: the smallest size above `size` that is known to exceed the budget; None if no such size was tried.
        simulations: the number of simulated steps, including steps that try candidates.
        confirmation: the measurement of a real step; None if no real step ran, for the reason in `notes`.
        notes: the assumptions that the result rests on.
        interrupted: whether the search was stopped from the keyboard.
        complete: whether the search reached its end; otherwise `size` is the best size found until the search stopped.
    """

    objective: str
    size: int
    plan: ProvenPlan
    per_second: float
    bound_per_second: float | None
    unit: str
    budget_bytes: int
    trials: tuple[SizeTrial, ...]
    too_large: int | None
    simulations: int
    confirmation: Confirmation | None = None
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    complete: bool = True

    def to_json(self) -> str:
        """Returns the tuning as JSON text, with a schema version."""
        data = {
            **vars(self),
            "plan": json.loads(self.plan.to_json()),
            "trials": [vars(each) for each in self.trials],
            "confirmation": None if self.confirmation is None else vars(self.confirmation),
        }
        return _DOCUMENT.write(data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Tuning:
        """Returns the tuning that `to_json` wrote.

        Raises:
            ConfigError: the text is not JSON, or of another schema version.
            PlanError: the plan in the text is of another schema version.
        """
        data = _DOCUMENT.read(text)
        with _DOCUMENT.parts():
            confirmation: Mapping[str, Any] | None = data["confirmation"]
            return cls(
                **{
                    **data,
                    "plan": ProvenPlan.from_json(json.dumps(data["plan"])),
                    "trials": tuple(SizeTrial(**each) for each in data["trials"]),
                    "confirmation": None if confirmation is None else Confirmation(**confirmation),
                    "notes": tuple(data["notes"]),
                }
            )

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws memory and rate over the sizes to the file `path`, as PNG or SVG by its suffix.

        Raises:
            ConfigError: the suffix is neither ``.png`` nor ``.svg``, or the folder does not exist.
            RuntimeUnavailable: matplotlib is not installed.
        """
        _reports().plot_sizes(self._tried(), self.size, self.budget_bytes, self._axis, self.unit, path)

    def html(self, path: str | PathLike[str]) -> None:
        """Writes the rate over the sizes, and the plan for the best size, as one self-contained HTML file.

        Raises:
            ConfigError: the suffix is not ``.html``, or the folder does not exist.
        """
        text, script = f"{self.plan.explain()}\n\n{self.plan}", self.plan.to_python()
        drawn = (self._tried(), self.size, self.budget_bytes, self._axis, self.unit, path)
        _reports().write_sizes(*drawn, text=text, script=script)

    def _tried(self) -> list[Any]:
        tried = _reports().TriedSize
        return [tried(each.size, each.taken_bytes, each.fits, each.per_second) for each in self.trials]

    @property
    def _axis(self) -> str:
        return "length" if self.objective == "sequence" else "batch size"

    def __repr__(self) -> str:
        return f"Tuning(objective={self.objective!r}, size={self.size}, plan={self.plan!r})"

    def __str__(self) -> str:
        verdict = {"throughput": "fastest", "batch": "largest", "sequence": "longest"}[self.objective]
        lines = [
            f"{verdict} within {format_bytes(self.budget_bytes)}: {self._axis} {self.size}, "
            f"{format_count(self.per_second)} {self.unit}/s; {Point.of(self.plan).summary}"
        ]
        if not self.complete:
            lines[0] += " (stopped: the best so far)"
        if self.bound_per_second is not None:
            lines.append(f"bound of every size: {format_count(self.bound_per_second)} {self.unit}/s")
        if self.too_large is not None and self.objective != "throughput":
            lines.append(f"{self.too_large} is too large for every plan")
        rows = [(self._axis, "memory", "step", f"{self.unit}/s", "plan")]
        for each in self.trials:
            pace = (format_seconds(each.step_seconds), format_count(each.per_second)) if each.fits else ("", "")
            done = (each.done if each.fits else "does not fit") + (" (chosen)" if each.size == self.size else "")
            rows.append((str(each.size), format_bytes(each.taken_bytes), *pace, done))
        lines += table_lines(rows, ">>>><")
        if (real := self.confirmation) is not None:
            lines.append(
                f"a real step held {format_bytes(real.peak_bytes)} and took {format_seconds(real.step_seconds)}"
            )
        return wrapped("\n".join([*lines, *(f"note: {note}" for note in self.notes)]))


def _reports() -> ModuleType:
    """Returns the module `memscale.reports`, imported at the first drawing to keep ``import memscale`` fast."""
    from memscale import reports

    return reports
