"""What a CUDA device runs otherwise than a CPU: held against the allocator of the CUDA build of torch 2.13."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale as ms
from memscale.simulation.kernels.cuda_fused import cuda_fused
from memscale.simulation.rules.rule import RESULTS
from tests.support.kernels import cuda_program


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


class Attention(nn.Module):
    """Scores in float16 and weights in float32, which a softmax makes of them with no copy between."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(256, 512), nn.Linear(256, 256)

    def forward(self, x):
        query, key = self.inner(x).chunk(2, -1)
        weights = F.softmax(query @ key.mT, dim=-1, dtype=torch.float32)
        return self.outer(weights.to(x.dtype) @ x).log_softmax(-1, dtype=torch.float32)


class Autocast(nn.Module):
    def __init__(self, inner, dtype=torch.bfloat16):
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x):
        with torch.autocast("cuda", self.dtype):
            return self.inner(x)


# PyTorch says once in a process that a norm's dtypes differ: on purpose here, or as autocast of torch 2.10 leaves them.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")


# What `torch.cuda.max_memory_allocated()` said of the third step with a fake A100: see tests/ghost.
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
def test_a_step_takes_what_it_takes_on_a_card(model, shape, expected, request):
    casts_norms = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")
    if request.node.callspec.id == "autocast" and not casts_norms:
        pytest.skip("autocast of this PyTorch leaves RMS norms as they are")
    with torch.device("meta"):
        model, x = model(), torch.randn(shape)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    found = ms.profile(
        model,
        x,
        keeps_output=False,
        optimizer=optimizer,
        loss=lambda y, _: y.float().square().mean(),
        hardware="a100-80",
    )
    assert found.peak_bytes == expected


def test_an_rms_norm_is_composed_where_pytorch_composes_it():
    """Of two dtypes, and of complex numbers."""
    with cuda_fused():
        other = torch.rms_norm(torch.ones(2, 4, dtype=torch.bfloat16), [4], torch.ones(4, requires_grad=True))
        turned = torch.rms_norm(torch.ones(2, 4, dtype=torch.complex64, requires_grad=True), [4])
    assert "Fused" not in other.grad_fn.name() + turned.grad_fn.name()
    assert torch.equal(other, torch.ones(2, 4))


@pytest.mark.parametrize(("casts", "expected"), [(True, 63580160), (False, 55973376)], ids=["autocast", "float16"])
def test_a_softmax_of_halves_reads_them_as_they_are(casts, expected):
    """And clipping takes what every chunk of a gradient sums to."""
    with torch.device("meta"):
        model, x = Attention(), torch.randn(8, 512, 256)
        model, x = (Autocast(model, torch.float16), x) if casts else (model.half(), x.half())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step():
        model(x).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    assert ms.profile(step, hardware="a100-80").peak_bytes == expected


def test_norms_of_many_tensors_have_room_for_every_chunk():
    tensors = [torch.empty(50_000_000, device="meta"), *[torch.empty(8, device="meta")] * 99]
    program = cuda_program("aten._foreach_norm.Scalar", (tensors,), None, (9, 0))
    assert program == (100 * 763 * 4, RESULTS)
