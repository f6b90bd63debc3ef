"""`Program`: a mixed-integer program for HiGHS with lazy rows, which join when a solution violates them.

The settings make the solver deterministic: one thread, a fixed seed and a limit of nodes instead of seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from memscale.core import package

Floats = npt.NDArray[np.float64]

#: The relative gap to the bound at which a solution is accepted, and by which a choice must be faster to be simulated;
#: less takes longer: benchmarks/bench_simulate.py --plan.
GAP = 1e-3
# Nodes of the search tree after which the best solution so far is taken, in a program of up to `_FEW_COLUMNS` columns.
# Each node of a larger program takes longer, and the program gets fewer nodes: benchmarks/bench_simulate.py --plan.
_NODES, _FEW_COLUMNS = 1000, 100
# Feasibility tolerance. Source: at HiGHS' default of 1e-6 its presolve (1.15.1) declares feasible programs infeasible.
_TOLERANCE = 1e-7
# The most violated rows join the program, at most so many at once: benchmarks/bench_simulate.py --plan.
_AT_ONCE = 8
#: The distance from an integer up to which a value in a solution counts as the integer. Source: HiGHS' default of
#: mip_feasibility_tolerance.
INTEGRAL = 1e-6


class Program:
    """A program: minimize ``cost @ values`` with ``0 <= values <= upper``, subject to the rows that are added.

    >>> program = Program(np.array([-1.0, -2.0]), np.array([1.0, 1.0]))
    >>> program.wait(np.array([[1.0, 1.0], [0.0, 1.0]]), 0.5)
    >>> program.solve(), program.values.tolist()
    (True, [0.0, 0.5])

    Args:
        cost: [column] the cost of a unit of the column.
        upper: [column] the upper bound of the column.

    Attributes:
        values: [column] the last solution.
        bound: a lower bound of the cost of any solution.
    """

    def __init__(self, cost: Floats, upper: Floats) -> None:
        self._highspy = package("highspy", "a choice of transforms")
        self._highs = _quiet(self._highspy)
        for option, value in (
            ("threads", 1),
            ("random_seed", 0),
            ("mip_rel_gap", GAP),
            ("mip_abs_gap", 0.0),
            ("mip_max_nodes", min(_NODES, _NODES * _FEW_COLUMNS // len(cost))),
            ("mip_feasibility_tolerance", _TOLERANCE),
            ("mip_allow_restart", False),  # a restart repeats the cuts, for nothing where most columns are fixed
        ):
            self._highs.setOptionValue(option, value)
        self.values: Floats = np.zeros(0)
        self.bound = -np.inf
        self._waiting: tuple[Floats, float] = np.zeros((0, len(cost))), 0.0
        self._joined = np.zeros(0, dtype=bool)
        self._integers = 0
        self._upper = np.zeros(0)
        self.add_columns(cost, upper)

    def add_columns(self, cost: Floats, upper: Floats) -> int:
        """Adds columns, and returns the number of the first new column."""
        first: int = self._highs.getNumCol()
        self._upper = np.r_[self._upper, upper]
        self._highs.addVars(len(cost), np.zeros(len(cost)), upper.astype(np.float64))
        self._highs.changeColsCost(len(cost), np.arange(first, first + len(cost)), cost.astype(np.float64))
        return first

    def add_row(self, low: float, high: float, columns: Any, factors: Any) -> None:
        """Adds the row ``low <= factors @ values[columns] <= high``."""
        self._highs.addRow(low, high, len(columns), np.asarray(columns), np.asarray(factors, dtype=np.float64))

    def wait(self, rows: Floats, limit: float) -> None:
        """Sets the lazy rows ``rows @ values <= limit``, for `rows` [row, column] over the columns that exist now."""
        self._waiting, self._joined = (rows, limit), np.zeros(len(rows), dtype=bool)

    def between(self, columns: Any, low: Floats, high: Floats) -> None:
        """Sets the bounds of `columns`."""
        self._highs.changeColsBounds(len(columns), np.asarray(columns), low, high)

    def whole(self, columns: Any) -> None:
        """Restricts the values of `columns` to integers."""
        kinds = np.full(len(columns), self._highspy.HighsVarType.kInteger)
        self._highs.changeColsIntegrality(len(columns), np.asarray(columns), kinds)
        self._integers += len(columns)

    def branch(self, columns: list[int]) -> bool:
        """Solves with integers in a few `columns` by branch and bound; returns as `solve` does.

        Each branch is a linear program near the one before, which HiGHS solves from its last basis: for a few columns
        this is far faster than HiGHS' own integer search.
        """
        upper = self._upper[columns]
        best, found, least = np.inf, np.zeros(0), -np.inf
        waiting = [(np.zeros(len(columns)), upper)]
        for _ in range(_NODES):
            if not waiting:
                least = best  # all branches are done: the best solution is optimal
                break
            low, high = waiting.pop()
            self.between(columns, low, high)
            if not self.solve() or self.bound >= best:
                continue
            least = self.bound if least == -np.inf else least  # the root's bound, without integers, bounds all branches
            values = self.values[columns]
            parted = np.flatnonzero(np.abs(values - values.round()) > INTEGRAL)
            if not len(parted):
                best, found = self.bound, self.values
                continue
            at = parted[0]
            below, above = high.copy(), low.copy()
            below[at], above[at] = np.floor(values[at]), np.ceil(values[at])
            sides = [(low, below), (above, high)]
            waiting += sides if values[at] - below[at] > 0.5 else sides[::-1]  # the nearer side is popped first
        self.between(columns, np.zeros(len(columns)), upper)
        self.values, self.bound = found, least
        return bool(len(found))

    def solve(self, *, surely: bool = True) -> bool:
        """Returns whether the program has a solution, and sets `values` and `bound` from the solution.

        Args:
            surely: whether to check an "infeasible" of HiGHS' presolve by a run without presolve. The unchecked answer
                is nearly always right, and takes a hundredth of the time.
        """
        rows, limit = self._waiting
        while self._run(("choose", "off") if surely else ("choose",)):
            excess = np.where(self._joined, 0.0, rows @ self.values[: rows.shape[1]] - limit)
            broken = np.flatnonzero(excess > _TOLERANCE * max(1.0, abs(limit)))
            if not len(broken):
                return True
            for at in broken[np.argsort(-excess[broken], kind="stable")][:_AT_ONCE].tolist():
                which = np.flatnonzero(rows[at])
                self.add_row(-np.inf, limit, which, rows[at, which])
                self._joined[at] = True
        return False

    def _run(self, presolves: Iterable[str]) -> bool:
        """Solves with the rows that have joined; returns whether there is a solution."""
        highs = self._highs
        for presolve in presolves:
            highs.setOptionValue("presolve", presolve)
            highs.run()
            if highs.getModelStatus() != self._highspy.HighsModelStatus.kInfeasible:
                break
        else:
            return False
        info = highs.getInfo()
        self.values = np.array(highs.getSolution().col_value)
        self.bound = float(info.mip_dual_bound if self._integers else info.objective_function_value)
        return bool(len(self.values)) and bool(np.isfinite(info.objective_function_value))


def _quiet(highspy: Any) -> Any:
    """Returns a HiGHS solver that prints nothing."""

    class Quiet(highspy.Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:
            # HiGHS 1.16 prints its banner in the constructor, right after this call: the output is off before.
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    found = Quiet()
    found.setOptionValue("output_flag", False)  # for versions of HiGHS without callbacks
    return found
