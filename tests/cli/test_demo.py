import sys
from pathlib import Path

import pytest
import torch

import memscale as ms
from memscale.cli import demo as _demo
from memscale.cli import main
from memscale.cli.training import Job, read_text, train

PNG = b"\x89PNG\r\n\x1a\n"
SMALL = ["--steps", "3", "--layers", "2", "--width", "64", "--batch", "2", "--seq", "64", "--device", "cpu"]
JOB = Job(steps=3, layers=2, width=64, batch=2, seq=64, device=torch.device("cpu"))


def demo(*options: str) -> int:
    return main(["demo", *options])


def test_it_compares_and_leaves_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "memory.png"
    assert demo(*SMALL, "--out", str(out)) == 0
    shown = capsys.readouterr().out
    said = ("budget", "peak memory, measured", "proof: the simulated step takes", "step time", "losses", "random state")
    assert all(each in shown for each in said)
    assert "DIFFERENT" not in shown
    assert str(out) in shown
    *lines, _ = shown.splitlines()  # the last one has a path
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80
    assert out.read_bytes().startswith(PNG)


def test_the_numbers_are_equal_and_the_memory_is_not():
    text = read_text()
    calls = []
    plan = _demo._planned(JOB, None, lambda *_: None)
    baseline, transformed = (train(JOB, text, each, lambda: calls.append(1)) for each in (None, plan))
    assert len(calls) == 2 * JOB.steps
    assert baseline.losses == transformed.losses
    assert len(set(baseline.losses)) == JOB.steps
    assert baseline.digests == transformed.digests
    first, second = baseline.trace, transformed.trace
    assert first.start_bytes == second.start_bytes
    assert second.peak_bytes <= plan.evidence.budget_bytes < 0.9 * first.peak_bytes
    assert second.peak_bytes == pytest.approx(plan.evidence.planned.peak_bytes, rel=0.02)
    assert first.peak_bytes == pytest.approx(plan.evidence.plain.peak_bytes, rel=0.02)


def test_a_transform_that_disturbs_dropout_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def disturbed(model: torch.nn.Module) -> torch.nn.Module:
        model.register_forward_hook(lambda *_: torch.rand(1) and None)
        return model

    monkeypatch.setattr(ms, "transform", lambda model, plan: disturbed(model))
    assert demo(*SMALL, "--out", str(tmp_path / "memory.png")) == 1
    shown = capsys.readouterr().out
    assert "NOT EQUAL: losses, gradients, parameters, moments, random state differ" in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "2"], "'--steps': must be at least 3, got 2"),
        (["--width", "100"], "--width must be a multiple of 64, the width of a head, got 100"),
        (["--seq", "1025"], "--seq must be at most 1024, GPT-2's longest text, got 1025"),
        (["--device", "abacus"], "--device must be auto, cpu, cuda or cuda:N, got 'abacus'"),
        (["--device", "cuda:99"], "--device cuda:99 needs a CUDA device that PyTorch can use, and it finds"),
        (["--batch", "1000000"], "free; lower --batch, --seq, --layers or --width"),
        (["--out", "memory.jpg"], "'--out': must end in .png, got 'memory.jpg'"),
    ],
)
def test_bad_options_get_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert demo(*options) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("memscale: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("typer", "typer: pip install 'memscale-transforms[cli]'"),
        ("rich.console", "rich: pip install 'memscale-transforms[cli]'"),
        ("psutil", "psutil: pip install 'memscale-transforms[cli]'"),
        ("transformers", "transformers: pip install 'memscale-transforms[hf]'"),
        ("matplotlib", "matplotlib: pip install 'memscale-transforms[plot]'"),
    ],
)
def test_a_missing_package_gets_one_line(
    module: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, module, None)
    # Forgotten, so that they import what is missing again.
    for name in ("memscale.cli.app", "memscale.cli.demo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert demo(*SMALL) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("memscale: ")
    assert shown.err.endswith(f"needs {remedy}\n")
    assert shown.err.count("\n") == 1
