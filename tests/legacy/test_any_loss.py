"""The loss that `wrap` assumes where it knows none: it takes every output that has a gradient."""

import pytest
import torch
from torch.nn import functional as F

from memscale.legacy.assumed import any_loss

WEIGHT = torch.nn.Parameter(torch.ones(3, 4))
OUTPUTS = {
    "rows": WEIGHT * 1,
    "one row": WEIGHT[0] * 1,
    "images": (WEIGHT * 1).view(1, 3, 2, 2),
    "half": WEIGHT.to(torch.float16),
    "scalar": WEIGHT.sum(),
    "nothing": WEIGHT[:0] * 1,
    "complex": torch.complex(WEIGHT, WEIGHT),
    "sparse": WEIGHT.to_sparse(),
    "several": {"logits": WEIGHT * 1, "states": (WEIGHT[0] * 1, WEIGHT.detach(), None, 3)},
}


@pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
def test_it_is_a_number_with_a_gradient(output):
    found = any_loss(output, None)
    assert found.shape == ()
    assert found.dtype == torch.float32
    (gradient,) = torch.autograd.grad(found, WEIGHT, retain_graph=True)
    assert gradient.shape == WEIGHT.shape


def test_rows_of_several_lengths_are_summed():
    rows = torch.nested.as_nested_tensor([WEIGHT[0] * 1, WEIGHT[1, :2] * 1], layout=torch.jagged)
    assert torch.equal(any_loss((WEIGHT.sum(), rows), None), WEIGHT.sum() + 6)


def test_it_is_a_cross_entropy_of_the_largest_output_and_a_sum_of_the_others():
    small, large = WEIGHT[0] * 2, WEIGHT * torch.arange(12.0).view(3, 4)
    expected = small.sum() + F.cross_entropy(large, torch.zeros(3, dtype=torch.long))
    assert torch.equal(any_loss((small, large), None), expected)
    assert torch.equal(any_loss({"loss": small.sum(), "logits": large}, None), small.sum())
