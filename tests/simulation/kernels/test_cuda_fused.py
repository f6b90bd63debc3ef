"""What a CUDA device runs otherwise than a CPU: held against the allocator of the CUDA build of torch 2.13."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.simulation.kernels.cuda_fused import cuda_fused


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.norm = nn.LSTMCell(96, 256), nn.GRUCell(256, 256), nn.RMSNorm(256)

    def forward(self, steps):
        hidden, state, sums = None, None, []
        for x in steps:
            hidden = self.lstm(x, hidden)
            state = self.gru(self.norm(hidden[0]), state)
            sums.append(state)
        return torch.stack(sums)


class Channels(nn.Module):
    """cuDNN's batch norm gets the channels last but one in a copy, which stays for backward."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)

    def forward(self, x):
        return self.outer(self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2))


class Counts(nn.Module):
    """A histogram of integers, which a CPU does not have, decides how many rows there are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        counts = torch.histc(torch.arange(x.shape[0], device=x.device, dtype=torch.int32) % 4, bins=4, min=0, max=3)
        return self.linear(x[: int(counts[0])])


class Autocast(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            return self.inner(x)


# What `torch.cuda.max_memory_allocated()` said of the third step with an A100's stand-ins: see tests/ghost.
@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (Cells, (24, 64, 96), 77129728),
        (lambda: Autocast(Cells()), (24, 64, 96), 59835392),
        (Channels, (8, 512, 64), 25536000),
        (Counts, (4096, 64), 19450368),
    ],
    ids=["cells", "autocast", "batch-norm", "histogram"],
)
def test_a_step_takes_what_it_takes_on_a_card(model, shape, expected):
    with torch.device("meta"):
        model, x = model(), torch.randn(shape)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    found = ms.profile(model, x, optimizer=optimizer, loss=lambda y, _: y.float().square().mean(), hardware="a100-80")
    assert found.peak_bytes == expected


# PyTorch says so once in a process, from 2.15 on: of what the test does on purpose.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_an_rms_norm_is_composed_where_pytorch_composes_it():
    """Of two dtypes, and of complex numbers."""
    with cuda_fused():
        other = torch.rms_norm(torch.ones(2, 4, dtype=torch.bfloat16), [4], torch.ones(4, requires_grad=True))
        turned = torch.rms_norm(torch.ones(2, 4, dtype=torch.complex64, requires_grad=True), [4])
    assert "Fused" not in other.grad_fn.name() + turned.grad_fn.name()
    assert torch.equal(other, torch.ones(2, 4))
