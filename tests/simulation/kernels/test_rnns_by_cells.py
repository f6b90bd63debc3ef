"""Recurrences that a card runs without cuDNN: held against the allocator of the CUDA build of torch 2.13."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import memscale as ms
from memscale.simulation.kernels.cuda_rnns import by_cells
from memscale.simulation.rules.recurrences import MODES
from tests.support.coverings import in_turn

LENGTHS = tuple(range(40, 8, -2))


class Tagger(nn.Module):
    def __init__(self, kind, *, packs=False, **options):
        super().__init__()
        self.rnn, self.packs = kind(64, 96, 2, batch_first=True, **options), packs
        states = self.rnn.proj_size or self.rnn.hidden_size
        self.head = nn.Linear(states * (1 + self.rnn.bidirectional), 50)

    def forward(self, x):
        if not self.packs:
            return self.head(self.rnn(x)[0])
        packed = pack_padded_sequence(x, torch.tensor(LENGTHS, device="cpu"), batch_first=True)
        return self.head(pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])


# Of `torch.cuda.max_memory_allocated()` in the third step with a fake T4, see tests/ghost, with which each
# reserved peak agreed to the byte, too: in bfloat16, and in float32 where cuDNN is turned off.
CASES = {
    "lstm": ({"kind": nn.LSTM, "dropout": 0.1}, 22370304, 26991104),
    "both ways": ({"kind": nn.LSTM, "bidirectional": True, "bias": False}, 27271680, 37155840),
    "projected": ({"kind": nn.LSTM, "proj_size": 48}, 22018560, 26347520),
    "packed": ({"kind": nn.GRU, "packs": True, "bidirectional": True, "dropout": 0.1}, 23733760, 29886464),
    "tanh": ({"kind": nn.RNN, "bidirectional": True}, 19345920, 21014528),
}


@pytest.mark.parametrize(("case", "cudnn"), in_turn(CASES, [True, False]))
def test_a_step_without_cudnn_takes_what_it_takes_on_a_card(case, cudnn, monkeypatch):
    options, *expected = CASES[case]
    monkeypatch.setattr(torch.backends.cudnn, "enabled", cudnn)
    dtype = torch.bfloat16 if cudnn else torch.float32
    with torch.device("meta"):
        model, x = Tagger(**options).to(dtype), torch.randn(16, 40, 64, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    found = ms.profile(
        model, x, keeps_output=False, optimizer=optimizer, loss=lambda y, _: y.float().square().mean(), hardware="t4"
    )
    assert found.peak_bytes == expected[not cudnn]
    assert not any("cuDNN" in note for note in found.notes)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("packs", [False, True])
def test_the_cells_are_those_of_the_layer(packs, bidirectional):
    rnn = nn.RNN(8, 16, 2, batch_first=True, bidirectional=bidirectional)
    x, lengths = torch.randn(3, 5, 8), torch.tensor([5, 4, 2])
    data = pack_padded_sequence(x, lengths, batch_first=True) if packs else x
    output, last = rnn(data)
    found, last_found = by_cells(
        data.data,
        data.batch_sizes.tolist() if packs else [],
        [torch.zeros(2 * (1 + bidirectional), 3, 16)],
        rnn._flat_weights,
        mode=MODES["rnn_tanh"],
        has_biases=True,
        dropout=0.0,
        bidirectional=bidirectional,
        batch_first=not packs,
    )
    torch.testing.assert_close(found, output.data)
    torch.testing.assert_close(last_found, last)
