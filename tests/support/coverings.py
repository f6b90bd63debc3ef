"""Which of many combinations a test runs: every value or pair of values at least once, all in the deep suite."""

import itertools
import os

import pytest

DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"  # `make test-deep`


def pairwise(cases):
    """Of `cases`, tuples of hashable values, a few in which each pair of values that stands in any case stands too.

    Greedy and without chance: of the cases left, the one with the most pairs that none has had yet, the first of these.
    In the deep suite, all cases.
    """
    cases = list(cases)
    if DEEP:
        return cases
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing = set().union(*pairs.values())
    chosen = []
    for size in range(len(cases[0]) * (len(cases[0]) - 1) // 2, 0, -1):
        for case in cases:
            if len(pairs[case] & missing) >= size:
                chosen.append(case)
                missing -= pairs[case]
    assert not missing
    return chosen


def in_turn(*axes):
    """As few combinations of the axes' values as have each value in one: they take turns. In the deep suite, all."""
    axes = [list(values) for values in axes]
    if DEEP:
        return list(itertools.product(*axes))
    return [tuple(values[at % len(values)] for values in axes) for at in range(max(map(len, axes)))]


def taking_turns(**axes):
    """A parametrization of a test by `in_turn`; each axis is a dictionary, whose keys name the values."""
    cases = in_turn(*axes.values())
    values = [[axis[key] for axis, key in zip(axes.values(), case, strict=True)] for case in cases]
    ids = ["-".join(map(str, case)) for case in cases]
    return pytest.mark.parametrize(tuple(axes), [pytest.param(*v, id=i) for v, i in zip(values, ids, strict=True)])
