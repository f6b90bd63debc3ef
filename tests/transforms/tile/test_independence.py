"""Rows that are independent are shown to be, and what couples them in any way, or might, is refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale as ms
from memscale.transforms import proven_rows
from tests.support.models import TransformerBlock

ROWS, TOKENS, WIDTH = 8, 6, 4
torch.manual_seed(0)
WEIGHT, TABLE = torch.randn(WIDTH, WIDTH), torch.randn(TOKENS, TOKENS)
LSTM, GRU = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.GRU(WIDTH, WIDTH, batch_first=True)
TIME_FIRST = nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True)
QUERIES, PLACES = torch.randn(3, WIDTH), torch.randn(ROWS, 1, 1)
SQUARE, CELL = torch.randn(ROWS, WIDTH), nn.GRUCell(WIDTH, ROWS)


def _heads(x):
    return x.view(len(x), TOKENS, 2, WIDTH // 2).transpose(1, 2)


def _scores(x):
    q = _heads(x).reshape(-1, TOKENS, WIDTH // 2)
    scores = torch.bmm(q, q.transpose(1, 2)).view(len(x), 2, TOKENS, TOKENS) + TABLE
    return (scores.softmax(-1) @ _heads(x)).transpose(1, 2).reshape(x.shape)


def _turned_by_a_grid(x):
    grid = torch.stack([x[..., 0, None].expand(-1, -1, 2), x[..., 1, None].expand(-1, -1, 2)], -1).sin()
    return F.grid_sample(x[:, None], grid, align_corners=False)[:, 0]


def _windows(x):
    parts = x.view(len(x), 2, 3, WIDTH).permute(0, 2, 1, 3).contiguous().view(-1, 2, WIDTH)
    return (parts - parts.mean(1, keepdim=True)).view(len(x), 3, 2, WIDTH).permute(0, 2, 1, 3).reshape(x.shape)


INDEPENDENT = {
    "products": lambda x: F.gelu(F.layer_norm(x @ WEIGHT, (WIDTH,))) + x,
    "attention": lambda x: F.scaled_dot_product_attention(_heads(x), _heads(x), _heads(x)).transpose(1, 2).flatten(2),
    "attention by hand, with a table": _scores,
    "windows": _windows,
    "a mask of the tokens": lambda x: x.masked_fill(torch.ones(TOKENS, WIDTH).triu().bool(), 0.0),
    "joined, split, turned": lambda x: torch.cat([*x.chunk(2, -1)[::-1], x.roll(1, 1)], -1).flip(1),
    "reduced and spread": lambda x: x / x.norm(dim=(1, 2), keepdim=True) + x.amax(1)[:, None].expand(-1, TOKENS, -1),
    "stacked": lambda x: torch.stack([x, 2 * x], 0).unbind(0)[1].unsqueeze(0).squeeze(0),
    "written in place": lambda x: x.clone().mul_(2).add_(x),
    "convolved": lambda x: F.group_norm(F.conv2d(x[:, None], torch.ones(2, 1, 3, 3), padding=1), 2).flatten(1),
    "in the middle, and folded with the tokens": lambda x: (
        (x.transpose(0, 1).reshape(-1, WIDTH) @ WEIGHT).view(TOKENS, len(x), WIDTH)
    ).transpose(0, 1),
    "recurrent": lambda x: LSTM(x)[0] + GRU(x)[0],
    "recurrent, of one state for all": lambda x: LSTM(x, (torch.ones(1, 1, 4).expand(1, len(x), 4).contiguous(),) * 2)[
        0
    ],
    "queries for each": lambda x: QUERIES.expand(len(x), -1, -1) @ x.transpose(1, 2) @ x,
    "as many queries for each as rows": lambda x: SQUARE.expand(len(x), -1, -1) @ x.transpose(1, 2) @ x,
    "a state as wide as the batch is long": lambda x: CELL(x[:, 0], torch.zeros(len(x), ROWS)),
    "normalized by buffers": lambda x: F.batch_norm(x, torch.zeros(TOKENS), torch.ones(TOKENS)),
    "recurrent, time first": lambda x: TIME_FIRST(x.transpose(0, 1))[0].transpose(0, 1)[..., :WIDTH],
    "padded": lambda x: F.max_pool2d(F.pad(x, (1, 1))[:, None], 2),
    "mirrored, and enlarged": lambda x: F.pixel_shuffle(
        F.interpolate(F.pad(x, (1, 1), "reflect").unflatten(1, (2, 3)).repeat(1, 2, 1, 1), scale_factor=2), 2
    ),
    "light along rays": lambda x: torch.cumprod(1 - x.sigmoid(), 1) * x.cummax(1).values + x.logcumsumexp(-1),
    "a long convolution": lambda x: torch.fft.irfft(torch.fft.rfft(x, n=12, dim=1) * 2, n=12, dim=1)[:, :TOKENS],
    "gathered": lambda x: x.gather(1, x.argmax(1, keepdim=True)) + x.index_select(1, torch.tensor([0])),
    "in frames, by their median": lambda x: x.unfold(1, 3, 1).median(-1).values,
    "scattered": lambda x: torch.zeros_like(x).scatter(1, x.argsort(1), x).scatter_add(1, x.argsort(1), x),
    "of the best": lambda x: torch.zeros(len(x), TOKENS, WIDTH).scatter_(-1, x.topk(2, -1).indices, 1.0) * x,
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (2, 2)).contiguous()).conj().resolve_conj()
    ),
    "looked up": lambda x: F.embedding((x[..., 0] > 0).long(), WEIGHT) * x.tril(),
    "sampled at a grid": _turned_by_a_grid,
    "blocks of pixels": lambda x: F.unfold(x[:, None], 2),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_are_proven(name):
    x = torch.randn(ROWS, TOKENS, WIDTH)
    with proven_rows():
        found = ms.tile(size=2)(INDEPENDENT[name])(x)
    torch.testing.assert_close(found, INDEPENDENT[name](x))


@pytest.mark.parametrize("kind", ["ours", "PyTorch's"])
def test_a_block_is_proven_with_its_parameters(kind):
    block = TransformerBlock(16, dropout=0.0)
    if kind == "PyTorch's":  # its attention has the tokens first
        block = nn.TransformerEncoderLayer(16, 2, dropout=0.0, batch_first=True)
    x = torch.randn(ROWS, TOKENS, 16)
    with proven_rows():
        torch.testing.assert_close(ms.tile(size=2)(block)(x), block(x))


@pytest.mark.parametrize(("layer", "rows"), [(LSTM, 0), (GRU, 0), (TIME_FIRST, 1)], ids=["LSTM", "GRU", "time first"])
def test_a_recurrent_layer_is_proven_and_cut_with_its_states(layer, rows):
    x = torch.randn(ROWS, TOKENS, WIDTH)
    dims = {"in_dims": rows, "out_dims": (rows, 1 if layer is GRU else (1, 1))}
    with proven_rows():
        ms.tile(chunks=2, **dims)(layer)(x)
        with pytest.raises(ms.TransformError, match="not known to be made of the rows"):
            ms.tile(chunks=2, **dims | {"out_dims": 0})(layer)(x)  # states have the layers in front
    whole, pieces = layer(x), ms.tile(chunks=2, **dims)(layer)(x)
    torch.testing.assert_close(pieces, whole)
    gradients = [torch.autograd.grad(found[0].square().sum(), list(layer.parameters())) for found in (pieces, whole)]
    torch.testing.assert_close(*gradients)


COUPLED = {
    "softmax over them": lambda x: x.softmax(0),
    "normalized by all": lambda x: F.batch_norm(x, torch.zeros(TOKENS), torch.ones(TOKENS), training=True),
    "their mean": lambda x: x - x.mean(0),
    "a mean of all": lambda x: x - x.mean(),
    "one after the other": lambda x: x.cumsum(0),
    "neighbours": lambda x: x.roll(1, 0) + x,
    "sorted": lambda x: x.sort(0).values,
    "products of rows": lambda x: x.flatten(1) @ x.flatten(1).T @ x.flatten(1),
    "a view across them": lambda x: x.reshape(TOKENS, len(x), WIDTH).softmax(0).reshape(x.shape),
    "attention between them": lambda x: F.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).transpose(0, 1),
    "padded with rows": lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)),
    "repeated": lambda x: x.repeat(2, 1, 1)[: len(x)],
    "gathered from others": lambda x: x.gather(0, (x > 0).long()),
    "their frequencies": lambda x: torch.fft.fft(x, dim=0).abs(),
    "one after the other, with what is kept": lambda x: TIME_FIRST(x)[0],
    "states that are not theirs": lambda x: LSTM(x, (torch.ones(1, ROWS, 4)[:, : len(x)].contiguous(),) * 2)[0],
    "a table of their places, spread": lambda x: x + PLACES[: len(x)].expand(len(x), TOKENS, WIDTH),
    "a table of their places, joined": lambda x: torch.cat([x, PLACES[: len(x)].expand(len(x), 1, WIDTH)], 1),
    "a triangle of them": lambda x: x.transpose(0, -1).tril().transpose(0, -1),
    "where they are in the piece": lambda x: x + torch.arange(len(x))[:, None, None],
    "their number": lambda x: x + torch.ones(len(x), 1, 1).cumsum(0),
    "their number, in a square": lambda x: x + torch.ones(ROWS, len(x)).cumsum(1).t()[:, :TOKENS, None],
    "random numbers": lambda x: F.dropout(x, 0.5),
    "random rows": lambda x: x * torch.rand(len(x), 1, 1),
    "random attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[
        :, 0
    ],
    "chosen by value": lambda x: x[torch.argsort(x[:, 0, 0])],
    "put elsewhere": lambda x: torch.zeros_like(x).index_add(0, torch.arange(len(x)).flip(0), x),
    "what no rule speaks of": lambda x: x.renorm(2, 1, 1.0),
    "distances between them": lambda x: torch.cdist(x.flatten(1), x.flatten(1)),
    "scattered to others": lambda x: torch.zeros_like(x).scatter(0, (x > 0).long(), x),
    "one system of all": lambda x: torch.linalg.pinv(x.flatten(1)).mT.view_as(x),
    "folded with the tokens, and summed": lambda x: x.transpose(0, 1).reshape(-1, WIDTH).softmax(0).view_as(x),
    "folded, and left so": lambda x: x.transpose(0, 1).reshape(x.shape),
    "rows behind": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)[:, :2].transpose(0, 1).reshape(len(x), -1),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_rows_is_refused(name):
    with proven_rows(), pytest.raises(ms.TransformError, match=r"not known|cut"):
        ms.tile(size=2)(COUPLED[name])(torch.randn(ROWS, TOKENS, WIDTH))


NUMBERED = {
    "times their number": lambda x: x * len(x),
    "added by it": lambda x: torch.add(x, x, alpha=len(x)),
    "clamped by it": lambda x: x.clamp(max=1 / len(x)),
    "a tensor of it": lambda x: x * torch.tensor(float(len(x))),
    "turned by it": lambda x: x.roll(len(x), 1),
    "that token": lambda x: x + x.select(1, len(x) % TOKENS)[:, None],
    "another way for few": lambda x: x * 2.0 if len(x) > ROWS - 1 else x * 2.0 * 1.0,
}


@pytest.mark.parametrize("name", NUMBERED)
def test_what_computes_with_their_number_is_refused(name):
    with proven_rows(), pytest.raises(ms.TransformError, match="how many rows there are"):
        ms.tile(size=2)(NUMBERED[name])(torch.randn(ROWS, TOKENS, WIDTH))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad / len(grad)


def test_a_backward_of_the_users_own_is_refused():
    x = torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True)
    with proven_rows(), pytest.raises(ms.TransformError, match="_Backward"):
        ms.tile(size=2)(lambda x: _Backward.apply(x * 3) + 1)(x)
    before = _Backward.apply(x)  # outside of the region
    with proven_rows():
        ms.tile(size=2)(INDEPENDENT["products"])(before)


class _Share(nn.Linear):
    def forward(self, x):
        return super().forward(x) / x.shape[0]


def test_a_projection_that_computes_with_the_number_of_rows_is_not_lazy():
    x, head = torch.randn(6, WIDTH), _Share(WIDTH, 5)
    assert type(ms.tile(chunks=2)(nn.Linear(WIDTH, 5))(x)) is not torch.Tensor
    assert type(ms.tile(size=1)(head)(x)) is torch.Tensor
    with pytest.raises(ms.TransformError, match="other numbers than its two halves"):
        ms.tile(chunks=2)(head)(x)


class _Hooked(nn.Module):
    def forward(self, x):
        y = F.gelu(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad / len(grad))
        return y


def test_a_hook_on_a_gradient_is_refused():
    with proven_rows(), pytest.raises(ms.TransformError, match="hook"):
        ms.tile(size=2)(_Hooked())(torch.randn(ROWS, TOKENS, WIDTH, requires_grad=True))


class _Block(nn.Module):
    def __init__(self, coupled, numbered=False):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.dim = 0 if coupled else 1
        self.numbered = numbered

    def forward(self, x):
        if self.numbered:
            return x + self.down(F.gelu(self.up(x / len(x))))
        return x + self.down(F.gelu(self.up(x)).softmax(self.dim)) / math.sqrt(2)


def test_a_plan_cuts_whole_blocks_only_where_rows_are_independent(monkeypatch, tmp_path):
    """Nor does one from disk: the steps of the first two have the same trace."""
    monkeypatch.setenv("MEMSCALE_CACHE", str(tmp_path))
    assert _tiles(_planned(coupled=False))
    for coupled, refusal in ((True, "not known to compute each row"), (False, "how many rows there are")):
        engine = _planned(coupled, numbered=not coupled)
        assert not _tiles(engine)
        assert any(refusal in reason for reason in engine.searches.own[0].costs.rejected.values())


def _tiles(engine):
    return any("tile" in repr(rule.transform) for rule in engine.smallest())


def _planned(coupled, numbered=False):
    return ms.DecisionEngine(
        nn.Sequential(_Block(coupled, numbered)),
        torch.ones(4, 32, 32),
        loss=lambda y, _: y.square().mean(),
        hardware="cpu",
        config=ms.Config(mode="aggressive"),
    )
