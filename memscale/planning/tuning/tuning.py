"""`Tuning`: the best size of a batch and the plan for it, and what else was tried, as frozen data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from types import ModuleType
from typing import Any

from memscale.core import ConfigError, Document, format_bytes, format_seconds, table_lines
from memscale.planning.evidence.curve import Point
from memscale.planning.evidence.proven import ProvenPlan

_DOCUMENT = Document("tuning", version=1, writer="Tuning.to_json()", error=ConfigError)


@dataclass(frozen=True)
class SizeTrial:
    """A step that was simulated.

    Attributes:
        size: of its batch.
        taken_bytes: what it takes of the device; where no plan fits, what the smallest takes that was found.
        fits: whether that is within the budget.
        step_seconds: the time of the step.
        per_second: what it gets through in a second; 0 if it does not fit.
        done: what its plan does, in a line.
    """

    size: int
    taken_bytes: int
    fits: bool
    step_seconds: float
    per_second: float
    done: str


@dataclass(frozen=True)
class Confirmation:
    """A real step under the plan, with the best size.

    Attributes:
        peak_bytes: the most that it held, by the device's own allocator.
        step_seconds: how long it took.
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
        objective: what was looked for.
        size: the best one.
        plan: for it, with its evidence.
        per_second: what its step gets through in a second, counted in `unit`.
        bound_per_second: no size gets through more, as far as the sizes that were looked at tell; None where they do
            not, or where something else was looked for.
        unit: ``"samples"``, ``"tokens"``, or ``"counted"`` if the caller counts.
        budget_bytes: what a step may take.
        trials: the sizes that were simulated, each with the best plan that was found for it.
        too_large: the smallest size that was found not to fit above `size`; None without one.
        simulations: how many steps were simulated in all, those of candidates included.
        confirmation: a real step; None if there was none, for which a note says why.
        notes: what the result rests on.
        interrupted: whether the search was stopped from the keyboard.
        complete: whether the search came to its end. It is the best so far otherwise, as where its seconds were over.
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
        """The result as JSON text, with a schema version."""
        data = {
            **vars(self),
            "plan": json.loads(self.plan.to_json()),
            "trials": [vars(each) for each in self.trials],
            "confirmation": None if self.confirmation is None else vars(self.confirmation),
        }
        return _DOCUMENT.write(data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Tuning:
        """The result that `to_json` wrote.

        Raises:
            ConfigError: the text is not JSON, or of another schema version. PlanError: its plan is.
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
        """Draw memory and rate over the sizes, as PNG or SVG by the suffix.

        Raises:
            ConfigError: the suffix is neither, or the folder does not exist.
            RuntimeUnavailable: matplotlib is not installed.
        """
        _reports().plot_sizes(self._tried(), self.size, self.budget_bytes, self._axis, self.unit, path)

    def html(self, path: str | PathLike[str]) -> None:
        """Write the rate over the sizes, and the plan of the best, as one HTML page that needs no other file.

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
            f"{self.per_second:.4g} {self.unit}/s; {Point.of(self.plan).summary}"
        ]
        if not self.complete:
            lines[0] += " (stopped: the best so far)"
        if self.bound_per_second is not None:
            lines.append(f"no size gets through more than {self.bound_per_second:.4g} {self.unit}/s")
        if self.too_large is not None and self.objective != "throughput":
            lines.append(f"{self.too_large} does not fit with any plan")
        rows = [(self._axis, "memory", "step", f"{self.unit}/s", "plan")]
        for each in self.trials:
            pace = (format_seconds(each.step_seconds), f"{each.per_second:.4g}") if each.fits else ("", "")
            done = (each.done if each.fits else "does not fit") + (" (chosen)" if each.size == self.size else "")
            rows.append((str(each.size), format_bytes(each.taken_bytes), *pace, done))
        lines += table_lines(rows, ">>>><")
        if (real := self.confirmation) is not None:
            lines.append(
                f"a real step held {format_bytes(real.peak_bytes)} and took {format_seconds(real.step_seconds)}"
            )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _reports() -> ModuleType:
    """The reports, which are loaded when the first result is to be drawn."""
    from memscale import reports

    return reports
