"""The tiled head's way on an accelerator, with real numbers on a CPU: as right as untiled, and quick."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale as ms
from memscale import tile
from memscale.transforms.tile.head import accelerated
from tests.transforms.tile import test_head_by_classes as by_classes
from tests.transforms.tile.test_tiled_head import CLASSES, Head, tiled

mm = torch.mm


@pytest.fixture
def taken(monkeypatch):
    """One entry for each backward that went the accelerator's way, on what says that it is one."""
    found = []
    before = accelerated._gradients

    def spy(rows, hidden):
        found.append(len(hidden))
        return before(rows, hidden)

    def wide(left, right, *, out_dtype=None, out=None):
        return mm(left, right, out=out) if out_dtype is None else mm(left.to(out_dtype), right.to(out_dtype))

    monkeypatch.setattr(accelerated, "_gradients", spy)
    monkeypatch.setattr(accelerated, "device_type", lambda tensor: "cuda")
    monkeypatch.setattr(accelerated, "compute_capability", lambda tensor: (9, 0))
    monkeypatch.setattr(torch, "mm", wide)
    return found


@pytest.mark.parametrize(("dtype", "goes"), [(torch.bfloat16, False), (torch.float16, True)], ids=["bf16", "fp16"])
def test_a_card_without_products_into_32_bits_goes_by_rows(dtype, goes, taken, monkeypatch):
    """PyTorch refuses those of bfloat16 before sm_80."""
    monkeypatch.setattr(accelerated, "compute_capability", lambda tensor: (7, 5))
    by_classes.test_every_loss(PLAIN["plain"], "mean", dtype, taken if goes else [None])
    assert bool(taken) is goes


PLAIN = {name: by_classes.SETTINGS[name] for name in ("plain", "ignore_index", "all ignored", "weights", "sliced")}
PLAIN["all ignored"] = lambda logits, y, how: F.cross_entropy(logits, y * 0 - 100, reduction=how)


@by_classes.SIXTEEN_BITS
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("setting", PLAIN.values(), ids=PLAIN)
def test_every_loss(setting, reduction, dtype, taken):
    by_classes.test_every_loss(setting, reduction, dtype, taken)


@pytest.mark.parametrize("again", ["heads", "sequences", "double_backward"])
def test_as_by_rows(again, taken):
    test = getattr(by_classes, f"test_{again}")
    for case in (by_classes.without_bias, by_classes.Tied) if again == "heads" else (None,):
        taken.clear()
        test(*[case] if case else [], taken)


@pytest.mark.parametrize("chunks", [5, 1000])
def test_many_rows(chunks, taken):
    by_classes.test_many_rows(by_classes.wide, chunks, torch.bfloat16, taken)


@by_classes.SIXTEEN_BITS
def test_scaling_and_retain_graph(dtype, taken):
    """A factor that only backward knows, of either sign, is in the exponent: float16 does not underflow."""
    model, (x, y) = Head().to(dtype), by_classes.sixteen_bit(dtype)
    by_classes.as_right_as_untiled(model, tiled(model), x, by_classes.small(y), factor=2.0**16)
    by_classes.as_right_as_untiled(model, tiled(model), x, by_classes.mean(y), factor=-3.0)
    loss = F.cross_entropy(tiled(model)(x).float(), y)
    first = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(loss, [x, *model.parameters()]), strict=True):
        assert torch.equal(one, two)
    assert len(taken) == 4


def test_a_confident_loss_and_changes_and_wrong_targets(taken):
    by_classes.test_a_confident_loss_is_not_lost_beside_its_logits()
    by_classes.test_a_change_in_place_raises("weight")
    by_classes.test_settings_that_do_not_fit_raise_as_without_tiles()


def test_rows_of_minus_infinity_and_signs_by_row(taken):
    """Blocks of masked classes come before the first other one; each row has a factor of any sign, or none."""
    linear = nn.Linear(8, CLASSES).bfloat16()
    with torch.no_grad():
        linear.bias[: CLASSES // 2] = -torch.inf
    x = torch.randn(12, 8).bfloat16().requires_grad_()
    y = torch.full((12,), CLASSES - 1)
    factors = torch.linspace(-2, 2, 13)[:12]
    factors[6] = 0
    found = []
    for fn in (linear, ms.transform(linear, {"": tile(chunks=12)})):
        value = F.cross_entropy(fn(x).float(), y, reduction="none") * factors
        found.append([value, *torch.autograd.grad(value.sum(), [x, linear.weight, linear.bias])])
    assert len(taken) == 1
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("other", ["smoothing", "softcap"])
def test_other_losses_go_by_rows(other, taken):
    model, (x, y) = Head().bfloat16(), by_classes.sixteen_bit(torch.bfloat16)
    by_classes.trained(tiled(model), x, lambda logits: by_classes.SETTINGS[other](logits, y, "mean"))
    assert not taken


# ---------------------------------------------------------------------------------------------- what profile says of it


def test_a_large_head_on_a_card_is_predicted_as_the_card_would_run_it():
    """Hidden states of 4096, 128,256 classes, 4096 tokens: tiled, one product more."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4096, 128_256, bias=False, dtype=torch.bfloat16, device="meta")

        def forward(self, x, y):
            return F.cross_entropy(self.head(x).float(), y)

    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    batch = x, torch.zeros(4096, dtype=torch.long)
    plain = ms.profile(Loss(), batch, hardware="h100")
    began = time.perf_counter()
    fit = ms.profile(Loss(), batch, hardware="h100", plan={"head": tile(chunks=16)})
    assert time.perf_counter() - began < 5, "half a second on a machine with nothing else to do"
    assert fit.step_seconds <= 1.4 * plain.step_seconds
    assert fit.peak_bytes <= 0.35 * plain.peak_bytes
    assert fit.flops == plain.flops * 4 // 3
