"""``memscale tune``: what the library finds, as text and files; exit codes for scripts."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.algebra import is_transformed
from memscale.cli import main

FACTORIES = """
import torch
from torch import nn

def mlps():
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)]
    return nn.Sequential(*blocks), lambda batch, seq: torch.ones(batch, seq, 32), lambda y, _: y.square().mean()

def interrupted():
    def batch(batch, seq):
        if batch > 4:
            raise KeyboardInterrupt
        return torch.ones(batch, 8)

    return nn.Linear(8, 8), batch, lambda y, _: y.sum()

def pictures():
    return nn.Linear(8, 8), lambda batch, seq: torch.ones(batch, 8), lambda y, _: y.sum()
"""
STEP = ("--hf", "tuned_factories:mlps", "--gpu", "cpu")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    (tmp_path / "tuned_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def command(*arguments):
    return main([str(each) for each in arguments])


def expected(batch_fn, **fields):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())
    config = ms.Config(mode="aggressive", enable_tiling=False)  # the command allows no rounding by default
    tuner = ms.AutoTuner(model, optimizer, loss=lambda y, _: y.square().mean(), config=config, hardware="cpu")
    return tuner.tune(batch_fn, confirm=False, **fields)


@pytest.mark.deep
def test_the_result_is_that_of_the_library(capsys):
    files = ("--json", "best.json", "--html", "best.html", "--plot", "best.svg", "--python", "script.py")
    options = ("--seq", 64, "--objective", "batch", "--budget", "768KiB", "--at-most", 12, *files)
    assert command("tune", *STEP, *options) == 0
    shown = capsys.readouterr().out
    found = ms.Tuning.from_json(Path("best.json").read_text())
    library = expected(lambda rows: torch.ones(rows, 64, 32), objective="batch", budget="768KiB", at_most=12)
    assert (found.size, found.plan, found.per_second) == (library.size, library.plan, library.per_second)
    assert 1 < found.size < 12
    assert found.confirmation.peak_bytes <= 768 * 1024
    assert shown == f"{found}\n"
    assert Path("best.svg").read_text().startswith("<?xml")
    page = Path("best.html").read_text()
    tried = json.loads(Path("best.json").read_text())["trials"]
    assert page.count('class="point') == sum(each["fits"] for each in tried) > 1
    assert page.count('class="choice') == len(tried)
    assert page.count(' shown">') == 2, "the best is marked in both"
    scope = {}
    exec(Path("script.py").read_text(), scope)
    assert is_transformed(scope["fit"])


def test_sequences_and_the_fastest(capsys):
    step = (*STEP, "--batch", 3, "--budget", "1GiB", "--at-most", 5, "--no-confirm", "--json", "best.json")
    assert command("tune", *step, "--objective", "sequence") == 0
    assert ms.Tuning.from_json(Path("best.json").read_text()).size == 5
    assert capsys.readouterr().out.startswith("longest within 1.00 GiB: length 5, ")
    assert command("tune", *step, "--seq", 4) == 0
    assert ms.Tuning.from_json(Path("best.json").read_text()).confirmation is None
    assert capsys.readouterr().out.startswith("fastest within 1.00 GiB: batch size 5, ")


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--objective", "speed"), 2, "'--objective': must be one of throughput, batch, sequence, got 'speed'"),
        (("--at-least", "5", "--at-most", "4"), 2, "--at-least 5 and --at-most 4 leave no size; swap the two"),
        (("--at-least", "2000000"), 2, "--at-least 2000000 is more than 1048576, the most that is tried; lower it"),
    ],
)
def test_wrong_options_of_tune_get_one_line(options, status, message, capsys):
    assert command("tune", *STEP, *options) == status
    _, _, said = capsys.readouterr().err.rpartition("memscale: ")
    assert message in said


def test_a_model_whose_batches_have_no_sequence(capsys):
    assert command("tune", "--hf", "tuned_factories:pictures", "--gpu", "cpu", "--objective", "sequence") == 2
    assert "the batches of this model are the same for any seq; use --objective batch" in capsys.readouterr().err


def test_an_interrupt_prints_the_best_so_far(capsys):
    step = ("--hf", "tuned_factories:interrupted", "--gpu", "cpu", "--objective", "batch", "--budget", "1MiB")
    assert command("tune", *step) == 130
    assert "(stopped: the best so far)" in " ".join(capsys.readouterr().out.split())
