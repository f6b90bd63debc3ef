"""Pieces are joined only if they are of one kind: `copy_` and `+` would cast and broadcast, where `cat` raises."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import tile
from memscale.core import internals

ONE_ROW = torch.tensor([[1.0], [2.0], [3.0]])


def wider(x):
    """The second piece in another type."""
    return x.double() if len(x) == 1 else x


CASES = {
    "size": (
        tile(size=2),
        lambda x: x.expand(-1, len(x)),
        r"output 0 of one piece is float32\[\*, 2\] on cpu and that of another ",
    ),
    "dtype": (tile(size=2), wider, r"float32\[\*, 1\] on cpu and that of another float64\[\*, 1\] on cpu"),
    "a dimension less": (
        tile(size=2),
        lambda x: x if len(x) == 2 else x[:, 0],
        r"float32\[\*, 1\] on cpu and that of another float32\[\*\] on cpu",
    ),
    "reduced size": (
        tile(size=2, reduce="sum"),
        lambda x: torch.stack([x.T * x] * 5),
        r"float32\[5, 2, 2\] .* float32\[5, 1, 1\]",
    ),
    "reduced dtype": (tile(size=2, reduce="sum"), lambda x: wider(x).sum(), r"float32\[\] .* float64\[\]"),
    "out_dims": (tile(size=2, out_dims=-1), lambda x: x.T.expand(len(x), -1), r"float32\[2, \*\] .* float32\[1, \*\]"),
}


@pytest.mark.parametrize("mode", ["eager", "torch.func", "kept"])
@pytest.mark.parametrize(("how", "fn", "message"), CASES.values(), ids=CASES)
def test_pieces_of_another_kind_are_refused(how, fn, message, mode):
    if mode == "kept":
        how = tile(size=2, out_dims=how.out_dims, reduce=how.reduce, recompute=False)
    run = torch.func.grad(lambda x: how(fn)(x).sum()) if mode == "torch.func" else how(fn)
    with pytest.raises(ms.TransformError, match=rf"{message}|is float32\[.*\] and that of its half float32\["):
        run(ONE_ROW)


def test_pieces_of_one_kind_may_be_of_any_length():
    """Two rows out for each row in: joined along the given dimension, in whatever length they come."""
    fn = lambda x: x.repeat_interleave(2, 0)  # noqa: E731
    torch.testing.assert_close(tile(size=2, out_dims=0)(fn)(ONE_ROW), fn(ONE_ROW), rtol=0, atol=0)


def test_another_length_is_no_other_graph():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    region = tile(chunks=2)(torch.tanh)
    fn = torch.compile(lambda x: region(region(x)), backend=backend, fullgraph=True, dynamic=True)
    for rows in (6, 8, 12, 20):
        x = torch.randn(rows, 3)
        assert torch.equal(fn(x), x.tanh().tanh())
    assert len(graphs) == 1


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.skipif(internals.TORCH_VERSION < (2, 12), reason="Dynamo of 2.10 cannot trace it, with a clear error")
def test_floats_that_the_compiler_keeps_open():
    """Each piece has a body of its own, and all of them read the epsilon and what they are called with."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.scale = torch.nn.LayerNorm(4), 0.5

        def forward(self, x, factor):
            return self.norm(x) * self.scale * factor

    block = Block()
    fit = ms.transform(block, {"": tile(chunks=2)})
    fn = torch.compile(fit, backend="aot_eager", fullgraph=True, dynamic=True)
    for x, factor in ((torch.randn(4, 4), 0.1), (torch.randn(7, 4), 0.2)):
        assert torch.equal(fn(x, factor), block(x, factor))
    assert not torch._dynamo.config.specialize_float


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    ("fn", "dim"),
    [
        (nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last), 0),
        (lambda x: torch.tanh(x).transpose(1, 3), 0),
        (lambda x: torch.tanh(x).permute(2, 0, 1, 3), 1),
        (lambda x: torch.tanh(x)[..., :1].expand(-1, -1, -1, 3), 0),
    ],
    ids=["channels_last", "transposed", "rows inside", "expanded"],
)
def test_the_dimensions_of_an_output_lie_in_memory_as_without_tile(fn, dim, recompute):
    """So that a view of the output, such as ``permute(0, 2, 3, 1).flatten(1)``, works as it does without `tile`."""
    x = torch.randn(4, 4, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    plain, tiled = fn(x), tile(size=2, out_dims=dim, recompute=recompute)(fn)(x)
    torch.testing.assert_close(tiled, plain)
    if 0 in plain.stride():
        assert tiled.is_contiguous()
    else:
        assert tiled.stride() == plain.stride()
