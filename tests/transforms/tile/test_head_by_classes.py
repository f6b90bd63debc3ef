"""A 16-bit output projection whose weight's gradient is made by blocks of classes: as right as without tiles."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale as ms
from memscale import checkpoint, tile
from memscale.simulation.measured.allocator_trace import measure
from memscale.transforms.tile.head import class_blocks
from tests.transforms.tile.test_tiled_head import (
    CLASSES,
    ROWS,
    WIDTH,
    Head,
    LoRA,
    Tied,
    frozen,
    inputs,
    tiled,
    without_bias,
)

SIXTEEN_BITS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def taken(monkeypatch):
    """One entry for each backward that went by blocks of classes."""
    found = []
    before = class_blocks._gradients_of_linear

    def spy(rows, hidden):
        found.append(len(hidden))  # not the gradients, which autograd would then have to copy
        return before(rows, hidden)

    monkeypatch.setattr(class_blocks, "_gradients_of_linear", spy)
    return found


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


def ignoring(y):
    return y.masked_fill(torch.arange(len(y)) % 3 == 0, -100)


def weight(logits):
    return torch.linspace(0.5, 2, CLASSES, dtype=logits.dtype)


SETTINGS = {
    "plain": lambda logits, y, how: F.cross_entropy(logits, y, reduction=how),
    "ignore_index": lambda logits, y, how: F.cross_entropy(logits, ignoring(y), reduction=how),
    "another": lambda logits, y, how: F.cross_entropy(logits, y, reduction=how, ignore_index=int(y[0])),
    "all ignored": lambda logits, y, how: F.cross_entropy(logits, y * 0 - 100, reduction=how, label_smoothing=0.1),
    "smoothing": lambda logits, y, how: F.cross_entropy(logits, ignoring(y), reduction=how, label_smoothing=0.2),
    "weights": lambda logits, y, how: F.cross_entropy(logits, ignoring(y), weight(logits), reduction=how),
    "both": lambda logits, y, how: F.cross_entropy(
        logits, ignoring(y), weight(logits), reduction=how, label_smoothing=0.3
    ),
    "softcap": lambda logits, y, how: F.cross_entropy(torch.tanh(logits / 2) * 2, y, reduction=how),
    "constant for each class": lambda logits, y, how: F.cross_entropy(logits + weight(logits) * 3, y, reduction=how),
    "masked class": lambda logits, y, how: F.cross_entropy(
        logits + torch.zeros(CLASSES).index_fill(0, torch.tensor([0]), -torch.inf), y.clamp(min=1), reduction=how
    ),
    "sliced": lambda logits, y, how: F.cross_entropy(logits[2:], y[2:], reduction=how),
}


@SIXTEEN_BITS
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_loss(setting, reduction, dtype, taken):
    model, (x, y) = Head().to(dtype), sixteen_bit(dtype)
    by_row = 1 + torch.arange(ROWS).reshape(-1) / 4

    def loss(logits):
        value = setting(wide(logits), y, reduction)
        return value * by_row[-len(value) :] if reduction == "none" else value

    as_right_as_untiled(model, tiled(model), x, loss)
    assert len(taken) == 1


@SIXTEEN_BITS
@pytest.mark.parametrize("chunks", [5, pytest.param(64, marks=pytest.mark.deep), 1000])
@pytest.mark.parametrize("cast", [wide, lambda logits: logits], ids=["float32", "16 bits"])
def test_many_rows(cast, chunks, dtype, taken):
    """Of 512 rows added up in pieces, a sum in 16 bits would be visibly wrong."""
    head, y = nn.Linear(64, CLASSES).to(dtype), torch.randint(0, CLASSES, (512,))
    x = torch.randn(512, 64).to(dtype).requires_grad_()
    fit = ms.transform(head, {"": tile(chunks=chunks)})
    # The loss of 16-bit logits is not the same computation: theirs rounds log-probabilities to 16 bits.
    as_right_as_untiled(head, fit, x, lambda logits: F.cross_entropy(cast(logits), y), bound=1.05)
    assert len(taken) == 1


@pytest.mark.parametrize(
    "make", [without_bias, lambda: frozen(weight=False, bias=True), Tied], ids=["no", "fix", "tied"]
)
def test_heads(make, taken):
    model, (x, y) = make().bfloat16(), sixteen_bit(torch.bfloat16)
    as_right_as_untiled(model, tiled(model), x, mean(y))
    assert len(taken) == 1


def test_sequences(taken):
    model, (x, y) = Head().bfloat16(), sixteen_bit(torch.bfloat16, 3, 4)
    as_right_as_untiled(model, tiled(model), x, lambda z: F.cross_entropy(wide(z).transpose(1, 2), y))
    rows = tiled(model)(x).transpose(1, 2)
    assert F.cross_entropy(rows, y, reduction="none").shape == (3, 4)
    assert len(taken) == 1


def test_a_confident_loss_is_not_lost_beside_its_logits():
    """Of logits of 48 and 32 the loss is 1e-6, which a difference of numbers near 48 in float32 would not show."""
    linear = nn.Linear(16, 2, bias=False).bfloat16()
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[3.0], [2.1875]]).expand(2, 16))
    x, y = torch.ones(8, 16).bfloat16(), torch.zeros(8, dtype=torch.long)
    found = F.cross_entropy(ms.transform(linear, {"": tile(chunks=8)})(x).float(), y, reduction="none")
    exact = F.cross_entropy(linear(x).double(), y, reduction="none")
    assert 1e-6 < exact[0] < 1e-5
    assert ((found - exact).abs() <= 0.02 * exact).all()


@SIXTEEN_BITS
def test_scaling_and_retain_graph(dtype, taken):
    """A factor that only backward knows is applied before gradients are rounded, even where float16 would underflow."""
    model, (x, y) = Head().to(dtype), sixteen_bit(dtype)
    as_right_as_untiled(model, tiled(model), x, small(y), factor=2.0**16)
    as_right_as_untiled(model, tiled(model), x, mean(y), factor=-3.0 if dtype == torch.float16 else -4.0)
    assert len(taken) == 2
    loss = F.cross_entropy(tiled(model)(x), y)
    first = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    doubled = torch.autograd.grad(loss * 2, [x, *model.parameters()], retain_graph=True)
    last = torch.autograd.grad(loss, [x, *model.parameters()])
    for one, two, three in zip(first, doubled, last, strict=True):
        assert torch.equal(one, three)
        assert (one * 2 - two).abs().max() <= 2**-23, "equal but for float16's smallest numbers"
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward(taken):
    model, (x, y) = Head().bfloat16(), sixteen_bit(torch.bfloat16)
    found = []
    for fn in (copy.deepcopy(model).double(), model, tiled(model)):
        point = x.detach().to(fn.head.weight.dtype).requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(fn(point), y, reduction="sum"), point, create_graph=True)
        found.append(torch.autograd.grad(grad.pow(2).sum(), list(fn.parameters())))
    for truth, before, after in zip(*found, strict=True):
        assert (after - truth).norm() <= 2 * (before - truth).norm()
    assert not taken, "by rows, with a graph"


def test_the_surroundings(taken):
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


@pytest.mark.parametrize("what", ["weight", "hidden"])
def test_a_change_in_place_raises(what):
    linear, (x, y) = nn.Linear(WIDTH, CLASSES).bfloat16(), sixteen_bit(torch.bfloat16)
    hidden = x * 1
    loss = F.cross_entropy(ms.transform(linear, {"": tile(chunks=5)})(hidden), y)
    with torch.no_grad():
        {"weight": linear.weight, "hidden": hidden}[what].add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_settings_that_do_not_fit_raise_as_without_tiles():
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


# ------------------------------------------------------------------------------------------------- when, and the memory


@pytest.mark.parametrize(
    ("make", "dtype", "chunks", "expected"),
    [
        (Head, torch.bfloat16, 4, 0),  # 64 rows in pieces of 16: a sum is as large as a piece's logits
        (Head, torch.bfloat16, 5, 1),
        (Head, torch.bfloat16, 1, 0),
        (Head, torch.float32, 5, 0),
        (lambda: frozen(weight=True, bias=False), torch.bfloat16, 5, 0),
        (lambda: Head(LoRA()), torch.bfloat16, 5, 0),
    ],
)
def test_when(make, dtype, chunks, expected, taken):
    model, (x, y) = make().to(dtype), sixteen_bit(dtype, 64)
    trained(tiled(model, chunks), x, lambda logits: F.cross_entropy(logits, y))
    assert len(taken) == expected


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
