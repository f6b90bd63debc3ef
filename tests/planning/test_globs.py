"""Few rules for many: never another meaning."""

import pytest
from torch import nn

import memscale as ms
from memscale.algebra import find_regions
from memscale.planning.parts.globs import with_globs

A, B = ms.checkpoint(), ms.checkpoint(policy=ms.policies.dots_saveable)


def _block():
    return nn.ModuleDict({"attn": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)})


def _nested():
    return nn.ModuleDict({"stages": nn.ModuleList(nn.ModuleList(_block() for _ in range(2)) for _ in range(3))})


def _named():
    return nn.ModuleDict({f"layer{at}": nn.Linear(2, 2) for at in (1, 2, 10)})


def _shared():
    model = nn.ModuleDict({"rows": nn.ModuleList(nn.Linear(2, 2) for _ in range(3))})
    model["last"] = model["rows"][2]
    return model


EVERY = [f"stages.{stage}.{block}.attn" for stage in range(3) for block in range(2)]
CASES = {
    "a whole row": (_nested, dict.fromkeys(EVERY, A), {"stages.*.*.attn": A}),
    "one stage": (_nested, dict.fromkeys(EVERY[:2], A), {"stages.0.*.attn": A}),
    "one of each stage": (_nested, dict.fromkeys(EVERY[::2], A), {"stages.*.0.attn": A}),
    "one is missing": (
        _nested,
        dict.fromkeys(EVERY[:-1], A),
        {"stages.0.*.attn": A, "stages.1.*.attn": A, "stages.2.0.attn": A},
    ),
    "one is different": (
        _nested,
        {**dict.fromkeys(EVERY, A), EVERY[-1]: B},
        {"stages.0.*.attn": A, "stages.1.*.attn": A, "stages.2.0.attn": A, "stages.2.1.attn": B},
    ),
    "two rows": (
        _nested,
        {path: how for each in EVERY for path, how in ((each, A), (each.replace("attn", "mlp"), B))},
        {"stages.*.*.attn": A, "stages.*.*.mlp": B},
    ),
    "numbers within names": (_named, {"layer1": A, "layer2": A, "layer10": A}, {"layer*": A}),
    "a number that begins another": (_named, {"layer1": A, "layer2": A}, {"layer1": A, "layer2": A}),
    "the root": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        {"0": A, "1": A, "": B},
        {"*": A, "": B},
    ),
    "one module, two paths": (_shared, {"rows.0": A, "rows.1": A, "last": A}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_become_patterns_of_the_same_meaning(name):
    make, rules, expected = CASES[name]
    model, plan = make(), ms.Plan(rules)
    found = with_globs(plan, model)
    assert found == (plan if expected is None else ms.Plan(expected))
    meaning = [{id(module): how for module, how in _regions(model, each)} for each in (plan, found)]
    assert meaning[0] == meaning[1]


def test_rules_that_meet_on_a_path_stay():
    model = _named()
    plan = ms.Plan([("layer1", A), ("layer2", A), ("layer10", A), ("layer1", B)])
    assert with_globs(plan, model) == plan


def _regions(model, plan):
    return find_regions(model, plan)
