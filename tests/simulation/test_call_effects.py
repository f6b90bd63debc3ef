"""What is remembered of calls: the same whatever the process has simulated before."""

from __future__ import annotations

import torch
from torch import nn

import memscale as ms
from memscale.simulation.dispatch import operators


def changes(monkeypatch):
    """The changes of an LSTM's step by a process that remembers nothing of its own."""
    monkeypatch.setattr(operators, "_known", {})
    lstm = nn.LSTM(8, 8, bidirectional=True)
    return ms.profile(lstm, torch.ones(4, 2, 8), loss=lambda output, _: output[0].sum(), hardware="h100").changes


def test_two_results_that_are_one_tensor_are_one_in_every_simulation(monkeypatch):
    # PyTorch's cache of fake results returned two tensors from the second call on.
    first = changes(monkeypatch)
    assert first == changes(monkeypatch)
    assert (
        first
        == ms.profile(
            nn.LSTM(8, 8, bidirectional=True),
            torch.ones(4, 2, 8),
            loss=lambda output, _: output[0].sum(),
            hardware="h100",
        ).changes
    )
