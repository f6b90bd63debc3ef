"""What a dispatch mode of ours sees, and that it changes nothing."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from memscale.regions import OperatorWatch


class Seen(OperatorWatch):
    def __init__(self):
        super().__init__()
        self.names = []

    def on_call(self, func, args, kwargs):
        self.names.append(func.name())
        return func(*args, **kwargs)


def kernels(call, watch):
    with torch.profiler.profile(acc_events=True) as profiler, watch:
        call()
    return {event.name for event in profiler.events()} & {"aten::mm", "aten::bmm", "aten::addmm"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_an_operator_that_is_watched_takes_the_kernels_of_one_that_is_not(mode):
    layer, x = nn.Linear(5, 2), torch.randn(3, 4, 5).transpose(0, 1)
    with mode():
        watch = Seen()
        assert kernels(lambda: layer(x), nullcontext()) == kernels(lambda: layer(x), watch) == {"aten::mm"}
        # `linear` comes whole there.
        assert ("aten::linear" in watch.names) == (mode is torch.inference_mode)


def test_a_change_in_place_is_counted_once_in_inference_mode():
    weight = nn.Parameter(torch.ones(2))
    before = weight._version
    with torch.inference_mode(), Seen():
        weight.mul_(2)
    assert weight._version == before + 1


@pytest.mark.parametrize("call", [torch.linalg.pinv, lambda x: torch.linalg.lstsq(x, x * 2).residuals])
def test_a_kernel_that_conjugates_returns_the_numbers_of_one_that_is_not_watched(call):
    """PyTorch returns other numbers under a mode that does nothing, without an error."""
    x = torch.randn(5, 3, dtype=torch.complex128)
    with Seen():
        watched = call(x)
    assert torch.equal(watched, call(x))
