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


def test_what_one_simulation_found_of_operators_the_next_knows(monkeypatch):
    monkeypatch.setattr(operators, "_known", {})
    found = []
    monkeypatch.setattr(operators, "work_of", lambda *call, by=operators.work_of: found.append(call[0]) or by(*call))
    step = {"loss": lambda y, _: y.sum(), "hardware": "h100"}
    first, second = (ms.MemoryProfiler(nn.Linear(8, 8), **step) for _ in range(2))

    def profiled(profiler):
        del found[:]
        profile = profiler.profile(torch.ones(4, 8))
        return profile.peak_bytes, bool(found)

    (before, is_new), (again, is_new_again) = profiled(first), profiled(second)
    assert (before, is_new, is_new_again) == (again, True, False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:64")  # but not under other switches
    assert profiled(second) > (before + (128 << 20), True)


def test_what_reads_another_row_at_each_step_is_found_once(monkeypatch):
    # Of 2048 steps each found anew that a row's gradient is as large as all rows, a third of such a profile.
    found, find = [], operators.CallEffects.find
    monkeypatch.setattr(
        operators.CallEffects, "find", lambda self, op, *call: found.append(op.name) or find(self, op, *call)
    )

    class Steps(nn.Module):
        def forward(self, x):
            return sum((x[at] if at % 2 else x[at : at + 2].diagonal(at)[0]).sum() for at in range(6))

    rows = nn.Sequential(nn.Linear(8, 8), Steps())
    ms.profile(rows, torch.ones(8, 8), loss=lambda y, _: y.sum(), hardware="h100")
    parts = [name for name in found if name.endswith(("select_backward", "slice_backward", "diagonal_backward"))]
    assert len(parts) == 4, parts  # of a row, of two rows, of a diagonal, and of its first number
