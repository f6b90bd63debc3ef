"""What the kernels of a CPU do that shapes do not say: in which order results lie, and what is taken on the way."""

import pytest
import torch
from steps import Training, assert_exact
from torch import nn
from torch.nn import functional as F

from memscale.profiling._shapes import FakeKernels, layout_of

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
    "mse_loss_backward": (aten.mse_loss_backward.default, (torch.ones([]), *ROWS, 1), {}),
    "smooth_l1_loss_backward": (aten.smooth_l1_loss_backward.default, (torch.ones([]), *ROWS, 1, 1.0), {}),
    "huber_loss_backward": (aten.huber_loss_backward.default, (torch.ones([]), *ROWS, 1, 1.0), {}),
    "soft_margin_loss": (aten.soft_margin_loss.default, ROWS, {}),
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
    "batch_norm_backward of rows": (
        aten.native_batch_norm_backward.default,
        (UNPICTURED, UNPICTURED, *[vector()] * 5, True, 1e-5, [True] * 3),
        {},
    ),
    "channel_shuffle of pictures": (aten.channel_shuffle.default, (PICTURE, 2), {}),
    "channel_shuffle": (aten.channel_shuffle.default, (PICTURE.contiguous(), 2), {}),
    "replication_pad2d_backward": (
        aten.replication_pad2d_backward.default,
        (permuted(4, 6, 7, 5), PICTURE, [1, 1, 1, 1]),
        {},
    ),
}


@pytest.mark.parametrize(("op", "args", "kwargs"), LAYOUTS.values(), ids=LAYOUTS)
def test_results_lie_in_memory_as_the_real_kernel_lays_them(op, args, kwargs):
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    assert FakeKernels().layout(op, args, kwargs, tensors) == layout_of(op(*args, **kwargs), tensors)


class Residual(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.shortcut = nn.Conv2d(cin, cout, 1)

    def forward(self, x):
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_an_autoencoder_in_channels_last(dtype, loss):
    grow = nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU()
    shrink = nn.Conv2d(3, 16, 3, padding=1), Residual(16, 16), nn.Conv2d(16, 16, 3, stride=2, padding=1)
    layers = *shrink, Residual(16, 16), *grow, nn.Conv2d(16, 3, 3, padding=1)
    model = nn.Sequential(*layers).to(dtype, memory_format=torch.channels_last)
    pictures = torch.rand(2, 3, 32, 32).to(dtype, memory_format=torch.channels_last)
    assert_exact(Training(model, pictures, torch.optim.AdamW(model.parameters()), loss))


def test_windows_whose_gradients_arrive_transposed():
    transformers = pytest.importorskip("transformers")
    shape = {"image_size": 56, "patch_size": 4, "embed_dim": 48, "window_size": 7, "depths": [2], "num_heads": [3]}
    model = transformers.SwinForImageClassification(transformers.SwinConfig(num_labels=10, **shape)).train()
    batch = {"pixel_values": torch.rand(8, 3, 56, 56), "labels": torch.zeros(8, dtype=torch.long)}
    assert_exact(Training(model, batch, torch.optim.AdamW(model.parameters())))
