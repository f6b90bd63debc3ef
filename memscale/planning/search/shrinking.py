"""The search for the choice whose step takes least."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

from memscale.planning.solving.solver import Chooser
from memscale.planning.trials.costs import Assignment
from memscale.simulation import Profile

# A smallest plan that holds no more than this share of what was thought to be the least is it.
_LEAST = 1.005
# So often a faster choice is looked for that holds as little.
_LOOKS = 3


class Shown(Protocol):
    """A simulated step."""

    @property
    def profile(self) -> Profile: ...

    @property
    def taken_bytes(self) -> int: ...

    def correct(self, chooser: Chooser) -> None:
        """Let the chooser know what the step took."""


_S = TypeVar("_S", bound=Shown)


def shrink(
    chooser: Chooser,
    prove: Callable[[Assignment], _S],
    tried: dict[Assignment, _S],
    among: Collection[str],
    floor_bytes: int,
    *,
    patience: int,
) -> None:
    """Choose what takes least and simulate until a step is what was thought of it, or the floor is reached.

    Args:
        chooser: that learns from each step.
        prove: simulates the step with a choice.
        tried: those that were; what is found is added.
        among: the techniques of which candidates may be chosen.
        floor_bytes: what every step holds.
        patience: at most so many simulations.
    """
    seen: set[Assignment] = set()
    for _ in range(patience):
        if reaches(tried.values(), floor_bytes):
            return
        choice = chooser.smallest(among)
        if choice.assignment in seen:
            break
        seen.add(choice.assignment)
        found = tried[choice.assignment] = prove(choice.assignment)
        found.correct(chooser)
        if found.taken_bytes <= _LEAST * choice.bound:
            break
    # Many choices may hold as little: of these the fastest, and what looks for it may find a smaller one.
    for _ in range(min(patience, _LOOKS)):
        least = min(tried.values(), key=lambda each: each.taken_bytes)
        faster = chooser.fastest(least.taken_bytes, among)
        if faster is None or faster.assignment in tried:
            break
        found = tried[faster.assignment] = prove(faster.assignment)
        found.correct(chooser)


def reaches(found: Iterable[Shown], floor_bytes: int) -> bool:
    """Whether one of these holds no more than what every step does."""
    return any(
        max(each.profile.first_step_peak_bytes, each.profile.peak_bytes) <= _LEAST * floor_bytes for each in found
    )
