"""Whoever else wraps or replaces a forward, before or after `wrap`, in any order, while plans come and go."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.legacy import executor as executor_module
from memscale.legacy.decide import Verdict
from tests.legacy.test_wrap_among_others import blocks

PLANS = [
    ms.Plan(),
    ms.Plan({"*": ms.checkpoint()}),
    ms.Plan({"1": ms.checkpoint(), "": ms.checkpoint()}),
    ms.Plan({"0": ms.compose(ms.checkpoint(), ms.checkpoint())}),
]


class Other:
    """Somebody who puts a forward over a module's own, and counts its calls."""

    def __init__(self, module: nn.Module, way: str) -> None:
        self.module, self.way, self.calls = module, way, 0
        self.had = "forward" in module.__dict__
        self.under = module.forward
        self.mine = getattr(self, way)()
        module.forward = self.mine

    def _count(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # a recompute is no call
            self.calls += 1

    def closure(self) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._count()
            return self.under(*args, **kwargs)

        return forward

    def wraps(self) -> Callable[..., Any]:
        return functools.wraps(self.under)(self.closure())

    def method(self) -> Callable[..., Any]:
        """As accelerate's autocast, with DeepSpeed's and Liger's ways in it."""
        function = self.under.__func__ if hasattr(self.under, "__func__") else None
        if function is None:
            return self.wraps()

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._count()
            return function(module, *args, **kwargs)

        forward.__wrapped__ = function  # type: ignore[attr-defined]
        return types.MethodType(forward, self.module)

    def partial(self) -> Callable[..., Any]:
        """As accelerate's hooks, which keep the forward in an attribute of the module."""
        object.__setattr__(self.module, f"_old_forward_{id(self)}", self.under)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._count()
            return getattr(module, f"_old_forward_{id(self)}")(*args, **kwargs)

        return functools.update_wrapper(functools.partial(forward, self.module), self.under)

    def take_off(self) -> None:
        self.module.__dict__.pop(f"_old_forward_{id(self)}", None)
        if self.had:
            self.module.forward = self.under
        else:
            self.module.__dict__.pop("forward", None)


WAYS = ("closure", "wraps", "method", "partial")


def step(model: nn.Module, rows: int) -> list[torch.Tensor]:
    model.zero_grad()
    output = model(torch.ones(rows, 8))
    output.square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()  # another plan may follow
    return [output, *(parameter.grad for parameter in model.parameters())]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[ms.Plan]:
    """Its first is what is decided from here on, without a simulation."""
    decided = [ms.Plan()]

    def decide(*args: Any, **kwargs: Any) -> Verdict:
        return Verdict(decided[0], None, 0, None if decided[0] else "nothing to do")

    monkeypatch.setattr(executor_module, "decide", decide)
    monkeypatch.setattr("memscale.legacy.verbs.decide", decide)
    return decided


@pytest.mark.parametrize("seed", [*range(30), *(pytest.param(at, marks=pytest.mark.deep) for at in range(30, 60))])
def test_wrap_and_forwards_of_others_come_and_go_in_any_order(seed: int, plans: list[ms.Plan]) -> None:
    choose = random.Random(seed)
    model, plain = blocks(), blocks()
    before = [dict(module.__dict__) for module in model.modules()]
    others: list[Other] = []
    rows, wrapped = 1, False
    for _ in range(14):
        what = choose.choice(["wrap", "other", "step", "step", "grow", "detach", "other off"])
        plans[0] = choose.choice(PLANS)
        if what == "wrap":
            ms.wrap(model, ms.Config(enable_logging=False))
            wrapped = True
        elif what == "detach" and wrapped:
            ms.detach(model)
            wrapped = False
        elif what == "other":
            where = choose.choice([model, model[0], model[1]])
            others.append(Other(where, choose.choice(WAYS)))
        elif what == "other off" and others:
            where = choose.choice(others).module
            last = [other for other in others if other.module is where][-1]
            others.remove(last)
            last.take_off()
        elif what in ("step", "grow"):
            rows += what == "grow"
            for other in others:
                other.calls = 0
            found, expected = step(model, rows), step(plain, rows)
            assert all(map(torch.equal, found, expected))
            assert {other.calls for other in others} <= {1}
    if wrapped:
        ms.detach(model)
    for other in reversed(others):
        other.take_off()
    step(model, rows)
    assert not any(isinstance(value, ms.Plan) for module in model.modules() for value in vars(module).values())
    if not any(module.__dict__.get("forward") for module in model.modules()):
        assert [module.__dict__.keys() for module in model.modules()] == [each.keys() for each in before]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["", "1"])
def test_a_plan_that_follows_is_inside_of_a_forward_that_was_put_over_the_last(
    way: str, where: str, plans: list[ms.Plan], caplog: pytest.LogCaptureFixture
) -> None:
    model = blocks()
    plans[0] = ms.Plan({"*": ms.checkpoint()})
    ms.wrap(model, ms.Config(enable_logging=False))
    other = Other(model.get_submodule(where), way)
    for rows, plan in enumerate(PLANS, start=1):
        plans[0] = plan
        step(model, rows)
        assert model._memscale_executor.plan == plan
    assert model.get_submodule(where).__dict__["forward"] is other.mine
    assert model._memscale_executor.regions_that_ran
    ms.detach(model)
    assert not caplog.records  # it has only wrapped what is gone
    other.take_off()
    assert all(map(torch.equal, step(model, 2), step(blocks(), 2)))


def test_what_accelerate_takes_off_leaves_the_plan(plans: list[ms.Plan]) -> None:
    accelerate = pytest.importorskip("accelerate", reason="unwrap_model is of accelerate")
    for wraps_first in (True, False):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model = blocks()
        plans[0] = ms.Plan({"*": ms.checkpoint()})
        config = ms.Config(enable_logging=False)
        if wraps_first:
            model = accelerator.prepare(ms.wrap(model, config))
        else:
            model = ms.wrap(accelerator.prepare(model), config)
        step(model, 1)
        model = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        step(model, 2)
        assert model._memscale_executor.regions_that_ran == ("0", "1", "2")
        ms.detach(model)
        step(model, 2)
        if wraps_first:
            assert not any("forward" in module.__dict__ for module in model.modules())
            assert all(map(torch.equal, step(model, 2), step(blocks(), 2)))
    accelerate.state.AcceleratorState._reset_state(True)
