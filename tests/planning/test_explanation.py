"""What a plan says about itself: the numbers of its evidence, each row of parts once, and a script that runs."""

import itertools

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.algebra import find_regions
from memscale.core import format_bytes, format_seconds
from memscale.planning import ProvenPlan

BOX = ms.Hardware(name="box", device_type="cpu", memory_bytes=2**36)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(32, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(scope="module")
def engine():
    model = Tower()
    step = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": lambda y, _: y.square().mean()}
    return ms.DecisionEngine(model, torch.ones(512, 32), hardware=BOX, **step)


@pytest.fixture(scope="module")
def plan(engine):
    return engine.plan("6MiB")


def test_rows_of_equal_decisions_are_told_once(plan):
    text = plan.explain()
    evidence = plan.evidence
    layers = evidence.decisions[:-1]
    alike = [list(row) for _, row in itertools.groupby(layers, lambda each: (each.chosen, each.rule, each.runner_up))]
    assert 1 < len(alike) < len(layers) == 6
    lines = text.splitlines()
    named = [at for at, line in enumerate(lines) if line.startswith("layers.")]
    for at, row in zip(named, alike, strict=True):
        line = lines[at]
        first, last = (each.path.removeprefix("layers.") for each in (row[0], row[-1]))
        assert line.split("   ")[0] == (f"layers.{first}" if len(row) == 1 else f"layers.{first} to {last}")
        assert lines[at + 1] == f"    {row[0].chosen}"
        numbers = [
            format_bytes(sum(each.kept_bytes for each in row)),
            format_seconds(sum(each.seconds for each in row)),
        ]
        assert all(number in line for number in numbers)
    assert text.count("rule: ") == len(alike) + 1, "and what is outside"
    assert max(map(len, lines)) <= 80


def test_a_part_has_its_rule_its_numbers_and_its_runner_up(plan):
    one = next(each for each in plan.evidence.decisions if each.chosen != "as written")
    text = plan.explain(one.path)
    for fact in (
        f"{one.path}: {one.chosen}",
        f"rule: {one.rule}",
        f"keeps {format_bytes(one.kept_bytes)} until backward, {format_bytes(one.kept_bytes_before)} as written",
        f"takes {format_seconds(one.seconds)}, {format_seconds(one.seconds_before)} as written",
        f"runner-up: {one.runner_up}: {format_seconds(one.seconds - one.runner_up_seconds)} faster",
    ):
        assert fact in text.replace("\n      ", " ")
    assert one.runner_up_peak_bytes > plan.evidence.planned.taken_bytes
    assert plan.explain(f"{one.path}.0") == text, "a module inside of it"
    assert plan.explain("layers") == plan.explain("layers.*")
    assert "(the rest)" in plan.explain("")


def test_what_was_not_decided_is_refused_with_what_was(plan, engine):
    with pytest.raises(ms.PlanError, match=r"about 'head'; the parts of this plan are layers\.0 to 5, \(the rest\)"):
        plan.explain("head")
    with pytest.raises(ms.PlanError, match="the step fits unchanged"):
        engine.plan("1GiB").explain("layers.0")


def test_diff_names_the_modules_that_change(plan, engine):
    whole = ProvenPlan(ms.Plan({"layers.*": ms.checkpoint()}), plan.evidence)
    lines = plan.diff(whole).splitlines()
    meant = [{id(module): how for module, how in find_regions(engine.model, each)} for each in (plan, whole)]
    changed = [at for at, layer in enumerate(engine.model.layers) if meant[0].get(id(layer)) != meant[1].get(id(layer))]
    named = set()
    for line in lines[:-1]:
        if not line.startswith("layers."):
            continue
        first, _, last = line.partition(":")[0].partition(" to ")
        named |= set(range(int(first[7:]), int(last or first[7:]) + 1))
    assert named == set(changed)
    assert lines[-1].startswith("takes ")
    by_hand = ms.Plan({f"layers.{at}": whole.rules[0].transform for at in range(6)})
    assert whole.diff(by_hand) == "no difference"
    assert whole.diff(ms.Plan({"": ms.checkpoint()})).splitlines()[0] == "(root): as written -> checkpoint()"


def test_the_script_runs_as_it_is_and_says_what_for(plan, engine):
    scope = {"model": engine.model}
    exec(plan.to_python(), scope)
    assert scope["plan"] == plan
    x = torch.ones(4, 32)
    assert torch.equal(scope["fit"](x), engine.model(x))
    assert plan.to_python().startswith(
        f"# For 6.00 MiB on box: the simulated step takes {format_bytes(plan.evidence.planned.taken_bytes)}"
    )
