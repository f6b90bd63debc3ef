"""`Frontier`: the Pareto frontier of plans, from the smallest peak to the shortest step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING, Any, overload

from memscale.core import (
    BudgetError,
    ConfigError,
    Document,
    budget_bytes,
    format_bytes,
    format_seconds,
    format_unlike,
    in_runs,
    row_label,
    table_lines,
)
from memscale.planning.evidence.evidence_text import reasons, rows_of
from memscale.planning.evidence.proven import ProvenPlan

if TYPE_CHECKING:
    from memscale.reports import DrawnPoint, Price

_DOCUMENT = Document("frontier", version=1, writer="Frontier.to_json()", error=ConfigError)
# Runs of modules that a summary names; the number of further runs follows. By choice.
_FEW = 3


@dataclass(frozen=True)
class Point:
    """A plan of a frontier, with its memory and its time.

    Attributes:
        peak_bytes: device memory that the step takes under the plan.
        step_seconds: the time of the step under the plan.
        plan: the plan, with its evidence.
    """

    peak_bytes: int
    step_seconds: float
    plan: ProvenPlan

    @classmethod
    def of(cls, plan: ProvenPlan) -> Point:
        """Returns the point of a plan, by the figures of its evidence."""
        return cls(plan.evidence.planned.taken_bytes, plan.evidence.planned.step_seconds, plan)

    @property
    def summary(self) -> str:
        """Returns the plan as a line of text: ``checkpoint() on layers.0 to 6``."""
        places: dict[str, list[str]] = {}
        for rule in self.plan:
            places.setdefault(repr(rule.transform), []).append(rule.pattern)
        return "; ".join(f"{how} on {_places(on)}" for how, on in places.items()) or "as written"


class Frontier(Sequence[Point]):
    """A sequence of points by growing memory and falling time. Prints as a table; `plot` and `html` draw the curve.

    >>> import torch, memscale as ms
    >>> from torch import nn
    >>> blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)]
    >>> step = {"loss": lambda y, _: y.square().mean(), "hardware": "cpu"}
    >>> curve = ms.frontier(nn.Sequential(*blocks), torch.ones(1024, 64), points=3, **step)
    >>> curve.at("5MiB").peak_bytes <= 5 * 2**20
    True
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = tuple(points)

    @classmethod
    def of(cls, points: Iterable[Point]) -> Frontier:
        """Returns the Pareto frontier of `points`: a point stays if no other point is as small and as fast."""
        kept: list[Point] = []
        for point in sorted(points, key=lambda point: (point.peak_bytes, point.step_seconds)):
            if not kept or point.step_seconds < kept[-1].step_seconds:
                kept.append(point)
        return cls(kept)

    def __len__(self) -> int:
        return len(self._points)

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> Frontier: ...
    def __getitem__(self, index: int | slice) -> Any:
        return Frontier(self._points[index]) if isinstance(index, slice) else self._points[index]

    def __iter__(self) -> Iterator[Point]:
        return iter(self._points)

    def at(self, budget: int | float | str) -> Point:
        """Returns the fastest point within a budget.

        Args:
            budget: bytes as an int, ``"6GiB"`` or ``"6GB"``, or a share of the device's usable bytes as a float in
                (0, 1].

        Raises:
            BudgetError: even the smallest point is above the budget.
        """
        limit = budget_bytes(budget, self._points[-1].plan.evidence.hardware.usable_bytes)
        fitting = [point for point in self._points if point.peak_bytes <= limit]
        if not fitting:
            least = self._points[0]
            budget_text, smallest = format_unlike(limit, least.peak_bytes)
            error = BudgetError(f"no point fits {budget_text}: the smallest takes {smallest}")
            error.peak_bytes, error.plan = least.peak_bytes, least.plan
            raise error
        return fitting[-1]

    def plot(self, path: str | PathLike[str], *, price: float | None = None, steps: int = 1000) -> None:
        """Draws the time of a step over its memory, as PNG or SVG by the suffix of `path`.

        Args:
            path: the file to write.
            price: dollars per hour for all devices of the step together; adds an axis in dollars on the right.
            steps: the number of steps that the axis in dollars is for.

        Raises:
            ConfigError: the suffix is neither ``.png`` nor ``.svg``, the folder does not exist, or `price` or `steps`
                is not a number above 0.
            RuntimeUnavailable: matplotlib is not installed.
        """
        _reports().plot_frontier(self._choices(), self._device, path, _price(price, steps, "Frontier.plot"))

    def html(self, path: str | PathLike[str], *, price: float | None = None, steps: int = 1000) -> None:
        """Writes the curve as one self-contained HTML file, in which each point shows its plan with the evidence.

        Args:
            path, price, steps: as in `plot`; with a price, the table has a column in dollars as well.

        Raises:
            ConfigError: the suffix is not ``.html``, the folder does not exist, or `price` or `steps` is not a number
                above 0.
        """
        _reports().write_frontier(self._choices(), self._device, path, _price(price, steps, "Frontier.html"))

    def to_json(self) -> str:
        """Returns the plans of the points, with their evidence, as JSON text with a schema version."""
        return _DOCUMENT.write({"plans": [json.loads(point.plan.to_json()) for point in self._points]}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Frontier:
        """Returns the frontier that `to_json` wrote.

        Raises:
            ConfigError: the text is not JSON, or of another schema version.
            PlanError: a plan in the text is of another schema version.
        """
        data = _DOCUMENT.read(text)
        with _DOCUMENT.parts():
            return cls([Point.of(ProvenPlan.from_json(json.dumps(plan))) for plan in data["plans"]])

    @property
    def _device(self) -> str:
        return self._points[-1].plan.evidence.hardware.name

    def _choices(self) -> list[DrawnPoint]:
        choice, part = _reports().DrawnPoint, _reports().PartOfPlan
        found = []
        for point in self._points:
            evidence = point.plan.evidence
            parts = [
                part(
                    row_label([each.path for each in row]),
                    row[0].chosen,
                    sum(each.kept_bytes for each in row),
                    sum(each.kept_bytes_before for each in row),
                    sum(each.seconds for each in row),
                    sum(each.seconds_before for each in row),
                    reasons(row, evidence),
                )
                for row in rows_of(evidence.decisions)
            ]
            text, script = point.plan.explain(), point.plan.to_python()
            found.append(choice(point.peak_bytes, point.step_seconds, point.summary, parts, text, script))
        return found

    def __repr__(self) -> str:
        return f"Frontier({list(self._points)!r})"

    def __str__(self) -> str:
        fastest = self._points[-1].step_seconds
        rows = [("memory", "step", "ratio", "plan")]
        for each in self._points:
            figures = format_bytes(each.peak_bytes), format_seconds(each.step_seconds)
            rows.append((*figures, f"{each.step_seconds / fastest:.2f} ×", each.summary))
        return "\n".join(table_lines(rows, ">>><"))


def _places(patterns: Sequence[str]) -> str:
    """Returns the modules of one transform as text, with runs of consecutive modules as ``layers.0 to 6``."""
    runs = [row_label(run) if run[0] else "the model" for run in in_runs(patterns, str, lambda _: None)]
    shown, rest = runs[:_FEW], len(runs) - _FEW
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _price(dollars: float | None, steps: int, caller: str) -> Price | None:
    return None if dollars is None else _reports().Price.of(dollars, steps, caller)


def _reports() -> ModuleType:
    """Returns the module `memscale.reports`, imported at the first drawing to keep ``import memscale`` fast."""
    from memscale import reports

    return reports
