"""`Searches`: the searches of one step, in the model as written, in the cast model, and under optimizer strategies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from torch import nn

from memscale.algebra import Transform
from memscale.config import Config
from memscale.core import ConfigError
from memscale.hardware import Hardware, knows_copies, narrow_dtype
from memscale.planning.parts.candidates import Candidate, Menu, Rules
from memscale.planning.parts.parts import Part
from memscale.planning.search.found import Found, Proven, fastest_of, smallest_of
from memscale.planning.search.search import Search
from memscale.planning.speeds import link_rates
from memscale.planning.step_simulator import StepSimulator
from memscale.planning.stepping import Strategy, held_by_phase, hows, least_held, loop_share, strategies
from memscale.planning.trials.trials import Trials
from memscale.simulation import Trace, analyse
from memscale.transforms import cast


class Searches:
    """The searches of one step. Each is made when it is first needed, and answers for any number of budgets.

    Args:
        steps: the simulator of the step, on hardware whose rates are known.
        plain: the trace of the step as written.
        config: the transforms that a plan may use.
        stepping: the optimizer transforms that a plan may use, see `memscale.planning.stepping.checked`.
        streams: whether a plan may move parameters off the device.

    Attributes:
        link: the rates of the link to the tier below the device; None if no plan may move bytes.
    """

    def __init__(
        self,
        steps: StepSimulator,
        plain: Trace,
        config: Config,
        stepping: Mapping[str, Transform | None],
        *,
        streams: bool,
    ) -> None:
        assert steps.step.module is not None, "a function is not planned"
        self._model: nn.Module = steps.step.module
        self._steps, self._plain, self._config, self._stepping = steps, plain, config, stepping
        self._streams = streams
        self.link = link_rates(steps.hardware, config)
        self._loop_share = loop_share(steps.step.optimizer, steps.hardware)
        self._found: dict[tuple[frozenset[str], Strategy | None], list[Search]] = {}
        self._strategies: list[Strategy] | None = None

    # -- what there is to search ---------------------------------------------------------------------------------------

    def techniques(self, config: Config | None = None) -> frozenset[str]:
        """Returns the techniques for the model that a config allows, without `cast`; with "stream" if possible."""
        found = set((config or self._config).eligible()) - {"cast", "quantize_states"}
        if self.link is None:
            found.discard("offload")
        elif "offload" in found and self._streams:
            found.add("stream")
        return frozenset(found)

    def usable(self, config: Config) -> frozenset[str]:
        """Returns all techniques that a config allows: for the model, `cast`, and for the optimizer."""
        return self.techniques(config) | self._casts() | self._stepping.keys()

    def _casts(self) -> frozenset[str]:
        return self._config.eligible() & {"cast"}

    @property
    def own(self) -> list[Search]:
        """Returns the searches among the techniques that the own config allows."""
        return self.among(self.techniques())

    @property
    def strategies(self) -> list[Strategy]:
        """Returns the allowed optimizer strategies that lower a phase of the step, the fastest first."""
        if self._strategies is None:
            found = hows(self._steps.step.optimizer, self._stepping, moves=self.link is not None)
            self._strategies = strategies(found, self._plain, self._steps.simulate)
        return self._strategies

    def among(self, techniques: frozenset[str], strategy: Strategy | None = None) -> list[Search]:
        """Returns the searches among techniques, for a step with an optimizer strategy.

        The first is that in the model as written; the second, if the config allows `cast`, that in the cast model.
        """
        if (techniques, strategy) not in self._found:
            if strategy is None:
                menu = Menu.of(techniques, narrow_dtype(self._steps.hardware), self._steps.step.batch)
                found = [self._search(menu, plain=self._plain)]
                if self._casts():
                    always = (("", cast(compute=menu.dtype)),)
                    found.append(self._search(dataclasses.replace(menu, casts=True), always=always))
            else:
                found = [
                    self._search(
                        each.menu,
                        always=(*each.always, *strategy.rules),
                        plain=None if each.always else strategy.plain,
                        trials=each.trials,
                        parts=each.parts,
                    )
                    for each in self.among(techniques)
                ]
            self._found[techniques, strategy] = found  # assigned once, so that a stopped search leaves no partial list
        return self._found[techniques, strategy]

    def _search(
        self,
        menu: Menu,
        *,
        always: Rules = (),
        plain: Trace | None = None,
        trials: Trials | None = None,
        parts: tuple[Part, ...] | None = None,
    ) -> Search:
        return Search(
            self._model,
            self._steps.simulate,
            menu,
            always=always,
            link=self.link,
            plain=plain,
            trials=trials,
            parts=parts,
            loop_share=self._loop_share,
        )

    # -- answers -------------------------------------------------------------------------------------------------------

    def fastest(self, limit: int, config: Config | None = None) -> Found | None:
        """Returns the fastest plan for `limit` bytes under a config, by default the own one; None if no plan fits."""
        among = self.techniques(config)
        found = [best for search in self.among(among) if (best := search.fastest(limit)) is not None]
        for strategy in self.strategies:
            seconds = analyse(strategy.plain).step_seconds or 0.0
            # A strategy that alone is slower than a plan found is skipped: transforms of the model only add time.
            below = min((each.proven.seconds for each in found), default=math.inf)
            if self._casts() or seconds < below:
                searches = self.among(among, strategy)
                found += [best for search in searches if (best := search.fastest(limit, below)) is not None]
        return fastest_of(found)

    def smallest(self, config: Config | None = None, floor_bytes: int = 0, enough_bytes: int = 0) -> Found:
        """Returns the plan with the smallest peak under a config; arguments as in `Search.smallest`."""
        among = self.techniques(config)
        found: list[Found] = []
        for strategy in dict.fromkeys((None, self._lightest())):
            for search in self.among(among, strategy):
                found.append(search.smallest(floor_bytes, enough_bytes))
                if search.suffices([found[-1].proven], 0, enough_bytes):
                    return smallest_of(found, enough_bytes)
        return smallest_of(found, enough_bytes)

    def _lightest(self) -> Strategy | None:
        """Returns the strategy with the fewest bytes that no plan for the model frees; None without strategies."""
        return min(self.strategies, key=least_held, default=None)

    def shown(self) -> list[Proven]:
        """Returns the plans of allowed techniques whose steps were simulated."""
        usable = self.usable(self._config)
        return [
            each
            for searches in self._found.values()
            for search in searches
            for each in search.shown
            if Candidate(tuple((rule.pattern, rule.transform) for rule in each.plan)).techniques <= usable
        ]

    def least(self) -> list[Proven]:
        """Returns the plans with the smallest estimated peaks, by one simulation each; `smallest` takes many."""
        return [search.least() for search in self.among(self.techniques(), self._lightest())]

    # -- bounds and notes ----------------------------------------------------------------------------------------------

    def floor_seconds(self) -> float:
        """Returns a lower bound of the seconds of every plan: the fastest step without an exact transform.

        Exact transforms only add time; `cast` and optimizer strategies may save time, and their steps are included.
        """
        casting = self.own[1:]
        steps = [self._plain, *(each.plain for each in casting), *(strategy.plain for strategy in self.strategies)]
        return min(analyse(step).step_seconds or 0.0 for step in steps)

    def floor_bytes(self) -> int:
        """Returns a lower bound of the bytes that any plan holds: the bytes of the optimizer phase.

        Without streams, only an optimizer strategy changes the bytes of this phase. With streams, the bound is 0.
        """
        if self._streams:
            return 0
        steps = [self._plain, *(strategy.plain for strategy in self.strategies)]
        return min(held_by_phase(analyse(step)).get("optimizer", 0) for step in steps)

    def notes(self) -> list[str]:
        """Returns what the searches of the own config left out of a long step."""
        return list(dict.fromkeys(note for search in self.own for note in search.notes))


def check_link(config: Config, hardware: Hardware) -> None:
    """Checks that bytes can be moved, if the caller's config asks for `offload`.

    Raises:
        ConfigError: the device shares its host's memory, or its hardware does not say how fast its link is.
    """
    if not config.enable_offloading or config.given.isdisjoint(("enable_offloading", "async_offload")):
        return
    if hardware.unified_memory:
        raise ConfigError(
            f"the config asks for offloading, and {hardware.name} shares its host's memory, so offloading "
            "frees nothing; leave enable_offloading to the mode, or offload to the disk by hand"
        )
    if not knows_copies(hardware):
        raise ConfigError(
            f"the config asks for offloading, and {hardware.name} does not say how fast its link is; give "
            "Hardware(...) host_to_device_bytes_per_second and device_to_host_bytes_per_second, pass "
            "Hardware.measure() there, or leave enable_offloading to the mode"
        )
