"""`record=...` of profile, plan and wrap: what the history has afterwards, and that nothing else changes."""

import copy
import logging
import pickle

import pytest
import torch

import memscale as ms
from memscale.hardware.device import Hardware
from memscale.history import History
from tests.legacy.test_wrap_plans import MIB, config, rows, stack
from tests.support.checks import bits

STEP = {"loss": lambda y, _: y.square().mean(), "hardware": "cpu"}


@pytest.fixture
def runs(tmp_path):
    path = tmp_path / "runs.db"

    def read():
        with History(path) as history:
            return history.runs()

    read.path = path
    return read


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv("MEMSCALE_HISTORY", raising=False)


def test_a_profile_and_a_plan_are_kept_under_a_name_that_tells_steps_apart(runs):
    model = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = ms.profile(model, rows(1024), optimizer=optimizer, accumulate=2, **STEP, record=runs.path)
    config = ms.Config(mode="conservative")
    plan = ms.plan(model, rows(1024), budget="6MiB", config=config, **STEP, record=runs.path)
    by_hand, planned = runs()
    assert by_hand.name == "Sequential 1024x64 SGD loop=keeps_output accumulate=2"
    assert by_hand.profile.peak_bytes == found.peak_bytes
    assert planned.name == "Sequential 1024x64 loop=keeps_output"
    assert (planned.plan_hash, planned.decision_source) == (plan.hash, "planner")
    assert planned.model == by_hand.model != ""
    assert planned.shapes == by_hand.shapes == ("1024x64 float32",)
    assert (planned.config, by_hand.config) == (repr(config), "")
    assert planned.profile.peak_bytes == plan.evidence.planned.peak_bytes  # of the step with the plan


def test_the_variable_records_and_false_does_not(runs, monkeypatch):
    monkeypatch.setenv("MEMSCALE_HISTORY", str(runs.path))
    layer, batch = torch.nn.Linear(64, 64), torch.ones(8, 64)
    for record in (None, True, False):
        ms.profile(layer, batch, **STEP, record=record)
    assert len(runs()) == 2


@pytest.mark.parametrize("record", [True, "", 1])
def test_a_call_that_names_no_file_is_refused_before_it_does_anything(record):
    model = stack()
    for call in (
        lambda: ms.profile(None, record=record),
        lambda: ms.plan(None, None, budget=None, record=record),
        lambda: ms.wrap(model, config(), record=record),
    ):
        with pytest.raises(ms.ConfigError, match=r"record=.*'runs\.db'"):
            call()
    assert not hasattr(model, "_memscale_executor")


def trained(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(rows(1024)).square().mean().backward()
        optimizer.step()
    return bits(list(model.parameters()))


@pytest.mark.parametrize(("mib", "given"), [(11, True), (1000, False)], ids=["planned", "fits at the first call"])
def test_wrap_keeps_its_step_and_adds_what_the_step_takes(runs, monkeypatch, mib, given):
    box = Hardware(name="box", device_type="cpu", memory_bytes=mib * MIB)
    monkeypatch.setattr(Hardware, "detect", lambda device=None: box)
    plain = trained(ms.wrap(stack(), config(), rows(1024)))
    model = ms.wrap(stack(), config(), rows(1024) if given else None, record=runs.path)
    assert [run.measured for run in runs()] == ([{}] if given else [])
    assert trained(model) == plain
    (run,) = runs()
    assert {f"{name}_bytes" for name in ("gradient", "optimizer_state", "buffer")} < set(run.measured)
    assert run.measured["parameter_bytes"] == run.profile.by_category["parameter"]
    assert run.measured["step_seconds"] > 0
    executor = model._memscale_executor
    assert run.plan_hash == executor.plan.hash
    assert run.profile.peak_bytes == executor.predicted_bytes
    copy.deepcopy(model)
    pickle.dumps(model)


class Own(ms.policies.Policy):
    def verdict(self, site):
        return ms.policies.Recompute()


def test_a_history_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch, caplog):
    box = Hardware(name="box", device_type="cpu", memory_bytes=11 * MIB)
    monkeypatch.setattr(Hardware, "detect", lambda device=None: box)
    plain = trained(ms.wrap(stack(), config(), rows(1024)))
    caplog.set_level(logging.WARNING)
    path = tmp_path / "no" / "runs.db"
    model = ms.wrap(stack(), config(), rows(1024), record=path)
    assert trained(model) == plain
    assert ms.profile(stack(), rows(8), **STEP, record=path).peak_bytes > 0
    policy = ms.checkpoint(policy=Own())
    assert ms.profile(stack(), rows(8), plan={"*": policy}, **STEP, record=tmp_path / "runs.db").peak_bytes > 0
    assert sum("not recorded" in each.message for each in caplog.records) == 3
