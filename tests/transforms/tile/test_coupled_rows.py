"""A region that couples its rows is refused before it returns other numbers; one that does not is left alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from memscale import tile

SEQUENCE = {"in_dims": 1, "out_dims": 1}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Convolution(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.inner = nn.Conv1d(8, 8, **kwargs)

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Recurrence(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(8, 8)

    def forward(self, x):
        return self.inner(x)[0]


def contrast(x):
    z = F.normalize(x, dim=-1)
    return torch.softmax(z @ z.transpose(-1, -2), -1) @ x


def clipped(x):
    most = torch.where(torch.isinf(x).any(), 1.0, 2.0)
    return torch.clamp(x, -most, most)


def in_loops(x):
    return torch.cat([torch.sin(part) for part in x.split(2)])


def energy_and_force(x):
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(z.square().sum(), z)
    return x * force


def first_row_set(x):
    found = x.sin()
    found[0] = 0
    return found


def deviation(x):
    x = x - x.mean(0)
    return x


class Doubles(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner.double()

    def forward(self, x):
        return self.inner(x.double()).to(x.dtype)


class Steps(nn.Module):
    """A recurrence written as a loop over the first dimension."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8)

    def forward(self, x):
        state, states = torch.zeros_like(x[0]), []
        for step in x.unbind(0):
            state = self.cell(step, state)
            states.append(state)
        return torch.stack(states)


def each_by_number(x):
    found = torch.empty_like(x)
    for at in range(len(x)):
        found[at] = torch.sin(x[at] / x[at].norm())
    return found


def halves(x):
    """Queries and keys that were stacked in front of the rows are all rows, not some."""
    query, key = torch.cat([x, 2 * x]).view(2, *x.shape).flatten(0, 1).chunk(2)
    return query * key


def own_entries(x):
    """The numbers of the rows as an index of entries of each row."""
    kept = x.flatten(1)
    return kept.flatten()[torch.arange(len(x)).mul(kept.shape[1]).unsqueeze(1) + x.argmax(-1) % 8]


class Positions(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.table = nn.Embedding(8, 8)

    def forward(self, x):
        found = self.table(torch.arange(x.shape[self.dim]))
        return x + (found if self.dim else found.unsqueeze(1))


COUPLED = {
    "softmax": ({}, lambda: lambda x: torch.softmax(x, 0)),
    "cumulative sum": (SEQUENCE, lambda: lambda x: x.cumsum(1)),
    "sort": ({}, lambda: lambda x: x.sort(dim=0).values),
    "roll": (SEQUENCE, lambda: lambda x: x.roll(1, 1)),
    "flip": ({}, lambda: lambda x: x.flip(0)),
    "fourier": (SEQUENCE, lambda: lambda x: torch.fft.fft(x, dim=1).real),
    "mean": ({}, lambda: deviation),
    "maximum": ({}, lambda: lambda x: x / x.abs().max()),
    "median of all": ({}, lambda: lambda x: (x > x.flatten().median()) * x),
    "scaled by a sum": ({"reduce": "sum"}, lambda: lambda x: (x / x.sum()).square().sum()),
    "contrast": ({}, lambda: lambda x: contrast(x.flatten(1))),
    "product of rows": ({}, lambda: lambda x: torch.addmm(torch.ones(()), x.flatten(1), x.flatten(1).T)),
    "attention": (SEQUENCE, Attention),
    "convolution": (SEQUENCE, lambda: Convolution(kernel_size=3, padding=1)),
    "norm": (SEQUENCE, lambda: lambda x: F.layer_norm(x, x.shape[1:])),
    "recurrence": ({}, Recurrence),
    "steps": ({}, Steps),
    "recurrence in float64": ({}, lambda: Doubles(Recurrence())),
    "first row": ({}, lambda: lambda x: x - x[:1]),
    "last row": (SEQUENCE, lambda: lambda x: x * x[:, -1].unsqueeze(1)),
    "differences": (SEQUENCE, lambda: lambda x: F.pad(x[:, 1:] - x[:, :-1], (0, 0, 0, 1))),
    "token shift": (SEQUENCE, lambda: lambda x: x + F.pad(x, (0, 0, 1, -1))),
    "rolled by hand": ({}, lambda: lambda x: torch.cat([x[1:], x[:1]])),
    "shifted": ({}, lambda: lambda x: x + torch.cat([torch.zeros_like(x[:1]), x[:-1]])),
    "rolled through all": ({}, lambda: lambda x: x.roll(1)),
    "sums as the result": ({}, lambda: lambda x: torch.ones(len(x), len(x)).tril() @ x.flatten(1)),
    "most frequent": ({}, lambda: lambda x: x * x.mode(0).values),
    "largest of all": ({}, lambda: lambda x: x * x.argmax(0)),
    "histogram": ({}, lambda: lambda x: x * torch.histc(x, 4)[0]),
    "weights over the rows": ({}, lambda: lambda x: x.flatten(1) * (torch.ones(len(x)) @ x.flatten(1))),
    "dot": ({}, lambda: lambda x: x * torch.dot(x[:, 0, 0], x[:, 0, 1])),
    "trace": ({}, lambda: lambda x: x * x[:, 0].trace()),
    "diagonal": ({}, lambda: lambda x: x * x[:, :, 0].diagonal().sum()),
    "triangle": ({}, lambda: lambda x: x.flatten(1).triu()),
    "singular values": ({}, lambda: lambda x: x * torch.linalg.svdvals(x.flatten(1)).sum()),
    "limited norms": ({}, lambda: lambda x: x.renorm(2, 1, 1.0)),
    "first row set": ({}, lambda: first_row_set),
    "distances": ({}, lambda: lambda x: torch.cdist(x.flatten(1), x.flatten(1)) @ x.flatten(1)),
    "windows": (SEQUENCE, lambda: lambda x: F.pad(x.unfold(1, 3, 1).sum(-1), (0, 0, 0, 2))),
    "pools": (SEQUENCE, lambda: lambda x: F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)),
    "resized": (SEQUENCE, lambda: lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2.0, mode="linear").mT),
    "numbers of rows": ({}, lambda: lambda x: x * torch.arange(len(x)).view(-1, 1, 1)),
    "the first rows alone": ({}, lambda: lambda x: torch.where((torch.arange(len(x)) < 1).view(-1, 1, 1), x, 0.0)),
    "positions": (SEQUENCE, lambda: Positions(1)),
    "pairs": ({}, lambda: lambda x: torch.cat([x[::2] * x[1::2]] * 2)),
}
APART = {
    "softmax": ({}, lambda: lambda x: torch.softmax(x, 1)),
    "attention": ({}, Attention),
    "convolution": ({}, lambda: Convolution(kernel_size=3, padding=1)),
    "pools": (SEQUENCE, lambda: lambda x: F.avg_pool1d(x, 2).repeat_interleave(2, -1)),
    "distances": ({}, lambda: lambda x: torch.cdist(x, x)),
    "nearest": (SEQUENCE, lambda: lambda x: F.interpolate(x.transpose(1, 2), scale_factor=1.0).transpose(1, 2)),
    "sum of products": ({}, lambda: lambda x: torch.addbmm(x[:, 0], x.transpose(0, 1), x.new_ones(6, 8, 8))),
    "largest of each": ({}, lambda: lambda x: x * x.argmax(-1, keepdim=True)),
    "singular values": ({}, lambda: lambda x: x * torch.linalg.svdvals(x).sum(-1)[:, None, None]),
    "patches": (SEQUENCE, lambda: Convolution(kernel_size=1)),
    "merged": ({}, lambda: lambda x: torch.softmax(x.flatten(0, 1), 1).view(x.shape)),
    "norm": (SEQUENCE, lambda: nn.LayerNorm(8)),
    "mask of ones": (SEQUENCE, lambda: lambda x: x * torch.ones(x.shape[1]).unsqueeze(1)),
    "clipped where a number is infinite": ({}, lambda: clipped),
    "loops over rows": ({}, lambda: in_loops),
    "rows one by one": ({}, lambda: each_by_number),
    "stacked rows": ({}, lambda: lambda x: torch.stack([torch.cat([row, 2 * row]) for row in x.sin()])),
    "halves": ({}, lambda: halves),
    "padded": (SEQUENCE, lambda: lambda x: F.pad(x, (0, 0, 0, 2)).exp()[:, : x.shape[1]]),
    "steps along another dimension": (SEQUENCE, Steps),
    "positions along another dimension": ({}, lambda: Positions(1)),
    "positions of another dimension": (SEQUENCE, lambda: Positions(0)),
    "as many numbers as rows": ({}, lambda: lambda x: (x.unflatten(2, (-1, 2)) * torch.arange(2.0)).flatten(2)),
    "own entries": ({}, lambda: own_entries),
    "tiles inside": ({}, lambda: tile(chunks=2)(nn.Linear(8, 8))),
    "gradients of a sum": ({}, lambda: energy_and_force),
    "mean as the result": ({"reduce": "mean"}, lambda: lambda x: x.square().mean()),
    "sparse weights": ({}, lambda: lambda x: (torch.eye(8).to_sparse() @ x.flatten(0, 1).T).T.view(x.shape)),
    "sparse rows": ({}, lambda: lambda x: (x.flatten(1).to_sparse() * x.flatten(1)).to_dense()),
    "gram": ({"reduce": "sum"}, lambda: lambda x: x.flatten(1).T @ x.flatten(1)),
}


def given():
    return torch.linspace(-1, 1, 4 * 6 * 8).sin().view(4, 6, 8)


@pytest.mark.parametrize("mode", ["eager", "torch.func"])
@pytest.mark.parametrize(("how", "make"), COUPLED.values(), ids=COUPLED)
def test_a_region_that_couples_its_rows_is_refused_in_the_first_call(how, make, mode):
    if mode == "torch.func" and make in (Recurrence, Attention):
        pytest.skip("torch.func refuses the recurrence itself, and runs the projection of attention in other operators")
    fn = make()
    run = tile(chunks=2, **how)(fn)
    if mode == "torch.func":
        run = torch.func.grad(lambda x: tile(chunks=2, **how)(fn)(x).sum())
    with pytest.raises(ms.TransformError, match="its own rows, which gives other numbers"):
        run(given())


# Of one row alone, a part of the rows looks like the row itself, and views do not show where the row is.
UNSEEN = [
    "steps",
    "recurrence in float64",
    "first row",
    "last row",
    "differences",
    "token shift",
    "rolled by hand",
    "shifted",
    "numbers of rows",
    "the first rows alone",
    "positions",
    "pairs",
    "median of all",
    "attention",
    "windows",
    "pools",
    "first row set",
]


@pytest.mark.parametrize("name", [name for name in COUPLED if name not in UNSEEN])
def test_pieces_of_one_row_are_watched_too(name):
    how, make = COUPLED[name]
    with pytest.raises(ms.TransformError, match="its own rows, which gives other numbers"):
        tile(size=1, **how)(make())(given())


def test_a_region_is_watched_again_in_the_first_pieces_of_several_rows():
    run = tile(chunks=2)(Steps())
    run(given()[:2])  # in pieces of one row, of which a loop over the rows shows nothing
    with pytest.raises(ms.TransformError, match="its own rows, which gives other numbers"):
        run(given())


@pytest.mark.parametrize(("how", "make"), APART.values(), ids=APART)
@pytest.mark.parametrize("pieces", [{"chunks": 2}, {"size": 1}], ids=["several", "one"])
def test_a_region_that_treats_each_row_alone_runs_in_pieces(how, make, pieces):
    torch.manual_seed(0)
    fn = make()
    torch.testing.assert_close(tile(**pieces, **how)(fn)(given()), fn(given()))
