"""cuDNN's RNNs on a simulated card: against what a real one saved and took."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

import memscale as ms
from memscale.simulation.allocator.block_pool import round_up
from memscale.simulation.rules import recurrences
from memscale.simulation.rules.recurrences import RNN, RNN_BACKWARD, Recurrence, reserve_bytes
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.rule import Result
from tests.support.kernels import cuda_program

H100 = (9, 0)
RESULTS = json.loads((Path(__file__).parents[3] / "benchmarks/results/cudnn-rnns.json").read_text())
MEASURED, PROJECTED = RESULTS["rows"], RESULTS["projections"]
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
MODES = {"lstm": 2, "gru": 3, "rnn": 1}


def network(row, **options):
    shape = row["input"], row["hidden"], row["layers"]
    kind = KINDS[row["mode"]]
    projection = {"proj_size": row["projection"]} if row.get("projection") else {}
    return kind(*shape, bidirectional=row["bidirectional"], batch_first=True, **projection, **options)


def arguments(row, *, flat=None):
    """Of ``_cudnn_rnn`` for a measured network, as its module calls it."""
    with torch.device("meta"):
        module = network(row, dtype=getattr(torch, row["dtype"]))
        data = torch.empty(row["batch"], row["steps"], row["input"], dtype=module.weight_ih_l0.dtype)
        layers, projection = row["layers"] * (1 + row["bidirectional"]), row.get("projection", 0)
        states = [data.new_empty(layers, row["batch"], width) for width in (projection or row["hidden"], row["hidden"])]
    cx = states[1] if row["mode"] == "lstm" else None
    flat = row["dtype"] != "bfloat16" if flat is None else flat
    weights = [weight.data for weight in module.parameters()]
    options = row["layers"], True, 0.0, True, row["bidirectional"], [], None
    first = data, weights, 5 if projection else 4, weights[0] if flat else None, states[0], cx
    return *first, MODES[row["mode"]], row["hidden"], projection, *options


def blocks(*tensors):
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(round_up(nbytes, 512) for nbytes in storages.values())


def most_with(results, op, args):
    """The most bytes that a kernel holds at once, with `results`, which it takes one by one or all at once."""
    held = most = 0
    rest = dict(enumerate(results))
    for step in cuda_program(str(op), args, None, H100):
        if isinstance(step, Result):
            held += blocks(*flat([rest.pop(step.place, None)]))
        elif step:
            held += round_up(abs(step), 512) * (1 if step > 0 else -1)
        else:
            held += blocks(*flat(rest.values()))
            rest.clear()
        most = max(most, held)
    return most


def flat(results):
    return [each for each in tree_leaves(list(results)) if isinstance(each, torch.Tensor)]


def forward(args):
    """What is held after a call, and at most in it."""
    output, hy, cy, reserve, weights = rule_of(RNN).results(*args)
    states = blocks(args[4]) * (1 if args[5] is None else 2)  # the module makes them
    weights = [weights] if args[3] is None else []
    kept = blocks(output, reserve, *weights)
    made = output, hy, cy if args[5] is not None else None, reserve, *weights
    return states + kept, states + most_with(made, RNN, args)


def backward(args):
    """The most bytes of a backward pass, of a gradient that lies as the output does, beside what is held."""
    output, *_, reserve, weights = rule_of(RNN).results(*args)
    given = *args[:3], weights, *args[4:6], output, output, None, None, *args[6:], reserve, (True,) * 4
    return blocks(output) + most_with(rule_of(RNN_BACKWARD).results(*given), RNN_BACKWARD, given)


def test_reserves_and_peaks_are_those_of_measured_networks():
    for row in MEASURED + PROJECTED:
        assert reserve_bytes(Recurrence.of(arguments(row))) == row["reserve"], row
    for row in MEASURED:
        held, peak = forward(arguments(row))
        # A block of which less than 1 MiB is left is not split, and counts whole; beside it peaks are off by 33 kB.
        assert held <= row["held"] < held + (1 << 20), row
        assert -(1 << 20) < peak - row["forward_peak"] <= 1 << 15, row
        assert -(1 << 20) < held + backward(arguments(row)) - row["backward_peak"] <= 1 << 15, row


SEEN = io.StringIO()  # a simulation puts back what it finds in modules, lists and dicts


class Watched(nn.Module):
    """Takes note of what autograd saves in a recurrent network, as the measurement did: one entry a storage."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *inputs):
        saved = {}

        def pack(tensor):
            saved.setdefault(tensor.untyped_storage()._cdata, (str(tensor.dtype)[6:], list(tensor.shape)))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self.module(*inputs)[0]
        SEEN.seek(0)
        SEEN.truncate()
        json.dump(list(saved.values()), SEEN)
        return output


def profiled(module, *inputs, hardware="h100", plan=None):
    """The profile of a step, and what it saved by dtype and shape."""
    plan = None if plan is None else ms.Plan(plan)
    loss = lambda output, _: output.float().sum()  # noqa: E731
    profile = ms.profile(Watched(module), inputs, loss=loss, hardware=hardware, plan=plan)
    return profile, sorted((dtype, tuple(shape)) for dtype, shape in json.loads(SEEN.getvalue()))


@pytest.mark.parametrize(
    "row", [row for row in MEASURED if "saved" in row], ids=lambda row: f"{row['mode']}-{row['dtype']}-{row['layers']}"
)
def test_saved_tensors_are_those_of_the_card(row):
    dtype = getattr(torch, row["dtype"])
    with torch.device("meta"):
        module, x = network(row, dtype=dtype), torch.empty(row["batch"], row["steps"], row["input"], dtype=dtype)
    _, saved = profiled(module, x)
    expected = [(name, tuple(shape)) for name, shape in row["saved"]]
    if row["dtype"] == "float32":  # all weights lie in one storage, which was seen as the first of them
        expected.remove(("float32", (sum(weight.numel() for weight in module.parameters()),)))
        expected.append(("float32", tuple(module.weight_ih_l0.shape)))
    assert saved == sorted(expected)


class Packed(nn.Module):
    def __init__(self, *, bias):
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, bias=bias, dtype=torch.bfloat16)

    def forward(self, x):
        packed, state = self.lstm(pack_padded_sequence(x, torch.tensor([9, 5, 2])))
        return packed.data, state


@pytest.mark.parametrize("bias", [True, False])
def test_packed_sequences_keep_no_padding(bias):
    profile, saved = profiled(Packed(bias=bias), torch.ones(9, 3, 8, dtype=torch.bfloat16))
    assert profile.method == "static"
    assert ("uint8", (256 + (9 + 5 + 2) * 16 * 2 * (2 * 5 + 1),)) in saved
    # The copy of the weights has room for biases in any case.
    assert ("bfloat16", (4 * 16 * (8 + 16 + 2) + 4 * 16 * (16 + 16 + 2),)) in saved


class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(8, 16)

    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output, state = self.gru(x)
        assert output.dtype == state.dtype == torch.float16
        return output, state


def test_autocast_runs_them_in_float16():
    _, saved = profiled(Cast(), torch.ones(9, 3, 8))
    assert ("uint8", (256 + 9 * 3 * 16 * 2 * 6,)) in saved


def test_autocast_of_a_packed_sequence_takes_what_it_takes_on_a_card(monkeypatch):
    """What its rows are packed from, and the states of dropout before the narrow weights; `benchmarks/_zoo.py` has it.

    The fake libraries of tests/ghost, which said so, give cuDNN 8 MiB to work in.
    """
    monkeypatch.setattr(recurrences, "workspace_bytes", lambda call, *, backward=False: 8 << 20)

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(4000, 128), nn.Linear(256, 1000)
            self.rnn = nn.LSTM(128, 256, 2, batch_first=True, dropout=0.1)

        def forward(self, tokens):
            with torch.autocast("cuda", torch.bfloat16):
                lengths = torch.arange(64, 0, -2, device="cpu")
                packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True)
                return self.head(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])

    def loss(y, tokens):
        return F.cross_entropy(y[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    with torch.device("meta"):
        model, tokens = Tagger(), torch.randint(3, 1000, (32, 64))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    found = ms.profile(model, tokens, keeps_output=False, optimizer=optimizer, loss=loss, hardware="rtx-4090")
    assert (found.peak_bytes, found.reserved_peak_bytes) == (79502336, 104857600)


@pytest.mark.parametrize("plan", [None, {"module": ms.checkpoint()}], ids=["plain", "checkpoint"])
def test_dropout_leaves_the_states_of_its_generators_once(plan):
    # Also where a checkpoint draws in backward, too, whose thread has handles of its own.
    peaks = [profiled(nn.LSTM(8, 16, 2, dropout=p), torch.ones(9, 3, 8), plan=plan)[0].peak_bytes for p in (0.0, 0.5)]
    assert peaks[1] - peaks[0] == 132 * 1024 * 48


@pytest.mark.parametrize(("dtype", "cudnn"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_recurrence_without_cudnn_is_refused(dtype, cudnn, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "enabled", cudnn)
    with torch.device("meta"):
        model, x = nn.LSTM(64, 96).to(dtype), torch.randn(40, 16, 64, dtype=dtype)
    with pytest.raises(ms.ConfigError, match=r"runs this LSTM in .* cell after cell.*: train in float32 or float16"):
        ms.profile(model, x, loss=lambda y, _: y[0].float().mean(), hardware="t4")
