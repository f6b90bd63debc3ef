"""`Optimizing`: puts a plan's rules on the optimizers of a wrapped model, in place, until `detach`."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from memscale.algebra import Plan, rules_by_parameter, trains
from memscale.config import Config
from memscale.core import ConfigError, MemscaleError, RuntimeUnavailable
from memscale.legacy.assumed import is_as_assumed
from memscale.legacy.log import LOG, say
from memscale.optimizers import InPlace, TransformedOptimizer, as_plain, quantize_states
from memscale.runtime import Runtime
from memscale.simulation import check_optimizer


class Optimizing:
    """The optimizer rules of a plan, and the optimizers under them.

    Args:
        config: says whether and where to log.
        optimizer: the optimizer that trains the model; None if it is to be found by its first step.

    Attributes:
        is_given: whether the caller gave the optimizer.
        own: the optimizers that were seen to step parameters of the model.
    """

    def __init__(self, config: Config, optimizer: torch.optim.Optimizer | None) -> None:
        self._config = config
        self._known = None if optimizer is None else weakref.ref(optimizer)
        self.is_given = optimizer is not None
        self._met: weakref.ref[torch.optim.Optimizer] | None = None  # the last that stepped all that is trained
        self._rules = Plan()
        self._runtime: Runtime | None = None
        self._under: list[InPlace] = []
        # Weak sets, because the id of a freed optimizer may become that of another one.
        self._left: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # the rules cannot change these
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # these no plan can be made for
        # Optimizers known to have parameters of the model: finding out takes 1 ms per step for 1,000 parameters.
        self.own: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def follow(self, model: nn.Module, plan: Plan, runtime: Runtime | None) -> None:
        """Applies the rules of `plan` from now on; optimizers under other rules get their own step back first."""
        rules = plan.of_optimizers()
        if rules != self._rules or runtime is not self._runtime:
            self.release()
        self._rules, self._runtime = rules, runtime
        if self._known is not None and (optimizer := self._known()) is not None:
            self._take(model, optimizer)

    def trains(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` has parameters of `model`."""
        if optimizer not in self.own and trains(optimizer, model):
            self.own.add(optimizer)
        return optimizer in self.own

    def stepped(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Called when `optimizer` has stepped parameters of `model`: it trains the model unless another is known."""
        if self._known is None:
            self._take(model, optimizer)

    def meets(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether plans have to be made for `optimizer` from now on, which was not given and has just stepped.

        It has to step all trained parameters: another one may step the others, with states of its own. A simulation
        cannot step one that needs a closure, such as LBFGS.
        """
        if self.is_given or (self._met is not None and self._met() is optimizer) or optimizer in self._others:
            return False
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        try:
            check_optimizer(model, optimizer)
            are_all = all(id(parameter) in own for parameter in model.parameters() if parameter.requires_grad)
        except ConfigError:
            are_all = False
        if not are_all:
            self._others.add(optimizer)
            return False
        is_first, self._met = self._met is None, weakref.ref(optimizer)
        return not (is_first and is_as_assumed(optimizer))

    def plain(self) -> torch.optim.Optimizer | None:
        """Returns the optimizer to plan for, given or met; if under rules, an equal one without rules and states."""
        known = self._known or self._met
        optimizer = None if known is None else known()
        under = optimizer is not None and any(each.optimizer is optimizer for each in self._under)
        return as_plain(optimizer) if under and optimizer is not None else optimizer

    def _take(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Puts `optimizer` under the rules; logs a warning if they cannot change it."""
        if not self._rules or optimizer in self._left or any(each.optimizer is optimizer for each in self._under):
            return
        try:
            found = rules_by_parameter(model, self._rules, optimizer, self._runtime)
            self._under.append(InPlace(optimizer, found))
        except MemscaleError as error:
            self._left.add(optimizer)
            LOG.warning("the optimizer stays unchanged, with its states in full: %s", error)
        else:
            say(self._config, f"the optimizer is under the plan:\n{optimizer!r}".partition(" (\n")[0])

    def release(self) -> None:
        """Removes the rules from all optimizers, which keep the states that they have by now."""
        self._rules, self._runtime = Plan(), None
        self._left.clear()
        while self._under:
            self._under.pop().undo()

    def text(self) -> list[str]:
        """Returns lines about what is done to which parameters."""
        found = [each.optimizer for each in self._under]
        return [each.report() for each in found if isinstance(each, TransformedOptimizer)]


def without_8_bits(config: Config) -> str | None:
    """Returns why the 8-bit states that `config` asks for are unavailable; None if available or not asked for."""
    if not config.use_8bit_optimizer:
        return None
    try:
        quantize_states()(torch.optim.SGD([torch.zeros(1)], lr=0.0))
    except RuntimeUnavailable as error:
        return str(error)
    return None
