"""The same step has the same simulation, byte for byte, whatever the process did before; which stays as it was."""

from __future__ import annotations

import functools
import gc
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from memscale.simulation.dispatch import operators, step_recorder
from memscale.simulation.process import process_state
from memscale.simulation.record import MemoryProfiler
from tests.support.coverings import DEEP


class Block(nn.Module):
    """Attention, experts that are chosen by what comes in, and a cycle that keeps a tensor until Python collects."""

    def __init__(self, width=64):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.router = nn.Linear(width, 2)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        q, k, v = self.heads(self.norm(x)).chunk(3, -1)
        x = x + F.dropout(F.scaled_dot_product_attention(q, k, v), 0.1)
        chosen = self.router(x).argmax(-1)
        routed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)
            routed[rows] = expert(x[rows]) * (0.5 + random.random())
        ring = SimpleNamespace(kept=routed.detach() * 2)
        ring.itself = ring
        return x + routed


class Narrowed(nn.Module):
    """Autocast keeps what it narrowed in a table by address, and lets go of it in the order of that table."""

    def __init__(self, width=64):
        super().__init__()
        self.rows = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for row in self.rows:
                x = row(x)
        return x.float()


PLANS = {
    "plain": None,
    "offload": ms.offload(min_bytes=0),
    "params": ms.offload(what="params", min_bytes=0),
    "params+checkpoint": ms.compose(ms.offload(what="params", min_bytes=0), ms.checkpoint()),
}


def simulated(*step, **options):
    return step_of(*step, **options).digest()


def step_of(block=Block, plan=None, hardware="h100", blocks=2):
    with torch.device("meta"):
        model, batch = nn.Sequential(*[block() for _ in range(blocks)]), torch.empty(8, 16, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = None if plan is None else {"*": plan}
    profiler = MemoryProfiler(model, optimizer, loss=lambda y, _: y.square().sum(), plan=plan, hardware=hardware)
    return profiler.simulated(batch, accumulate=1 if plan is None else 2)


def caches():
    """Everything of memscale's that is found once in a process; not its runtime, which owns what it moved."""
    for name, module in list(sys.modules.items()):
        if name.startswith("memscale."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper) and value.__name__ != "default_runtime":
                    yield value


def after_nothing():
    for cache in caches():
        cache.cache_clear()


def after_a_real_step():
    model = ms.transform(nn.Sequential(*[Block() for _ in range(2)]), {"*": ms.offload(min_bytes=0)})
    model(torch.randn(8, 16, 64)).sum().backward()
    torch.manual_seed(random.randrange(100))
    random.seed(7)


def after_garbage():
    after_garbage.kept = [[index] for index in range(6_000)], [torch.empty(size % 13) for size in range(999)]


def after_an_error():
    def fail(y, _):
        raise ArithmeticError("on purpose")

    profiler = MemoryProfiler(nn.Linear(8, 8), loss=fail, hardware="h100", plan={"": PLANS["params"]})
    with pytest.raises(ArithmeticError):
        profiler.simulated(torch.ones(2, 8))


BEFORE = [after_nothing, after_a_real_step, after_garbage, after_an_error]


@pytest.mark.parametrize(
    ("block", "plan", "hardware"),
    [
        pytest.param(Block, "plain", "h100", marks=pytest.mark.deep),
        pytest.param(Block, "offload", "h100", marks=pytest.mark.deep),
        (Block, "params+checkpoint", "h100"),
        pytest.param(Block, "params", "cpu", marks=pytest.mark.deep),
    ],
)
def test_a_simulation_does_not_depend_on_what_was_before(block, plan, hardware):
    step = (block, PLANS[plan], hardware, 1)
    expected = simulated(*step)
    for together in [[each] for each in BEFORE] if DEEP else [BEFORE[:1], BEFORE[1:]]:
        for before in together:
            before()
        assert simulated(*step) == expected, together
    with ThreadPoolExecutor(1) as new:  # where autograd has numbered no node yet
        assert new.submit(simulated, *step).result() == expected


def test_what_ends_with_autocast_ends_in_an_order_of_its_own():
    held, found = [], set()
    for each in range(3):
        held.append([torch.empty(8) for _ in range(37 * each)])  # addresses are others every time
        found.add(simulated(Narrowed, None, "cpu"))
    assert len(found) == 1


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(step_recorder, "EVERY", 30)  # these steps are short
    monkeypatch.setattr(process_state, "_YOUNG", 2000)


def test_where_collections_are_off_cycles_stay_as_they_do_in_reality():
    expected = simulated()
    gc.disable()
    try:
        assert simulated() != expected
    finally:
        gc.enable()


OTHER = {
    "gradients": False,
    "garbage collection thresholds": (100, 5, 5),
    "threads": 1 + torch.get_num_threads() % 2,
}


@pytest.mark.parametrize("name", process_state.SETTINGS)
def test_a_setting_that_a_step_changes_comes_back(name):
    read, put = process_state.SETTINGS[name]
    before = read()
    model = nn.Linear(4, 4)

    def step():
        torch.set_grad_enabled(True)
        model(torch.ones(2, 4)).sum().backward()
        put(OTHER.get(name, not before))

    ms.profile(step, hardware="h100")
    try:
        assert read() == before
    finally:
        put(before)


def test_what_libraries_keep_of_answers_about_the_device_is_asked_again(monkeypatch):
    @functools.lru_cache
    def is_cuda_here():
        return torch.cuda.is_available()

    monkeypatch.setattr(sys.modules[__name__], "is_cuda_here", is_cuda_here, raising=False)
    process_state._cached_questions.cache_clear()
    assert is_cuda_here() == torch.cuda.is_available()
    model, answers = nn.Linear(4, 4), []

    def step():
        answers.append(is_cuda_here())
        model(torch.ones(2, 4)).sum().backward()

    ms.profile(step, hardware="h100")
    assert all(answers)
    assert is_cuda_here() == torch.cuda.is_available()
    process_state._cached_questions.cache_clear()


# ------------------------------------------------------------------------------------------ what is remembered of calls


def changes(monkeypatch):
    """The changes of an LSTM's step by a process that remembers nothing of its own."""
    monkeypatch.setattr(operators, "_known", {})
    lstm = nn.LSTM(8, 8, bidirectional=True)
    return ms.profile(lstm, torch.ones(4, 2, 8), loss=lambda output, _: output[0].sum(), hardware="h100").changes


def test_two_results_that_are_one_tensor_are_one_in_every_simulation(monkeypatch):
    # PyTorch's cache of fake results returned two tensors from the second call on.
    first = changes(monkeypatch)
    assert first == changes(monkeypatch)
    assert (
        first
        == ms.profile(
            nn.LSTM(8, 8, bidirectional=True),
            torch.ones(4, 2, 8),
            loss=lambda output, _: output[0].sum(),
            hardware="h100",
        ).changes
    )
