"""Plans that are kept on disk: what is returned from there is what planning would give, and is proven again."""

import multiprocessing

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.core import DiskCache
from tests.support.coverings import DEEP

MIB = 2**20
BOX = ms.Hardware(name="box", device_type="cpu", memory_bytes=2**36)
_HABITS = {"recomputes": 1}


class Block(nn.Module):
    """Has a habit that nothing shows before it recomputes."""

    def __init__(self, width=64, scale=1):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.scale = scale

    def forward(self, x):
        if torch._C._current_graph_task_id() != -1:
            torch.cat([x] * (2 * _HABITS["recomputes"]))
        return self.down(self.act(self.up(x))) * self.scale


def model(count=3, **fields):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(**fields) for _ in range(count)])


def loss(output, _):
    return output.square().mean()


def step(made=None, **fields):
    made = model() if made is None else made
    given = {"batch": torch.ones(512, 64), "optimizer": torch.optim.AdamW(made.parameters(), fused=True), "loss": loss}
    return {"model": made, "hardware": BOX, **given, **fields}


class Planned:
    """What an engine simulates."""

    def __init__(self, **fields):
        self.said = []
        self.engine = ms.DecisionEngine(**step(**fields), progress=lambda what, *_: self.said.append(what))

    def plan(self, budget=4 * MIB):
        return self.engine.plan(budget)

    @property
    def known(self):
        """Whether all that was asked was answered from disk."""
        return set(self.said) == {"the step as written", "a cached plan"}


@pytest.fixture
def unkept(monkeypatch):
    """Plans as they are without a cache."""

    def plan(budget=4 * MIB, **fields):
        with monkeypatch.context() as patch:
            patch.setenv("MEMSCALE_CACHE", "")
            return ms.DecisionEngine(**step(**fields)).plan(budget)

    return plan


def test_the_second_time_a_plan_is_only_proven(unkept):
    first, second = Planned(), Planned()
    plans = first.plan(), second.plan()
    assert not first.known
    assert second.known
    assert second.said == ["the step as written", "a cached plan"]
    assert plans[0], "there is something to decide"
    assert plans[0].to_json() == plans[1].to_json() == unkept().to_json()


def test_an_answer_depends_on_its_arguments_alone(monkeypatch):
    """Not on what was asked before, nor on what is known from disk."""
    budgets = (4 * MIB, int(4.4 * MIB))
    monkeypatch.setenv("MEMSCALE_CACHE", "")
    expected = [ms.DecisionEngine(**step()).plan(budget).to_json() for budget in budgets]
    engine = ms.DecisionEngine(**step())
    assert [engine.plan(budget).to_json() for budget in budgets[::-1]] == expected[::-1]
    monkeypatch.undo()
    Planned().plan(budgets[0])
    asked = Planned()
    assert [asked.plan(budget).to_json() for budget in budgets] == expected
    again = Planned()
    assert [again.plan(budget).to_json() for budget in budgets] == expected
    assert again.known


def test_what_only_the_planned_step_shows_is_planned_again(unkept, monkeypatch):
    """The key cannot see everything; the proof does."""
    budget = int(4.7 * MIB)
    before = Planned().plan(budget)
    monkeypatch.setitem(_HABITS, "recomputes", 4)
    asked = Planned()
    plan = asked.plan(budget)
    assert not asked.known
    assert plan.to_json() == unkept(budget).to_json() != before.to_json()
    assert plan.evidence.planned.taken_bytes <= budget
    last = Planned()
    last.plan(budget)
    assert last.known, "what no longer holds is replaced"


def test_an_edited_forward_never_gets_a_plan_of_before(unkept):
    source = "class Made(Block):\n    def forward(self, x):\n        return {}\n"

    def edited(text):
        space = {"Block": Block, "torch": torch}
        exec(source.format(text), space)
        return nn.Sequential(*[space["Made"]() for _ in range(3)])

    Planned(made=edited("self.down(self.act(self.up(x)))")).plan()
    asked = Planned(made=edited("self.down(torch.relu(self.up(x)))"))
    plan = asked.plan()
    assert not asked.known
    assert plan.to_json() == unkept(made=edited("self.down(torch.relu(self.up(x)))")).to_json()


def _spoiled_choice(value):
    """Another choice, with the evidence of the one that it takes the place of."""
    plan = value["plans"][0]
    return {**value, "plans": [{**plan, "rules": [{**plan["rules"][0], "transform": {"type": "offload"}}]}]}


@pytest.mark.deep
def test_an_entry_that_says_something_else_is_planned_again():
    expected = Planned().plan().to_json()
    cache = DiskCache("plans")
    (path,) = cache.folder.glob("*.json")
    kept = cache.read(path.stem)
    for spoiled in (_spoiled_choice(kept), {}, [1], {"fault": {}, "plans": []}):
        cache.write(path.stem, spoiled)
        asked = Planned()
        assert asked.plan().to_json() == expected
        assert not asked.known
    asked = Planned()
    assert asked.plan().to_json() == expected
    assert asked.known, "the last one has put it right"


# -- the key -----------------------------------------------------------------------------------------------------------


def key(**fields):
    return ms.DecisionEngine(**step(**fields)).about()


def _changed(change):
    made = model()
    change(made)
    return {"made": made}


def _tie(made):
    made[1].up.weight = made[0].up.weight


def _adamw(**options):
    made = model()
    return {"made": made, "optimizer": torch.optim.AdamW(made.parameters(), **options)}


#: What is different, and a part of the key that shows the difference.
DIFFERENT = {
    "the class": (lambda: _changed(lambda made: made[0].__setattr__("act", nn.ReLU())), "model"),
    "an operator": (lambda: {"made": model(scale=torch.ones(()))}, "step"),
    "a dtype": (lambda: {"made": model().bfloat16(), "batch": torch.ones(512, 64, dtype=torch.bfloat16)}, "model"),
    "a frozen parameter": (lambda: _changed(lambda made: made[0].up.weight.requires_grad_(False)), "model"),
    "a tied weight": (lambda: _changed(_tie), "model"),
    "rows": (lambda: {"batch": torch.ones(256, 64)}, "batch"),
    "its strides": (lambda: {"batch": torch.ones(64, 512).t()}, "batch"),
    "no optimizer": (lambda: {"optimizer": None}, "optimizer"),
    "its loop": (lambda: _adamw(foreach=False), "optimizer"),
    "the loss": (lambda: {"loss": lambda output, _: output.abs().mean()}, "step"),
    "a cap": (lambda: {"config": ms.Config(max_cpu_offload_gb=1)}, "config"),
    "a loop": (lambda: {"accumulate": 2}, "requested"),
}


@pytest.mark.parametrize(("make", "part"), DIFFERENT.values(), ids=DIFFERENT)
def test_the_key_tells_differences(make, part):
    one, other = key(), key(**make())
    assert part in {name for name in one if one[name] != other[name]}


def test_the_key_is_the_same_for_the_same_step():
    assert key() == key()
    assert key() == key(**(_adamw(lr=0.1, fused=True))), "a rate changes no size"


def test_settings_of_the_process_are_in_the_key():
    one = key()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert key()["step"] != one["step"]


# -- processes ---------------------------------------------------------------------------------------------------------


def _plan_into(queue):
    queue.put(Planned(made=model(2)).plan(3 * MIB).to_json())


def test_processes_that_plan_at_once_find_the_same():
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    processes = [context.Process(target=_plan_into, args=(queue,)) for _ in range(4 if DEEP else 2)]
    for each in processes:
        each.start()
    found = [queue.get() for _ in processes]
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0] * len(processes)
    assert len(set(found)) == 1
    assert len(list(DiskCache("plans").folder.iterdir())) == 1
