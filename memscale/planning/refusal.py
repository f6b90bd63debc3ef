"""`Refusal`: makes the error for a budget that no plan fits, with the smallest peak and simulated remedies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from memscale.config import Config
from memscale.core import Argument, BudgetError, MemscaleError, format_unlike
from memscale.planning.extra_remedies import Setting, extra_remedies
from memscale.planning.parts.globs import with_globs
from memscale.planning.search.found import Proven
from memscale.planning.search.searches import Searches
from memscale.planning.step_simulator import StepSimulator
from memscale.simulation import analyse
from memscale.transforms import cast

# By field of the config: how the field changes the numbers that a step computes. Other fields change no bit.
_CHANGES = {"enable_tiling": ", with sums in another order", "use_mixed_precision": ", in a lower precision"}


# Remedies in the message. By choice.
_SHOWN = 2


@dataclass(frozen=True)
class _Remedy:
    """Arguments that lower the smallest peak, to `peak_bytes`."""

    arguments: tuple[Argument, ...]
    peak_bytes: int

    @property
    def changes(self) -> str:
        """How the remedy changes the numbers of the step; ``""`` for equal bits."""
        return _CHANGES.get(self.arguments[0].name, "")

    def text(self, peak_bytes: int, limit: int) -> str:
        """Returns the remedy as a line about the peak, which is `peak_bytes` without it."""
        lowered, *_ = format_unlike(self.peak_bytes, peak_bytes, limit)
        fits = ", which fits" if self.peak_bytes <= limit else ""
        named = " and ".join(map(str, self.arguments))
        return f"{named} would lower the peak to {lowered}{self.changes}{fits}"


class Refusal:
    """The maker of the `BudgetError` for a budget that no plan fits.

    Args:
        steps: the simulator of the step.
        config: the config that the plans were searched under.
        searches: the searches of the step.
    """

    def __init__(self, steps: StepSimulator, config: Config, searches: Searches) -> None:
        self.steps, self.config, self.searches = steps, config, searches
        self.own = searches.own[0]  # in the model as written

    def error(self, smallest: Proven, limit: int, *, with_remedies: bool, stopped: str = "") -> BudgetError:
        """Returns the error for a budget of `limit` bytes that not even the `smallest` plan fits.

        Args:
            smallest: the plan with the smallest peak.
            limit: bytes that a step may take.
            with_remedies: whether the message names remedies, for which more steps are simulated.
            stopped: why the search ended early, "" for a complete search. A stopped search tries no other config.
        """
        least = smallest.taken_bytes
        budget, reached = format_unlike(limit, least)
        budget = f"{budget} on {self.steps.hardware.name}"
        said = f"no plan that fits {budget} was found: {stopped}" if stopped else f"no plan fits {budget}"
        tried = (", ".join(sorted(self.own.menu.techniques)) or "no transform").replace("stream", "offloaded weights")
        peak = f"the smallest peak {'so far' if stopped else 'within reach'} is {reached} ({least} bytes)"
        model = self.steps.step.module
        assert model is not None, "a function is not planned"
        best = self._remedies(smallest, limit, wider=not stopped)[:_SHOWN] if with_remedies else []
        lines = [f"{peak}; tried: {tried}", *(each.text(smallest.taken_bytes, limit) for each in best)]
        if with_remedies and not best:
            lighter = ", or an optimizer with less state" if smallest.profile.by_category.get("optimizer state") else ""
            lines.append(f"take a smaller batch and accumulate gradients{lighter}")
        error = BudgetError("\n  ".join([said, *lines])).naming(*(each for found in best for each in found.arguments))
        error.peak_bytes, error.plan = least, with_globs(smallest.plan, model)
        return error

    def _remedies(self, smallest: Proven, limit: int, *, wider: bool) -> list[_Remedy]:
        """Returns the remedies that lower the peak, the best first; fields of the config only if `wider`.

        The best fits and changes no bit of the numbers; without one, the lowest peak is the best.
        """
        fields = self._wider(smallest) if wider else ()
        found = [_Remedy((Argument("Config", field, True),), nbytes) for field, nbytes in fields]
        own = Setting(smallest.plan, self.steps.step.parallel)
        *_, (arguments, best) = extra_remedies(own, smallest.profile, limit, self.steps.other, step=self.steps.step)
        found.append(_Remedy(arguments, best.taken_bytes))
        lower = [each for each in found if each.arguments and each.peak_bytes < smallest.taken_bytes]
        return sorted(
            lower,
            key=lambda each: (each.peak_bytes > limit, each.peak_bytes <= limit and each.changes, each.peak_bytes),
        )

    def _wider(self, smallest: Proven) -> Iterator[tuple[str, int]]:
        """Yields the fields of the config that allow more transforms, each with the peak in bytes of a small plan."""
        own = self.own
        for field in ("enable_checkpointing", "enable_offloading", "enable_tiling"):
            more = self.searches.techniques(dataclasses.replace(self.config, **{field: True}))  # type: ignore[arg-type]
            if more != own.menu.techniques:
                yield field, own.among(more).least().taken_bytes
        if not self.config.use_mixed_precision:
            # The smallest choice of the model in its own dtype, simulated in a cast model: an upper bound of the
            # smallest peak of the cast model.
            costs, menu = smallest.costs, own.menu
            chosen = zip(costs.candidates, smallest.assignment, [*(part.path for part in costs.parts), ""], strict=True)
            rules = [rule for each, at, path in chosen for rule in menu.cast_within(each[at]).at(path)]
            try:
                step = self.steps.simulate((*rules, ("", cast(compute=menu.dtype))), True)
            except MemscaleError:  # the model's own code refuses the dtype
                return
            yield "use_mixed_precision", analyse(step).taken_bytes
