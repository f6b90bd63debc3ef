"""A 16-bit output projection whose weight's gradient is made by blocks of classes: as right as without tiles.

The other half of the work goes by pieces of rows (`LossRows`), or on a GPU by blocks of classes too (`SignedRows`).
"""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memscale as ms
from memscale import checkpoint, tile
from memscale.simulation.measured.allocator_trace import measure
from memscale.transforms.tile.head import class_blocks
from memscale.transforms.tile.head.class_blocks import LossRows, SignedRows
from tests.support.coverings import pairwise
from tests.transforms.tile.test_tiled_head import (
    CLASSES,
    ROWS,
    SETTINGS,
    WIDTH,
    Head,
    Tied,
    frozen,
    inputs,
    tiled,
    without_bias,
)

SIXTEEN_BITS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


ON_A_GPU = pytest.mark.parametrize("gpu", [False, True], ids=["CPU", "GPU"], indirect=True)
mm = torch.mm


@pytest.fixture
def taken(monkeypatch):
    """The class of rows of each sweep through the blocks of classes."""
    found = []
    before = class_blocks._fill

    def spy(rows, *args, **kwargs):
        found.append(type(rows))
        return before(rows, *args, **kwargs)

    monkeypatch.setattr(class_blocks, "_fill", spy)
    return found


@pytest.fixture
def gpu(request, monkeypatch):
    """What the head asks of a device is answered as by a GPU, or by this CPU; the class of rows that is to be taken."""
    if not request.param:
        return LossRows

    def wide(left, right, *, out_dtype=None, out=None):
        return mm(left, right, out=out) if out_dtype is None else mm(left.to(out_dtype), right.to(out_dtype))

    monkeypatch.setattr(class_blocks, "device_type", lambda tensor: "cuda")
    monkeypatch.setattr(class_blocks, "compute_capability", lambda tensor: (9, 0))
    monkeypatch.setattr(torch, "mm", wide)
    return SignedRows


def sixteen_bit(dtype, *leading):
    x, y = inputs(*leading)
    return x.detach().to(dtype).requires_grad_(), y


def trained(model, x, loss, factor=1.0):
    """The loss of `model`, and the gradients of `factor` times its sum."""
    value = loss(model(x))
    tensors = [tensor for tensor in (x, *model.parameters()) if tensor.requires_grad]
    return [value.detach(), *torch.autograd.grad((value * factor).sum(), tensors)]


def wide(logits):
    """In float32, as Hugging Face models have them; the truth stays in float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def mean(y):
    return lambda logits: F.cross_entropy(wide(logits), y)


def small(y):
    """A loss whose gradients, unscaled, are below the smallest number of float16."""

    def loss(logits):
        weight = torch.full((CLASSES,), 1e-6, dtype=wide(logits).dtype)
        return F.cross_entropy(wide(logits), y, weight, reduction="sum")

    return loss


def as_right_as_untiled(model, fit, x, loss, factor=1.0, bound=1.001):
    """Against the truth in float64, the loss and every gradient are as close as those of the untiled model."""
    exact = trained(copy.deepcopy(model).double(), x.detach().double().requires_grad_(x.requires_grad), loss, factor)
    plain, ours = (trained(fn, x, loss, factor) for fn in (model, fit))
    for truth, before, after in zip(exact, plain, ours, strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before.isnan(), after.isnan())
        errors = [(found.double() - truth).nan_to_num().norm().item() for found in (before, after)]
        assert errors[1] <= bound * errors[0] + 1e-6 * truth.nan_to_num().norm(), errors


# ------------------------------------------------------------------------------------------------- the same numbers


MODIFIED = ("smoothing", "weights, smoothing", "softcap", "constant for each class", "masked class")


@pytest.mark.parametrize(
    ("name", "reduction", "dtype", "gpu"),
    pairwise(itertools.product(SETTINGS, ["mean", "sum", "none"], [torch.bfloat16, torch.float16], [False, True])),
    indirect=["gpu"],
)
def test_every_loss_is_as_right_as_untiled(name, reduction, dtype, gpu, taken):
    model, (x, y) = Head().to(dtype), sixteen_bit(dtype)
    by_row = 1 + torch.arange(ROWS).reshape(-1) / 4

    def loss(logits):
        value = SETTINGS[name](wide(logits), y, reduction)
        return value * by_row[-len(value) :] if reduction == "none" else value

    as_right_as_untiled(model, tiled(model), x, loss)
    assert taken == [LossRows if name in MODIFIED else gpu]


@ON_A_GPU
@SIXTEEN_BITS
@pytest.mark.parametrize("chunks", [5, pytest.param(64, marks=pytest.mark.deep), 1000])
@pytest.mark.parametrize("cast", [wide, lambda logits: logits], ids=["float32", "16 bits"])
def test_a_sum_of_many_rows_is_as_right_as_untiled(cast, chunks, dtype, gpu, taken):
    """Of 512 rows added up in pieces, a sum in 16 bits would be visibly wrong."""
    head, y = nn.Linear(64, CLASSES).to(dtype), torch.randint(0, CLASSES, (512,))
    x = torch.randn(512, 64).to(dtype).requires_grad_()
    fit = ms.transform(head, {"": tile(chunks=chunks)})
    # The loss of 16-bit logits is not the same computation: theirs rounds log-probabilities to 16 bits.
    bound = 1.001 if cast is wide else 1.05
    as_right_as_untiled(head, fit, x, lambda logits: F.cross_entropy(cast(logits), y), bound=bound)
    assert taken == [gpu]


class TiedWithBias(Tied):
    def __init__(self):
        super().__init__()
        self.head.bias = nn.Parameter(torch.randn(CLASSES))


@ON_A_GPU
@pytest.mark.parametrize(
    ("make", "sweeps"),
    [
        (without_bias, 1),
        (lambda: frozen(weight=False, bias=True), 1),
        (Tied, 2),  # late, the weight has a sweep of its own on a GPU; on a CPU it is the only one
        (TiedWithBias, 2),
    ],
    ids=["no", "fix", "tied", "tied with bias"],
)
def test_every_head_is_as_right_as_untiled(make, sweeps, gpu, taken):
    model, (x, y) = make().bfloat16(), sixteen_bit(torch.bfloat16)
    as_right_as_untiled(model, tiled(model), x, mean(y))
    assert taken == [gpu] * (sweeps if gpu is SignedRows else 1)


@ON_A_GPU
def test_a_confident_loss_is_not_lost_beside_its_logits(gpu):
    """Of logits of 48 and 32 the loss is 1e-6, which a difference of numbers near 48 in float32 would not show."""
    linear = nn.Linear(16, 2, bias=False).bfloat16()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[3.0], [2.1875]]).expand(2, 16))
    x, y = torch.ones(8, 16).bfloat16(), torch.zeros(8, dtype=torch.long)
    found = F.cross_entropy(ms.transform(linear, {"": tile(chunks=8)})(x).float(), y, reduction="none")
    exact = F.cross_entropy(linear(x).double(), y, reduction="none")
    assert 1e-6 < exact[0] < 1e-5
    assert ((found - exact).abs() <= 0.02 * exact).all()


@ON_A_GPU
@SIXTEEN_BITS
def test_scaling_and_retain_graph(dtype, gpu, taken):
    """A factor that only backward knows is applied before gradients are rounded, even where float16 would underflow."""
    model, (x, y) = Head().to(dtype), sixteen_bit(dtype)
    as_right_as_untiled(model, tiled(model), x, small(y), factor=2.0**16)
    as_right_as_untiled(model, tiled(model), x, mean(y), factor=-3.0 if dtype == torch.float16 else -4.0)
    assert taken == [gpu] * 2
    loss = F.cross_entropy(tiled(model)(x), y)
    first = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    doubled = torch.autograd.grad(loss * 2, [x, *model.parameters()], retain_graph=True)
    last = torch.autograd.grad(loss, [x, *model.parameters()])
    for one, two, three in zip(first, doubled, last, strict=True):
        assert torch.equal(one, three)
        if gpu is LossRows:
            assert (one * 2 - two).abs().max() <= 2**-23, "equal but for float16's smallest numbers"
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_the_surroundings_of_a_loss_change_nothing(taken):
    """A default type of 16 bits, autocast around the loss, and a region that recomputes it."""
    model, (x, y) = Head().bfloat16(), sixteen_bit(torch.bfloat16)

    def smooth(logits):
        return F.cross_entropy(logits, y, label_smoothing=0.3)

    expected = trained(tiled(model), x, smooth)

    def surrounded(logits):
        with torch.autocast("cpu", torch.float16):
            return smooth(logits)

    torch.set_default_dtype(torch.bfloat16)
    try:
        by_default = trained(tiled(model), x, smooth)
    finally:
        torch.set_default_dtype(torch.float32)
    fit = tiled(model)
    recomputed = trained(model, x, lambda _: checkpoint()(lambda x: smooth(fit(x)))(x))
    for found in (by_default, trained(tiled(model), x, surrounded), recomputed):
        for before, after in zip(expected[1:], found[1:], strict=True):
            assert torch.equal(before, after)
    assert len(taken) == 4


# ------------------------------------------------------------------------------------------------------------- errors


@ON_A_GPU
def test_settings_that_do_not_fit_raise_as_without_tiles(gpu):
    model, (x, y) = Head().bfloat16(), sixteen_bit(torch.bfloat16)
    for settings in ({"weight": torch.ones(3)}, {"weight": torch.ones(CLASSES).double()}, {"label_smoothing": 2.0}):
        messages = []
        for fn in (model, tiled(model)):
            with pytest.raises(RuntimeError) as error:
                F.cross_entropy(fn(x).float(), y, **settings)
            messages.append(str(error.value).splitlines()[0])
        assert messages[0] == messages[1]
    for wrong in (CLASSES, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            F.cross_entropy(tiled(model)(x), y.index_fill(0, torch.tensor([3]), wrong))


@ON_A_GPU
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_class_weights_that_change_or_are_trained_raise_as_without_tiles(reduction, gpu):
    model, (x, y) = Head().bfloat16(), sixteen_bit(torch.bfloat16)
    for fn in (model, tiled(model)):
        weight = torch.rand(CLASSES).bfloat16()
        loss = F.cross_entropy(fn(x), y, weight=weight, reduction=reduction).sum()
        weight.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with pytest.raises(RuntimeError, match=r"not differentiable with respect to argument 'weight'"):
            F.cross_entropy(fn(x), y, weight=weight.requires_grad_(), reduction=reduction)


# ------------------------------------------------------------------------------------------------- when, and the memory


@ON_A_GPU
@pytest.mark.parametrize(("dtype", "capability", "goes"), [
    (torch.bfloat16, (7, 5), LossRows),  # before sm_80 PyTorch refuses products of bfloat16 into 32 bits
    (torch.float16, (7, 5), SignedRows),
    (torch.bfloat16, None, SignedRows),
])  # fmt: skip
def test_a_card_without_products_into_32_bits(dtype, capability, goes, gpu, taken, monkeypatch):
    monkeypatch.setattr(class_blocks, "compute_capability", lambda tensor: capability)
    model, (x, y) = Head().to(dtype), sixteen_bit(dtype)
    as_right_as_untiled(model, tiled(model), x, mean(y))
    assert taken == [goes if gpu is SignedRows else LossRows]


@ON_A_GPU
def test_rows_of_minus_infinity_and_signs_by_row(gpu, taken):
    """Blocks of masked classes come before the first other one; each row has a factor of any sign, or none."""
    linear = nn.Linear(8, CLASSES).bfloat16()
    with torch.no_grad():
        linear.bias[: CLASSES // 2] = -torch.inf
    x = torch.randn(12, 8).bfloat16().requires_grad_()
    y = torch.full((12,), CLASSES - 1)
    factors = torch.linspace(-2, 2, 13)[:12]
    factors[6] = 0
    found = []
    for fn in (linear, ms.transform(linear, {"": tile(chunks=12)})):
        value = F.cross_entropy(fn(x).float(), y, reduction="none") * factors
        found.append([value, *torch.autograd.grad(value.sum(), [x, linear.weight, linear.bias])])
    assert taken == [gpu]
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize(
    ("dtype", "reduction", "expected"),
    [
        (torch.float32, "none", 4),
        (torch.bfloat16, "mean", 4),
        (torch.bfloat16, "none", 5),
        (torch.float16, "mean", 5),  # before the loss is scaled its gradients would underflow
    ],
)
def test_products_of_the_size_of_the_logits(dtype, reduction, expected):
    linear, (x, y) = without_bias().head.to(dtype), sixteen_bit(dtype)
    logits = tile(chunks=5)(linear)(x)  # outside of the counter, whose hooks on modules would have the logits computed
    with FlopCounterMode(display=False) as count:
        F.cross_entropy(logits.float(), y, reduction=reduction).sum().backward()
    assert count.get_total_flops() == expected * 2 * ROWS * WIDTH * CLASSES


ROWS_HERE, WIDTH_HERE, CLASSES_HERE, CHUNKS = 128, 64, 4000, 4


@pytest.fixture
def small_parts(monkeypatch):
    """Two rows of a piece, 32 kB, in 32 bits at a time; and kernels pack factors for each thread, so one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(class_blocks, "_CPU_PART_NUMEL", 2 * CLASSES_HERE)
    yield
    torch.set_num_threads(before)


def growth_bytes(reduction="mean"):
    """The most that a step of a head, and its forward alone, add to memory."""
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH_HERE, CLASSES_HERE, bias=False).bfloat16()
    x = torch.randn(ROWS_HERE, WIDTH_HERE).bfloat16().requires_grad_()
    y = torch.randint(0, CLASSES_HERE, (ROWS_HERE,))
    fit = ms.transform(linear, {"": tile(chunks=CHUNKS)})

    def forward():
        return F.cross_entropy(fit(x).float(), y, reduction=reduction)

    def step():
        forward().sum().backward()
        x.grad = linear.weight.grad = None

    step()
    return measure(forward).growth_bytes, measure(step).growth_bytes


def kernel_bytes():
    """What the products of a piece and of a block take inside their kernels, for packed factors."""
    hidden, weight = torch.ones(ROWS_HERE, WIDTH_HERE).bfloat16(), torch.ones(CLASSES_HERE, WIDTH_HERE).bfloat16()
    piece = torch.ones(ROWS_HERE // CHUNKS, CLASSES_HERE).bfloat16()
    block = torch.ones(ROWS_HERE, CLASSES_HERE // CHUNKS).bfloat16()
    rows, classes = hidden[: len(piece)].clone(), weight[: block.shape[1]].clone()
    of_a_piece = (rows, weight.t(), piece.clone()), (piece, weight, rows.clone())
    products = *of_a_piece, (hidden, classes.t(), block.clone()), (block.t(), hidden, classes.clone())
    return max(measure(partial(torch.mm, left, right, out=out)).growth_bytes for left, right, out in products)


PIECE = ROWS_HERE // CHUNKS * CLASSES_HERE * 2  # the logits of a piece of rows, and of a block of classes
HIDDEN_GRAD, WEIGHT_GRAD = ROWS_HERE * WIDTH_HERE * 2, CLASSES_HERE * WIDTH_HERE * 2
PART = 2 * CLASSES_HERE * 4
SMALL = 16 * ROWS_HERE * 8  # at most 16 numbers of 8 bytes for each row


def test_the_memory_is_the_gradients_and_one_piece(small_parts, taken):
    room = max(3 * PART, kernel_bytes()) + SMALL  # a part of a piece twice in 32 bits and twice in 16, or a product
    held = PIECE + HIDDEN_GRAD + WEIGHT_GRAD
    for reduction, early in (("mean", HIDDEN_GRAD), ("none", 0)):  # unreduced, hidden states wait for backward too
        forward_bytes, step_bytes = growth_bytes(reduction)
        assert PIECE + early <= forward_bytes <= PIECE + early + room
        assert held <= step_bytes <= held + room
    assert len(taken) == 4


# ---------------------------------------------------------------------------------------------- what profile says of it


def test_a_large_head_on_a_card_is_predicted_as_the_card_would_run_it():
    """Hidden states of 4096, 128,256 classes, 4096 tokens: tiled, one product more."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4096, 128_256, bias=False, dtype=torch.bfloat16, device="meta")

        def forward(self, x, y):
            return F.cross_entropy(self.head(x).float(), y)

    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    batch = x, torch.zeros(4096, dtype=torch.long)
    plain = ms.profile(Loss(), batch, hardware="h100")
    fit = ms.profile(Loss(), batch, hardware="h100", plan={"head": tile(chunks=16)})
    assert fit.step_seconds <= 1.4 * plain.step_seconds
    assert fit.peak_bytes <= 0.35 * plain.peak_bytes
    assert fit.flops == plain.flops * 4 // 3
