"""Regions that are given tensors of several lengths in one, or sparse ones."""

import pytest
import torch
from torch import nn

import memscale as ms


def lengths(layout):
    torch.manual_seed(0)
    return torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)


def mean_square(y, _=None):
    return torch.nested.to_padded_tensor(y, 0.0).square().mean()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("policy", [ms.policies.nothing_saveable, ms.policies.dots_saveable])
def test_nested_tensors_have_the_same_gradients(model, layout, policy):
    batch, found = lengths(layout), []
    for each in (model, ms.transform(model, {"": ms.checkpoint(policy=policy)})):
        mean_square(each(batch)).backward()
        found.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_one_that_is_changed_in_place(layout):
    """Code that compares memory added the lengths of a jagged tensor, which are no numbers."""

    def region(x):
        return (x.relu_() * 3).sin()

    found = []
    for fn in (region, ms.checkpoint()(region)):
        for _ in range(2):
            leaf = lengths(layout).requires_grad_()
            given = leaf * 1
            mean_square(fn(given)).backward()
            found.append([*leaf.grad.unbind(), *given.detach().unbind()])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_profile_of_them(model):
    assert ms.profile(model, lengths(torch.strided), loss=mean_square, hardware="cpu").peak_bytes > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: lengths(torch.strided), "nested tensor"),
        (lambda: lengths(torch.jagged), "nested tensor"),
        (lambda: torch.eye(8).to_sparse(), "layout torch.sparse_coo"),
        (lambda: torch.eye(8).to_sparse_csr(), "layout torch.sparse_csr"),
    ],
)
def test_tile_cuts_none_of_these(make, kind):
    with pytest.raises(ms.TransformError, match=f"would cut a .*{kind}, which has no pieces; .* in_dims None"):
        ms.tile(chunks=2)(lambda a: a * 2)(make())
    given = make()
    if not given.is_nested:
        rows = ms.tile(chunks=2, in_dims=(0, None))(lambda x, a: (a @ x.T).T)(torch.ones(4, 8), given)
        assert torch.equal(rows, torch.ones(4, 8))
