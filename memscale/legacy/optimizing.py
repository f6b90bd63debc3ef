"""What a plan does to the optimizers of a wrapped model, in place: on when they are known, off when it is detached."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from memscale.algebra import Plan, rules_by_parameter
from memscale.config import Config
from memscale.core import MemscaleError, RuntimeUnavailable
from memscale.legacy.log import LOG, say
from memscale.optimizers import InPlace, TransformedOptimizer, as_plain, quantize_states
from memscale.runtime import Runtime


class Optimizing:
    """The rules of a plan for optimizers, and those that are under them.

    Args:
        config: says whether and where to log.
        optimizer: the one that trains; None where it is known by its step.
    """

    def __init__(self, config: Config, optimizer: torch.optim.Optimizer | None) -> None:
        self._config = config
        self._known = None if optimizer is None else weakref.ref(optimizer)
        self._rules = Plan()
        self._runtime: Runtime | None = None
        self._under: list[InPlace] = []
        self._left: set[int] = set()  # by their ids, optimizers that the rules cannot change: said once

    def follow(self, model: nn.Module, plan: Plan, runtime: Runtime | None) -> None:
        """From here on the rules are those of `plan`; optimizers that are under others get their own step back."""
        rules = plan.of_optimizers()
        if rules != self._rules or runtime is not self._runtime:
            self.release()
        self._rules, self._runtime = rules, runtime
        if self._known is not None and (optimizer := self._known()) is not None:
            self._take(model, optimizer)

    def stepped(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` has stepped parameters of `model`: it trains `model`, unless another one is known to."""
        if self._known is None:
            self._take(model, optimizer)

    def plain(self) -> torch.optim.Optimizer | None:
        """The optimizer to plan for: the known one or, where that is under rules, one like it without states."""
        optimizer = None if self._known is None else self._known()
        under = optimizer is not None and any(each.optimizer is optimizer for each in self._under)
        return as_plain(optimizer) if under and optimizer is not None else optimizer

    def _take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put `optimizer`, which trains `model`, under the rules; one that they cannot change is left alone, aloud."""
        if not self._rules or id(optimizer) in self._left or any(each.optimizer is optimizer for each in self._under):
            return
        try:
            found = rules_by_parameter(model, self._rules, optimizer, self._runtime)
            self._under.append(InPlace(optimizer, found))
        except MemscaleError as error:
            self._left.add(id(optimizer))
            LOG.warning("the optimizer stays as it is, with its states in full: %s", error)
        else:
            say(self._config, f"the optimizer is under the plan:\n{optimizer!r}".partition(" (\n")[0])

    def release(self) -> None:
        """Give the optimizers their own steps back, with the states that they have by now, and forget the rules."""
        self._rules, self._runtime = Plan(), None
        self._left.clear()
        while self._under:
            self._under.pop().undo()

    def text(self) -> list[str]:
        """What is done to which parameters, in lines."""
        found = [each.optimizer for each in self._under]
        return [each.report() for each in found if isinstance(each, TransformedOptimizer)]


def without_8_bits(config: Config) -> str | None:
    """Why `config` cannot have states in 8 bits though it asks for them; None if it can, or does not."""
    if not config.use_8bit_optimizer:
        return None
    try:
        quantize_states()(torch.optim.SGD([torch.zeros(1)], lr=0.0))
    except RuntimeUnavailable as error:
        return str(error)
    return None
