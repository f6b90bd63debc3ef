"""Plans: which paths a pattern means, what a plan prints, and how bad ones are refused."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import Plan, checkpoint, compose, identity, policies
from memscale.algebra.apply import find_regions
from memscale.core import row_label
from memscale.planning.parts.globs import with_globs

DOTS = checkpoint(policy=policies.dots_saveable)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return self.mlp(self.attention(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 4)
        self.alias = self.head

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def regions(plan, model=None):
    model = Model() if model is None else model
    paths = {id(module): path for path, module in model.named_modules()}
    return {paths[id(module)]: how for module, how in find_regions(model, Plan(plan))}


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("", [""]),
        ("head", ["head"]),
        ("h*", ["head"]),
        ("layers.*", ["layers.0", "layers.1"]),
        ("layers.*.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("layers.**.mlp", ["layers.0.mlp", "layers.1.mlp"]),
        ("**.0.mlp.**", ["layers.0.mlp", "layers.0.mlp.0", "layers.0.mlp.1"]),
        ("**.0", ["layers.0", "layers.0.mlp.0", "layers.1.mlp.0"]),
        ("**.m*p", ["layers.0.mlp", "layers.1.mlp"]),
    ],
)  # fmt: skip
def test_what_a_pattern_names(pattern, paths):
    assert sorted(regions({pattern: checkpoint()})) == sorted(paths)


def test_a_later_rule_composes_outside_an_earlier_one():
    assert regions([("head", DOTS), ("h*", checkpoint())]) == {"head": compose(checkpoint(), DOTS)}
    assert regions([("head", DOTS), ("head", DOTS)]) == {"head": compose(DOTS, DOTS)}
    assert regions([("head", DOTS), ("alias", checkpoint())]) == {"head": compose(checkpoint(), DOTS)}
    assert regions({"head": identity, "layers.0": DOTS}) == {"layers.0": DOTS}


@pytest.mark.parametrize("path", ["layers", "*"])
def test_a_container_cannot_be_a_region(path):
    with pytest.raises(ms.TransformError, match=r"'layers' is a ModuleList, which has no forward.*'layers\.\*'"):
        ms.transform(Model(), {path: checkpoint()})


def test_a_transform_in_the_place_of_a_plan_is_told_where_it_belongs():
    with pytest.raises(ms.PlanError, match=r"got checkpoint\(\); write \{'layers\.\*': checkpoint\(\)\}"):
        ms.transform(Model(), checkpoint())


def test_all_patterns_that_match_nothing_are_reported_at_once_with_the_nearest_paths():
    plan = {"layer.0": checkpoint(), "layers.*": checkpoint(), "haed": checkpoint()}
    with pytest.raises(ms.PlanError) as caught:
        ms.transform(Model(), plan)
    first, second = str(caught.value).split("; the plan's path")
    assert "'layer.0' matches no module of Model" in first
    assert "'layers.0'" in first
    assert "'haed'" in second
    assert "'head'" in second


@pytest.mark.parametrize("target", [torch.sin, None, "model", torch.ones(2), {}])
def test_a_target_that_is_no_module(target):
    with pytest.raises(ms.TransformError, match=rf"takes a torch.nn.Module, got {type(target).__name__}"):
        ms.transform(target, {})
    with pytest.raises(ms.TransformError, match=r"functional\(module\) takes a torch.nn.Module"):
        ms.functional(target)


def test_a_plan_is_immutable_comparable_and_hashable():
    plan = Plan({"a.*": checkpoint(), "b": DOTS})
    with pytest.raises(AttributeError, match="immutable"):
        plan.rules = ()
    with pytest.raises(AttributeError, match="immutable"):
        del plan.rules
    assert plan == Plan([("a.*", checkpoint()), ("b", DOTS)])
    assert plan != Plan([("b", DOTS), ("a.*", checkpoint())]), "the order of rules has a meaning"
    assert plan != {"a.*": checkpoint(), "b": DOTS}
    assert len({plan, Plan({"a.*": checkpoint(), "b": DOTS}), Plan()}) == 2
    assert len(plan) == 2
    assert [rule.pattern for rule in plan] == ["a.*", "b"]


def test_a_plan_prints_as_a_table():
    assert str(Plan({"layers.*": checkpoint(), "": DOTS})) == (
        "path      numbers  transform\n"
        "layers.*  exact    checkpoint()\n"
        "(root)    exact    checkpoint(policy=policies.dots_saveable)"
    )  # fmt: skip
    assert str(Plan()) == "path    numbers  transform\n(none)  exact    identity"


def test_each_transform_says_what_it_does_to_numbers():
    half, chunks = ms.cast(), ms.tile(chunks=4)
    of_steps = (ms.step_in_backward(), ms.step_in_groups(group_bytes="1MiB"), ms.offload_states())
    exact = (ms.identity, DOTS, ms.offload(), *of_steps)
    assert {how.numbers for how in exact} == {"exact"}
    assert {how.numbers for how in (chunks, ms.round_stochastically(), ms.compensate_rounding())} == {"rounds"}
    assert {how.numbers for how in (half, ms.quantize_states())} == {"lossy"}
    assert ms.compose(DOTS, chunks).numbers == "rounds"
    assert ms.compose(half, DOTS, chunks).numbers == "lossy"
    assert str(Plan({"a": chunks, "b": half})).splitlines()[1:] == [
        "a     rounds   tile(chunks=4)",
        "b     lossy    cast()",
    ]


@pytest.mark.parametrize(
    ("rules", "messages"),
    [
        (3, ["takes a mapping from path patterns to transforms", "got 3"]),
        (["a"], ["or pairs of the two"]),
        ({3: checkpoint()}, ["a path pattern is a string such as 'layers.*', got 3"]),
        ({"a": checkpoint}, ["the rule for 'a' must be a transform", "call the factory"]),
        ({"a..b": checkpoint()}, ["'a..b' has an empty segment"]),
        ({".": checkpoint()}, ["empty segment"]),
        ({"a**": checkpoint()}, ["'**' must be a whole segment"]),
        ({"a..b": checkpoint(), "c": 1}, ["'a..b' has an empty segment", "the rule for 'c' must be a transform"]),
    ],
)
def test_rules_that_are_no_plan(rules, messages):
    with pytest.raises(ms.PlanError) as caught:
        Plan(rules)
    for message in messages:
        assert message in str(caught.value)


GOOD = Plan({"layers.*": compose(checkpoint(), DOTS)}).to_json()


def changed(**changes):
    return json.dumps({**json.loads(GOOD), **changes})


def rule(transform):
    return changed(rules=[{"path": "a", "transform": transform}])


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ms.PlanError, "not JSON, or was cut off"),
        (None, ms.PlanError, "not JSON"),
        (changed(rules={}), ms.PlanError, "'rules' is a list of objects"),
        (changed(rules=[{"path": "a"}]), ms.PlanError, "'rules' is a list of objects"),
        (rule({"type": "teleport"}), ms.PlanError, "unknown transform or policy 'teleport'.*'checkpoint'"),
        (rule({}), ms.PlanError, "unknown transform or policy None"),
        (rule({"type": "checkpoint", "depth": 3}), ms.PlanError, "checkpoint cannot be made from .*depth"),
        (rule({"type": "checkpoint", "policy": 3}), ms.ConfigError, "a policy is a value of memscale.policies"),
        (rule({"type": "compose", "args": [3]}), ms.ConfigError, r"compose\(\) takes transforms.*got 3"),
        (rule(3), ms.PlanError, "must be a transform"),
        (rule({"type": "policies.dots_saveable"}), ms.PlanError, "must be a transform"),
    ],
)
def test_text_that_is_no_plan(text, error, message):
    with pytest.raises(error, match=message):
        Plan.from_json(text)


@dataclasses.dataclass(frozen=True, repr=False)
class Mine(policies.Policy):
    spelling = "Mine"
    decide: object = None


def test_a_policy_of_the_users_own_has_no_json_form():
    with pytest.raises(ms.PlanError, match=r"Mine\(decide=<built-in.*no JSON form"):
        Plan({"a": checkpoint(policy=Mine(decide=len))}).to_json()


class Unspelled(policies.Policy):
    def verdict(self, site: policies.Site) -> policies.Verdict:
        return policies.Recompute()


def test_a_policy_of_the_users_own_needs_no_spelling():
    plan = Plan({"*": checkpoint(policy=Unspelled())})
    assert repr(plan) == "Plan({'*': checkpoint(policy=Unspelled())})"
    with pytest.raises(ms.PlanError, match=r"Unspelled\(\).*no JSON form"):
        plan.to_json()
    model = ms.transform(torch.nn.Sequential(torch.nn.Linear(4, 4)), plan)
    model(torch.ones(2, 4)).sum().backward()


def test_a_plan_is_saved_and_loaded(tmp_path):
    plan = ms.Plan({"layers.[0-2]": ms.checkpoint(), "head": ms.tile(chunks=4)})
    plan.save(tmp_path / "plan.json")
    assert ms.Plan.load(str(tmp_path / "plan.json")) == plan
    with pytest.raises(ms.PlanError, match=r"save\('.*'\): No such file"):
        plan.save(tmp_path / "no" / "plan.json")
    (tmp_path / "bytes").write_bytes(b"\xff")
    for name in ("none.json", "bytes"):
        with pytest.raises(ms.PlanError, match=r"give a file that Plan\.save\(\) wrote"):
            ms.Plan.load(tmp_path / name)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("[01]", [0, 1]),
        ("[0-2]", [0, 1, 2]),
        ("1[01]", [10, 11]),
        ("[3-5]*", [3, 4, 5]),
        ("[", []),
    ],
)
def test_a_class_of_characters_is_one_of_them(pattern, expected):
    plan = ms.Plan([(f"blocks.{pattern}", ms.checkpoint())])
    (rule,) = plan.rules
    assert [number for number in range(12) if rule.matches(f"blocks.{number}")] == expected
    assert not rule.matches("blocks.0.mlp")


# ------------------------------------------------------------------------------------------ paths of a compiled model


def blocks():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))


@pytest.mark.parametrize(("pattern", "expected"), [("*", ["0", "1", "2"]), ("*.0", ["0.0", "1.0", "2.0"]), ("", [""])])
def test_a_rule_for_a_model_is_one_for_the_compiled_model(pattern, expected):
    model = blocks()
    compiled = torch.compile(model, backend="eager")
    assert sorted(regions({pattern: ms.checkpoint()}, model)) == expected
    inner = [f"_orig_mod.{path}" if path else "" for path in expected]
    assert sorted(regions({pattern: ms.checkpoint()}, compiled)) == inner
    assert sorted(regions({f"_orig_mod.{pattern}" if pattern else "": ms.checkpoint()}, compiled)) == inner


def test_a_rule_for_a_compiled_block_is_one_region():
    model = nn.Sequential(*(torch.compile(block, backend="eager") for block in blocks()))
    assert sorted(regions({"*": ms.checkpoint()}, model)) == ["0", "1", "2"]
    assert sorted(regions({"*.2": ms.checkpoint()}, model)) == ["0._orig_mod.2", "1._orig_mod.2", "2._orig_mod.2"]


def test_a_plan_for_a_compiled_model_is_written_like_the_models():
    compiled = torch.compile(blocks(), backend="eager")
    every = ms.Plan({f"_orig_mod.{at}": ms.checkpoint() for at in range(3)})
    assert with_globs(every, compiled) == ms.Plan({"*": ms.checkpoint()})
    assert row_label(["_orig_mod.0", "_orig_mod.1", "_orig_mod.2"]) == "0 to 2"
