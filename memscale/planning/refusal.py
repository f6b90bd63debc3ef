"""`Refusal`: makes the error for a budget that no plan fits, with the smallest peak and simulated remedies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from memscale.config import Config
from memscale.core import Argument, BudgetError, format_unlike
from memscale.planning.extra_remedies import Setting, extra_remedies
from memscale.planning.parts.globs import with_globs
from memscale.planning.search.found import Proven
from memscale.planning.search.search import Search
from memscale.planning.step_simulator import StepSimulator
from memscale.simulation import analyse
from memscale.transforms import cast

# By field of the config: how the field changes the numbers that a step computes. Other fields change no bit.
_CHANGES = {"enable_tiling": " (sums in another order)", "use_mixed_precision": " (a lower precision)"}


class Refusal:
    """The maker of the `BudgetError` for a budget that no plan fits.

    Args:
        steps: the simulator of the step.
        config: the config that the plans were searched under.
        own: the search in the model as it is.
        techniques: returns the techniques that a config allows for the model.
    """

    def __init__(
        self,
        steps: StepSimulator,
        config: Config,
        own: Search,
        techniques: Callable[[Config], frozenset[str]],
    ) -> None:
        self.steps, self.config, self.own, self.techniques = steps, config, own, techniques

    def error(self, smallest: Proven, limit: int, *, with_remedies: bool, stopped: str = "") -> BudgetError:
        """Returns the error for a budget of `limit` bytes that not even the `smallest` plan fits.

        Args:
            smallest: the plan with the smallest peak.
            limit: bytes that a step may take.
            with_remedies: whether the message names remedies, for which more steps are simulated.
            stopped: why the search ended early, "" for a complete search. A stopped search tries no other config.
        """
        least = smallest.taken_bytes
        asked, reached = format_unlike(limit, least)
        on = f"{asked} ({limit} bytes) on {self.steps.hardware.name}"
        no_plan = f"no plan that fits {on} was found: {stopped}, and " if stopped else f"no plan fits {on}: "
        said = f"{no_plan}the smallest peak {'so far' if stopped else 'within reach'} is {reached} ({least} bytes)"
        model = self.steps.step.module
        assert model is not None, "a function is not planned"
        lines, arguments = self._what_helps(smallest, limit, wider=not stopped) if with_remedies else ([], [])
        error = BudgetError("; ".join([said, *lines])).naming(*arguments)
        error.peak_bytes, error.plan = least, with_globs(smallest.plan, model)
        return error

    def _what_helps(self, smallest: Proven, limit: int, *, wider: bool) -> tuple[list[str], list[Argument]]:
        """Returns the remedies as lines of text, and their arguments; fields of the config only if `wider`."""
        fields = sorted(self._wider(smallest), key=lambda each: each[1]) if wider else []
        lower = [(Argument("Config", field, True), each) for field, each in fields if each < smallest.taken_bytes]
        lines = [
            f"{argument} would lower it to {format_unlike(nbytes, smallest.taken_bytes, limit)[0]}"
            + _CHANGES.get(argument.name, "")
            for argument, nbytes in lower
        ]
        own = Setting(smallest.plan, self.steps.step.parallel)
        *_, (said, best) = extra_remedies(own, smallest.profile, limit, self.steps.other, step=self.steps.step)
        nbytes = best.taken_bytes
        if said:
            fits = ", which fits" if nbytes <= limit else ""
            lowered, *_ = format_unlike(nbytes, smallest.taken_bytes, limit)
            lines.append(
                f"with its plan, {' and '.join(map(str, said))} would lower it to {lowered} ({nbytes} bytes){fits}"
            )
        states = smallest.profile.by_category.get("optimizer state", 0)
        lighter = ", or an optimizer with less state" if states else ""
        lines = lines or [f"take a smaller batch and accumulate gradients{lighter}"]
        return lines, [*(argument for argument, _ in lower), *said]

    def _wider(self, smallest: Proven) -> Iterator[tuple[str, int]]:
        """Yields the fields of the config that allow more transforms, each with the peak in bytes of a small plan."""
        own = self.own
        for field in ("enable_checkpointing", "enable_offloading", "enable_tiling"):
            more = self.techniques(dataclasses.replace(self.config, **{field: True}))  # type: ignore[arg-type]
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
            except Exception:  # the model's own code refuses the dtype
                return
            yield "use_mixed_precision", analyse(step).taken_bytes
