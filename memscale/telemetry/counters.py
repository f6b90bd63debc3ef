"""The closed lists of telemetry: what is counted, and in which buckets."""

from __future__ import annotations

from bisect import bisect
from typing import NamedTuple

SCHEMA = 4
MOST = 100  # the largest count that is reported; more is reported as this

#: The verbs and the commands that are counted.
CALLS = ("detach", "optimize", "plan", "predict", "transform", "wrap")
COMMANDS = ("cards", "demo", "explain", "frontier", "history", "plan", "predict", "tune")

_TECHNIQUES = (
    "cast checkpoint compensate_rounding offload offload_states quantize_states round_stochastically "
    "step_in_backward step_in_groups tile"
)
_OUTCOMES = "fits skipped budget_error correctness_error runtime_unavailable transform_error other_error"
_OF_MODELS = "optimize plan predict transform wrap"


class Dimension(NamedTuple):
    """A division of calls into buckets. Each dimension is counted separately."""

    buckets: tuple[str, ...]
    calls: tuple[str, ...]


#: All buckets and verbs of each dimension. ``docs/telemetry.md`` says what each is for.
DIMENSIONS = {
    name: Dimension(tuple(buckets.split()), tuple(calls.split()))
    for name, buckets, calls in (
        ("params", "<1e7 1e7 1e8 1e9 1e10 >=1e11", _OF_MODELS),
        ("technique", _TECHNIQUES, "plan transform wrap"),
        ("outcome", _OUTCOMES, "plan predict transform wrap"),
    )
}


def counters() -> tuple[str, ...]:
    """Returns all names that a report can contain, in order."""
    divided = [
        f"{call}_called/{name}:{bucket}"
        for name, dimension in DIMENSIONS.items()
        for call in dimension.calls
        for bucket in dimension.buckets
    ]
    calls, commands = (f"{call}_called" for call in CALLS), (f"command:{name}" for name in COMMANDS)
    return tuple(sorted((*calls, *commands, *divided)))


_ENDS_OF_PARAMS = (1e7, 1e8, 1e9, 1e10, 1e11)


def bucket_of_params(count: int) -> str:
    """Returns the bucket of a number of parameters.

    >>> [bucket_of_params(count) for count in (10, 10**7, 7 * 10**9, 10**12)]
    ['<1e7', '1e7', '1e9', '>=1e11']
    """
    return DIMENSIONS["params"].buckets[bisect(_ENDS_OF_PARAMS, count)]
