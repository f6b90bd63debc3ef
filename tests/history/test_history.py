"""Runs that are kept: what is in the file after everything that can happen to it."""

import dataclasses
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch

import memscale as ms
from memscale.cli import main
from memscale.core.errors import ConfigError, RuntimeUnavailable
from memscale.history import TEXTS, TRACKERS, Baseline, Comparison, History, Run, record


def step(width=64, **options):
    torch.manual_seed(0)
    return ms.profile(torch.nn.Linear(64, width), torch.ones(8, 64), loss=lambda y, _: y.sum(), **options)


@pytest.fixture(scope="module")
def profile():
    return step(hardware="t4")


@pytest.fixture
def history(tmp_path):
    with History(tmp_path / "runs.db") as opened:
        yield opened


def test_a_run_comes_back_as_it_was(profile, history):
    plan = ms.Plan({"layers.*": ms.checkpoint()})
    run = Run.of(profile, "layer", plan=plan, measured={"peak_bytes": 5.0})
    history.add(run)
    assert history.runs() == [run] == [history.run("last")] == [history.run(run.id[:9])]
    assert (run.plan_hash, run.decision_source) == (plan.hash, "user")
    assert run.profile.by_module == profile.by_module
    assert len(run.to_json()) < 20_000  # without what grows with the operators of a step


def test_runs_are_found_by_name_device_and_commit(profile, history):
    runs = [dataclasses.replace(Run.of(profile, name), commit=commit) for name, commit in [("a", "x"), ("b", "y+")]]
    for run in runs:
        history.add(run)
    assert history.runs(name="a") == history.runs(commit="x") == runs[:1]
    assert history.runs(commit="y") == history.runs(last=1) == runs[1:]
    assert history.runs(hardware="none") == []


ADDING = """
import sys, memscale as ms
from memscale.history import History, Run
run = Run.from_json(open(sys.argv[2]).read())
print("ready", flush=True)
with History(sys.argv[1]) as history:
    for number in range(10**6):
        history.add(__import__("dataclasses").replace(run, id=f"{sys.argv[3]}{number:08d}"))
        print(number, flush=True)
"""


@pytest.mark.deep
def test_what_was_added_outlives_a_killed_process_and_two_write_at_once(profile, tmp_path):
    document, path = tmp_path / "run.json", tmp_path / "runs.db"
    document.write_text(Run.of(profile, "layer").to_json())
    adding = [
        subprocess.Popen([sys.executable, "-c", ADDING, path, document, name], stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    said = {process: [] for process in adding}

    def listen(process):
        for line in process.stdout:
            said[process].append(line)
            if len(said[process]) == 20:
                process.send_signal(signal.SIGKILL)

    listeners = [threading.Thread(target=listen, args=(process,)) for process in adding]
    for thread in listeners:
        thread.start()
    for thread, process in zip(listeners, adding, strict=True):
        thread.join()
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
    with History(path) as history:
        kept = {run.id for run in history.runs()}
    promised = {
        f"{name}{int(line):08d}" for name, process in zip("ab", adding, strict=True) for line in said[process][1:]
    }
    assert len(promised) >= 38
    assert promised <= kept


def test_a_damaged_file_is_refused_and_left_as_it_is(profile, tmp_path, caplog):
    path = tmp_path / "runs.db"
    path.write_bytes(b"these are not the bytes of a database" * 100)
    with pytest.raises(
        ConfigError, match=r"cannot be used: file is not a database; check that it is an undamaged file"
    ):
        History(path)
    assert record(profile, "layer", path=path) is None
    assert "this run is not recorded" in caplog.text
    assert path.read_bytes().startswith(b"these are not")
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_a_history_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("MEMSCALE_HISTORY", raising=False)
    with pytest.raises(ConfigError, match=r"no history: set \$MEMSCALE_HISTORY to a file"):
        History()
    with pytest.raises(ConfigError, match=r"cannot be used: .*; check that it is an undamaged file"):
        History(tmp_path / "no" / "runs.db")
    monkeypatch.setattr("memscale.history.database.filesystem_of", lambda folder: "nfs4")
    with pytest.raises(ConfigError, match=r"is on nfs4, .*; use a file on a disk of this machine"):
        History(tmp_path / "runs.db")


def test_a_newer_file_is_left_alone(tmp_path):
    path = tmp_path / "runs.db"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(ConfigError, match=r"has schema version 9, .* use a newer memscale"):
        History(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_may_only_be_read_is_one_clear_line(profile, tmp_path, monkeypatch, caplog):
    path, connect = tmp_path / "runs.db", sqlite3.connect
    with History(path) as history:
        history.add(Run.of(profile, "layer"))
    before = path.read_bytes()

    def read_only(path, **options):  # what a file system that is mounted so gives; a superuser may write all others
        return connect(f"file:{path}?mode=ro", uri=True, **options)

    monkeypatch.setattr("memscale.history.database.sqlite3.connect", read_only)
    with History(path) as history:
        assert [run.name for run in history.runs()] == ["layer"]
        with pytest.raises(ConfigError, match=r"readonly database; check that it is .* that you may write to"):
            history.add(Run.of(profile, "another"))
    monkeypatch.setenv("MEMSCALE_HISTORY", str(path))
    assert record(profile, "another") is None
    assert "this run is not recorded: the history" in caplog.text
    assert path.read_bytes() == before
    assert not list(tmp_path.glob("*damaged*"))


def test_what_older_runs_were_not_told_of_is_not_there(profile):
    run = Run.of(
        profile, "layer", model=torch.nn.Linear(2, 2), batch=torch.ones(2), config=ms.Config(mode="aggressive")
    )
    assert (run.shapes, run.config) == (("2 float32",), "Config(mode=OptimizationMode.AGGRESSIVE)")
    fields = json.loads(run.to_json())
    for name in ("model", "shapes", "config"):
        del fields[name]
    old = Run.from_json(json.dumps(fields))
    assert old == dataclasses.replace(run, model="", shapes=(), config="")


def test_a_model_is_known_by_its_modules_and_shapes(profile):
    def hash_of(*layers):
        return Run.of(profile, "layer", model=torch.nn.Sequential(*layers)).model

    first = hash_of(torch.nn.Linear(4, 4), torch.nn.ReLU())
    assert first == hash_of(torch.nn.Linear(4, 4), torch.nn.ReLU())  # whatever its values are
    others = [(torch.nn.Linear(4, 5), torch.nn.ReLU()), (torch.nn.Linear(4, 4), torch.nn.GELU())]
    assert len({first, *(hash_of(*layers) for layers in others), hash_of(torch.nn.Linear(4, 4).double())}) == 4


def test_a_verdict_is_of_what_was_predicted_and_measured(profile):
    room = profile.hardware.usable_bytes
    assert Run.of(profile, "layer", measured={"peak_bytes": room}).verdict == "fits"
    assert Run.of(profile, "layer", measured={"peak_bytes": room + 1}).verdict == "does not fit"
    assert Run.of(dataclasses.replace(profile, reserved_peak_bytes=room + 1), "layer").verdict == "does not fit"


def test_recording_never_stops_a_script(profile, tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("MEMSCALE_HISTORY", raising=False)
    assert record(profile, "layer") is None
    assert not caplog.text
    monkeypatch.setenv("MEMSCALE_HISTORY", str(tmp_path / "no" / "runs.db"))
    assert record(profile, "layer") is None
    assert "this run is not recorded: the history" in caplog.text
    monkeypatch.setenv("MEMSCALE_HISTORY", str(tmp_path / "runs.db"))
    run = record(profile, "layer")
    with History() as history:
        assert history.runs() == [run]
    with pytest.raises(ConfigError, match="must be one line of text"):
        record(profile, "two\nlines")


def test_only_more_bytes_of_one_simulator_are_a_regression(profile):
    before = Run.of(profile, "layer")
    after = Run.of(step(96, hardware="t4"), "layer")
    assert [Comparison(*runs).verdict for runs in [(before, after), (after, before), (before, before)]] == [
        *("regression", "smaller", "same")
    ]
    assert Comparison(before, after).diff.by_category["parameter"] == 32 * 65 * 4
    within = Comparison(before, after, tolerance_bytes=1 << 30)
    assert (within.verdict, within.is_regression) == ("within tolerance", False)
    other = Comparison(before, dataclasses.replace(after, simulator="other"))
    assert (other.verdict, other.is_regression) == ("simulator changed", False)
    assert "record the baseline again" in str(other)


def test_a_baseline_keeps_one_run_of_each_step(profile, tmp_path, monkeypatch):
    baseline = Baseline(tmp_path / "memory.jsonl")
    assert baseline.run("a", profile.hardware.name) is None
    runs = [Run.of(profile, name) for name in "baa"]
    for run in runs:
        baseline.write(run)
    assert baseline.runs() == [runs[2], runs[0]]
    with monkeypatch.context() as full:
        full.setattr("os.replace", mock.Mock(side_effect=OSError(28, "no room")))
        with pytest.raises(ConfigError, match=r"cannot be written: no room; pass a file"):
            baseline.write(Run.of(profile, "c"))
    assert baseline.runs() == [runs[2], runs[0]], "a write that fails loses nothing"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"hello\n", r"line 1 of the baseline '.*' is no run; restore the file from version control, or remove it"),
        (b"{}\n", r"line 1 of the baseline '.*' is no run: the text is no run of memscale.*; restore"),
        (b"\xff\xfe", r"the baseline '.*' is no text; restore"),
    ],
)
def test_a_baseline_of_something_else_is_an_error_without_a_parsers_words(tmp_path, content, said):
    (tmp_path / "memory.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=said) as error:
        Baseline(tmp_path / "memory.jsonl").runs()
    assert "codec" not in str(error.value)
    assert "Expecting" not in str(error.value)


def test_text_for_other_tools(profile, monkeypatch):
    run = Run.of(profile, "=HYPERLINK(1)", measured={"peak_bytes": 7.0})
    assert Run.from_json(TEXTS["json"]([run, run]).splitlines()[1]) == run
    header, row = TEXTS["csv"]([run]).splitlines()
    assert dict(zip(header.split(","), row.split(","), strict=True))["name"] == "'=HYPERLINK(1)"
    assert row.endswith(",7.0")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(RuntimeUnavailable, match="--to mlflow needs mlflow: pip install mlflow"):
        TRACKERS["mlflow"]([run])


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_trackers_get_names_and_figures(profile, tracker, monkeypatch):
    calls = []

    class Tracker:
        def __getattr__(self, name):
            return lambda *args, **kwargs: calls.append((name, args, kwargs))

    monkeypatch.setitem(sys.modules, tracker, Tracker())
    TRACKERS[tracker]([Run.of(profile, "layer", measured={"peak_bytes": 7.0})])
    (_, _, begun), (_, (figures,), _), _ = calls
    assert [name for name, _, _ in calls] == ["init", "log", "finish"]
    assert begun["name"] == "layer"
    assert figures["memscale/peak_bytes/predicted"] == profile.peak_bytes
    assert figures["memscale/peak_bytes/measured"] == 7.0
    json.dumps([begun, figures])


def test_an_export_prints_the_runs(profile, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MEMSCALE_HISTORY", str(tmp_path / "runs.db"))
    run = record(profile, "layer")
    assert main(["history", "export", "--to", "json"]) == 0
    assert Run.from_json(capsys.readouterr().out) == run
    assert main(["history", "list", "--last", "0"]) == 2
    assert "--last" in capsys.readouterr().err
