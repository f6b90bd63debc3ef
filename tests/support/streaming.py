"""Random models whose parameters live elsewhere, and a caller who trains them at random on a simulated device.

A case is a number, as in `schedules`. The CPU really changes what lives on the host whenever allowed, and
lets queued copies run meanwhile: one that reads or writes those bytes then shows in the results.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import memscale as ms
from memscale import checkpoint, compose, offload
from memscale.runtime import HostParameters, Runtime, host_parameter_of
from memscale.runtime.parameters import host_parameter as _host_parameter
from tests.support.adversarial_device import AdversarialDevice
from tests.support.checking.checked_engine import CheckedEngine, CheckedRuntime
from tests.support.checking.hazards import Checked
from tests.support.checks import bits
from tests.support.schedules import Interrupted

SIDE = 6
NBYTES = SIDE * SIDE * 4
PARAMS, ACTIVATIONS = offload(what="params", min_bytes=0), offload(min_bytes=0)
HOWS = (
    PARAMS,
    PARAMS,
    compose(PARAMS, ACTIVATIONS),
    compose(ACTIVATIONS, PARAMS),
    compose(PARAMS, checkpoint()),
    compose(checkpoint(), PARAMS),
    ACTIVATIONS,
)


def clamped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """As an embedding with `max_norm` does."""
    with torch.no_grad():
        w.clamp_(-1.0, 1.0)
    return (x @ w).tanh()


OPERATORS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda x, w: (x @ w / SIDE).tanh(),
    lambda x, w: (x * w).sin(),
    lambda x, w: (x @ w.t()[:, :3]) @ w[:3] / SIDE,
    lambda x, w: (x.double() @ w.double()).float().tanh(),
    lambda x, w: (x @ w).tanh() @ w / SIDE,
    lambda x, w: x.sin() + 1,
    clamped,
)
CAST, UNUSED, CHANGE = 3, 5, 6
SEVERAL = (2, 4)  # operators that use a weight more than once


class Region(nn.Module):
    def __init__(self, operator: int, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self.operator = operator
        self.add_up = operator in SEVERAL
        self.weights = nn.ParameterList(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            # The gradients of all uses in a region are added up on the device. PyTorch adds up those of all regions in
            # one go, unless these uses have a node of their own.
            x = OPERATORS[self.operator](x, weight.view_as(weight) if self.add_up else weight)
        return x


class Model(nn.Module):
    """Regions in random order, some more than once; some weights shared, some frozen, one outside of all regions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

        def weight() -> nn.Parameter:
            value = torch.randn(SIDE, SIDE, generator=generator)
            if draw.random() < 0.2:
                value = value.t()
            return nn.Parameter(value, requires_grad=draw.random() < 0.8)

        pool = [weight() for _ in range(6)]
        self.outside = weight()
        self.regions = nn.ModuleList()
        self.plan = {}
        # PyTorch saves a cast, which a later change of the weight leaves alone; we make it again, and raise.
        refused = CAST if draw.random() < 0.3 else CHANGE
        for index in range(draw.randrange(2, 6)):
            how = draw.choice(HOWS)
            # A checkpoint refuses to change parameters, and to run again with changed ones, used or not.
            no = {refused, CHANGE, UNUSED} if "checkpoint" in repr(how) else {refused}
            operator = draw.choice([index for index in range(len(OPERATORS)) if index not in no])
            weights = draw.sample(pool, draw.randrange(1, 3))
            if draw.random() < 0.1:
                weights.append(self.outside)
            self.regions.append(Region(operator, weights))
            self.plan[f"regions.{index}"] = how
        self.order = [draw.randrange(len(self.regions)) for _ in range(draw.randrange(2, 7))]
        self.pause: Callable[[], None] = lambda: None

    def in_one_order(self) -> bool:
        """Whether the weights of no region are asked for twice, so that the engine knows where a forward begins."""
        used = [id(weight) for index in self.order for weight in self.regions[index].weights]
        return len(set(used)) == len(used)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x
        for index in self.order:
            before, x = x, self.regions[index](x) + before
            self.pause()
        return (x * self.outside).square().mean()


# ------------------------------------------------------------------------------------------------ training at random


class Caller:
    """Trains one model; `touch` is told of each tensor that lives on a tier before the CPU reads or writes it."""

    def __init__(
        self, seed: int, model: Model, touch: Callable[[torch.Tensor, bool], None], settle: Callable[[], None]
    ) -> None:
        self._draw = random.Random(seed)
        self.settle = settle
        self._generator = torch.Generator().manual_seed(seed)
        self._model = model
        self._touch = touch
        self._seen: dict[int, list[Any]] = {}
        self.found: list[Any] = []

    def input(self) -> torch.Tensor:
        return torch.randn(SIDE, SIDE, generator=self._generator).requires_grad_()

    def loss(self) -> torch.Tensor:
        loss = self._model(self.input())
        self.found.append(bits(loss))
        self._touch_all()
        return loss

    def train(self, steps: int) -> None:
        ending = self._draw.choice(ENDINGS)
        if ending is second_order:  # which uses again what the first order has used
            for region in self._model.regions:
                region.add_up = True
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        hooks = []
        if self._draw.random() < 0.5:
            hooks = [parameter.register_post_accumulate_grad_hook(self._at_once) for parameter in trained]
        for _ in range(steps):
            self._seen.clear()
            try:
                for gradients in ending(self, trained):
                    self._touch_all()
                    self.found.append(bits(gradients))
                self.found.append([self._seen.get(id(parameter)) for parameter in trained])
            except RuntimeError as error:  # a parameter was changed between forward and backward
                if "inplace operation" not in str(error):
                    raise
                self.found.append("refused")
                self._model.zero_grad()
                self.settle()
            self._step(ending in WITH_BACKWARD)
        for hook in hooks:
            hook.remove()
        self.found.append(bits(list(self._model.parameters())))

    def _at_once(self, parameter: torch.Tensor) -> None:
        """In the middle of backward: the gradient is complete."""
        self._touch(parameter.grad, False)
        self._seen.setdefault(id(parameter), []).append(bits(parameter.grad))

    def _touch_all(self) -> None:
        for parameter in self._model.parameters():
            self._touch(parameter, True)
            if parameter.grad is not None:
                self._touch(parameter.grad, True)

    @torch.no_grad()
    def _step(self, after_backward: bool) -> None:
        kind = self._draw.randrange(5 if after_backward or self._model.in_one_order() else 1)
        for parameter in self._model.parameters():
            if kind == 0:
                parameter.mul_(0.75)
            elif kind == 1:
                parameter.data.mul_(0.75)  # no version counter sees this
            elif kind == 2:
                parameter.data = parameter.data.clone()
            elif parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.125)
        if self._draw.random() < 0.7:
            self._model.zero_grad(set_to_none=self._draw.random() < 0.7)


def once(caller: Caller, trained: list[torch.Tensor]) -> Iterator[Any]:
    loss = caller.loss()
    if loss.requires_grad:
        loss.backward()
    yield [parameter.grad for parameter in trained]


def twice(caller: Caller, trained: list[torch.Tensor]) -> Iterator[Any]:
    loss = caller.loss()
    for keep in (True, False):
        loss.backward(retain_graph=keep)
        yield [parameter.grad for parameter in trained]


def partial(caller: Caller, trained: list[torch.Tensor]) -> Iterator[Any]:
    loss = caller.loss()
    for parameter in trained[:3]:
        yield torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)


def dropped(caller: Caller, trained: list[torch.Tensor]) -> Iterator[Any]:
    for _ in range(2):
        yield caller.loss().detach()
    with torch.no_grad():
        yield caller.loss()


def held(caller: Caller, trained: list[torch.Tensor]) -> Iterator[Any]:
    """A graph that is alive while the parameters change, and never goes backward."""
    yield from once(caller, trained)
    loss = caller.loss()
    if caller._model.in_one_order():
        for parameter in caller._model.parameters():
            parameter.data.mul_(0.5)
    yield from once(caller, trained)
    del loss


def interleaved(caller: Caller, trained: list[torch.Tensor]) -> Iterator[Any]:
    first, second = caller.loss(), caller.loss()
    first.backward()
    yield [parameter.grad for parameter in trained]
    second.backward()
    yield [parameter.grad for parameter in trained]


def interrupted(caller: Caller, trained: list[torch.Tensor]) -> Iterator[Any]:
    def interrupt(_: Any) -> None:
        raise Interrupted

    loss = caller.loss()
    for parameter in trained[::2]:
        handle = parameter.register_hook(interrupt)
        with contextlib.suppress(Interrupted):
            torch.autograd.grad(loss, trained, allow_unused=True, retain_graph=True)
        handle.remove()
        caller.settle()  # nobody hears of a backward that ends with an exception
        caller._touch_all()
    if trained:
        yield torch.autograd.grad(loss, trained, allow_unused=True)


def second_order(caller: Caller, trained: list[torch.Tensor]) -> Iterator[Any]:
    loss = caller.loss()
    if not trained:
        return
    first = torch.autograd.grad(loss, trained, allow_unused=True, create_graph=True)
    yield [grad if grad is None else grad.detach() for grad in first]
    squares = [grad.square().sum() for grad in first if grad is not None and grad.requires_grad]
    if squares:
        yield torch.autograd.grad(torch.stack(squares).sum(), trained, allow_unused=True)


WITH_BACKWARD = (once, once, twice, held, interleaved)
ENDINGS = (*WITH_BACKWARD, partial, dropped, interrupted, second_order)


# ---------------------------------------------------------------------------------------------------- on the device


def untouched(tensor: torch.Tensor, write: bool) -> None:
    pass


class Tiers:
    """Which buffer is under which tensor that lives on a tier, for `Checked.touched`."""

    def __init__(self, engine: CheckedEngine, mover: HostParameters) -> None:
        self._engine, self._mover = engine, mover
        self._buffers: dict[int, Any] = {}
        memory = mover._memory
        take = memory.take

        def taken(nbytes: int, tier: str) -> Any:
            found = take(nbytes, tier)
            if found is not None:
                self._buffers[found[1].untyped_storage().data_ptr()] = found[0].buffer
            return found

        memory.take = taken  # type: ignore[method-assign]

    def touch(self, tensor: torch.Tensor, write: bool) -> None:
        """Read `tensor`, or spoil its values for a while, if it lives on a tier now."""
        buffer = self._buffers.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
        if buffer is None or buffer.freed is not None:
            return
        # A region that was expected and did not run: a change is noticed by the version, and the load not used.
        host = host_parameter_of(tensor)
        if host is not None and host in self._mover._awaited:
            return
        self._engine.backend.touched(buffer, write=write)
        if write:
            values = tensor.detach().clone()
            tensor.data.fill_(float("nan"))
            self._engine.backend.inner.compute(1e-7)
            tensor.data.copy_(values)


def device(draw: random.Random) -> Runtime:
    """A runtime on a random device: some tiers without room, some disks that fail."""
    caps = {
        "pinned": draw.choice([0, 3 * NBYTES, 64 * NBYTES]),
        "pageable": draw.choice([0, 2 * NBYTES]),
        "disk": draw.choice([0, 64 * NBYTES, 64 * NBYTES]),
    }
    failing = draw.random() < 0.3

    def fails() -> OSError | None:
        return OSError(28, "No space left on device") if failing and draw.random() < 0.3 else None

    config = ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=draw.randrange(4))
    # A parameter for which there is no room asks again at every call.
    return CheckedRuntime(config, backend=AdversarialDevice(draw.randrange, caps, fails=fails, patience=1 << 20))


def results(seed: int, runtime: Runtime | None, steps: int = 3) -> list[Any]:
    """What a caller finds; without a runtime, as PyTorch trains by itself."""
    model = Model(seed)
    touch, settle = untouched, model.pause
    if runtime is not None:
        engine = runtime.engine(torch.empty(0))
        assert isinstance(engine, CheckedEngine)
        model = ms.transform(model, model.plan, runtime=runtime)  # type: ignore[assignment]
        model.pause = lambda: engine.backend.inner.compute(1e-7)
        touch, settle = Tiers(engine, runtime.mover(torch.empty(0))).touch, runtime.settle
    caller = Caller(seed, model, touch, settle)
    caller.train(steps)
    return caller.found


def run_case(seed: int, runtime: Runtime | None = None) -> tuple[list[Any], int]:
    """Run a case; the hazards found, and how many bytes were streamed. Results and books must be right."""
    runtime = runtime or device(random.Random(seed))
    expected, actual = results(seed, None), results(seed, runtime)
    assert len(actual) == len(expected), f"case {seed}"
    different = [index for index, pair in enumerate(zip(expected, actual, strict=True)) if pair[0] != pair[1]]
    assert not different, f"case {seed}: {different} of {len(expected)} differ"
    # After an exception autograd's queue keeps what was ready to run, until the thread runs a node of an older number.
    gc.collect()
    oldest = torch.ones(1, requires_grad=True).sum()
    assert oldest.grad_fn is not None
    oldest.grad_fn._set_sequence_nr(0)
    oldest.backward()
    runtime.settle()
    gc.collect()
    engine, mover = runtime.engine(torch.empty(0)), runtime.mover(torch.empty(0))
    stats = engine.stats()
    assert set(stats.live_bytes.values()) <= {0}, f"case {seed}: {stats.live_bytes}"
    assert (engine._moved, engine._by_storage, engine.loader.back, mover._loader.back) == ({}, {}, {}, {})
    assert (mover._reading, mover.gradients._arriving) == ({}, {})
    assert _host_parameter.running == {}
    assert isinstance(engine.backend, Checked)
    return engine.backend.finish(), sum(stats.in_bytes.values())
