"""The logger: silent unless asked, warnings everywhere, one process of a run speaks."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
import torch

import memscale as ms


@pytest.mark.parametrize("configured", [False, True])
def test_a_library_prints_nothing_but_warnings_that_nobody_hears(
    configured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    monkeypatch.setattr(logging.root, "handlers", [handler] if configured else [])
    model = ms.wrap(torch.nn.Linear(2, 2), ms.Config())
    ms.detach(model)
    ms.detach(model)
    printed = capsys.readouterr()
    assert (heard.getvalue() if configured else printed.err).count("is not wrapped; nothing to undo") == 1
    assert (printed.err if configured else heard.getvalue()) == ""
    assert "hardware" not in printed.err
    assert printed.out == ""
    assert any(isinstance(each, logging.NullHandler) for each in logging.getLogger("memscale").handlers)


@pytest.mark.parametrize("rank", [0, 3])
def test_one_process_of_a_run_speaks(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    path = tmp_path / "log.txt"
    with caplog.at_level(logging.DEBUG, logger="memscale"):
        ms.detach(ms.wrap(torch.nn.Linear(2, 2), ms.Config(log_file=path)))
    assert {record.levelno for record in caplog.records} == {logging.DEBUG if rank else logging.INFO}
    assert bool(path.read_text()) is not bool(rank)
