"""``memscale history check``: regressions that were put into a small package are found, other changes are not."""

import json
import re
import subprocess
import sys

import pytest

from memscale.cli.app import run

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(hidden))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(3))
        self.head = nn.Linear(64, 1000, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def make():
    def batch(rows, length):
        return torch.zeros(rows, length, dtype=torch.long)
    def loss(logits, tokens):
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    return Model(), batch, loss
"""

# What a commit changes, and the module that is to blame.
REGRESSIONS = {
    "a wider block": ("4 * width", "6 * width", "blocks"),
    "another activation is kept": ("gelu(self.up(self.norm(x)))", "gelu(self.up(self.norm(x))).sin()", "blocks"),
    "kept in double precision": ("return self.head(x)", "return self.head(x).double()", "(root)"),
    "a buffer": ("self.drop =", "self.register_buffer('b', torch.ones(999)); self.drop =", "blocks"),
    "a copy of the stream": ("x = block(x)", "x = block(x * 1.0 + x.sigmoid())", "(root)"),
}  # fmt: skip
NEUTRAL = {
    "a new name": ("hidden", "inner"),
    "another rate": ("Dropout(0.1)", "Dropout(0.2)"),
    "the same sum": ("x + self.drop(self.down(hidden))", "self.drop(self.down(hidden)) + x"),
    "an assertion": ("x = self.embed(tokens)", "assert tokens.dim() == 2\n        x = self.embed(tokens)"),
    "a reshape": ("logits.flatten(0, 1)", "logits.reshape(-1, logits.shape[-1])"),
}


@pytest.fixture(autouse=True)
def _without_compiled_files(monkeypatch):
    """Python takes a compiled file for that of another text of the same size, written within the same second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def check(tmp_path, monkeypatch, capsys, module, text, *options):
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for known in [name for name in sys.modules if name == module]:
        del sys.modules[known]
    arguments = ["history", "check", "--hf", f"{module}:make", "--batch", "16", "--seq", "128", "--gpu", "t4"]
    arguments += ["--optimizer", "sgd"]
    status = run([*arguments, "--baseline", str(tmp_path / "memory.jsonl"), "--json", *options])
    return status, capsys.readouterr()


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    def checked(text, *options):
        status, said = check(tmp_path, monkeypatch, capsys, "sample_of_history", text, *options)
        return status, json.loads(said.out) if said.out else said.err

    assert checked(MODEL, "--update")[1]["verdict"] == "new"
    return checked


def test_regressions_are_found_at_their_modules(checked):
    for name, (before, after, blamed) in REGRESSIONS.items():
        assert before in MODEL
        status, comparison = checked(MODEL.replace(before, after))
        assert (status, comparison["verdict"]) == (3, "regression"), name
        grown = max(comparison["by_module"], key=lambda path: comparison["by_module"][path])
        assert (grown or "(root)").startswith(blamed), (name, comparison["by_module"])


def test_changes_that_take_nothing_pass(checked):
    for name, (before, after) in NEUTRAL.items():
        assert before in MODEL
        status, comparison = checked(MODEL.replace(before, after))
        assert (status, comparison["verdict"], comparison["changed_bytes"]) == (0, "same", 0), name


def test_a_smaller_step_is_told_and_becomes_the_baseline(checked):
    smaller = MODEL.replace("range(3)", "range(2)")
    status, comparison = checked(smaller, "--update")
    assert (status, comparison["verdict"]) == (0, "smaller")
    assert checked(smaller)[1]["verdict"] == "same"
    status, comparison = checked(MODEL, "--tolerance", "0")
    assert status == 3
    more = comparison["changed_bytes"]
    assert more == 20 * 2**20, "one more segment of the allocator"
    for tolerance, expected in ((more, (0, "within tolerance")), (more - 1, (3, "regression"))):
        status, comparison = checked(MODEL, "--tolerance", str(tolerance))
        assert (status, comparison["verdict"]) == expected


@pytest.mark.parametrize("tolerance", ["0.5", "1%", "a bit"])
def test_a_tolerance_is_bytes(capsys, tolerance):
    arguments = ["history", "check", "--hf", "sample:make", "--baseline", "base.json", "--tolerance", tolerance]
    assert run(arguments) == 2
    assert f"'--tolerance': must be 6GiB, 6GB or bytes, got {tolerance!r}" in capsys.readouterr().err


def test_a_baseline_that_is_not_there(tmp_path, monkeypatch, capsys):
    status, said = check(tmp_path, monkeypatch, capsys, "sample_without", MODEL)
    assert status == 2
    assert re.search(r"has no run of .* on 'Tesla T4'; write the first with --update", said.err)
    monkeypatch.chdir(tmp_path)
    arguments = ["history", "check", "--hf", "sample_without:make", "--gpu", "t4", "--baseline", "no-such-branch"]
    assert run(arguments) == 2
    assert "is neither a file nor a git reference here" in capsys.readouterr().err


def test_the_runs_of_a_commit_are_a_baseline(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    monkeypatch.setattr("memscale.history.run._commit_here", lambda: commit)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    monkeypatch.setenv("MEMSCALE_HISTORY", str(tmp_path / "runs.db"))

    def at(reference, text):
        (tmp_path / "sample_of_commits.py").write_text(text)
        sys.modules.pop("sample_of_commits", None)
        arguments = ["history", "check", "--hf", "sample_of_commits:make", "--gpu", "t4", "--seq", "32"]
        return run([*arguments, "--baseline", reference])

    monkeypatch.syspath_prepend(str(tmp_path))
    assert at("HEAD", MODEL) == 0  # it is its own baseline
    commit = "of the next one"
    assert at("HEAD", MODEL.replace("range(3)", "range(4)")) == 3
    assert "regression: sample_of_commits:make batch=1 seq=32" in capsys.readouterr().out
    assert run(["history", "list"]) == run(["history", "show", "last"]) == run(["history", "export"]) == 0
    listed = capsys.readouterr().out
    assert listed.count("sample_of_commits:make") >= 4
    first = listed.splitlines()[1].split()[0]
    assert run(["history", "compare", first]) == 0
    assert capsys.readouterr().out.startswith("regression: ")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("", "an id is empty; write the beginning of one, or last; `memscale history list` shows the ids"),
        ("last", "there are no runs yet in '"),
        ("0", "no run begins with '0' in '"),
    ],
)
def test_a_run_that_is_not_there_is_an_error_with_the_remedy(tmp_path, monkeypatch, capsys, start, said):
    monkeypatch.setenv("MEMSCALE_HISTORY", str(tmp_path / "runs.db"))
    assert run(["history", "show", start]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"memscale: {said}")
    assert message.endswith("; `memscale history list` shows the ids\n")
