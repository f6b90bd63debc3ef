"""Plans: within their budget on the real allocator, the same everywhere, no slower with more memory."""

import hashlib
import os
import re

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.algebra import is_transformed
from memscale.core import format_bytes
from memscale.planning import INTERRUPTED_SEARCH, ProvenPlan
from memscale.simulation.measured import training_roles
from tests.support import processes
from tests.support.checks import bits
from tests.support.models import TransformerBlock

CPU = ms.Hardware(name="box", device_type="cpu", memory_bytes=2**36)


def _mlps(count=3, width=64):
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)]
    )


def _loss(output, _):
    return output.square().mean()


def _step(model, batch):
    return {
        "batch": batch,
        "optimizer": torch.optim.AdamW(model.parameters(), fused=True),
        "loss": _loss,
        "hardware": CPU,
    }


class Stages(nn.Module):
    """Nothing repeats: every stage has another width, and what goes down is needed again on the way up."""

    def __init__(self):
        super().__init__()
        widths = (4, 8, 16)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.ModuleList(self._stage(n, 2 * n) for n in widths)
        self.up = nn.ModuleList(self._stage(4 * n, n) for n in reversed(widths))

    @staticmethod
    def _stage(inner, outer):
        return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU())

    def forward(self, x):
        x = self.stem(x)
        kept = []
        for stage in self.down:
            x = stage(x)
            kept.append(x)
        for stage in self.up:
            x = stage(torch.cat([x, kept.pop()], 1))
        return x


MODELS = {
    "mlps": (_mlps, lambda: torch.ones(512, 64)),
    "blocks": (lambda: nn.Sequential(*[TransformerBlock(32) for _ in range(5)]), lambda: torch.ones(16, 32, 32)),
    "stages": (Stages, lambda: torch.ones(4, 3, 32, 32)),
}


@pytest.mark.parametrize(
    "name", [name if name == "stages" else pytest.param(name, marks=pytest.mark.deep) for name in MODELS]
)
def test_the_real_peak_keeps_to_the_budget(name):
    make, batch = MODELS[name][0](), MODELS[name][1]()
    engine = ms.DecisionEngine(make, **_step(make, batch))
    curve = engine.frontier(4)
    assert len(curve) >= 2, "there is something to decide"
    for point in curve[:-1]:
        fit = ms.transform(make, point.plan)
        optimizer = torch.optim.AdamW(fit.parameters(), lr=0.0)

        def step(fit=fit, optimizer=optimizer):
            _loss(fit(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        measured = ms.measure(step, roles=training_roles(fit, optimizer, batch))
        assert measured.peak_bytes <= point.peak_bytes


BUDGET = 3_900_000


@pytest.fixture(scope="module")
def planned():
    """A plan for a budget of the step of a model."""
    model = _mlps()
    return ms.plan(model, budget=BUDGET, **_step(model, torch.ones(512, 64)))


def test_a_plan_trains_to_the_same_numbers(planned):
    model, batch = _mlps(), torch.randn(512, 64)
    fit = ms.transform(model, planned)
    assert is_transformed(fit)
    gradients = []
    for each in (model, fit):
        _loss(each(batch), batch).backward()
        gradients.append([parameter.grad for parameter in each.parameters()])
        each.zero_grad()
    assert bits(gradients[0]) == bits(gradients[1])


def test_what_fits_is_left_as_it_is():
    model, batch = _mlps(), torch.ones(8, 64)
    plan = ms.plan(model, budget="1GiB", **_step(model, batch))
    assert plan == ms.Plan()
    assert "no plan needed" in plan.explain()


def test_what_fits_to_the_last_byte_leaves_no_margin():
    model, batch = _mlps(2), torch.ones(512, 64)
    engine = ms.DecisionEngine(model, **_step(model, batch))
    exactly = engine.frontier(2)[-1].peak_bytes
    evidence = engine.plan(exactly).evidence
    assert evidence.planned.taken_bytes <= 0.999 * exactly
    assert not any("leaves less" in note for note in evidence.notes)
    nothing = ms.Config(enable_checkpointing=False, enable_offloading=False)  # where nothing frees anything, it is said
    engine = ms.DecisionEngine(model, config=nothing, **_step(model, batch))
    plan = engine.plan(engine.frontier(2)[-1].peak_bytes)
    assert not plan
    assert any("leaves less than 0.1 % of the budget" in note for note in plan.evidence.notes)


def test_a_step_of_very_many_operators_is_tried_few_times(monkeypatch):
    monkeypatch.setattr("memscale.planning.search.effort._MOST_OPERATORS", 100)
    model, batch = _mlps(3), torch.ones(512, 64)
    engine = ms.DecisionEngine(model, **_step(model, batch))
    evidence = engine.plan(0.8 * engine.frontier(2)[-1].peak_bytes / CPU.usable_bytes).evidence
    assert engine.simulations <= 12
    assert any("few choices were tried" in note for note in evidence.notes)
    assert any("not tried" in reason for reason in evidence.rejected.values())


def test_a_long_step_that_no_plan_fits_is_refused_after_few_simulations(monkeypatch):
    monkeypatch.setattr("memscale.planning.search.effort._MOST_OPERATORS", 100)
    model, batch = _mlps(6), torch.ones(512, 64)
    engine = ms.DecisionEngine(model, **_step(model, batch))
    with pytest.raises(ms.BudgetError, match="no plan fits") as caught:
        engine.plan("1KiB")
    assert engine.simulations <= 16
    by_hand = ms.profile(model, **_step(model, batch), plan=ms.Plan({"[0-5]": ms.checkpoint()}))
    assert caught.value.peak_bytes <= max(by_hand.peak_bytes, by_hand.first_step_peak_bytes)


def test_a_budget_below_the_smallest_peak_is_an_error_with_the_smallest_plan():
    model, batch, few = _mlps(1), torch.ones(512, 64), ms.Config(mode="conservative")
    engine = ms.DecisionEngine(model, config=few, **_step(model, batch))
    smallest = engine.smallest().evidence.planned.taken_bytes
    with pytest.raises(ms.BudgetError, match="no plan fits") as caught:
        engine.plan(smallest - 1)
    asked, reached = re.search(r"fits (\S+ \wiB) .*\n.* within reach is (\S+ \wiB) ", str(caught.value)).groups()
    assert asked != reached  # sizes that are told apart, however near
    again = ms.profile(model, **_step(model, batch), plan=caught.value.plan)
    assert max(again.peak_bytes, again.first_step_peak_bytes) == caught.value.peak_bytes == smallest


def test_a_transformed_model_is_refused():
    model = _mlps()
    with pytest.raises(ms.ConfigError, match="transformed already"):
        ms.plan(ms.transform(model, {"0": ms.checkpoint()}), torch.ones(2, 64), budget="1GiB")
    with pytest.raises(ms.ConfigError, match=r"^plan\(model=\.\.\.\) takes a torch\.nn\.Module, got builtin_function"):
        ms.plan(torch.sin, torch.ones(2), budget="1GiB")
    with pytest.raises(ms.ConfigError, match=r"^frontier\(model=\.\.\.\) takes a torch\.nn\.Module, got str"):
        ms.frontier("model", torch.ones(2))


def test_a_step_that_reads_values_is_refused_with_the_remedy():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            return y * 2 if y.sum().item() > 0 else y

    with pytest.raises(ms.ConfigError, match=r"cannot be planned.*by\s+hand"):
        ms.plan(Reads(), torch.ones(2, 4), budget="1GiB", loss=_loss)


def test_the_evidence_says_what_was_decided(planned):
    plan, evidence = planned, planned.evidence
    assert evidence.planned.taken_bytes <= BUDGET < evidence.plain.taken_bytes
    assert evidence.planned.step_seconds > evidence.plain.step_seconds
    assert evidence.gap < 0.01
    assert [each.path for each in evidence.decisions] == ["0", "1", "2", ""]
    text = plan.explain()
    assert "memory pressure" in text
    assert "proof" in text
    one = next(each for each in evidence.decisions if each.chosen != "as written")
    assert one.runner_up in plan.explain(one.path)
    with pytest.raises(ms.PlanError, match="nothing was decided about 'nowhere'"):
        plan.explain("nowhere")
    assert "as written" in plan.diff(ms.Plan())
    assert plan.diff(plan).startswith("takes")


def test_a_plan_and_its_evidence_travel_as_json(planned):
    again = ProvenPlan.from_json(planned.to_json())
    assert again == planned == ms.Plan.from_json(planned.to_json())
    assert again.evidence == planned.evidence
    assert again.to_json() == planned.to_json()
    with pytest.raises(ms.PlanError, match="no evidence"):
        ProvenPlan.from_json(ms.Plan().to_json())


_SCRIPT = """
import hashlib, torch, memscale as ms
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)])
box = ms.Hardware(name="box", device_type="cpu", memory_bytes=2**36)
def loss(output, _):
    return output.square().mean()
plan = ms.plan(model, torch.ones(512, 64), budget=3_900_000, loss=loss, hardware=box,
               optimizer=torch.optim.AdamW(model.parameters(), fused=True))
print(hashlib.sha256(plan.to_json().encode()).hexdigest())
"""


def test_every_process_makes_the_same_plan_and_knows_those_of_others(planned):
    found = processes.run(_SCRIPT, MEMSCALE_CACHE=os.environ["MEMSCALE_CACHE"])  # whose hashes have a seed of their own
    assert found.stdout.strip() == hashlib.sha256(planned.to_json().encode()).hexdigest()
    said = []
    model = _mlps()
    known = ms.plan(model, budget=BUDGET, progress=lambda *what: said.append(what), **_step(model, torch.ones(512, 64)))
    assert known.to_json() == planned.to_json()
    assert len(said) == 2


def test_what_the_models_own_code_raises_is_one_error_of_ours():
    with pytest.raises(ms.ConfigError, match=r"the step fails.*shapes"):
        ms.plan(_mlps(), torch.ones(2, 63), budget="1GiB", loss=_loss, hardware=CPU)


class Language(nn.Module):
    def __init__(self, width=512, words=16_000):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential()
        for _ in range(6):
            wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.blocks.append(nn.Sequential(nn.LayerNorm(width), wide, nn.GELU(), narrow))
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.blocks(self.embed(tokens)))


def test_a_budget_holds_for_a_loop_that_keeps_its_output():
    """A plan for a loop that lets go of it takes more there than its budget."""

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.head = _mlps(2), torch.nn.Linear(64, 200)

        def forward(self, x):
            logits = self.head(self.blocks(x))
            return {"loss": torch.log_softmax(logits * 1, -1).square().mean(), "logits": logits}

    def real_peak(plan):
        fit, kept = ms.transform(model, plan), []

        def steps():
            for _ in range(2):
                kept[:] = [fit(batch)]
                kept[0]["loss"].backward()
                fit.zero_grad()

        return ms.measure(steps, roles=training_roles(fit, None, batch)).peak_bytes

    model, batch = Head(), torch.randn(512, 64)
    limit = int(0.9 * ms.profile(model, batch, hardware=CPU).taken_bytes)
    held, let_go = (ms.plan(model, batch, limit, hardware=CPU, keeps_output=keeps) for keeps in (True, False))
    assert real_peak(held) <= limit < real_peak(let_go)
    assert ["keeps the model's output" in plan.explain() for plan in (held, let_go)] == [True, False]


def test_an_interrupted_search_gives_the_best_that_it_has_simulated(monkeypatch):
    monkeypatch.setenv("MEMSCALE_CACHE", "")
    model = _mlps(2)
    # A card's allocator reserves segments: the search goes on behind the first plan that fits.
    step, said = {**_step(model, torch.ones(65536, 64, device="meta")), "hardware": "rtx-4090"}, []
    budget = ms.profile(model, **step).taken_bytes * 3 // 4

    def stop(at):
        said.clear()

        def progress(*what):
            said.append(what)
            if len(said) == at:
                raise KeyboardInterrupt

        return ms.plan(model, budget=budget, progress=progress, **step)

    whole = stop(None)
    calls = len(said)
    found = []
    for at in (1, calls):
        try:
            found.append(stop(at))
        except KeyboardInterrupt:
            assert not found, "what was there is not lost"
    assert found
    for plan in found:
        assert plan.evidence.planned.taken_bytes <= plan.evidence.budget_bytes
        assert INTERRUPTED_SEARCH in plan.evidence.notes
        assert plan.evidence.planned.step_seconds >= whole.evidence.planned.step_seconds
    assert INTERRUPTED_SEARCH not in whole.evidence.notes


@pytest.mark.deep
def test_an_exact_plan_tells_what_a_head_in_pieces_would_give():
    """The logits that it names, and a tile of the head frees most of them; nothing where rounding is allowed."""
    torch.manual_seed(0)
    tokens = torch.zeros(4, 64, dtype=torch.long)
    loss = lambda y, tokens: nn.functional.cross_entropy(y.flatten(0, 1), tokens.flatten())  # noqa: E731

    def plan_of(model, exact=True):
        step = {"loss": loss, "hardware": "t4"}
        limit = ms.profile(model, tokens, **step).taken_bytes * 9 // 10
        plan = ms.plan(model, tokens, limit, exact=exact, **step)
        return plan, step, [note for note in plan.evidence.notes if "exact=False" in note]

    plan, step, (note,) = plan_of(model := Language())
    rules = {rule.pattern: rule.transform for rule in plan} | {"lm_head": ms.tile(chunks=8)}
    by_rules = ms.profile(model, tokens, plan=ms.Plan(rules), **step)
    assert "tile(chunks=8) on lm_head" in note
    logits_bytes = 4 * tokens.numel() * model.lm_head.out_features
    counts = [format_bytes(each * logits_bytes) for each in range(1, 5)]
    assert any(f"logits take {each} of the peak" in note for each in counts)
    assert plan.evidence.planned.taken_bytes - by_rules.taken_bytes >= logits_bytes / 2
    assert not plan_of(model, exact=False)[2]


def test_a_plan_changes_no_bit_unless_it_is_asked_to():
    """A budget that only a tiled head reaches is refused by default, and names what would reach it."""

    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 4000)

        def forward(self, x):
            return self.head(self.body(x))

    torch.manual_seed(0)
    model, x, target = Head(), torch.randn(256, 16), torch.randint(0, 4000, (256,))
    step = {"loss": lambda y, _: nn.functional.cross_entropy(y, target), "hardware": "cpu", "keeps_output": False}
    plain = ms.profile(model, x, **step).peak_bytes
    reached = r"Config\(enable_tiling=True\) would lower the peak to [\d.]+ [KM]iB, with sums in another order"
    with pytest.raises(ms.BudgetError, match=reached):
        ms.plan(model, x, plain // 2, **step)
    rounds = ms.plan(model, x, plain // 2, exact=False, **step)
    assert any("tile(" in repr(rule) for rule in rounds)
    curve = ms.frontier(model, x, points=2, **step)
    assert all(ms.verify(model, ms.transform(model, point.plan), x, loss=step["loss"]).exact for point in curve)


@pytest.mark.deep
def test_a_curve_that_is_stopped_has_the_plans_until_then(monkeypatch):
    monkeypatch.setenv("MEMSCALE_CACHE", "")
    step = _step(model := _mlps(2), torch.ones(512, 64))
    whole = ms.frontier(model, points=3, **step)
    cut = ms.frontier(model, points=3, seconds=0, **step)
    assert len(cut) >= 2
    assert cut[-1].plan == ms.Plan()
    for point in cut[:-1]:
        assert point.plan.evidence.notes[0].startswith("stopped after 0 s")
        assert ms.profile(model, plan=point.plan, **step).taken_bytes == point.peak_bytes
        assert point.step_seconds >= whole.at(point.peak_bytes).step_seconds
    assert not any("stopped" in note for point in whole for note in point.plan.evidence.notes)


def test_a_card_without_units_for_what_autocast_computes_in_is_planned_for():
    class Autocast(nn.Linear):
        def forward(self, x):
            with torch.autocast("cuda", torch.bfloat16):
                return super().forward(x)

    engine = ms.DecisionEngine(Autocast(64, 64), torch.ones(64, 64), loss=_loss, hardware="t4")
    assert engine.plain.step_seconds > 0


@pytest.mark.deep
def test_after_the_last_second_a_plan_that_takes_few_simulations_is_tried(monkeypatch, tmp_path):
    step = _step(model := _mlps(2), torch.ones(512, 64))
    monkeypatch.setenv("MEMSCALE_CACHE", "")
    whole = ms.DecisionEngine(model, **step)
    smallest = whole.smallest().evidence.planned.taken_bytes
    monkeypatch.setenv("MEMSCALE_CACHE", str(tmp_path))
    engine = ms.DecisionEngine(model, **step)
    cut = engine.plan(smallest + 2**19, seconds=0)
    assert cut.evidence.planned.taken_bytes <= smallest + 2**19
    assert cut.evidence.notes[0].startswith("stopped after 0 s (seconds= or --seconds allows more): the fastest")
    assert engine.simulations < whole.simulations
    with pytest.raises(
        ms.BudgetError, match=r"was found: stopped after 0 s \(seconds= .* allows more\)\n  the smallest"
    ):
        engine.plan(smallest // 2, seconds=0)
    # An answer that was cut short is not kept for others, and what the engine says after it is what any other says.
    assert not list(tmp_path.rglob("plans/*"))
    monkeypatch.setenv("MEMSCALE_CACHE", "")
    assert engine.plan("3MiB").to_json() == ms.DecisionEngine(model, **step).plan("3MiB").to_json()
