"""A recompute sees its arguments in the layout of the forward, also inside other regions."""

import pytest
import torch
from torch import nn

from memscale import checkpoint, compose, offload, policies, transform
from tests.support.checks import bits

VIEWS = {
    "a slice of the sequence": lambda h: h[:, 1:3],
    "every other": lambda h: h[:, ::2],
    "transposed": lambda h: h.transpose(1, 2),
    "permuted": lambda h: h.permute(2, 0, 1),
    "expanded": lambda h: h[:1].expand(3, *h.shape[1:]),
    "one row": lambda h: h.narrow(0, 0, 1),
    "half of the width": lambda h: h.chunk(2, 2)[1],
    "one of the sequence": lambda h: h.unbind(1)[1],
    "one more dimension": lambda h: h.unsqueeze(0),
    "channels last": lambda h: h.unflatten(1, (2, -1)).contiguous(memory_format=torch.channels_last),
    "overlapping": lambda h: h.as_strided((2, 4), (1, 2), 1),
}
AROUND = [
    checkpoint(),
    checkpoint(policy=policies.everything_saveable),
    offload(min_bytes=0),
    compose(offload(min_bytes=0), checkpoint()),
]


class ByLayout(nn.Module):
    """Its values depend on the layout of its argument."""

    def forward(self, x):
        by_strides = sum(at * stride % 97 for at, stride in enumerate(x.stride(), 1))
        format_counts = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return torch.sin(x * (1 + by_strides + x.storage_offset() + x.is_contiguous() / 2 + format_counts / 4))


class Viewed(nn.Module):
    def __init__(self, view):
        super().__init__()
        self.first, self.view, self.inner = nn.Linear(6, 6), view, nn.Sequential(ByLayout(), ByLayout())

    def forward(self, x):
        return self.inner(self.view(self.first(x)))


@pytest.mark.parametrize("around", AROUND, ids=repr)
@pytest.mark.parametrize("view", VIEWS)
def test_a_recompute_inside_another_region_sees_the_layout_of_the_forward(view, around):
    torch.manual_seed(0)
    model, x = Viewed(VIEWS[view]), torch.randn(1, 8, 6)

    def gradients(run):
        given = x.clone().requires_grad_()
        return torch.autograd.grad(run(given).square().sum(), [given, *model.parameters()])

    rules = [("inner.*", checkpoint()), ("inner", around), ("", checkpoint())]
    assert bits(gradients(transform(model, rules))) == bits(gradients(model))
