"""`Frontier`: what memory costs in time, as plans of which none is both larger and slower than another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from memscale.core import BudgetError, budget_bytes, format_bytes, format_seconds
from memscale.planning.evidence import ProvenPlan


@dataclass(frozen=True)
class Point:
    """One plan of a frontier.

    Attributes:
        peak_bytes: what its step takes of the device.
        step_seconds: how long that takes.
        plan: the plan, with its evidence.
    """

    peak_bytes: int
    step_seconds: float
    plan: ProvenPlan


class Frontier(Sequence[Point]):
    """Points by growing memory and falling time. Prints as a table.

    >>> import torch, memscale as ms
    >>> from torch import nn
    >>> blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    >>> step = {"loss": lambda y, _: y.square().mean(), "hardware": "cpu"}
    >>> curve = ms.frontier(nn.Sequential(*blocks), torch.ones(1024, 64), points=4, **step)
    >>> curve.at("6MiB").peak_bytes <= 6 * 2**20
    True
    """

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = tuple(points)

    @classmethod
    def of(cls, points: Iterable[Point]) -> Frontier:
        """The frontier of any points: without those that another is as small as and as fast as."""
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
        """The fastest point within a budget of bytes.

        Raises:
            BudgetError: even the smallest point is larger.
        """
        limit = budget_bytes(budget, self._points[-1].plan.evidence.hardware.usable_bytes)
        fitting = [point for point in self._points if point.peak_bytes <= limit]
        if not fitting:
            least = self._points[0]
            error = BudgetError(
                f"no point fits {format_bytes(limit)}: the smallest takes {format_bytes(least.peak_bytes)}"
            )
            error.peak_bytes, error.plan = least.peak_bytes, least.plan
            raise error
        return fitting[-1]

    def __repr__(self) -> str:
        return f"Frontier({list(self._points)!r})"

    def __str__(self) -> str:
        fastest = self._points[-1].step_seconds
        lines = [f"{'memory':>10}  {'step':>8}  {'time':>6}  plan"]
        for point in self._points:
            rules = len(point.plan)
            what = "as it is" if not rules else f"{rules} rules"
            lines.append(
                f"{format_bytes(point.peak_bytes):>10}  {format_seconds(point.step_seconds):>8}  "
                f"{point.step_seconds / fastest:>5.2f}x  {what}"
            )
        return "\n".join(lines)
