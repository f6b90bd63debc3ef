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
        own: the optimizers that were seen to step parameters of the model, and whether each steps all of them.
    """

    def __init__(self, config: Config, optimizer: torch.optim.Optimizer | None) -> None:
        self._config = config
        self._is_given = optimizer is not None
        self._known = None if optimizer is None else weakref.ref(optimizer)  # given, or the last that a loop stepped
        self._is_as_assumed = True  # whether it takes the memory of the optimizer that plans assume until one is known
        self._rules = Plan()
        self._runtime: Runtime | None = None
        self._under: list[InPlace] = []
        # Weak sets, because the id of a freed optimizer may become that of another one.
        self._left: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # the rules cannot change these
        # Kept, because finding out takes 1 ms per step for 1,000 parameters.
        self.own: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()

    def follow(self, model: nn.Module, plan: Plan, runtime: Runtime | None) -> None:
        """Applies the rules of `plan` from now on; optimizers under other rules get their own step back first."""
        rules = plan.of_optimizers()
        if rules != self._rules or runtime is not self._runtime:
            self.release()
        self._rules, self._runtime = rules, runtime
        if (optimizer := self._optimizer) is not None:
            self._take(model, optimizer)

    def trains(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `optimizer` has parameters of `model`."""
        if optimizer not in self.own and trains(optimizer, model):
            self.own[optimizer] = _steps_all(model, optimizer)
        return optimizer in self.own

    def stepped(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Called when `optimizer` has stepped parameters of `model`: it trains the model unless another is known."""
        if not self._is_given:
            self._take(model, optimizer)

    def meets(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Whether plans have to be made again for `optimizer`, which the loop steps, where none was given."""
        if self._is_given or self._optimizer is optimizer or not self.trains(model, optimizer):
            return False
        if not self.own[optimizer]:  # another one steps the others, with states of its own
            return False
        was_as_assumed, self._is_as_assumed = self._is_as_assumed, is_as_assumed(optimizer)
        self._known = weakref.ref(optimizer)
        return not (was_as_assumed and self._is_as_assumed)

    def plain(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Returns the optimizer to plan for, given or met; None if unknown, or if it does not train all of `model`.

        Another one may step the other parameters, with states of its own. In place of an optimizer under rules it is an
        equal one without rules and states.
        """
        optimizer = self._optimizer
        if optimizer is None or not (self._is_given or _steps_all(model, optimizer)):
            return None
        return as_plain(optimizer) if any(each.optimizer is optimizer for each in self._under) else optimizer

    @property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        return None if self._known is None else self._known()

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


def _steps_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a simulated step of `optimizer` steps all trained parameters of `model`; LBFGS needs a closure."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    try:
        check_optimizer(model, optimizer)
    except ConfigError:
        return False
    return all(id(parameter) in own for parameter in model.parameters() if parameter.requires_grad)


def without_8_bits(config: Config) -> str | None:
    """Returns why the 8-bit states that `config` asks for are unavailable; None if available or not asked for."""
    if not config.use_8bit_optimizer:
        return None
    try:
        quantize_states()(torch.optim.SGD([torch.zeros(1)], lr=0.0))
    except RuntimeUnavailable as error:
        return str(error)
    return None
