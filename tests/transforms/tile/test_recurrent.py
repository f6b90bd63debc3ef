"""Recurrent layers and attention are cut over their batch, not their steps: sizes do not tell a step from a row."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import memscale as ms

STEPS, ROWS, WIDTH = 6, 4, 5
OVER_ROWS = [
    (True, {"in_dims": (0,), "out_dims": (0, (1, 1))}, False),
    (True, {"in_dims": (0, (1, 1)), "out_dims": (0, 1)}, True),
    (False, {"dim": 1}, True),
    (False, {"in_dims": 1, "out_dims": (1, (1, 1))}, False),
]


def _inputs(batch_first):
    torch.manual_seed(0)
    x = torch.randn((ROWS, STEPS, 3) if batch_first else (STEPS, ROWS, 3), requires_grad=True)
    return x, tuple(torch.randn(4, ROWS, width, requires_grad=True) for width in (2, WIDTH))


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize(("batch_first", "dims", "given"), OVER_ROWS)
def test_over_the_batch_the_numbers_are_the_same(batch_first, dims, given):
    layer = nn.LSTM(3, WIDTH, num_layers=2, bidirectional=True, proj_size=2, batch_first=batch_first)
    x, states = _inputs(batch_first)
    leaves = [x, *(states if given else ()), *layer.parameters()]
    found = []
    for run in (layer, ms.transform(layer, {"": ms.tile(chunks=3, **dims)})):
        out, (hidden, cells) = run(x, states) if given else run(x)
        loss = out.square().sum() + hidden.sin().sum() + cells.cos().sum()
        found.append([out, hidden, cells, *torch.autograd.grad(loss, leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrence_cut_in_its_steps_is_refused(kind, batch_first):
    """Pieces of one step were joined with the states of one layer, in silence."""
    layer = kind(3, WIDTH, batch_first=batch_first)
    fit = ms.transform(layer, {"": ms.tile(size=1)})
    with pytest.raises(ms.TransformError, match=r"say in_dims=\([01],\), out_dims=\([01], (1|\(1, 1\))\)"):
        fit(_inputs(batch_first)[0])
    with pytest.raises(ms.TransformError, match="no batch"):
        fit(torch.randn(STEPS, 3))


def test_packed_sequences_are_refused_where_they_go_in_and_come_out():
    rows = [torch.randn(length, 3) for length in (3, 2)]
    with pytest.raises(ms.TransformError, match="PackedSequence, which stores rows step by step"):
        ms.tile(chunks=2)(nn.GRU(3, WIDTH))(pack_sequence(rows))
    with pytest.raises(ms.TransformError, match="PackedSequence"):
        ms.tile(chunks=2)(lambda x: (x, pack_sequence(list(x))))(torch.randn(4, 2, 3))


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_is_cut_over_its_batch_or_its_queries(batch_first):
    """`batch_first` is False by default, and the pieces of a cut sequence did not see each other, in silence."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
    x, wrong = torch.randn(STEPS, ROWS, 8), int(batch_first)
    for module, args in (
        (layer, (x,)),
        (layer.self_attn, (x, x, x)),
        (nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (x,)),
    ):
        with pytest.raises(ms.TransformError, match=rf"cut the batch, tile\(dim={1 - wrong}"):
            ms.transform(module, {"": ms.tile(chunks=2, dim=wrong)})(*args)
        with pytest.raises(ms.TransformError, match="use checkpoint"):
            ms.transform(module, {"": ms.tile(chunks=2)})(*[each[0] for each in args])
    over = {
        layer: (ms.tile(chunks=2, dim=1 - wrong), (x,)),
        layer.self_attn: (ms.tile(chunks=2, in_dims=(wrong, *[None] * 4), out_dims=wrong), (x, x, x, None, False)),
    }
    for module, (how, args) in over.items():
        found, wanted = ms.transform(module, {"": how})(*args), module(*args)
        torch.testing.assert_close(found, wanted)
