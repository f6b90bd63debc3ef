"""``--price``, ``--tokens`` and ``--fits``: what a step's time costs, and a verdict that a script can use."""

import json
import re
from pathlib import Path

import pytest

from memscale.cli import main

GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 64, "n_head": 2}
FACTORY = """
import torch
from torch import nn

def build():
    return nn.Linear(64, 64), lambda batch, seq: torch.ones(batch, 64), lambda y, _: y.square().mean()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps({**GPT2, "n_positions": 256, "vocab_size": 999}))
    Path("priced.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)


def predicted(capsys, *options, source="config.json"):
    words = ["predict", "--hf", source, "--gpu", "h100", "--batch", "4", "--seq", "128", "--json"]
    assert main([*words, *map(str, options)]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_cost_follows_from_the_time_of_the_step(folder, capsys):
    data = predicted(capsys, "--price", 2.5, "--tokens", "10B")
    cost, seconds = data["cost"], data["profile"]["step_seconds"]
    assert (cost["unit"], cost["cards"]) == ("tokens", 1)
    assert cost["per_second"] == pytest.approx(4 * 128 / seconds)
    assert cost["per_dollar"] == pytest.approx(cost["per_second"] * 3600 / 2.5)
    assert cost["hours"] == pytest.approx(10e9 / cost["per_second"] / 3600)
    assert cost["dollars"] == pytest.approx(2.5 * cost["hours"]) == pytest.approx(10e9 / cost["per_dollar"])


def test_several_cards_are_paid_for_and_train_together(folder, capsys):
    data = predicted(capsys, "--price", 2, "--parallel", "ddp", "--world", 8, "--accumulate", 3)
    cost, seconds = data["cost"], data["profile"]["step_seconds"]
    assert (cost["cards"], cost["hours"], cost["dollars"]) == (8, None, None)
    assert cost["per_second"] == pytest.approx(8 * 3 * 4 * 128 / seconds)
    assert cost["per_dollar"] == pytest.approx(cost["per_second"] * 3600 / 16)


def test_what_grows_with_no_length_is_counted_in_samples(folder, capsys):
    data = predicted(capsys, "--tokens", "1k", source="priced:build")
    assert (data["cost"]["unit"], data["cost"]["per_dollar"], data["cost"]["dollars"]) == ("samples", None, None)
    assert data["cost"]["per_second"] == pytest.approx(4 / data["profile"]["step_seconds"])
    assert "cost" not in predicted(capsys, source="priced:build")


@pytest.mark.parametrize("command", ["predict", "plan", pytest.param("tune", marks=pytest.mark.deep)])
def test_every_command_prints_it(folder, capsys, command):
    more = {"plan": ["--budget", "1GiB"], "tune": ["--budget", "60MiB", "--at-most", "3"], "predict": []}[command]
    words = [command, "--hf", "config.json", "--gpu", "t4", "--seq", "32", *more, "--price", "0.5", "--tokens", "1M"]
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    pace = r"cost: at most [\w. ]+ tokens a second, [\w. ]+ tokens for a dollar"
    assert re.search(rf"{pace}, at least .* for them all", out)


def test_a_device_without_a_speed_says_so(folder, capsys):
    assert main(["predict", "--hf", "priced:build", "--gpu", "cpu", "--price", "1"]) == 0
    assert "cost: unknown, like the time of a step on this device" in capsys.readouterr().out


@pytest.mark.parametrize(("budget", "status", "said"), [("90%", 0, "LOW: the step fits"), ("1MiB", 3, "does not fit")])
def test_fits_is_one_line_and_the_exit_status(folder, capsys, budget, status, said):
    assert (
        main(["predict", "--hf", "config.json", "--gpu", "t4", "--seq", "32", "--budget", budget, "--fits"]) == status
    )
    output = capsys.readouterr().out
    assert said in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--price", "0"], "'--price': must be at least 0.01, got 0.0"),
        (["--price", "nan"], "'--price': must be at least 0.01, got nan"),
        (["--tokens", "many"], "--tokens must be a number above 0, with K, M, B or T behind it, got 'many'; write"),
        (["--tokens", "0B"], "--tokens must be a number above 0"),
        (["--fits", "--json"], "--fits prints the verdict and nothing else; leave out --json, or --fits"),
        (["--fits", "--largest", "batch"], "leave out --largest"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, options, said):
    assert main(["predict", "--hf", "priced:build", "--gpu", "t4", *options]) == 2
    assert said in capsys.readouterr().err
