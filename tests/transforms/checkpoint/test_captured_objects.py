"""Objects that a region captures, and does not get as arguments: the recompute finds them as the run did."""

import argparse
import dataclasses
import functools
import queue
import random
import threading
import types
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import memscale as ms
from memscale.regions.captures import Captures
from tests.support.checks import bits

HOW = {
    "checkpoint": ms.checkpoint(),
    "keeping": ms.checkpoint(policy=ms.policies.dots_saveable),
    "nested": ms.compose(ms.checkpoint(), ms.checkpoint()),
    "offload, checkpoint": ms.compose(ms.offload(), ms.checkpoint()),
}
X = torch.linspace(-1, 1, 8).view(2, 4)


@dataclasses.dataclass
class Record:
    count: int = 0
    seen: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Slotted:
    count: int = 0


class Configured(dict):
    scale = 1.0


class Statistics:
    def __init__(self, owner):
        self.owner = owner
        self.record = Record()
        self.total = torch.zeros(4)
        self.pair = (torch.full((4,), 2.0), "a name")
        self.torch_generator = torch.Generator().manual_seed(0)
        self.generator = random.Random(0)
        self.numpy_generator = np.random.default_rng(0)


class Layer(nn.Module):
    adds_in_place = True

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.record, self.slotted, self.statistics = Record(), Slotted(), Statistics(self)
        self.settings = argparse.Namespace(scale=1.0, inner=types.SimpleNamespace(shift=0.0))
        self.configured = Configured()

    def forward(self, x):
        statistics = self.statistics
        self.record.count += 1
        self.record.seen.append(self.record.count)
        self.slotted.count += 1
        self.configured["calls"] = self.configured.get("calls", 0) + 1
        self.configured.scale += 1
        statistics.record.count += 2
        statistics.total = statistics.total.add_(1) if self.adds_in_place else statistics.total + 1
        drawn = torch.rand(4, generator=statistics.torch_generator) * statistics.generator.random()
        x = self.linear(x) * statistics.total.clone() * statistics.pair[0] * drawn * statistics.numpy_generator.random()
        x = x * self.record.count * len(self.record.seen) * self.slotted.count * statistics.record.count
        x = x * self.settings.scale + self.settings.inner.shift
        return (x * self.configured["calls"] * self.configured.scale).tanh()

    def state(self):
        own = self.statistics
        drawn = own.generator.random(), own.numpy_generator.random(), torch.rand(1, generator=own.torch_generator)
        counts = self.record, self.slotted, own.record, own.total.tolist(), self.configured, self.configured.scale
        return [str(each) for each in (*counts, *drawn, self.settings)]


def trained(how):
    torch.manual_seed(0)
    layer = Layer()
    model = ms.transform(nn.Sequential(layer, nn.Linear(4, 4)), {"0": how})
    found = []
    for step in range(3):
        loss = model(X).square().sum()
        layer.settings.scale, layer.settings.inner.shift = step + 2.0, 0.1 * step  # between forward and backward
        model.zero_grad()
        loss.backward()
        found.append(layer.linear.weight.grad.tolist())
    return found, model[0].state()


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_state_in_objects_of_modules_is_that_of_the_run_and_counts_once(how):
    assert trained(how) == trained(ms.identity)


def test_and_under_torch_func():
    def gradient(how):
        torch.manual_seed(0)
        model = ms.transform(nn.Sequential(Layer()), {"0": how})
        model[0].adds_in_place = False  # which is a TransformError there
        fn, state = ms.functional(model)
        found = [torch.func.grad(lambda s: fn(s, X).square().sum())(state)["0.linear.bias"] for _ in range(2)]
        return found, model[0].record

    (ours, record), (plain, expected) = gradient(ms.checkpoint()), gradient(ms.identity)
    torch.testing.assert_close(ours, plain)
    assert record == expected


def test_objects_in_closures_defaults_and_globals_and_of_bound_methods():
    settings = types.SimpleNamespace(power=2)

    class Scaled:
        calls = 0

        def region(self, x, record=Record()):  # noqa: B008
            self.count()
            record.count += 1
            COUNTED.count += 1
            return torch.sin(x * self.calls * record.count * COUNTED.count) ** settings.power

        def count(self):
            self.calls += 1

    def gradient(how):
        COUNTED.count, settings.power, fn = 0, 2, Scaled()
        fn.region.__func__.__defaults__[0].count = 0
        x = torch.ones(2, requires_grad=True)
        y = how(fn.region)(x).sum()
        settings.power = 3
        y.backward()
        return x.grad.tolist(), fn.calls, COUNTED.count

    assert gradient(ms.checkpoint()) == gradient(ms.identity)


COUNTED = Record()


@pytest.mark.parametrize(
    "held", [threading.Lock(), queue.Queue(), threading.Thread()], ids=lambda it: type(it).__name__
)
def test_what_other_threads_work_with_is_left_alone(held):
    shared = types.SimpleNamespace(held=held, items=[1])

    def region(x):
        return torch.sin(x * shared.items[0])

    x = torch.ones(1, requires_grad=True)
    y = ms.checkpoint()(region)(x)
    shared.items = [2]
    y.backward()
    assert x.grad.item() == pytest.approx(np.cos(2))
    assert shared.items == [2]


def test_modules_behind_objects_are_left_to_whoever_owns_them():
    layer = nn.Linear(4, 4)
    layer.trainer = types.SimpleNamespace(model=nn.Sequential(layer, nn.Linear(4, 4)), steps=0)
    assert Captures(layer, follows=True).modules == [layer]


def test_a_tuple_of_tensors_that_the_region_changes_is_refused_where_it_is_used():
    caches = (torch.zeros(4), torch.zeros(4))

    def region(x):
        caches[0].add_(1)
        return x * caches[0].clone()

    x = torch.ones(4, requires_grad=True)
    y = ms.checkpoint()(region)(x).sum()
    with pytest.raises(ms.CorrectnessError, match=r"in place that it has in a tuple.*keep the tensor in a list"):
        y.backward()


def test_an_object_whose_class_answers_for_its_attributes():
    class Config:
        def __init__(self):
            self.scale = 1.0

        def __getattribute__(self, name):
            assert name != "__dict__", "asked for what it may compute"
            return object.__getattribute__(self, name)

    config, x = Config(), torch.ones(1, requires_grad=True)
    y = ms.checkpoint()(lambda x: torch.sin(config.scale * x))(x)
    config.scale = 2.0
    y.backward()
    assert x.grad.item() == pytest.approx(np.cos(1))
    assert config.scale == 2.0


def test_a_profile_leaves_counters_of_objects_alone():
    model = nn.Sequential(Layer())
    ms.profile(model, X, loss=lambda y, _: y.sum(), hardware="cpu")
    assert model[0].record == Record()


class Scaled(nn.Module):
    """A projection, or something else by its activation, times how often it was called."""

    def __init__(self, activation=torch.tanh):
        super().__init__()
        self.linear, self.activation = nn.Linear(4, 4), activation
        self.calls = types.SimpleNamespace(count=0, total=torch.zeros(4))

    def forward(self, x):
        self.calls.count += 1
        return self.activation(self.linear(x)) * self.calls.count


@pytest.mark.parametrize("activation", [torch.tanh, nn.Identity()], ids=["tanh", "a projection"])
def test_tile_counts_once_what_is_counted_in_an_object(activation):
    def steps(how):
        torch.manual_seed(0)
        model = ms.transform(nn.Sequential(Scaled(activation)), {"0": how})
        for _ in range(2):
            model(torch.ones(8, 4)).sum().backward()
        return model[0].linear.bias.grad, model[0].calls.count

    torch.testing.assert_close(steps(ms.tile(chunks=4)), steps(ms.identity))


def test_tile_refuses_a_tensor_in_an_object_that_every_piece_would_change():
    module = Scaled()
    module.activation = lambda x: x + module.calls.total.add_(1)
    with pytest.raises(ms.TransformError, match=r"would update 'total' once for every piece"):
        ms.tile(chunks=4)(module)(torch.ones(8, 4))


def test_verify_leaves_counters_of_objects_alone():
    model = nn.Sequential(Scaled())
    assert ms.verify(model, ms.transform(model, {"0": ms.checkpoint()}), torch.ones(8, 4)).exact
    assert model[0].calls.count == 0


class Weight(nn.Parameter):
    """A weight with a scale beside it, until the first call takes it away, as those of bitsandbytes in 8 bits have."""


class TakesScale(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.weight = Weight(self.weight.detach(), requires_grad=False)
        self.weight.scale, self.scale = torch.full((4, 1), 3.0), None

    def forward(self, x):
        if self.weight.scale is not None:
            self.scale, self.weight.scale = self.weight.scale, None
        weight = self.weight if self.scale is None else self.weight * self.scale
        return nn.functional.linear(x, weight, self.bias).tanh()


@pytest.mark.parametrize("how", [None, *HOW])
def test_what_a_weight_has_as_an_attribute_and_loses_is_there_again(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), TakesScale())
    scale = model[1].weight.scale
    expected = torch.func.functional_call(
        nn.Sequential(model[0], nn.Linear(4, 4)),
        {"1.weight": model[1].weight.detach() * scale, "1.bias": model[1].bias},
        X,
    ).tanh()
    wanted = torch.autograd.grad(expected.sum(), model[0].weight)[0]
    fit = model if how is None else ms.transform(model, {"1": HOW[how]})
    for _ in range(2):  # the first call moves it
        model[0].weight.grad = None
        fit(X).sum().backward()
        assert torch.equal(model[0].weight.grad, wanted)
        assert (model[1].weight.scale, fit[1].scale) == (None, scale)


COUNTS = {"global": 0}
COUNT = 0


def counted(x):
    global COUNT
    COUNT += 1
    return x * COUNT


def counted_by_itself(x):
    counted_by_itself.count += 1
    return x * counted_by_itself.count


class Helps(nn.Module):
    """Has state of its file in helpers of many kinds, none of which its forward names by itself."""

    def __init__(self, helper):
        super().__init__()
        self.weight, self.helper = nn.Parameter(torch.rand(4)), helper

    def forward(self, x):
        return torch.sin(getattr(self, "by_" + self.helper)(x * self.weight) + self.own(x))

    def own(self, x):
        helpers = self.by_method, self.by_static, self.by_class, self.by_other, self.by_function, self.by_cached
        return sum(helper(x * 0) for helper in helpers)

    def by_method(self, x):
        return counted(x)

    @staticmethod
    def by_static(x):
        COUNTS["global"] += 1
        return x * COUNTS["global"]

    @classmethod
    def by_class(cls, x):
        return Scales.scaled(x)

    @property
    def by_other(self):
        return counted

    def by_function(self, x):
        return counted_by_itself(x)

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def table(self):
        return 2.0

    def by_cached(self, x):
        return counted(x) * self.table()


class Scales:
    @staticmethod
    def scaled(x):
        COUNTS["global"] += 2
        return x * COUNTS["global"]


def closing_over(count):
    """A module class whose helper method, not its forward, has a variable of this function."""

    def twice(x):
        return counted(x) * 2

    class Local(Helps):
        def own(self, x):
            nonlocal count
            count += 1
            return twice(x) * count

    return Local


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("helper", ["method", "static", "class", "other", "function", "cached", "closing"])
def test_what_helper_methods_name_is_followed(helper, how):
    def steps(how):
        global COUNT
        COUNT, COUNTS["global"], counted_by_itself.count = 0, 0, 0
        torch.manual_seed(0)
        kind, by = (closing_over(0), "method") if helper == "closing" else (Helps, helper)
        model = ms.transform(nn.Sequential(kind(by), kind(by)), {"*": how})
        found = []
        for _ in range(3):
            x = X.clone().requires_grad_()
            model(x).square().sum().backward()
            found.append(bits([x.grad, *[p.grad for p in model.parameters()]]))
        return found, COUNT, dict(COUNTS), counted_by_itself.count

    assert steps(how) == steps(ms.identity)


def test_a_tuple_of_buffers_does_no_harm():
    def gradient(how):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4)
        norm.pair = (norm.running_mean, norm.running_var)
        model = ms.transform(nn.Sequential(norm), {"0": how})
        model(X).square().sum().backward()
        return norm.weight.grad.tolist(), norm.running_mean.tolist()

    assert gradient(ms.checkpoint()) == gradient(ms.identity)


class Remembering(nn.Module):
    cache: ClassVar[dict[str, int]] = {}


class Listed(Remembering):
    seen: ClassVar[list[int]] = []
    kinds: ClassVar[set[int]] = set()

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        self.seen.append(len(self.seen))
        self.cache["calls"] = self.cache.get("calls", 0) + 1
        Listed.kinds.add(len(self.kinds))
        return torch.sin(self.weight * x * len(self.seen) * self.cache["calls"] * len(self.kinds))


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_lists_and_dictionaries_of_a_class_count_once(how):
    found = []
    for each in (ms.identity, how):
        for held in (Listed.seen, Listed.cache, Listed.kinds):
            held.clear()
        layer = Listed()
        fit = ms.transform(layer, {"": each})
        for _ in range(3):
            fit(X).sum().backward()
        found.append((layer.weight.grad.tolist(), list(Listed.seen), dict(Listed.cache), set(Listed.kinds)))
    assert found[0] == found[1]
