"""Random programs, the ways in which their graphs end, and a simulated device to run them on.

A case is a number: from it follow the program, the moments at which the device does its work, and what fails.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import torch

from tests.support.adversarial_device import AdversarialDevice
from tests.support.checking.checked_engine import CheckedEngine
from tests.support.checking.hazards import Checked, Hazard
from tests.support.checks import bits

SIDE = 6
NBYTES = SIDE * SIDE * 4


class Interrupted(Exception):
    pass


class Program:
    """A random function of some square matrices: chains, views, values used twice, values that the caller holds."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.seed = seed
        self.steps = [
            (draw.choice(OPERATORS), draw.randrange(8), draw.randrange(8), draw.random() < 0.2, draw.random() < 0.8)
            for _ in range(draw.randrange(2, 14))
        ]
        self.ending = draw.choice(ENDINGS)

    def leaves(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(SIDE, SIDE, generator=generator).requires_grad_() for _ in range(3)]

    def run(self, leaves: list[torch.Tensor], region: Any, pause: Any, held: list[torch.Tensor]) -> torch.Tensor:
        values = list(leaves)
        for operator, first, second, hold, inside in self.steps:
            with region() if inside else contextlib.nullcontext():
                value = operator(values[-1 - first % len(values)], values[-1 - second % len(values)])
            values.append(value)
            if hold:
                held.append(value.detach())
            if len(values) > 4:
                values.pop(0)
            pause()
        with region():
            return torch.stack([value.sin().sum() for value in values[-2:]]).sum()


OPERATORS = (
    lambda a, b: a.sin(),
    lambda a, b: a.tanh() * b,
    lambda a, b: a.sigmoid(),
    lambda a, b: (a * b).exp().reciprocal().tanh(),
    lambda a, b: a @ b.t() / SIDE,
    lambda a, b: a.t(),
    lambda a, b: torch.cat([a[:2], b[2:]]) * a,
    lambda a, b: a[1:].t() @ a[1:] / SIDE,
    lambda a, b: a[:1].expand(SIDE, SIDE) * b.t() * b,
    lambda a, b: torch.view_as_real(torch.complex(a.sin(), b.cos()).conj() * a)[..., 1],
)


def once(loss: torch.Tensor, leaves: list[torch.Tensor], other: Any, region: Any) -> Iterator[Any]:
    yield torch.autograd.grad(loss, leaves, allow_unused=True)


def retained(loss: torch.Tensor, leaves: list[torch.Tensor], other: Any, region: Any) -> Iterator[Any]:
    for _ in range(2):
        yield torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    yield torch.autograd.grad(loss, leaves, allow_unused=True)


def partial(loss: torch.Tensor, leaves: list[torch.Tensor], other: Any, region: Any) -> Iterator[Any]:
    for leaf in leaves[:2]:
        yield torch.autograd.grad(loss, leaf, allow_unused=True, retain_graph=True)


def dropped(loss: torch.Tensor, leaves: list[torch.Tensor], other: Any, region: Any) -> Iterator[Any]:
    yield loss.detach()


def interrupted(loss: torch.Tensor, leaves: list[torch.Tensor], other: Any, region: Any) -> Iterator[Any]:
    def interrupt(_: Any) -> None:
        raise Interrupted

    for leaf in leaves:
        handle = leaf.register_hook(interrupt)
        with contextlib.suppress(Interrupted):
            torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
        handle.remove()
    yield torch.autograd.grad(loss, leaves, allow_unused=True)


def two_graphs(loss: torch.Tensor, leaves: list[torch.Tensor], other: Any, region: Any) -> Iterator[Any]:
    second = other()
    yield torch.autograd.grad(loss, leaves, allow_unused=True)
    yield torch.autograd.grad(second, leaves, allow_unused=True)


def second_order(loss: torch.Tensor, leaves: list[torch.Tensor], other: Any, region: Any) -> Iterator[Any]:
    with region():  # what the first backward saves for the second one moves too
        first = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=True)
    yield [grad if grad is None else grad.detach() for grad in first]
    penalty = torch.stack([grad.pow(2).sum() for grad in first if grad is not None]).sum()
    if penalty.requires_grad:
        yield torch.autograd.grad(penalty, leaves, allow_unused=True)


ENDINGS = (once, once, retained, partial, dropped, interrupted, two_graphs, second_order)


def device(draw: random.Random) -> CheckedEngine:
    """An engine on a random device: some tiers without room, some disks that fail."""
    caps = {
        "pinned": draw.choice([0, NBYTES, 3 * NBYTES, 64 * NBYTES]),
        "pageable": draw.choice([0, 2 * NBYTES]),
        "disk": draw.choice([0, 64 * NBYTES, 64 * NBYTES]),
    }
    failing = draw.random() < 0.3

    def fails() -> OSError | None:
        return OSError(28, "No space left on device") if failing and draw.random() < 0.3 else None

    together_bytes = draw.choice([0, 0, 3 * NBYTES, 1 << 20])
    device = AdversarialDevice(draw.randrange, caps, fails=fails, together_bytes=together_bytes)
    return CheckedEngine(Checked(device), depth=draw.randrange(4))


def results(program: Program, engine: CheckedEngine | None, steps: int = 2) -> list[Any]:
    """What the program computes; without an engine, as PyTorch does by itself."""
    found = []

    def pause() -> None:
        if isinstance(engine.backend.inner, AdversarialDevice):
            engine.backend.inner.compute(1e-7)

    for _ in range(steps):
        leaves, held = program.leaves(), []

        @contextlib.contextmanager
        def region() -> Iterator[None]:
            with torch.autograd.graph.saved_tensors_hooks(engine.stash, engine.fetch):
                yield
            engine.look_again()

        def run(leaves=leaves, held=held, region=region) -> torch.Tensor:
            if engine is None:
                return program.run(leaves, contextlib.nullcontext, lambda: None, held)
            return program.run(leaves, region, pause, held)

        found += map(bits, program.ending(run(), leaves, run, region if engine else contextlib.nullcontext))
        found.append(bits(held))
    return found


def run_case(seed: int, engine: CheckedEngine | None = None) -> list[Hazard]:
    """Run a case, and return the hazards found; the results and the engine's books must be right."""
    program, engine = Program(seed), engine or device(random.Random(seed))
    assert results(program, engine) == results(program, None)
    stats = engine.stats()
    assert set(stats.live_bytes.values()) <= {0}
    assert (engine._moved, engine._by_storage, engine.loader.back) == ({}, {}, {})
    return engine.backend.finish()
