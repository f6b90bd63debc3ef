"""The policy: each of its answers by a real cause, and that no answer costs more than it may."""

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memscale as ms
from memscale.core import PolicyFallbackNeeded
from memscale.history import Run
from memscale.planning import ProvenPlan
from memscale.policy import FEATURES, TECHNIQUES, Artifact, StrategyContext, StrategyDecision, rule, select
from tests.support.models import Block

AUTO = ms.Config(auto_policy=True)
SOME = StrategyContext(**dict.fromkeys(FEATURES, 2048), eligible=TECHNIQUES)


def stack(kind=Block, layers=2):
    with torch.device("meta"):
        return nn.Sequential(*[kind(512, norm=True) for _ in range(layers)])


def engine(config, model=None):
    with torch.device("meta"):
        batch = torch.zeros(16384, 512)
    options = {"loss": lambda y, _: y.square().mean(), "hardware": "a100-40", "config": config}
    return ms.DecisionEngine(stack() if model is None else model, batch, **options)


def forest(arm, value=100, **changes):
    """An artifact that always says the same."""
    return {
        "schema": 1,
        "features": list(FEATURES),
        "techniques": list(TECHNIQUES),
        "ranges": [[0, 1 << 40]] * len(FEATURES),
        "threshold": 50,
        "trees": [[[-1, arm, value, 0]]],
        "manifest": {"planner": ""},
        **changes,
    }


@pytest.fixture
def artifact(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMSCALE_CACHE", "")  # of plans

    def write(content):
        path = tmp_path / "policy.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        os.utime(path, ns=(len(list(tmp_path.iterdir())), hash(str(content)) % 10**9))
        monkeypatch.setenv("MEMSCALE_POLICY", str(path))
        return path

    return write


# -- who decides, and why ----------------------------------------------------------------------------------------------


def reason(planner=""):
    decision = select(SOME, AUTO, planner=planner)
    return decision.decision_source, decision.reason


def test_without_the_policy_the_config_is_used_as_it_was_given():
    config = ms.Config(mode="conservative")
    decision = select(SOME, config)
    assert (decision.decision_source, decision.config) == ("user_config", config)
    assert decision.techniques == ("checkpoint",)
    assert select(dataclasses.replace(SOME, is_accelerator=0), AUTO).decision_source == "user_config"


def test_the_rules_answer_where_there_is_no_artifact(monkeypatch):
    monkeypatch.delenv("MEMSCALE_POLICY", raising=False)
    assert reason()[0] == "rule"
    monkeypatch.setenv("MEMSCALE_POLICY", "/nowhere/policy.json")
    assert reason() == ("rule_fallback", "no_artifact")
    assert select(None, AUTO).reason == "no_profile"
    assert select(dataclasses.replace(SOME, pressure=1024), AUTO).techniques == ()


def test_an_artifact_answers_or_says_why_not(artifact):
    artifact(forest(0b100))
    decision = select(SOME, AUTO)
    assert (decision.decision_source, decision.techniques, decision.confidence) == ("ml", ("offload",), 1.0)
    low = [[0, 1 << 40]] * len(FEATURES)
    low[3] = [0, 2047]
    split = [[[3, 4096, 1, 2], [-1, 1, 49, 0], [-1, 2, 100, 0]], [[-1, 2, 51, 0]]]
    for content, expected in (
        (forest(0b001, ranges=low), f"out_of_range:{FEATURES[3]}"),
        (forest(0b001, value=0), "unsure"),
        (forest(0b001, threshold=60, trees=split), "unsure"),
        (forest(0b001, manifest={"planner": "another"}), "stale_artifact"),
        (forest(0b001, schema=2), "bad_artifact"),
        (forest(8), "bad_artifact"),
        (forest(0b001, trees=[[[0, 1, 0, 0]]]), "bad_artifact"),  # a circle
        (forest(0b001, trees=[[[0, 1, 1, 5], [-1, 1, 1, 0]]]), "bad_artifact"),
        (forest(0b001, trees=[[[0, 1.5, 1, 2], [-1, 1, 1, 0], [-1, 1, 1, 0]]]), "bad_artifact"),
        (forest(0b001, threshold=float("nan")), "bad_artifact"),
        (b"[" * 100_000, "bad_artifact"),
        (b"\x80\x04\x95pickle", "bad_artifact"),
        (b" " * ((1 << 20) + 1), "bad_artifact"),
    ):
        artifact(content)
        assert reason(planner="this") == ("rule_fallback", expected), expected
        assert select(SOME, AUTO, planner="this").techniques == rule(SOME)
    path = artifact(forest(0b001))
    path.unlink()
    assert reason() == ("rule_fallback", "no_artifact")
    os.mkfifo(path)
    assert reason()[1] in ("no_artifact", "bad_artifact")


def answered(ask):
    """What an artifact answers; nothing, where it says why not in one of its ways."""
    try:
        return ask()
    except PolicyFallbackNeeded as needed:
        known = ("bad_artifact", "unsure", "out_of_range")
        if str(needed).partition(":")[0] not in known:
            raise
        return (), 0


@given(st.data())
def test_no_bytes_do_more_than_be_refused(tmp_path_factory, data):
    whole = json.dumps(forest(0b001)).encode()
    at = data.draw(st.integers(0, len(whole)))
    text = data.draw(
        st.one_of(st.binary(max_size=64), st.just(whole[:at] + data.draw(st.binary(max_size=3)) + whole[at:]))
    )
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_bytes(text)
    techniques, confidence = answered(lambda: Artifact.read(str(path)).vote(SOME))
    assert set(techniques) <= set(TECHNIQUES)
    assert 0 <= confidence <= 100


@pytest.mark.parametrize("arm", range(8))
def test_a_switch_that_the_caller_set_stays(artifact, arm):
    artifact(forest(arm))
    for switch, name in (
        ("enable_checkpointing", "checkpoint"),
        ("enable_offloading", "offload"),
        ("enable_tiling", "tile"),
    ):
        for value in (True, False):
            config = ms.Config(auto_policy=True, **{switch: value})
            before = repr(config)
            context = dataclasses.replace(SOME, eligible=tuple(t for t in TECHNIQUES if t != name or value))
            decision = select(context, config)
            assert (name in decision.config.eligible()) == value
            assert not {"cast", "quantize_states"} & decision.config.eligible()
            assert repr(config) == before
            assert StrategyDecision.from_data(json.loads(json.dumps(decision.to_data()))) == decision
    held = ms.Config(mode="conservative", auto_policy=True)
    assert select(dataclasses.replace(SOME, eligible=("checkpoint",)), held).config.eligible() <= {"checkpoint"}


# -- what is seen ------------------------------------------------------------------------------------------------------


def test_names_of_classes_and_of_the_card_are_not_seen():
    other = type("Renamed", (Block,), {})
    contexts = []
    for model, name in ((stack(), "a card"), (stack(other), "another")):
        found = engine(AUTO, model)
        card = dataclasses.replace(found.hardware, name=name)
        contexts.append(StrategyContext.of(found.plain, card, "300MiB", AUTO))
    assert contexts[0] == contexts[1]
    assert all(type(value) is int for value in contexts[0].features().values())
    assert contexts[0].blocks == 2 * 1024


# -- what it costs -----------------------------------------------------------------------------------------------------


def test_a_plan_made_without_it_knows_nothing_of_it(monkeypatch):
    monkeypatch.setenv("MEMSCALE_CACHE", "")
    plain = engine(ms.Config(mode="conservative"))
    plan = plain.plan(int(0.8 * plain.plain.taken_bytes))
    assert (plan.decision.decision_source, plan.decision.config) == ("user_config", plain.config)
    assert "policy: " not in plan.explain()
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(64, 8)
    host = ms.Hardware.detect("cpu")
    on_cpu = [
        ms.plan(model, x, budget=1.0, loss=lambda y, _: y.sum(), hardware=host, config=config)
        for config in (ms.Config(), AUTO)
    ]
    assert on_cpu[0] == on_cpu[1]
    assert on_cpu[0].evidence == on_cpu[1].evidence
    assert [each.decision.reason for each in on_cpu] == ["as it was given", "a CPU"]


@pytest.mark.deep
def test_what_it_did_not_choose_is_not_tried(artifact):
    artifact(forest(0b001))
    asked = engine(AUTO)
    budget = int(0.95 * asked.plain.taken_bytes)
    few, everything = asked.plan(budget), engine(ms.Config(mode="aggressive")).plan(budget)
    assert few.decision.widened == "no"
    assert few.evidence.planned == everything.evidence.planned
    assert few.evidence.simulations < everything.evidence.simulations
    assert "eligible: checkpoint" in few.evidence.trace
    assert not [each for each in few.evidence.decisions if "offload" in str(each)]


LIES = [(0.6, 0b100), *((share, arm) for share in (0.9, 0.6, 0.4) for arm in (0b000, 0b100, 0b010))]


@pytest.mark.parametrize(("share", "arm"), [LIES[0], *(pytest.param(*lie, marks=pytest.mark.deep) for lie in LIES[1:])])
def test_a_plan_carries_its_decision_and_an_artifact_that_lies_costs_two_percent_at_most(
    artifact, monkeypatch, share, arm
):
    monkeypatch.delenv("MEMSCALE_POLICY", raising=False)
    asked = engine(AUTO)
    budget = int(share * asked.plain.taken_bytes)
    ruled = asked.plan(budget)
    assert ruled.decision.decision_source == "rule"
    artifact(forest(arm))  # and sure of itself
    plan = engine(AUTO).plan(budget)
    assert plan.decision.decision_source == "ml"
    assert plan.evidence.planned.taken_bytes <= budget
    assert plan.evidence.planned.step_seconds <= 1.02 * ruled.evidence.planned.step_seconds
    assert plan.decision.artifact
    assert plan.decision.widened in ("no", "rules", "all")
    assert ProvenPlan.from_json(plan.to_json()).decision == plan.decision
    assert re.match(r"policy: [a-z+ ]+, by ml: few", plan.explain()), plan.explain()
    assert Run.of(asked.plain, "stack", plan=plan).decision_source == "ml"
    assert asked.plan(1.0).decision.reason == "the step fits"


@pytest.mark.deep
def test_a_configuration_is_labelled(tmp_path, monkeypatch):
    folder = Path(ms.__file__).parents[1] / "benchmarks" / "policy"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("MEMSCALE_CACHE", "")
    import label
    from families import subject

    row, out = label.labels(subject("mlp", 2), 2, "t4"), tmp_path / "labels.jsonl.xz"
    for _ in range(2):
        label.append(out, row)
    assert label.known(out) == [json.loads(json.dumps(row))] * 2
    assert [case[0] for case in row["cases"]] == list(label.BUDGETS)
    everything = [case[2][-1] for case in row["cases"] if case[2][-1] is not None]
    assert everything
    assert all(least is None or everything[0][0] <= least[0] for least in row["cases"][0][2])
    assert not label.runs_cells(subject("mlp", 2), "t4")


@pytest.mark.deep
def test_the_same_labels_give_the_same_artifact(tmp_path, monkeypatch):
    pytest.importorskip("sklearn", reason="fitting a policy takes scikit-learn: the extra train")
    folder = Path(ms.__file__).parents[1] / "benchmarks" / "policy"
    monkeypatch.syspath_prepend(str(folder))
    import fit

    labels = folder / "labels.jsonl.xz"
    cases, proven = fit.read(labels, folder / "proven.jsonl")
    assert proven
    made = fit.artifact(cases, labels.read_bytes(), {})
    assert made == fit.artifact(cases, labels.read_bytes(), {})
    assert len(made) < 300_000
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(json.loads(made) | {"threshold": 0}))  # sure or not
    contexts = [StrategyContext(*case.features, eligible=TECHNIQUES) for case in cases]
    read = Artifact.read(str(path))
    assert all(answered(lambda each=each: read.vote(each))[0] for each in contexts)
