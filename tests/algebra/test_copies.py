"""What a transformed tree has of its own, and what of hooks, partials and containers stays the user's."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import memscale as ms

PLANS = {
    "none": {},
    "identity": {"0": ms.identity},
    "elsewhere": {"2": ms.checkpoint()},
    "around": {"": ms.checkpoint()},
    "region": {"0": ms.checkpoint()},
}


def save(name: str, features: Any, module: nn.Module, given: Any, output: Any = None, **_: Any) -> None:
    features[name] = module


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


REGISTER = {
    "forward": lambda module, hook: module.register_forward_hook(hook),
    "forward, keywords": lambda module, hook: module.register_forward_hook(
        lambda m, a, k, o: hook(m, a, o), with_kwargs=True
    ),
    "pre": lambda module, hook: module.register_forward_pre_hook(lambda m, a: hook(m, a)),
    "backward": lambda module, hook: module.register_full_backward_hook(hook),
    "backward pre": lambda module, hook: module.register_full_backward_pre_hook(hook),
    "state dict": lambda module, hook: module.register_state_dict_post_hook(lambda m, *rest: hook(m, rest)),
    "load": lambda module, hook: module.register_load_state_dict_pre_hook(lambda m, *rest: hook(m, rest)),
    "loaded": lambda module, hook: module.register_load_state_dict_post_hook(hook),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER)
def test_what_a_partial_holds_is_the_users(register: Any, plan: Any) -> None:
    """A copy of the dictionary was filled, and the user's stayed empty."""
    model, features, log = stack(), {}, []
    hook = functools.partial(save, "gelu", features)
    register(model[1], hook)
    model[1].register_forward_hook(functools.partial(functools.partial(lambda log, *_: log.append(1)), log))
    fit = ms.transform(model, plan)
    fit(torch.ones(2, 4, requires_grad=True)).sum().backward()
    fit.load_state_dict(fit.state_dict())
    assert features == {"gelu": fit[1]}
    assert log[:1] == [1]
    assert not model[1]._forward_hooks or fit[1]._forward_hooks is not model[1]._forward_hooks


class Counts(nn.Module):
    """Hooks that are methods of its own, alone and in partials, and containers that they hold beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.GELU()
        self.seen: list[str] = []
        self.same = self.seen
        self.table = {"log": self.seen, "layers": [self.layer], "pairs": ((self.layer, self.seen),)}
        self.layer.register_forward_hook(self.note)
        self.layer.register_forward_hook(functools.partial(self.named, "partial"))
        self.act.register_forward_hook(functools.partial(lambda log, *_: log.append("own list"), self.seen))
        self.act.register_forward_hook(functools.partial(lambda layers, *_: layers[0].marks.append(1), [self.layer]))
        self.layer.register_load_state_dict_pre_hook(self.loading)
        self.layer._register_load_state_dict_pre_hook(self.inner_loading, with_module=True)
        self.layer.marks = []
        self.layer.owner = self.seen

    def note(self, module: nn.Module, given: Any, output: Any) -> None:
        self.seen.append("method")
        assert module is self.layer

    def named(self, name: str, *_: Any) -> None:
        self.seen.append(name)

    def loading(self, module: nn.Module, *_: Any) -> None:
        self.seen.append("loading")
        assert module is self.layer

    def inner_loading(self, module: nn.Module, *_: Any) -> None:
        assert module is self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer(x))


@pytest.mark.parametrize("plan", [{}, {"": ms.checkpoint()}, {"layer": ms.checkpoint()}], ids=["none", "root", "part"])
def test_methods_of_the_tree_and_its_own_containers_are_those_of_the_copy(plan: Any) -> None:
    model = Counts()
    fit = ms.transform(model, plan)
    fit(torch.ones(2, 4, requires_grad=True)).sum().backward()
    fit.load_state_dict(fit.state_dict())
    assert fit.seen[:4] == ["method", "partial", "own list", "loading"]
    assert fit.layer.marks == [1]
    assert model.seen == model.layer.marks == []
    assert fit.same is fit.seen
    assert fit.layer.owner is fit.seen
    assert fit.table["log"] is fit.seen
    assert fit.table["layers"][0] is fit.table["pairs"][0][0] is fit.layer
    assert fit.table["pairs"][0][1] is fit.seen


class Collector:
    """An object of the user's, which holds a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen = model, []

    def collect(self, tag: str, *_: Any) -> None:
        self.seen.append(tag)

    def __call__(self, *_: Any) -> None:
        self.seen.append("call")


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_objects_that_hooks_are_of_stay_the_users(plan: Any) -> None:
    model = stack()
    collector, closed = Collector(model), {}
    model[1].register_forward_hook(collector)
    model[1].register_forward_hook(functools.partial(collector.collect, "partial"))
    model[1].register_forward_pre_hook(functools.partial(collector.collect, "pre"))
    model[1].register_forward_hook(lambda module, *_: closed.update(module=module))
    fit = ms.transform(model, plan)
    with torch.no_grad():
        fit(torch.ones(2, 4))
    assert collector.seen == ["pre", "call", "partial"]
    assert closed == {"module": fit[1]}
    assert collector.model is model


class Doubled(nn.Module):
    def __init__(self, log: list[int]) -> None:
        super().__init__()
        self.log = log

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.log.append(1)
        return 2 * weight


def test_parametrizations_and_lists_that_are_shared_in_the_tree() -> None:
    model, log = stack(), []
    model.log = log
    parametrize.register_parametrization(model[0], "weight", Doubled(log))
    log.clear()
    fit = ms.transform(model, {"0": ms.checkpoint()})
    fit(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert log == []
    assert fit.log is fit[0].parametrizations.weight[0].log
    assert fit.log


def test_a_container_that_holds_itself() -> None:
    model = stack()
    model.ring = ring = [model[0]]
    ring.append(ring)
    fit = ms.transform(model, {})
    assert fit.ring[0] is fit[0]
    assert fit.ring[1] is fit.ring


class Tapped(nn.Module):
    """Functions of its own that close over it: a hook that keeps an activation, a branch, and one that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.taps: dict[str, torch.Tensor] = {}
        self.first.register_forward_hook(self.tap("first"))
        self.branch = lambda x: self.drop(x)
        self.first.owner = weakref.ref(self, print)

        def twice(x: torch.Tensor, count: int = 2, *, add: float = 1.0) -> torch.Tensor:
            return x if count == 0 else twice(self.second(x) + add, count - 1, add=add)

        self.twice = twice

    def tap(self, name: str) -> Any:
        def hook(module: nn.Module, given: Any, output: torch.Tensor) -> None:
            self.taps[name] = output

        return hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first(x)
        return self.twice(self.branch(self.taps["first"]))


@pytest.mark.parametrize("plan", [{}, {"": ms.checkpoint()}, {"first": ms.checkpoint()}], ids=["none", "root", "part"])
def test_closures_over_modules_of_the_tree_are_those_of_the_copy(plan: Any) -> None:
    """The copy read the activation that the model had kept in an earlier call, and dropped numbers after `eval()`."""
    model, x = Tapped(), torch.randn(2, 4)
    model(torch.zeros(2, 4))
    fit = ms.transform(model, plan)
    fit.eval()
    assert model.training
    fit(x).sum().backward()
    found = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    model.eval()
    model(x).sum().backward()
    assert all(torch.equal(each.grad, grad) for each, grad in zip(model.parameters(), found, strict=True))
    assert fit.taps["first"] is not model.taps["first"]
    assert fit.first.owner() is fit
    assert fit.first.owner.__callback__ is print
    assert fit.twice.__name__ == "twice"
    assert fit.twice.__kwdefaults__ == {"add": 1.0}


def test_a_forward_that_closes_over_its_module_runs_the_copy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    inner = model.forward
    model.forward = lambda x: inner(x) * 2
    fit = ms.transform(model, {"0": ms.checkpoint()}).eval()
    x = torch.ones(2, 4)
    assert torch.equal(fit(x), 2 * model[0](x))


class Named(nn.Linear):
    def __new__(cls, name: str, *_: Any) -> Any:
        return super().__new__(cls)

    def __init__(self, name: str, *sizes: int) -> None:
        super().__init__(*sizes)
        self.name = name


def test_a_class_that_is_made_with_arguments_is_copied() -> None:
    model, x = nn.Sequential(Named("first", 4, 4), nn.Tanh()), torch.ones(2, 4)
    fit = ms.transform(model, {"*": ms.checkpoint()})
    assert torch.equal(fit(x), model(x))
    assert type(fit[0]) is Named
    assert fit[0].name == "first"
