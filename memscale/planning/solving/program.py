"""A mixed-integer program for HiGHS, most of whose rows wait until a solution breaks them.

Its settings leave nothing to chance or to the clock, so that the same program has the same solution everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from memscale.core import RuntimeUnavailable

Floats = npt.NDArray[np.float64]

#: How far from the best a solution may be, as a share of it, and the nodes of the search tree after which the best one
# found so far is taken: a limit in seconds would make the solution depend on the machine.
GAP = 1e-3
_NODES = 1000
# With HiGHS' own 1e-6 its presolve (1.15.1) took a program of 9 parts for infeasible that has choices.
_TOLERANCE = 1e-7
# Of the rows that a solution breaks, those that it breaks most join the program, so many at once.
_AT_ONCE = 8
_INTEGER = 1e-6  # so far from an integer a value may be


class Program:
    """The least of ``cost @ values`` with values from 0 to `upper`, under the rows that are added.

    >>> program = Program(np.array([-1.0, -2.0]), np.array([1.0, 1.0]))
    >>> program.wait(np.array([[1.0, 1.0], [0.0, 1.0]]), 0.5)
    >>> program.solve(), program.values.tolist()
    (True, [0.0, 0.5])

    Args:
        cost: [column]
        upper: [column]

    Attributes:
        values: [column] of the solution.
        bound: no solution is below it.
    """

    def __init__(self, cost: Floats, upper: Floats) -> None:
        self._highspy = _highspy()
        self._highs = _quiet(self._highspy)
        for option, value in (
            ("threads", 1),
            ("random_seed", 0),
            ("mip_rel_gap", GAP),
            ("mip_abs_gap", 0.0),
            ("mip_max_nodes", _NODES),
            ("mip_feasibility_tolerance", _TOLERANCE),
            ("mip_allow_restart", False),  # where most columns are fixed it only makes its cuts again
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
        """Returns the number of the first of them."""
        first: int = self._highs.getNumCol()
        self._upper = np.r_[self._upper, upper]
        self._highs.addVars(len(cost), np.zeros(len(cost)), upper.astype(np.float64))
        self._highs.changeColsCost(len(cost), np.arange(first, first + len(cost)), cost.astype(np.float64))
        return first

    def add_row(self, low: float, high: float, columns: Any, factors: Any) -> None:
        """``low <= factors @ values[columns] <= high``."""
        self._highs.addRow(low, high, len(columns), np.asarray(columns), np.asarray(factors, dtype=np.float64))

    def wait(self, rows: Floats, limit: float) -> None:
        """``rows @ values <= limit``, of [row, column], where columns that were added later do not count."""
        self._waiting, self._joined = (rows, limit), np.zeros(len(rows), dtype=bool)

    def between(self, columns: Any, low: Floats, high: Floats) -> None:
        """Other bounds of these columns."""
        self._highs.changeColsBounds(len(columns), np.asarray(columns), low, high)

    def whole(self, columns: Any) -> None:
        """The values of these columns are integers."""
        kinds = np.full(len(columns), self._highspy.HighsVarType.kInteger)
        self._highs.changeColsIntegrality(len(columns), np.asarray(columns), kinds)
        self._integers += len(columns)

    def branch(self, columns: list[int]) -> bool:
        """As `solve`, with integers in these columns, of which there are few.

        To follow each way to round them costs two solutions that are near the one before: HiGHS' own search took 0.4 s
        for a single column of a program of 80 blocks, and this takes 0.01 s.
        """
        upper = self._upper[columns]
        best, found, least = np.inf, np.zeros(0), -np.inf
        waiting = [(np.zeros(len(columns)), upper)]
        for _ in range(_NODES):
            if not waiting:
                least = best  # there is no other
                break
            low, high = waiting.pop()
            self.between(columns, low, high)
            if not self.solve() or self.bound >= best:
                continue
            least = self.bound if least == -np.inf else least  # of the first, where no integer is asked for
            values = self.values[columns]
            parted = np.flatnonzero(np.abs(values - values.round()) > _INTEGER)
            if not len(parted):
                best, found = self.bound, self.values
                continue
            at = parted[0]
            below, above = high.copy(), low.copy()
            below[at], above[at] = np.floor(values[at]), np.ceil(values[at])
            sides = [(low, below), (above, high)]
            waiting += sides if values[at] - below[at] > 0.5 else sides[::-1]  # the nearer one is looked at first
        self.between(columns, np.zeros(len(columns)), upper)
        self.values, self.bound = found, least
        return bool(len(found))

    def solve(self, *, surely: bool = True) -> bool:
        """Whether there is a solution, which `values` and `bound` then are of.

        Unless `surely`, HiGHS' presolve is believed if it finds none, in a hundredth of the time and nearly always
        rightly.
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
        """Solve with the rows that have joined."""
        highs = self._highs
        for presolve in presolves:
            highs.setOptionValue("presolve", presolve)
            highs.run()
            if highs.getModelStatus() != self._highspy.HighsModelStatus.kInfeasible:
                break
        else:
            return False
        if not np.isfinite(highs.getInfo().objective_function_value):  # the nodes were too few for any solution
            highs.setOptionValue("mip_max_nodes", self._highspy.kHighsIInf)
            highs.setOptionValue("mip_max_improving_sols", 1)
            highs.run()
        info = highs.getInfo()
        self.values = np.array(highs.getSolution().col_value)
        self.bound = float(info.mip_dual_bound if self._integers else info.objective_function_value)
        return bool(len(self.values)) and bool(np.isfinite(info.objective_function_value))


def _quiet(highspy: Any) -> Any:
    """A solver that prints nothing."""

    class Quiet(highspy.Highs):  # type: ignore[misc]
        def enableCallbacks(self) -> None:
            # The constructor calls this, whereupon HiGHS 1.16 prints its banner unless it was told before.
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    found = Quiet()
    found.setOptionValue("output_flag", False)  # what has no callbacks
    return found


def _highspy() -> Any:
    try:
        import highspy
    except ImportError as error:
        raise RuntimeUnavailable(
            "a plan is chosen by the solver HiGHS, which is not installed; pip install highspy"
        ) from error
    return highspy
