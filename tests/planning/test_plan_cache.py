"""Plans that are kept on disk: what is returned from there is what planning would give, and is proven again."""

import contextlib
import functools
import multiprocessing

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.core import DiskCache
from memscale.planning import engine as engines
from memscale.planning import fingerprint as fingerprints
from memscale.planning.fingerprint import fingerprint
from memscale.simulation import TrainingStep
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
    engine.smallest()
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


def test_a_kept_plan_uses_nothing_that_is_not_allowed(monkeypatch):
    """Not even where its figures are right: cast changes numbers."""
    monkeypatch.setattr(engines, "fingerprint", lambda *_: {})
    allowed = ms.Config(mode="conservative", use_mixed_precision=True)
    assert "cast" in repr(Planned(config=allowed).plan())
    asked = Planned()
    assert "cast" not in repr(asked.plan())
    assert not asked.known


@pytest.mark.deep
def test_a_model_that_cannot_be_described_is_planned_every_time(monkeypatch):
    monkeypatch.setattr(engines, "fingerprint", lambda *_: 1 / 0)
    one, other = (Planned(made=model(2)).plan(3 * MIB) for _ in range(2))
    assert one.to_json() == other.to_json()
    assert not DiskCache("plans").folder.exists()


# -- the key -----------------------------------------------------------------------------------------------------------


def key(**fields):
    given = step(**fields)
    asked = TrainingStep(given["model"], given["batch"], given["optimizer"], given["loss"])
    return fingerprint(asked, given.get("config", ms.Config()), given["hardware"])


def _changed(change):
    made = model()
    change(made)
    return {"made": made}


def _tie(made):
    made[1].up.weight = made[0].up.weight


def _share(made):
    made[1].up.bias.data = made[0].up.bias.data


def _patch(made):
    made[0].forward = functools.partial(Block.forward, made[0])


def _scaled_loss(by):
    return lambda output, _: output.mean() * by


def _adamw(**options):
    made = model()
    return {"made": made, "optimizer": torch.optim.AdamW(made.parameters(), **options)}


def _stepped():
    fields = _adamw()
    fields["made"](torch.ones(2, 64)).sum().backward()
    fields["optimizer"].step()
    fields["optimizer"].zero_grad()
    return fields


def _other_loss(output, _):
    return output.abs().mean()


#: What is different, and which part of the key shows it.
DIFFERENT = {
    "the class": (lambda: _changed(lambda made: made[0].__setattr__("act", nn.ReLU())), {"model"}),
    "a number of a module": (lambda: {"made": model(scale=2)}, {"model"}),
    "a shape": (lambda: _changed(lambda made: made[0].__setattr__("down", nn.Linear(256, 32))), {"model"}),
    "a dtype": (lambda: _changed(lambda made: made[0].bfloat16()), {"model"}),
    "a device": (lambda: _changed(lambda made: made[0].to("meta")), {"model"}),
    "a frozen parameter": (lambda: _changed(lambda made: made[0].up.weight.requires_grad_(False)), {"model"}),
    "evaluation": (lambda: _changed(lambda made: made[0].eval()), {"model"}),
    "a tied weight": (lambda: _changed(_tie), {"model", "optimizer"}),
    "a shared memory": (lambda: _changed(_share), {"model"}),
    "one module twice": (lambda: _changed(lambda made: made.__setattr__("1", made[0])), {"model", "optimizer"}),
    "a gradient": (lambda: _changed(lambda made: made(torch.ones(2, 64)).sum().backward()), {"model"}),
    "a hook": (lambda: _changed(lambda made: made[0].register_forward_hook(lambda *_: None)), {"model"}),
    "another hook": (lambda: _changed(lambda made: made[0].register_forward_hook(lambda *_: 3)), {"model"}),
    "a patched method": (lambda: _changed(_patch), {"model"}),
    "rows": (lambda: {"batch": torch.ones(256, 64)}, {"batch"}),
    "the dtype of the batch": (lambda: {"batch": torch.ones(512, 64, dtype=torch.float64)}, {"batch"}),
    "its strides": (lambda: {"batch": torch.ones(64, 512).t()}, {"batch"}),
    "its kind": (lambda: {"batch": (torch.ones(512, 64),)}, {"batch"}),
    "a flag in it": (lambda: {"batch": {"input": torch.ones(512, 64), "causal": True}}, {"batch"}),
    "no optimizer": (lambda: {"optimizer": None}, {"optimizer"}),
    "its kind, too": (lambda: (f := _adamw()) | {"optimizer": torch.optim.SGD(f["made"].parameters())}, {"optimizer"}),
    "its loop": (lambda: _adamw(foreach=False), {"optimizer"}),
    "amsgrad": (lambda: _adamw(amsgrad=True), {"optimizer"}),
    "no decay": (lambda: _adamw(weight_decay=0.0), {"optimizer"}),
    "its states": (_stepped, {"optimizer"}),
    "the loss": (lambda: {"loss": _other_loss}, {"loss"}),
    "no loss": (lambda: {"loss": None}, {"loss"}),
    "what the loss closes over": (lambda: {"loss": _scaled_loss(2)}, {"loss"}),
    "the mode": (lambda: {"config": ms.Config(mode="conservative")}, {"config"}),
    "a cap": (lambda: {"config": ms.Config(max_cpu_offload_gb=1)}, {"config"}),
    "a switch that is set": (lambda: {"config": ms.Config(enable_offloading=True)}, {"config"}),
    "the card": (lambda: {"hardware": ms.Hardware.named("h100")}, {"hardware"}),
    "a speed": (
        lambda: {"hardware": ms.Hardware("box", "cpu", 2**36, bandwidth_bytes_per_second=1e9)},
        {"hardware"},
    ),
}


@pytest.mark.parametrize(("make", "parts"), DIFFERENT.values(), ids=DIFFERENT)
def test_each_part_of_the_key_tells_its_own_differences(make, parts):
    one, other = key(), key(**make())
    assert {name for name in one if one[name] != other[name]} == parts


#: Names that were read from the environment or from flags when a plan was made.
SETTINGS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "attention": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "allocator": lambda: _environment(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
    "precision": lambda: _precision("medium"),
    "threads": lambda: _threads(2),
}


@contextlib.contextmanager
def _environment(**names):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        yield


@contextlib.contextmanager
def _precision(wanted):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    yield
    torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def _threads(wanted):
    before = torch.get_num_threads()
    torch.set_num_threads(wanted)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("inside", SETTINGS.values(), ids=SETTINGS)
def test_settings_of_the_process_are_in_the_key(inside):
    one = key()
    with inside():
        other = key()
    assert {name for name in one if one[name] != other[name]} == {"settings"}


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


def test_the_planners_code_is_all_that_is_in_its_folders(monkeypatch, tmp_path):
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(fingerprints, "__file__", str(tmp_path / "fingerprint.py"))
    seen = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "inner" / "one.py").write_text(text)
        fingerprints.planner.cache_clear()
        seen.add(fingerprints.planner())
    fingerprints.planner.cache_clear()
    assert len(seen) == 2
