"""The effects that watched runs of a region found: which tensors it changes, and whether it draws random numbers."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

from memscale.regions import Captures, RegionEffects, Snapshot, in_recompute

_MOST_WATCHED = 16  # the most watched runs of a region, one for each mode


class LearnedEffects:
    """The effects of a region that its watched runs found, by mode, and the captures of its last run.

    A mode is the train/eval flags of the region's modules and the dtypes, ranks and `requires_grad` of its arguments.

    Attributes:
        effects: the effects found in each mode.
        made: the modes in which a watched run made a tensor. The effects of that run were discarded, since the next run
            may be the first to change the tensor in place.
    """

    def __init__(self) -> None:
        self.effects: dict[Any, RegionEffects] = {}
        self.made: set[Any] = set()
        self._captures: Captures | None = None
        self._fn: Any = None

    def effects_in(self, mode: Any) -> RegionEffects | None:
        """Returns the effects in `mode`; `None` if the next run must be watched."""
        known = self.effects.get(mode)
        if known is None and len(self.effects) >= _MOST_WATCHED:  # every call seems to have a new mode
            return RegionEffects.of_all(self.effects.values())
        return known

    def learn(self, mode: Any, effects: RegionEffects, snapshot: Snapshot) -> None:
        """Records the effects of a watched run, unless the run made a tensor in this mode for the first time."""
        if not snapshot.made_tensors() or mode in self.made or len(self.made) >= _MOST_WATCHED:
            self.effects[mode] = effects
        else:
            self.made.add(mode)

    def captures_of(self, fn: Callable[..., Any]) -> Captures:
        """Returns the captures of `fn`: those of the last call if every slot still has the same contents."""
        captures = self._captures
        if captures is None or self._fn is not fn or not captures.is_current():
            captures = Captures(fn, follows=True).seal()
            if not in_recompute():
                self._captures, self._fn = None, fn
                if captures.may_last:
                    # The module's `__dict__` leads to this object: a strong reference back would be a cycle, and the
                    # module would be freed only by Python's garbage collector.
                    self._captures = copy.copy(captures)
                    self._captures.weaken(functools.partial(_forget_captures, weakref.ref(self)))
        return captures

    def release(self) -> None:
        """Drops the captures of the last call if they are out of date: they keep what was replaced since in memory."""
        captures = self._captures  # another thread may drop them meanwhile
        if captures is not None and not captures.is_current():
            self._captures = None

    def __reduce__(self) -> Any:
        return (LearnedEffects, ())  # a copy of the region starts empty, since its effects may differ


def _forget_captures(learned: weakref.ref[LearnedEffects], _: object) -> None:
    if (alive := learned()) is not None:
        alive._captures = None
