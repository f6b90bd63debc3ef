"""The choice: for each part the candidate with which the step is fastest and its bytes stay below a limit everywhere.

A mixed-integer program for HiGHS: one binary variable for each candidate of each part. Its settings leave nothing to
chance or to the clock, so that the same costs give the same choice everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from memscale.core import RuntimeUnavailable
from memscale.planning.costs import Assignment, Costs

# How far from the best a choice may be, as a share of the step's time, and the nodes of the search tree after which
# the best one found so far is taken: a limit in seconds would make the plan depend on the machine.
_GAP = 1e-3
_NODES = 2000
_MIB = 2.0**20

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Link:
    """How fast bytes move between the device and the tier below it, each way; and how many may lie there."""

    out_bytes_per_second: float
    in_bytes_per_second: float
    cap_bytes: int | None = None


@dataclass(frozen=True)
class Choice:
    """A candidate for each part.

    Attributes:
        assignment: by part, the number of the candidate.
        bound: no assignment does better than this: seconds, or bytes where the least bytes were asked for.
    """

    assignment: Assignment
    bound: float


class Chooser:
    """Chooses among the candidates of `costs`.

    Args:
        costs: of the candidates.
        link: None if nothing moves.
    """

    def __init__(self, costs: Costs, link: Link | None) -> None:
        self.costs = costs
        self.link = link
        self._offsets = np.cumsum([0, *(len(menu) for menu in costs.effects)]).tolist()
        flat = [effect for menu in costs.effects for effect in menu]
        self._held = np.array([effect.held_bytes - effect.slack_bytes for effect in flat], dtype=np.float64) / _MIB
        self._seconds = np.array([effect.seconds for effect in flat])
        self._out = np.array([effect.out_bytes for effect in flat], dtype=np.float64)
        self._in = np.array([effect.in_bytes for effect in flat], dtype=np.float64)

    def fastest(self, limit_bytes: Floats) -> Choice | None:
        """The fastest choice that holds at most `limit_bytes` [station] at each station, None if there is none."""
        # Of equals, few changes come before many, and early parts change before late ones.
        scale = 1e-7 * max(self.costs.seconds(self.costs.as_it_is), 1e-9)
        ties = np.concatenate(
            [
                [scale * bool(number) * (1 + part / (10 * len(self.costs.effects))) for number in range(len(menu))]
                for part, menu in enumerate(self.costs.effects)
            ]
        )
        return self._solve(self._seconds + ties, limit_bytes / _MIB, least=False)

    def smallest(self, beside_bytes: Floats) -> Choice:
        """The choice whose most bytes are the fewest, with `beside_bytes` [station] beside what it holds."""
        choice = self._solve(np.zeros(len(self._seconds)), -beside_bytes / _MIB, least=True)
        assert choice is not None, "the step as it is takes some number of bytes"
        return choice

    def _solve(self, cost: Floats, limit: Floats, *, least: bool) -> Choice | None:
        highspy = _highspy()
        solver = highspy.Highs()
        for option, value in (
            ("output_flag", False),
            ("threads", 1),
            ("random_seed", 0),
            ("mip_rel_gap", _GAP),
            ("mip_abs_gap", 0.0),
            ("mip_max_nodes", _NODES),
        ):
            solver.setOptionValue(option, value)
        infinity = highspy.kHighsInf
        unit = 1.0 if least else max(self.costs.seconds(self.costs.as_it_is), 1e-12)
        columns = len(cost)
        # Beside the binaries: what forward and backward wait for the link, or the peak.
        extra = 1 if least else 2
        solver.addVars(columns + extra, np.zeros(columns + extra), np.r_[np.ones(columns), np.full(extra, infinity)])
        solver.changeColsCost(
            columns + extra, np.arange(columns + extra), np.r_[cost / unit, np.ones(extra)].astype(np.float64)
        )
        solver.changeColsIntegrality(columns, np.arange(columns), np.full(columns, highspy.HighsVarType.kInteger))
        for low, high in zip(self._offsets, self._offsets[1:], strict=False):
            solver.addRow(1.0, 1.0, high - low, np.arange(low, high), np.ones(high - low))
        for at in self._stations_that_matter(limit):
            held = self._held[:, at]
            which = np.flatnonzero(held)
            if least:
                solver.addRow(
                    -infinity, float(limit[at]), len(which) + 1, np.r_[which, columns], np.r_[held[which], -1.0]
                )
            else:
                solver.addRow(-infinity, float(limit[at]), len(which), which, held[which])
        if self.link is not None and not least:
            self._add_link(solver, unit, columns, infinity)
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None
        values = np.array(solver.getSolution().col_value[:columns])
        if not len(values) or not np.isfinite(solver.getInfo().objective_function_value):
            return None
        bound = float(solver.getInfo().mip_dual_bound)
        assignment = tuple(
            int(np.argmax(values[low:high])) for low, high in zip(self._offsets, self._offsets[1:], strict=False)
        )
        return Choice(assignment, bound * _MIB if least else bound * unit + self.costs.fixed_seconds)

    def _add_link(self, solver: Any, unit: float, columns: int, infinity: float) -> None:
        """What is waited for is what does not fit beside the compute: forward hides one way, backward the other."""
        assert self.link is not None
        for waits, nbytes, rate, window in (
            (columns, self._out, self.link.out_bytes_per_second, self.costs.forward_seconds),
            (columns + 1, self._in, self.link.in_bytes_per_second, self.costs.backward_seconds),
        ):
            which = np.flatnonzero(nbytes)
            if len(which):
                solver.addRow(
                    -infinity,
                    window / unit,
                    len(which) + 1,
                    np.r_[which, waits],
                    np.r_[nbytes[which] / rate / unit, -1.0],
                )
        if self.link.cap_bytes is not None and (which := np.flatnonzero(self._out)).size:
            solver.addRow(-infinity, self.link.cap_bytes / _MIB, len(which), which, self._out[which] / _MIB)

    def _stations_that_matter(self, limit: Floats) -> list[int]:
        """The stations where some choice can come nearest to the limit: what another station covers is left out."""
        kept: list[int] = []
        columns = self._held.T
        for at in np.argsort(limit - columns.sum(axis=1), kind="stable").tolist():
            if not any(limit[other] <= limit[at] and (columns[other] >= columns[at]).all() for other in kept):
                kept.append(at)
        return sorted(kept)


def _highspy() -> Any:
    try:
        import highspy
    except ImportError as error:
        raise RuntimeUnavailable(
            "a plan is chosen by the solver HiGHS, which is not installed; pip install highspy"
        ) from error
    return highspy
