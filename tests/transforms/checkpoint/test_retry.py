"""A backward that fails and is called again, one of several, and what each leaves behind: never a wrong gradient."""

import itertools
import random
import re
import sys
import threading
import types
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch

import memscale as ms
from memscale import checkpoint, compose, identity, offload, policies
from memscale.runtime import Runtime
from memscale.simulation.measured.allocator_trace import measure
from memscale.transforms.checkpoint import functorch
from tests.support.checks import bits
from tests.support.coverings import pairwise, taking_turns
from tests.support.models import numbers

DOTS = checkpoint(policy=policies.dots_saveable)
OFFLOAD = offload(min_bytes=0)
TRANSFORMS = {
    "checkpoint": checkpoint(),
    "dots": DOTS,
    "nested": compose(checkpoint(), checkpoint()),
    "checkpoint, dots": compose(checkpoint(), DOTS),
    "offload, checkpoint": compose(OFFLOAD, checkpoint()),
    "offload, dots": compose(OFFLOAD, DOTS),
}
WIDTH = 4


class Trip:
    """Raises once, at a chosen step of a region. Behind a class, where no snapshot of a region looks."""

    steps_left: ClassVar[int | None] = None
    error: ClassVar[type[BaseException]] = torch.OutOfMemoryError

    @classmethod
    def step(cls):
        if cls.steps_left is not None:
            cls.steps_left -= 1
            if cls.steps_left < 0:
                cls.steps_left = None
                raise cls.error("injected")


@pytest.fixture(autouse=True)
def no_trip():
    yield
    Trip.steps_left = None


class Block(nn.Module):
    """Depends on all that a recompute has to bring back, and saves a tensor last."""

    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm, self.drop, self.calls = nn.Linear(WIDTH, WIDTH), norm, nn.Dropout(), 0
        self.generator = torch.Generator()

    def forward(self, x, cache):
        self.calls += 1
        Trip.step()
        hidden = self.norm(self.linear(x))
        Trip.step()
        hidden = self.drop(hidden.tanh()) * self.calls
        Trip.step()
        cache.total = cache.total + hidden
        cache.entries.append(hidden)
        Trip.step()
        hidden = (cache.total * hidden).sin() * random.random()
        Trip.step()
        hidden = hidden * torch.rand(3, WIDTH, generator=self.generator) * len(cache.entries)
        Trip.step()
        return (hidden @ hidden.mT @ x).sigmoid()


STEPS = 6


def after_backward(how, norm, steps_left=None, *, retain=False):
    """The gradients of a second call of a block, and all that it changed; its first backward fails, if at all."""
    torch.manual_seed(0)
    random.seed(0)
    block = Block(norm(WIDTH))
    fit = how(block)
    for _ in range(2):  # the first call of a region learns what it changes
        x, cache = numbers(3, WIDTH), types.SimpleNamespace(total=torch.zeros(3, WIDTH), entries=[])
        loss = fit(x * 1.0, cache).sum()
    wanted = [x, *block.parameters()]
    if steps_left is not None:
        Trip.steps_left = steps_left
        with pytest.raises(Trip.error, match="injected"):
            torch.autograd.grad(loss, wanted, retain_graph=retain)
    try:
        found = torch.autograd.grad(loss, wanted)
    except ms.CorrectnessError as error:
        found = str(error)
    left = [*block.buffers(), torch.rand(3), torch.rand(3, generator=block.generator)]
    counts = (block.calls, len(cache.entries), random.random())
    return found, bits(left), counts


NORMS = [nn.LayerNorm, nn.BatchNorm1d]
ERRORS = [torch.OutOfMemoryError, KeyboardInterrupt]


@pytest.mark.parametrize(
    ("name", "norm", "retain", "error"), pairwise(itertools.product(TRANSFORMS, NORMS, [False, True], ERRORS))
)
def test_a_backward_that_failed_in_a_recompute_can_be_called_again(name, norm, retain, error, monkeypatch):
    how = TRANSFORMS[name]
    monkeypatch.setattr(Trip, "error", error)
    wanted, *wanted_state = after_backward(identity, norm)
    for steps_left in range(STEPS):
        found, *state = after_backward(how, norm, steps_left, retain=retain)
        assert state == wanted_state
        if norm is nn.BatchNorm1d and not retain and how not in (DOTS, compose(OFFLOAD, DOTS)):
            assert "buffer 'norm.running_mean' of Block, which the region changes in place" in found
            assert "Run the forward again" in found
        else:
            assert bits(found) == bits(wanted)


def test_what_a_recompute_that_differed_has_found_is_not_used():
    class Runs:
        count = 0

    def fn(x):
        Runs.count += 1
        if Runs.count == 2:
            return (x * 2).sin(), x  # saves one tensor of the same shape and other numbers, and not the second one
        return x.sin(), x.exp()

    x = numbers(4)
    one, other = checkpoint()(fn)(x)
    with pytest.raises(ms.CorrectnessError, match="it saved 1 tensors"):
        torch.autograd.grad((one + other).sum(), x, retain_graph=True)
    assert bits(torch.autograd.grad(one.sum(), x)) == bits((x.detach().cos(),))


# ----------------------------------------------------------------------------- changes that autograd cannot see


def _in_the_region(x, w):
    result = x.exp()
    product = result * w
    result.add_(1)  # what `exp` has saved
    return result.sin() * product


def _in_backward(x, w):
    def change(_):
        with torch.no_grad():
            w.mul_(3)

    product = x * w  # saves `w`
    product.register_hook(change)
    return product.sin()


@pytest.mark.parametrize("fn", [_in_the_region, _in_backward])
@pytest.mark.parametrize("how", [identity, *TRANSFORMS.values()], ids=["identity", *TRANSFORMS])
def test_a_change_between_the_saving_of_a_tensor_and_its_use_raises(how, fn):
    x, w = numbers(3, 4), numbers(3, 4)
    loss = how(fn)(x * 1.0, w).sum()
    with pytest.raises(RuntimeError, match="by an inplace operation"):
        loss.backward()


def test_the_error_for_such_a_change_names_the_tensor_and_its_versions():
    message = "saved tensor 2 of a checkpointed region, float32[3, 4], is at version 1, expected version 0"
    loss = checkpoint()(_in_the_region)(numbers(3, 4), numbers(3, 4)).sum()
    with pytest.raises(ms.CorrectnessError, match=re.escape(message)):
        loss.backward()


# ------------------------------------------------------------------------------------------ what is left behind


class Seen:
    """The memory that a region used in a run or a recompute, without keeping it."""

    storages: ClassVar[list[StorageWeakRef]] = []

    @classmethod
    def add(cls, *tensors):
        cls.storages += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]

    @classmethod
    def alive(cls):
        return sum(not storage.expired() for storage in cls.storages)


class Watched(nn.Linear):
    def forward(self, x):
        Seen.alive_before.append(Seen.alive())
        Seen.add(x)
        return super().forward(x).tanh()


def stack_with_inputs_elsewhere(monkeypatch):
    """The loss of some regions whose inputs have left the device."""
    monkeypatch.setattr(Seen, "storages", [])
    monkeypatch.setattr(Seen, "alive_before", [], raising=False)
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=0), disk_bytes=1 << 24)
    model = nn.Sequential(*[Watched(8, 8) for _ in range(4)])
    fit = ms.transform(model, {"*": compose(offload(), checkpoint())}, runtime=runtime)
    loss = fit(numbers(5, 8) * 1.0).sum()
    runtime.settle()
    assert Seen.alive() == 0
    Seen.storages.clear()
    Seen.alive_before.clear()
    return loss, list(model.parameters())


@pytest.mark.parametrize("times", [1, 2])
def test_with_retain_graph_one_fetched_input_is_on_the_device_at_a_time(times, monkeypatch):
    loss, wanted = stack_with_inputs_elsewhere(monkeypatch)
    for _ in range(times):
        torch.autograd.grad(loss, wanted, retain_graph=True)
        assert Seen.alive() == 0
    assert Seen.alive_before == [0] * 4 * times


def test_the_graph_of_gradients_keeps_no_fetched_input(monkeypatch):
    loss, wanted = stack_with_inputs_elsewhere(monkeypatch)
    found = torch.autograd.grad(loss, wanted, create_graph=True)
    assert len(Seen.storages) == 4
    assert Seen.alive() == 0, "the gradients of the weights were made from them, and can fetch them again"
    second = torch.autograd.grad(sum(each.square().sum() for each in found), wanted)
    assert len(Seen.storages) > 4
    assert all(each.abs().sum() > 0 for each in second)
    assert loss.requires_grad


@taking_turns(how=TRANSFORMS, norm={"layer": nn.LayerNorm, "batch": nn.BatchNorm1d})
def test_a_backward_that_retains_the_graph_leaves_as_many_bytes_as_it_found(how, norm):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), norm(16), nn.Tanh(), nn.Dropout()) for _ in range(3)])
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0), disk_bytes=1 << 24)
    fit = ms.transform(model, {"*": how}, runtime=runtime)
    fit(numbers(8, 16) * 1.0).sum().backward()
    model.zero_grad()
    loss = fit(numbers(8, 16) * 1.0).sum()
    runtime.settle()

    def backward():
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)

    backward()
    traces = [measure(backward) for _ in range(2)]
    assert [trace.end_bytes - trace.start_bytes for trace in traces] == [0, 0]
    assert traces[0].growth_bytes > 0


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Trip.step()
        return gradient


def test_a_failed_backward_that_retains_the_graph_lets_go_of_what_was_recomputed(monkeypatch):
    monkeypatch.setattr(Seen, "storages", [])

    def fn(x):
        inner = x.exp()
        middle = Fails.apply(inner.sin())
        outer = middle.exp()
        Seen.add(inner, outer)
        return outer.sin()

    x = numbers(4)
    loss = checkpoint()(fn)(x).sum()
    assert Seen.alive() == 0
    Trip.steps_left = 0
    with pytest.raises(Trip.error):
        loss.backward(retain_graph=True)
    assert len(Seen.storages) == 4
    assert Seen.alive() == 0
    assert bits(torch.autograd.grad(loss, x)) == bits(torch.autograd.grad(fn(x).sum(), x))


# ------------------------------------------------------------------------------------------------ around the rerun


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, id=name, marks=[pytest.mark.deep] * (at % 3 > 0))
        for at, (name, how) in enumerate(TRANSFORMS.items())
    ],
)
def test_backwards_of_one_graph_in_several_threads(how, monkeypatch):
    # PyTorch keeps for the whole process whether a mode is active, and threads that leave theirs at once leave it set.
    for name in [name for name in vars(_python_dispatch) if name.startswith("_is_in_")]:
        monkeypatch.setattr(_python_dispatch, name, getattr(_python_dispatch, name))
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)])
    loss = ms.transform(model, {"*": how})(numbers(3, 8)).sum()
    parameters = list(model.parameters())
    expected = bits(torch.autograd.grad(loss, parameters, retain_graph=True))
    found = []

    def backward():
        for _ in range(20):
            try:
                found.append(bits(torch.autograd.grad(loss, parameters, retain_graph=True)))
            except Exception as error:
                found.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=backward) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [result for result in found if result != expected] == []
    assert len(found) == 60


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return x * self.scale


def test_an_interrupt_while_torch_func_puts_its_tensors_in_place_leaves_the_module_whole(monkeypatch):
    module = nn.Sequential(Scaled(), Scaled())
    before = [id(buffer) for buffer in module.buffers()]
    original, written = functorch.write, []

    def write(place, content):
        written.append(place)
        if len(written) == 2:
            raise KeyboardInterrupt
        original(place, content)

    monkeypatch.setattr(functorch, "write", write)
    with pytest.raises(KeyboardInterrupt):
        torch.func.grad(lambda x: checkpoint()(module)(x).sum())(torch.ones(2))
    assert [id(buffer) for buffer in module.buffers()] == before


def test_vjp_can_be_called_again_after_an_interrupt(monkeypatch):
    monkeypatch.setattr(Trip, "error", KeyboardInterrupt)

    def pulled(how, steps_left):
        torch.manual_seed(0)
        random.seed(0)
        block = Block(nn.LayerNorm(WIDTH))
        cache = types.SimpleNamespace(total=torch.zeros(3, WIDTH), entries=[])
        y, pull = torch.func.vjp(lambda x: how(block)(x, cache), numbers(3, WIDTH).detach())
        if steps_left is not None:
            Trip.steps_left = steps_left
            with pytest.raises(KeyboardInterrupt):
                pull(torch.ones_like(y))
        return bits(pull(torch.ones_like(y))), block.calls, len(cache.entries), random.random(), bits([torch.rand(3)])

    wanted = pulled(identity, None)
    assert [pulled(checkpoint(), steps_left) for steps_left in range(STEPS)] == [wanted] * STEPS


@pytest.mark.parametrize("outer", [checkpoint(), DOTS], ids=["checkpoint", "dots"])
@pytest.mark.parametrize("keep", [False, True])
def test_values_kept_inside_another_region_come_back_without_arguments_to_ask_for(outer, keep):
    w = numbers(4, 4)
    inner = DOTS(lambda: (w.sin() @ w).exp() @ w)

    def fn(x):
        return inner()  # the first that backward asks for is what `inner` keeps, and `outer` has to run again for it

    expected = torch.autograd.grad(((w.sin() @ w).exp() @ w).sum(), w)
    assert bits(torch.autograd.grad(outer(fn)(numbers(2)).sum(), w, retain_graph=keep)) == bits(expected)


# ------------------------------------------------------------------ several backwards through the outputs of one region


def gradients_after(region, schedule):
    """The gradient after each backward of `schedule`: (which output, whether it keeps the graph)."""
    weight = torch.linspace(-1, 1, 4).requires_grad_()
    outputs = region(torch.linspace(0, 2, 4) * 1.0, weight)
    found = []
    for output, retain_graph in schedule:
        outputs[output].backward(retain_graph=retain_graph)
        found.append(bits(weight.grad))
    return found


def two_outputs(x, w):
    return (x * w).sin().sum(), (x * w).exp().sum()


TURNS = list(itertools.product((0, 1), (False, True)))
# Every order of three backwards that plain autograd accepts: an output whose graph was freed is not asked again.
SCHEDULES = [
    schedule
    for schedule in itertools.product(TURNS, repeat=3)
    if all((output, False) not in schedule[:turn] for turn, (output, _) in enumerate(schedule))
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_order_of_backwards_gives_the_gradients_without_checkpoint(schedule):
    assert gradients_after(ms.checkpoint()(two_outputs), schedule) == gradients_after(two_outputs, schedule)


def test_a_freed_graph_is_still_refused():
    with pytest.raises(RuntimeError, match="retain_graph"):
        gradients_after(ms.checkpoint()(two_outputs), [(0, False), (1, True), (1, False), (1, False)])
