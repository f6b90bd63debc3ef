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
_ERRORS = "over<0.1% over<1% over<5% over>=5% under<0.1% under<1% under<5% under>=5%"
_OF_MODELS = "optimize plan predict transform wrap"


class Dimension(NamedTuple):
    """A division of calls into buckets, each dimension counted separately; numbers are divided at `ends`."""

    buckets: tuple[str, ...]
    calls: tuple[str, ...]
    ends: tuple[float, ...]

    def bucket(self, value: float) -> str:
        """Returns the bucket of a number of parameters, or of a relative error.

        >>> [DIMENSIONS["params"].bucket(count) for count in (10, 10**7, 7 * 10**9, 10**12)]
        ['<1e7', '1e7', '1e9', '>=1e11']
        >>> DIMENSIONS["peak_error"].bucket(0.002), DIMENSIONS["peak_error"].bucket(-0.2)
        ('over<1%', 'under>=5%')
        """
        under = (len(self.ends) + 1) * (value < 0)  # buckets of errors below the measured peak follow those above
        return self.buckets[under + bisect(self.ends, abs(value))]


def _dimension(buckets: str, calls: str, *ends: float) -> Dimension:
    return Dimension(tuple(buckets.split()), tuple(calls.split()), ends)


#: All buckets and verbs of each dimension. ``docs/telemetry.md`` says what each is for.
DIMENSIONS = {
    "params": _dimension("<1e7 1e7 1e8 1e9 1e10 >=1e11", _OF_MODELS, 1e7, 1e8, 1e9, 1e10, 1e11),
    "technique": _dimension(_TECHNIQUES, "plan transform wrap"),
    "outcome": _dimension(_OUTCOMES, "plan predict transform wrap"),
    "peak_error": _dimension(_ERRORS, "detach", 0.001, 0.01, 0.05),
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
