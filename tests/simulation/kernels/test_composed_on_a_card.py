"""Operators that PyTorch composes of others, and steps that decide by a mode of ours: what a card takes for them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms


class Applied(nn.Module):
    """A function of what a linear layer makes."""

    def __init__(self, apply, *, autocast=False, **parts):
        super().__init__()
        self.inner = nn.Linear(96, 96)
        self.apply_ = apply
        self.autocast = autocast
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            return self.apply_(self, self.inner(x))


def distances(model, y):
    return F.pairwise_distance(y, y.flip(0)) + model.pair(y, y).norm(dim=-1) + y.norm(p=3)


def losses(model, y):
    wanted = (y > 0).float()
    weighed = F.binary_cross_entropy_with_logits(y.float(), wanted, pos_weight=torch.ones(96, device=y.device))
    return weighed + F.binary_cross_entropy_with_logits(y.float(), wanted, reduction="none").square().mean()


def attended(model, y):
    heads = y.view(8, -1, 4, 24).transpose(1, 2)
    mask = torch.zeros(heads.size(2), heads.size(2), device=y.device, dtype=y.dtype)
    return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)


def folded(model, y):
    patches = F.unfold(y.view(8, 6, 64, 64), 4, stride=2, padding=1)
    return F.fold(patches.transpose(1, 2).exp().transpose(1, 2), (64, 64), 4, stride=2, padding=1)


def margins(model, y):
    rows = torch.zeros(y.size(0), dtype=torch.long, device=y.device)
    halves = y.to(torch.bfloat16)
    found = F.soft_margin_loss(halves, torch.ones_like(halves)) + F.multi_margin_loss(halves, rows)
    return found + F.logsigmoid(y).mean()


def convolved(model, y):
    return model.parts(y.view(8, 24, 32, 32).to(torch.bfloat16))


def normed(model, y):
    return model.norm(y.view(8, 256, 96).transpose(1, 2).to(torch.bfloat16)).transpose(1, 2)


def separable():
    each = nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.Conv2d(24, 48, 1)
    return Applied(convolved, parts=nn.Sequential(*each).to(torch.bfloat16))


STEPS = {
    "folded": (lambda: Applied(folded), None),
    "margins": (lambda: Applied(margins), None),
    "convolved": (separable, None),
    "normed": (lambda: Applied(normed, norm=nn.BatchNorm1d(96)), None),
    "distances": (lambda: Applied(distances, autocast=True, pair=nn.Bilinear(96, 96, 8)), None),
    "losses": (lambda: Applied(losses), None),
    "cdist": (lambda: Applied(lambda model, y: torch.cdist(y, y)), None),
    "attention": (lambda: nn.Sequential(Applied(attended)), {"*": ms.checkpoint()}),
}


# What `torch.cuda.max_memory_allocated()` and its reserved twin said of the third step with a fake T4.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("distances", (98730496, 106954752)),
        ("losses", (23444992, 29360128)),
        ("cdist", (102611456, 134217728)),
        ("folded", (28947968, 48234496)),
        ("margins", (21101568, 25165824)),
        ("convolved", (27388416, 46137344)),
        ("normed", (22269952, 27262976)),
        ("attention", (25870848, 31457280)),
    ],
)
def test_a_step_takes_what_it_takes_on_a_card(name, expected):
    make, plan = STEPS[name]
    with torch.device("meta"):
        model, x = make(), torch.randn(2048, 96)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    loss = lambda y, _: y.float().square().mean()  # noqa: E731
    found = ms.profile(
        model, x, keeps_output=False, optimizer=optimizer, loss=loss, plan=plan and ms.Plan(plan), hardware="t4"
    )
    assert not any("on a CPU" in note for note in found.notes)
    assert (found.peak_bytes, found.reserved_peak_bytes) == expected
