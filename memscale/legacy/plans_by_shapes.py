"""`PlansByShapes`: what was decided for one model so far, each for batches of some shapes, and which of them holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from memscale.legacy.decision import Verdict
from memscale.legacy.shapes import Shapes, are_alike, buckets, covers
from memscale.runtime import Runtime

MOST = 8  # of one model


class Known(NamedTuple):
    """A verdict, the shapes that it is for, and what moves tensors under it; None where nothing does."""

    shapes: Shapes
    verdict: Verdict
    runtime: Runtime | None


@dataclass
class PlansByShapes:
    """Which plan is for which shapes.

    A plan may follow another one between two steps only: the graph of a step is made under one plan, and recomputed
    under it. What comes in the middle of a step waits for its end.
    """

    known: list[Known] = field(default_factory=list)
    present: Shapes | None = None  # those that the plan which holds was made for; None where no batch was known
    refused: list[Shapes] = field(default_factory=list)  # for which no step could be simulated
    _waiting: Shapes | None = None

    @property
    def are_enough(self) -> bool:
        """Whether no more are made."""
        return len(self.known) >= MOST

    def hold(self, shapes: Shapes) -> bool:
        """Whether the present plan is for `shapes`."""
        return self.present is not None and covers(self.present, shapes)

    def need_nothing(self, shapes: Shapes) -> bool:
        """Whether the present plan is for `shapes`, and nothing waits."""
        return self._waiting is None and self.hold(shapes)

    def wait(self, shapes: Shapes) -> None:
        """Plan for `shapes` at the next step, or for what waits already and is not covered by them."""
        if self._waiting is None or covers(shapes, self._waiting):
            self._waiting = shapes

    def wanted(self, shapes: Shapes) -> Shapes:
        """What to plan for now that `shapes` have come: themselves, or what waited for this and covers them."""
        waited, self._waiting = self._waiting, None
        return waited if waited is not None and covers(waited, shapes) else shapes

    def find(self, shapes: Shapes) -> Known | None:
        """One that there is for `shapes`."""
        return next((each for each in self.known if covers(each.shapes, shapes)), None)

    def widened(self, shapes: Shapes) -> list[Shapes]:
        """What to plan for so that it also serves what comes after `shapes`, widest first, themselves last."""
        alike = next((each.shapes for each in self.known if are_alike(each.shapes, shapes)), None)
        return [shapes] if alike is None else buckets(shapes, alike, self.refused)

    def add(self, shapes: Shapes, verdict: Verdict, runtime: Runtime | None) -> None:
        """The plan of `verdict`, which is for `shapes`, holds from here on."""
        self.present = shapes
        self.known.append(Known(shapes, verdict, runtime))
