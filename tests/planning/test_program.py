"""Programs whose rows wait, against the same with all rows and every way to round."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale.planning.solving.program import Program

_COLUMNS, _ROWS = 6, 30


def _program(seed):
    random = np.random.default_rng(seed)
    cost, rows = random.uniform(-1, 0, _COLUMNS), random.uniform(0, 1, (_ROWS, _COLUMNS))
    return cost, np.full(_COLUMNS, 3.0), rows, float(random.uniform(0.2, 6.0))


def _least(cost, upper, rows, limit, fixed):
    """By a program that has all its rows from the beginning."""
    program = Program(cost, upper)
    for row in rows:
        program.add_row(-np.inf, limit, range(_COLUMNS), row)
    program.between(list(fixed), np.array([*fixed.values()]), np.array([*fixed.values()]))
    return program.bound if program.solve() else np.inf


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_rows_that_wait_hold(seed):
    cost, upper, rows, limit = _program(seed)
    program = Program(cost, upper)
    program.wait(rows, limit)
    assert program.solve()
    assert (rows @ program.values).max() <= limit * (1 + 1e-6)
    assert program.bound == pytest.approx(_least(cost, upper, rows, limit, {}), rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_branches_find_the_best_of_all_ways_to_round(seed):
    cost, upper, rows, limit = _program(seed)
    ways = itertools.product(range(4), repeat=2)
    best = min(_least(cost, upper, rows, limit, dict(zip((1, 4), map(float, way), strict=True))) for way in ways)
    program = Program(cost, upper)
    program.wait(rows, limit)
    assert program.branch([1, 4])
    assert program.bound == pytest.approx(best, rel=1e-6)
    assert program.values[[1, 4]] == pytest.approx(program.values[[1, 4]].round(), abs=1e-6)
    assert cost @ program.values == pytest.approx(best, rel=1e-6)
    assert program.solve()  # the columns are free again
    assert program.bound == pytest.approx(_least(cost, upper, rows, limit, {}), rel=1e-6)


def test_what_has_no_solution_is_told():
    program = Program(np.ones(2), np.ones(2))
    program.wait(np.array([[-1.0, -1.0]]), -3.0)
    assert not program.solve()
    assert not program.branch([0])


def test_the_solver_prints_nothing(capfd):
    assert Program(np.array([-1.0]), np.array([1.0])).solve()
    assert capfd.readouterr() == ("", "")
