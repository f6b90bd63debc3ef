"""Operators that change lists of tensors: under a dispatch mode PyTorch gives their tensors no new versions.

A buffer that is saved for backward and changed so in the next call is an error in PyTorch. A region that is watched by
a mode must not compute with the changed values in silence.
"""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.regions import OperatorWatch

DISK = {"tier": "disk", "min_bytes": 0}
HOWS = {
    "checkpoint": ms.checkpoint(),
    "dots": ms.checkpoint(policy=ms.policies.dots_saveable),
    "offload": ms.offload(**DISK),
    "parameters": ms.offload(what="params", **DISK),
    "both": ms.compose(ms.offload(**DISK), ms.offload(what="params", **DISK)),
    "cast": ms.cast(compute=torch.float64),
    "tile": ms.tile(chunks=2),
}


class Scaled(nn.Module):
    def __init__(self, listed):
        super().__init__()
        self.linear, self.listed = nn.Linear(6, 6).double(), listed
        self.register_buffer("scale", torch.ones(6).double())

    def forward(self, h):
        if self.listed:
            torch._foreach_mul_([self.scale], 1.25)
        else:
            self.scale = self.scale * 1.25
        return torch.sin(self.linear(h) * self.scale)


def gradient(listed, how=None):
    torch.manual_seed(0)
    block = Scaled(listed)
    model = nn.Sequential(block, block)
    fit = model if how is None else ms.transform(model, {"": how})
    x = torch.randn(4, 6).double().requires_grad_()
    fit(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("name", HOWS)
def test_what_is_saved_and_then_changed_in_a_list_is_an_error_or_right(name):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(True)
    try:
        found = gradient(True, HOWS[name])
    except (RuntimeError, ms.CorrectnessError, ms.TransformError):
        return
    assert torch.equal(found, gradient(False))


def test_a_watch_leaves_versions_as_they_are_without_it():
    class Watch(OperatorWatch):
        def on_call(self, func, args, kwargs):
            return func(*args, **kwargs)

    def versions(change):
        tensors = [torch.ones(3), torch.ones(2)]
        change(tensors)
        return [each._version for each in tensors]

    changes = [
        lambda them: torch._foreach_mul_(them, 2.0),
        lambda them: torch._foreach_zero_(them),
        lambda them: torch._foreach_copy_(them, [each + 1 for each in them]),
        lambda them: torch._foreach_mul(them, 2.0),
        lambda them: [each.mul_(2) for each in them],
    ]
    for change in changes:
        with Watch(), Watch():
            watched = versions(change)
        assert watched == versions(change)
