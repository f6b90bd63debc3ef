"""What a policy is asked: about each operator of a region, once where it does not look at labels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import pytest
import torch

import memscale as ms
from memscale import policies

asked: list[tuple[str, str | None]] = []


@dataclasses.dataclass(frozen=True, repr=False)
class Everything(policies.Policy):
    spelling: ClassVar[str] = "Everything"

    def verdict(self, site: policies.Site) -> policies.Verdict:
        return policies.Save()


def test_operators_that_give_numbers_and_sparse_tensors() -> None:
    """Such as the one behind `item` or `one_hot`."""

    def region(x: torch.Tensor) -> torch.Tensor:
        diagonal = torch.sparse_coo_tensor(torch.arange(64).expand(2, -1), x.sin(), (64, 64), check_invariants=True)
        return torch.sparse.mm(diagonal, (x * x.detach().sum().item())[:, None]).exp()

    x = torch.linspace(0, 1, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(ms.checkpoint(policy=Everything())(region)(x).sum(), x)
    assert torch.equal(grad, torch.autograd.grad(region(x).sum(), x)[0])


class ReadsStatistics(torch.nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (ms.name(super().forward(x), "kept") * self.running_mean + self.running_var).tanh()


@pytest.mark.parametrize("policy", [Everything(), policies.save_only_these_names("kept")], ids=str)
def test_statistics_that_a_kept_operator_moves_are_moved_in_the_recompute(policy: policies.Policy) -> None:
    x = torch.linspace(0, 1, 64).reshape(8, 8).square().requires_grad_()
    (expected,) = torch.autograd.grad(ReadsStatistics(8)(x).sum(), x)
    norm = ReadsStatistics(8)
    assert torch.equal(torch.autograd.grad(ms.checkpoint(policy=policy)(norm)(x).sum(), x)[0], expected)
    assert norm.num_batches_tracked == 1
