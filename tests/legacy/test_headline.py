"""What `wrap` says by default, in a line on stdout, and what `report` prints."""

from __future__ import annotations

import io
import re
import sys

import pytest
import torch
from torch import nn

import memscale as ms
from tests.legacy.test_wrap_plans import rows, stack

SHARE = ms.Config(target_gpu_utilization=1)


def train(model: nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(rows(1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_first_training_call_says_once_that_the_step_fits(device, capsys):
    """The 256 KiB of the output are in it: whether the loop keeps it is not known, and `wrap` takes it that it does."""
    device(500)
    model = ms.wrap(stack(), SHARE)
    assert capsys.readouterr().out == ""
    train(model)
    assert capsys.readouterr().out == "memscale: fits unchanged, 12.1 MiB of 500 MiB\n"
    model(rows(1025)).sum().backward()
    assert re.fullmatch(r"memscale: fits unchanged, .* MiB of 500 MiB\n", capsys.readouterr().out)
    ms.detach(model)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (ms.Config(force_optimize=True), "checkpoint on 4 of 4 blocks; its peak is unknown"),
        (ms.Config(force_optimize=True, enable_tiling=True), "checkpoint on 4 of 4 blocks, tile on '4'; its peak"),
        (ms.Config(force_optimize=True, enable_checkpointing=False), "stays unchanged: enable_checkpointing is False"),
        (ms.Config(force_optimize=True, enable_logging=False), ""),
    ],
)
def test_what_the_rule_does_is_said(config, said, capsys):
    ms.wrap(nn.Sequential(*stack(), nn.Linear(64, 500)), config)
    printed = capsys.readouterr().out
    assert printed.replace("\n  ", " ").startswith(f"memscale: {said}") if said else printed == ""
    assert printed.replace("\n  ", " ").count("\n") == bool(said)
    assert max(map(len, printed.splitlines()), default=0) <= 80


def test_one_process_of_a_run_says_what_a_plan_saves_and_costs_and_any_encoding_takes_it(device, monkeypatch, capsys):
    device(1000)
    monkeypatch.setenv("RANK", "1")
    ms.wrap(stack(), sample_input=rows(1024), budget="10MiB")
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    ms.wrap(stack(), sample_input=rows(1024), budget="10MiB")
    sys.stdout.seek(0)
    said = r"memscale: 12\.1 MiB \? 9\.08 MiB, step \? \d\.\d\d: checkpoint.* on .*\n"
    assert re.fullmatch(said, sys.stdout.read())


@pytest.mark.deep
def test_report_advises_nothing_that_the_config_allows_already(device, capsys):
    device(1000)
    model = ms.wrap(stack(), ms.Config(mode="aggressive"), sample_input=rows(1024), budget="10MiB")
    ms.report(model)
    assert "enable_tiling=True" not in capsys.readouterr().out


def test_report_prints_what_is_applied_and_measured(device, capsys):
    device(1000)
    model = ms.wrap(stack(), ms.Config(enable_logging=True), sample_input=rows(1024), budget="10MiB")
    train(model, 3)
    assert "12.1 MiB → 9.08 MiB, step × " in capsys.readouterr().out
    ms.report(model)
    printed = capsys.readouterr().out
    for text in (
        "step without memscale: 12.1 MiB",
        "faster: a larger budget",
        "enable_tiling=True",
        "checkpoint(",
        "the real step's bytes",
    ):
        assert text in printed
    assert all(len(line) <= 80 for line in printed.splitlines()[1:])
    ms.detach(model)
    ms.report(model)
    assert capsys.readouterr().out == f"detached; while it was wrapped:\n{printed}"  # as after a trainer's end
    ms.report(stack())
    assert capsys.readouterr().out == "this Sequential is not wrapped\n"
    with pytest.raises(TypeError, match=r"report\(\) takes an nn.Module"):
        ms.report(3)
