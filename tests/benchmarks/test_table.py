"""`python -m memscale.benchmarks`: what it writes is what it simulated, and two results can be compared."""

import copy
import json
from functools import partial

import pytest
import torch

from memscale.benchmarks import __main__ as command
from memscale.benchmarks import subjects
from memscale.benchmarks.columns import COLUMNS, plans
from memscale.benchmarks.subjects import SUBJECTS, TableSubject, chosen
from memscale.benchmarks.table import changes

SMALL = TableSubject(
    "Tiny 4×32",
    partial(subjects.gpt2, 64, 1, 2),
    4,
    32,
    "lm_head",
    "rtx 3090",
    "mlp",
    (),
    60_000_000,
    200_000_000,
    ("exact",),
)


@pytest.fixture(autouse=True)
def _only_small(monkeypatch):
    monkeypatch.setattr(subjects, "SUBJECTS", (SMALL,))


def test_it_writes_what_it_simulated_and_tells_what_has_changed(tmp_path, capsys, monkeypatch):
    written, other = tmp_path / "now.json", tmp_path / "other.json"
    assert command.main(["--models", "tiny", "--output", str(written)]) == 0
    shown = capsys.readouterr().out
    data = json.loads(written.read_text())
    (row,) = data["rows"]
    again = copy.deepcopy(row)
    monkeypatch.setattr(command, "row", lambda subject, say: again)  # a simulation is the same every time
    exact = row["columns"]["exact"]
    assert f"{exact['peak_bytes'] / 1e9:.2f} GB | {exact['peak_bytes'] / 6e7:.2f}" in shown
    assert exact["peak_bytes"] < row["plain"]["peak_bytes"]
    assert exact["over_plain"] == round(exact["step_seconds"] / row["plain"]["step_seconds"], 3)
    assert {"peak_bytes", "step_seconds"} <= set(data["machine"]["deterministic"])
    assert list(changes(data["rows"], data["rows"])) == []
    row["columns"]["exact"]["peak_bytes"] += 2**20
    other.write_text(json.dumps(data))
    assert command.main(["--compare", str(other)]) == 0
    assert "Tiny 4×32, exact: peak_bytes" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--models", "no such"], ["--device", "abacus"], ["--compare", "no such file"]])
def test_what_it_does_not_know_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        command.main(wrong)
    assert "error: " in capsys.readouterr().err


def test_every_column_has_plans_and_every_subject_columns():
    with torch.device("meta"):
        known = plans(SMALL.make(), SMALL)
    assert {name for column in COLUMNS.values() for name in column.names} <= known.keys()
    assert all(column in COLUMNS for each in SUBJECTS for column in each.columns)
    assert [each.device for each in chosen(None, "h100")] == ["h100"]
