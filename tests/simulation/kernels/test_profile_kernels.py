"""What the kernels of a CPU do that shapes do not say: in which order results lie, and what is taken on the way."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from memscale.simulation.dispatch import operators
from memscale.simulation.kernels.cpu_scratch import CpuScratch
from memscale.simulation.kernels.shapes import FakeKernels
from memscale.simulation.rules.layouts import result_layout
from memscale.simulation.rules.rule import CardTraits
from tests.support.steps import Training, assert_exact

aten = torch.ops.aten


def permuted(*shape, dtype=torch.float32):
    """A tensor whose second dimension lies last in memory: channels_last, where there are pictures."""
    return torch.rand(shape[0], *shape[2:], shape[1]).to(dtype).movedim(-1, 1)


def vector(n=6):
    return torch.rand(n)


ROWS = (permuted(4, 6, 5), permuted(4, 6, 5))
PICTURE = permuted(4, 6, 5, 3)
UNPICTURED = permuted(4, 6, 5)
LAYOUTS = {
    "layer_norm_backward": (
        aten.native_layer_norm_backward.default,
        (permuted(4, 6, 5), torch.rand(4, 6, 5), [5], torch.rand(4, 6, 1), torch.rand(4, 6, 1), *[vector(5)] * 2),
        {"output_mask": [True] * 3},
    ),
    "log_softmax_backward": (aten._log_softmax_backward_data.default, (*ROWS, 1, torch.float32), {}),
    "smooth_l1_loss_backward": (aten.smooth_l1_loss_backward.default, (torch.ones([]), *ROWS, 1, 1.0), {}),
    "log_sigmoid": (aten.log_sigmoid_forward.default, ROWS[:1], {}),
    "batch_norm of pictures": (
        aten.native_batch_norm.default,
        (PICTURE, vector(), vector(), vector(), vector(), True, 0.1, 1e-5),
        {},
    ),
    "batch_norm of rows": (
        aten.native_batch_norm.default,
        (UNPICTURED, vector(), vector(), vector(), vector(), True, 0.1, 1e-5),
        {},
    ),
    "batch_norm of halves": (aten.native_batch_norm.default, (PICTURE.bfloat16(), *[None] * 4, True, 0.1, 1e-5), {}),
    "batch_norm_backward of rows": (
        aten.native_batch_norm_backward.default,
        (UNPICTURED, UNPICTURED, *[vector()] * 5, True, 1e-5, [True] * 3),
        {},
    ),
    "channel_shuffle of pictures": (aten.channel_shuffle.default, (PICTURE, 2), {}),
    "replication_pad2d_backward": (
        aten.replication_pad2d_backward.default,
        (permuted(4, 6, 7, 5), PICTURE, [1, 1, 1, 1]),
        {},
    ),
}


@pytest.mark.parametrize(("op", "args", "kwargs"), LAYOUTS.values(), ids=LAYOUTS)
def test_results_lie_in_memory_as_the_real_kernel_lays_them(op, args, kwargs):
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    assert FakeKernels().layout(op, args, kwargs, tensors) == result_layout(op(*args, **kwargs), tensors)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Of a batch normalisation of 8 channels on CUDA: the image, the weight, whether it trains; and what each of its two
# statistics is there, as the CUDA build of torch 2.13 makes them.
STATISTICS = [
    (BF16, BF16, True, FP32, 8),
    (BF16, FP32, True, FP32, 8),
    (BF16, BF16, False, FP32, 8),
    (FP16, FP16, False, FP32, 8),
    (FP16, FP32, False, FP32, 0),  # by cuDNN, as the next
    (FP32, FP32, False, FP32, 0),
    (FP32, None, False, FP32, 8),
]


@pytest.mark.parametrize(("image", "weight", "training", "dtype", "count"), STATISTICS)
def test_statistics_of_a_batch_on_cuda(image, weight, training, dtype, count):
    affine = [None] * 2 if weight is None else [torch.ones(8, dtype=weight) for _ in range(2)]
    running = [torch.ones(8, dtype=weight or image) for _ in range(2)]
    args = (torch.ones(2, 8, 4, 4, dtype=image), *affine, *running, training, 0.1, 1e-5)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    layout = FakeKernels(CardTraits((9, 0))).layout(aten.native_batch_norm.default, args, {}, tensors)
    assert [(each.dtype, each.shape) for each in layout.outputs[1:]] == [(dtype, (count,))] * 2
    assert layout.storage_bytes[1:] == (count * dtype.itemsize,) * 2


def test_a_card_gets_no_layouts_of_another(monkeypatch):
    """Layouts are remembered for the process, and those of a T4's own convolutions in bfloat16 are no H100's."""
    model = torch.nn.Sequential(*[torch.nn.Conv2d(16, 16, 3, padding=1) for _ in range(2)])
    model.to(BF16, memory_format=torch.channels_last)
    images = torch.zeros(4, 16, 32, 32, dtype=BF16).to(memory_format=torch.channels_last)

    def peak(card):
        return ms.profile(model, images, loss=lambda y, _: y.float().mean(), hardware=card).peak_bytes

    monkeypatch.setattr(operators, "_known", {})
    alone = peak("h100")
    monkeypatch.setattr(operators, "_known", {})
    peak("t4")
    assert peak("h100") == alone


class Residual(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.shortcut = nn.Conv2d(cin, cout, 1)

    def forward(self, x):
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


def test_an_autoencoder_in_channels_last():
    grow = nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()
    shrink = nn.Conv2d(3, 16, 3, padding=1), Residual(16, 16), nn.Conv2d(16, 16, 3, stride=2, padding=1)
    layers = *shrink, Residual(16, 16), *grow, nn.Conv2d(16, 3, 3, padding=1)
    model = nn.Sequential(*layers).to(BF16, memory_format=torch.channels_last)
    pictures = torch.rand(2, 3, 32, 32).to(BF16, memory_format=torch.channels_last)
    assert_exact(Training(model, pictures, torch.optim.AdamW(model.parameters()), F.smooth_l1_loss))


def test_windows_whose_gradients_arrive_transposed():
    transformers = pytest.importorskip("transformers")
    shape = {"image_size": 56, "patch_size": 4, "embed_dim": 48, "window_size": 7, "depths": [2], "num_heads": [3]}
    model = transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=10, **shape)).train()
    batch = {"pixel_values": torch.rand(8, 3, 56, 56), "labels": torch.zeros(8, dtype=torch.long)}
    assert_exact(Training(model, batch, torch.optim.AdamW(model.parameters())))


def positive(y):
    return y @ y.mT + 10 * torch.eye(48)


KERNELS = {
    "kthvalue": lambda y: y.kthvalue(5, -1).values,
    "inv": torch.linalg.inv,
    "solve": lambda y: torch.linalg.solve(y, y.exp()),
    "cholesky": lambda y: torch.linalg.cholesky(positive(y)),
    "svd": lambda y: torch.linalg.svdvals(y),
    "eigh": lambda y: torch.linalg.eigvalsh(positive(y)),
    "qr": lambda y: torch.linalg.qr(y).R,
    "exponentials": lambda y: torch.linalg.matrix_exp(y),
    "fft": lambda y: torch.fft.rfft(y).abs(),
    "sum in double": lambda y: y.sum(dtype=torch.float64),
    "logsumexp": lambda y: y.logsumexp(-1),
    "distances": lambda y: torch.cdist(y, y),
    "upsampling": lambda y: F.interpolate(y[None], scale_factor=2),
    "logits": lambda y: F.binary_cross_entropy_with_logits(y, y.detach()),
}


class Ends(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(48, 48), function

    def forward(self, x):
        return self.function(self.layer(x)).sum()


@pytest.mark.parametrize("function", KERNELS.values(), ids=KERNELS)
def test_what_a_kernel_takes_on_the_way_is_heard(function):
    assert_exact(Training(Ends(function), torch.rand(6, 48, 48)))


def test_a_kernel_that_refuses_zeros_is_left_alone():
    args = (torch.rand(5, 5), torch.full((5, 3), 7))
    assert CpuScratch(probe=False).nbytes(aten.gather.default, (args[0], 1, args[1]), {}, 0) == 0


def test_a_draw_is_not_asked_for():
    torch.manual_seed(0)
    first = torch.rand(3)
    torch.manual_seed(0)
    CpuScratch(probe=False).nbytes(aten.multinomial.default, (torch.ones(50), 3), {}, 0)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("shape", [(48, 48), (1, 48, 48), (3, 48, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_a_matrix_exponential_takes_what_large_numbers_need(shape, dtype):
    taken = {}
    for norm in (1e-9, 0.1, 1.0, 30.0):
        matrices = torch.eye(48).expand(shape).to(dtype) * norm
        result = []
        taken[norm] = ms.measure(lambda: result.append(torch.linalg.matrix_exp(matrices))).growth_bytes  # noqa: B023
    taken_at_most = matrices.nbytes + CpuScratch(probe=False).nbytes(aten.linalg_matrix_exp.default, (matrices,), {}, 0)
    assert max(taken.values()) == taken[30.0] <= 1.001 * taken_at_most
    assert taken_at_most <= 1.001 * taken[30.0]
