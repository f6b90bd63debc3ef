"""Telemetry: off it does nothing at all, on it counts from closed lists, and nothing that fails is ever seen."""

import errno
import json
import logging
import os
import re
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import memscale as ms
from memscale.cli.telemetry import machine
from memscale.hardware import card_names
from memscale.telemetry import State, Weeks, consent, counted, counting, give_consent
from memscale.telemetry.consent import _REFUSALS as REFUSALS
from memscale.telemetry.counters import CALLS, DIMENSIONS, MOST, SCHEMA, counters
from memscale.telemetry.facts import VerbCall

ROOT = Path(ms.__file__).parent
SCHEMA_OF_A_REPORT = json.loads((ROOT.parent / "docs" / "telemetry-schema.json").read_text(encoding="utf-8"))
STEP = {"loss": lambda y, _: y.square().mean(), "hardware": "cpu"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder of a user whom no variable overrules."""
    others = [name for name in REFUSALS if name != "PYTEST_CURRENT_TEST"]  # which pytest sets again at each stage
    for name in (*others, "MEMSCALE_TELEMETRY", "RANK", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.modules["memscale.telemetry.consent"], "_REFUSALS", tuple(others))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(counting, "_events", 0)
    monkeypatch.setattr(counting, "_process", os.getpid())
    return tmp_path / "memscale" / "telemetry"


def chosen(state, endpoint="https://example.org"):
    give_consent(state, since="2026-11-22", endpoint=endpoint)


def lines(place, state="local"):
    found = sorted((place / state).glob("*.txt"))
    return [line for path in found for line in path.read_text().splitlines()]


def report(state=State.LOCAL):
    weeks = Weeks(state)
    return json.loads(weeks.report(weeks.names()[-1], machine()))


def faults(document):
    """The fields of a report that are not as the schema has them."""
    fields = SCHEMA_OF_A_REPORT["properties"]

    def is_valid(name, value):
        rule = fields.get(name, {"enum": []})
        if "propertyNames" in rule:
            names, counts = rule["propertyNames"]["enum"], rule["additionalProperties"]
            most = counts["maximum"]
            return all(key in names and type(n) is int and 1 <= n <= most for key, n in value.items())
        if "pattern" in rule:
            return re.search(rule["pattern"], value) is not None
        return type(value) in (int, str) and value in rule.get("enum", [rule.get("const")])

    return sorted(name for name in fields.keys() | document.keys() if not is_valid(name, document[name]))


def stack():
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)])


WATCHED = """
import sys
found, watching = [], [True]
def hook(event, arguments):
    if not watching:  # a hook stays for the life of a process
        return
    if event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.fork", "os.posix_spawn"):
        found.append(event)
    if event in ("open", "os.mkdir", "os.rename", "os.remove", "_thread.start_new_thread"):
        frame = sys._getframe()
        while frame is not None and "/memscale/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None and "/memscale/telemetry/" in frame.f_code.co_filename:
            found.append(event)
import torch, memscale as ms
from torch import nn
[getattr(ms, name) for name in ms.__all__]
sys.addaudithook(hook)
model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)])
x, loss = torch.ones(64, 16), lambda y, _: y.square().mean()
step = {"loss": loss, "hardware": "cpu"}
fit = ms.transform(model, ms.plan(model, x, budget=1.0, **step))
ms.profile(model, x, **step)
ms.verify(model, fit, x), ms.OOMPredictor(model, **step).predict(x, recommend=False)
ms.wrap(model, ms.Config(enable_logging=False), x)
for _ in range(2):
    fit(x).sum().backward()
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
ms.detach(model)
with ms.optimize(model, None, ms.Config(enable_logging=False)):
    pass
try:
    ms.wrap(3)
except TypeError:
    pass
watching.clear()
print(*found)
"""


def test_the_public_verbs_touch_nothing_while_it_is_off(place, capsys):
    exec(WATCHED, {})
    assert capsys.readouterr().out.split() == []
    assert not place.exists()


def test_what_is_counted_of_each_verb(place):
    chosen(State.LOCAL)
    model, batch = stack(), torch.ones(256, 16)
    taken = ms.plan(model, batch, budget=1.0, **STEP).evidence.plain.taken_bytes
    plan = ms.plan(model, batch, budget=int(0.9 * taken), config=ms.Config(mode="conservative"), **STEP)
    ms.transform(model, plan)
    ms.wrap(model, ms.Config(enable_logging=False), batch)
    ms.detach(model)
    found = lines(place)
    assert found[1].split() == [
        "plan_called",
        "params:<1e7",
        "technique:checkpoint",
        "outcome:fits",
    ]
    assert [line.split()[0] for line in found[2:]] == ["transform_called", "wrap_called", "detach_called"]
    assert "outcome:skipped" in found[3]
    document = report()
    assert document["counters"]["plan_called"] == 2
    assert document["counters"]["plan_called/technique:checkpoint"] == 1
    assert faults(document) == []


def test_a_training_step_writes_nothing(place, monkeypatch):
    chosen(State.LOCAL)
    model = ms.wrap(stack(), ms.Config(enable_logging=False, force_optimize=True), torch.ones(8, 16))
    fit = ms.transform(stack(), {"*": ms.checkpoint()})
    monkeypatch.setattr(counting, "count", lambda *_: pytest.fail("counted in a step"))
    monkeypatch.setattr(counting, "is_off", lambda: pytest.fail("looked in a step"))
    for each in (model, fit):
        optimizer = torch.optim.AdamW(each.parameters())
        for _ in range(3):
            each(torch.ones(8, 16)).sum().backward()
            optimizer.step()


# -- what switches it off ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_any_value_but_three(place, monkeypatch, name):
    chosen(State.ON)
    monkeypatch.setattr(sys.modules["memscale.telemetry.consent"], "_REFUSALS", (name,))
    for value in ("1", "true", "yes", "anything", "https://ci.example.org"):
        monkeypatch.setenv(name, value)
        assert (consent().state, consent().because) == (State.OFF, f"${name} is set")
    for value in ("", "0", "false", "False", " 0 "):
        monkeypatch.setenv(name, value)
        assert consent().state is State.ON


@pytest.mark.parametrize("stored", [None, State.LOCAL, State.ON])
def test_no_variable_switches_it_on(place, monkeypatch, stored):
    if stored is not None:
        chosen(stored)
    for value, most in {"on": "on", "1": "off", "local": "local", "off": "off", "": "on"}.items():
        monkeypatch.setenv("MEMSCALE_TELEMETRY", value)
        order = ("off", "local", "on")
        expected = min(order.index(most), 0 if stored is None else order.index(stored.value))
        assert consent().state.value == order[expected]


def test_a_new_schema_asks_again(place):
    chosen(State.ON)
    file = place / "consent.json"
    file.write_text(file.read_text().replace('"schema": 4', '"schema": 3'))
    assert consent().state is State.LOCAL
    assert "`telemetry on` agrees to it" in consent().because


def test_workers_ranks_and_nested_calls_are_not_counted(place, monkeypatch):
    chosen(State.LOCAL)
    counted("wrap")(lambda: counted("plan")(lambda: None)())()
    assert lines(place) == ["wrap_called outcome:fits"]
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
        counting.count("plan_called")
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(counting, "_process", os.getpid() + 1)
    counting.count("plan_called")
    assert len(lines(place)) == 1


def test_there_is_an_end_to_it(place):
    chosen(State.LOCAL)
    for _ in range(70):
        counting.count("plan_called")
    assert len(lines(place)) == 64
    (path,) = (place / "local").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    with open(path, "ab") as file:
        file.truncate(1 << 20)  # the most for a week
    counting._events = 0
    counting.count("plan_called")
    assert path.stat().st_size == 1 << 20
    assert report()["counters"] == {"plan_called": 64}


def test_processes_at_once_tear_no_line(place):
    chosen(State.LOCAL)
    count = 64 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 8
    children = []
    for _ in range(count):
        with warnings.catch_warnings():  # from 3.12: PyTorch has threads
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            counting._process = os.getpid()
            for _ in range(64):
                counting.count("plan_called", lambda: ["outcome:fits", "mode:balanced"])
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert lines(place) == ["plan_called outcome:fits mode:balanced"] * (64 * count)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def week_file(place, state):
    return place / state.value / f"{counting.week_of(counting.datetime.now(counting.timezone.utc))}.txt"


def instead(make):
    """A fault: something else stands where the file of a week should be."""

    def fault(place, state, monkeypatch):
        path = week_file(place, state)
        path.parent.mkdir(parents=True)
        make(path)

    return fault


def in_place_of_consent(make):
    def fault(place, state, monkeypatch):
        place.mkdir(parents=True, exist_ok=True)
        (place / "consent.json").unlink(missing_ok=True)
        make(place / "consent.json")

    return fault


def failing(module, name, number):
    def fault(place, state, monkeypatch):
        def raises(*args, **kwargs):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(module, name, raises)

    return fault


class Old:
    @staticmethod
    def now(_):
        raise OverflowError("before 1970")


def file_where_a_folder_should_be(place, state, monkeypatch):
    place.mkdir(parents=True, exist_ok=True)
    (place / state.value).write_text("")


NUMBERS = [errno.ENOSPC, errno.EACCES, errno.EINTR, errno.ENOENT]
FAULTS = {
    "a pipe as the week": instead(os.mkfifo),
    "a folder as the week": instead(os.mkdir),
    "a link to nowhere as the week": instead(lambda path: path.symlink_to("/nowhere/at/all")),
    "a file as the folder": file_where_a_folder_should_be,
    "a pipe as consent": in_place_of_consent(os.mkfifo),
    "a folder as consent": in_place_of_consent(os.mkdir),
    "no JSON": in_place_of_consent(lambda path: path.write_bytes(b"\xff\x00{")),
    "deep JSON": in_place_of_consent(lambda path: path.write_text("[" * 4000)),
    "half of it": in_place_of_consent(lambda path: path.write_text('{"state": "on"}')),
    "another state": in_place_of_consent(lambda path: path.write_text('{"state": "max", "endpoint": ""}')),
    "no home": lambda place, state, monkeypatch: (
        monkeypatch.delenv("XDG_CONFIG_HOME"),
        monkeypatch.delenv("HOME", raising=False),
    ),
    "a home in no UTF-8": lambda place, state, monkeypatch: monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere/\udcff"),
    "a folder that is not": lambda place, state, monkeypatch: monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/none"),
    "a clock before 1970": lambda place, state, monkeypatch: monkeypatch.setattr(counting, "datetime", Old),
    "at shutdown": lambda place, state, monkeypatch: monkeypatch.setattr(sys, "is_finalizing", lambda: True),
    **{
        f"{name}: {errno.errorcode[number]}": failing(os, name, number)
        for name in ("open", "write", "fstat", "makedirs", "read")
        for number in NUMBERS
    },
}


def subject(model, plan):
    logging.getLogger("memscale").info("a line")
    print("a line")
    fit = ms.transform(model, plan)
    return {path: type(module) for path, module in fit.named_modules()}, ms.Plan(plan)


@pytest.mark.parametrize("state", list(State), ids=lambda state: state.value)
def test_nothing_that_goes_wrong_is_seen(place, state, capfd, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    model, plan = stack(), {"*": ms.checkpoint()}
    expected = subject(model, plan)
    usual = capfd.readouterr()
    for number, (name, fault) in enumerate(FAULTS.items()):
        caplog.clear()
        with pytest.MonkeyPatch.context() as monkeypatch:
            home = tmp_path / str(number)
            monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
            if state is not State.OFF:
                chosen(state)
            monkeypatch.setattr(counting, "_events", 0)
            fault(home / "memscale" / "telemetry", state, monkeypatch)
            begun = time.perf_counter()
            assert subject(model, plan) == expected, name
            assert time.perf_counter() - begun < 1, name
        assert capfd.readouterr() == usual, name
        assert [each.message for each in caplog.records] == ["a line"], name
    assert not place.exists()


def test_an_error_of_the_verb_is_the_users_own(place):
    chosen(State.LOCAL)

    def verb():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        counted("wrap")(verb)()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        counted("wrap")(interrupted)()
    assert lines(place)[0] == "wrap_called outcome:other_error"

    def over_budget():
        raise ms.BudgetError("too much")

    with pytest.raises(ms.BudgetError):
        counted("plan")(over_budget)()
    assert lines(place)[-1] == "plan_called outcome:budget_error"


# -- what a report can say ---------------------------------------------------------------------------------------------

SECRET = "xK9secretQ"


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_nothing_of_the_users_is_ever_in_a_line(data):
    kind = type(f"{SECRET}Model", (nn.Module,), {"forward": lambda self, x: x})
    model = kind()
    inner = data.draw(st.sampled_from([nn.Linear, nn.LSTM, nn.Embedding, nn.TransformerEncoderLayer]))
    model.add_module(SECRET, nn.ModuleList([inner(4, 4) for _ in range(data.draw(st.integers(0, 3)))]))
    setattr(model, data.draw(st.sampled_from(["model", "config", "plan"])), SECRET)
    call = data.draw(st.sampled_from(CALLS))
    args = data.draw(st.sampled_from([(model,), (model, SECRET), (SECRET,), (model, {SECRET: ms.checkpoint()}), ()]))
    kwargs = data.draw(st.sampled_from([{}, {"config": SECRET}, {"plan": {SECRET: 1}}, {"model": model}]))
    error = data.draw(st.sampled_from([None, ValueError(SECRET), ms.BudgetError(SECRET)]))
    listed = {f"{name}:{bucket}" for name, each in DIMENSIONS.items() for bucket in each.buckets}
    result = data.draw(st.sampled_from([None, model, SECRET, ms.Plan({SECRET: ms.checkpoint()})]))
    assert set(VerbCall(call, args, kwargs, result, error).facts()) <= listed


def test_what_is_not_listed_is_in_no_report(place):
    chosen(State.LOCAL)
    counting.count("plan_called")
    path = week_file(place, State.LOCAL)
    with open(path, "ab") as file:
        file.write(
            f"plan_called technique:{SECRET}\n{SECRET}\nplan_called outcome:fiplan_called\n\xff\n".encode("latin1")
        )
        file.write(b"plan_called\n" * 200)
    document = report()
    assert document["counters"] == {"plan_called": 100}
    for change in ({"host": SECRET}, {"week": SECRET}, {"card": SECRET}, {"schema": True}, {"os": "linux\n"}):
        assert faults(document | change)
    assert faults(document | {"counters": {SECRET: 1}})
    assert faults(document | {"counters": {"plan_called": 101}})


def test_the_schema_is_closed():
    document, fields = SCHEMA_OF_A_REPORT, SCHEMA_OF_A_REPORT["properties"]
    assert document["additionalProperties"] is False
    assert set(document["required"]) == set(fields)
    assert fields["schema"] == {"const": SCHEMA}
    assert fields["card"] == {"enum": [*card_names(), "none", "other"]}
    assert fields["counters"]["propertyNames"] == {"enum": list(counters())}
    assert fields["counters"]["additionalProperties"] == {"type": "integer", "minimum": 1, "maximum": MOST}
    for name, rule in fields.items():
        assert rule.keys() & {"enum", "const", "pattern", "propertyNames"}, name
