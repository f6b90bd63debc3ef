"""`tile` on an output projection: the logits are not computed until somebody needs them, and are then right."""

import copy
import dataclasses
import functools
import io
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale as ms
from memscale import checkpoint, compose, tile
from memscale.simulation.measured.allocator_trace import measure
from memscale.transforms.tile import factory
from memscale.transforms.tile.head.lazy_logits import LazyLogits
from memscale.transforms.tile.head.linear import is_projection
from tests.support.checks import bits, generators
from tests.transforms.tile.test_tile import ulps

ROWS, WIDTH, CLASSES = 12, 8, 50
# Gradients are sums over rows, taken piece by piece: the same terms in another order.
ULPS = 16


class Head(nn.Module):
    """A language model in little: hidden states, and an output projection named `head`."""

    def __init__(self, head=None):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES) if head is None else head

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def inputs(*leading):
    leading = leading or (ROWS,)
    return torch.randn(*leading, WIDTH, requires_grad=True), torch.randint(0, CLASSES, leading)


def results(model, x, loss):
    value = loss(model(x))
    tensors = [x, *(p for p in model.parameters() if p.requires_grad)]
    return [value.detach(), *torch.autograd.grad(value.sum(), [t for t in tensors if t.requires_grad])]


def close(expected, actual, bound=ULPS):
    for before, after in zip(expected, actual, strict=True):
        assert torch.equal(before.isnan(), after.isnan())
        assert ulps(before.nan_to_num(), after.nan_to_num()) <= bound


def tiled(model, chunks=5):
    return ms.transform(model, {"head": tile(chunks=chunks)})


def check(loss, *leading, model=None, bound=ULPS, lazy=True):
    """The loss and every gradient of the tiled model are those of the model; `lazy`: and it made no logits."""
    model = Head() if model is None else model
    x, y = inputs(*leading)
    fit = tiled(model)
    made = []
    before = factory.defer

    def spy(*args):
        made.append(before(*args))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "defer", spy)
        actual = results(fit, x, lambda logits: loss(logits, y))
    assert len(made) == 1
    assert made[0].recipe.projection.computed != lazy
    close(results(model, x, lambda logits: loss(logits, y)), actual, bound)


# ---------------------------------------------------------------------------------------- every cross entropy


def ignoring(y):
    return y.masked_fill(torch.arange(len(y)) % 3 == 0, -100)


def weight(logits):
    return torch.linspace(0.5, 2, CLASSES, dtype=logits.dtype)


MASK = torch.zeros(CLASSES).index_fill(0, torch.tensor([0]), -torch.inf)
SETTINGS = {
    "plain": lambda logits, y, how: F.cross_entropy(logits, y, reduction=how),
    "ignore_index": lambda logits, y, how: F.cross_entropy(logits, ignoring(y), reduction=how),
    "another": lambda logits, y, how: F.cross_entropy(logits, y, reduction=how, ignore_index=int(y[0])),
    "all ignored": lambda logits, y, how: F.cross_entropy(logits, y * 0 - 100, reduction=how),
    "smoothing": lambda logits, y, how: F.cross_entropy(logits, ignoring(y), reduction=how, label_smoothing=0.2),
    "weights": lambda logits, y, how: F.cross_entropy(logits, ignoring(y), weight(logits), reduction=how),
    "weights, smoothing": lambda logits, y, how: F.cross_entropy(
        logits, ignoring(y), weight(logits), reduction=how, label_smoothing=0.3
    ),
    "softcap": lambda logits, y, how: F.cross_entropy(torch.tanh(logits / 2) * 2, y, reduction=how),
    "constant for each class": lambda logits, y, how: F.cross_entropy(logits + weight(logits) * 3, y, reduction=how),
    "masked class": lambda logits, y, how: F.cross_entropy(logits + MASK, y.clamp(min=1), reduction=how),
    "sliced": lambda logits, y, how: F.cross_entropy(logits[2:], y[2:], reduction=how),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_loss_without_the_logits(name, reduction):
    check(lambda logits, y: SETTINGS[name](logits, y, reduction))


ROW_NUMBERS = torch.tensor([3, 1, 3])
LOSSES = {
    "mean": F.cross_entropy,
    "none": lambda logits, y: F.cross_entropy(logits, y, reduction="none") * torch.arange(len(y)),
    "module": lambda logits, y: nn.CrossEntropyLoss()(logits, y),
    "keywords": lambda logits, y: F.cross_entropy(input=logits, target=y),
    "probabilities": lambda logits, y: F.cross_entropy(logits, F.one_hot(y, CLASSES) * 0.8 + 0.2 / CLASSES),
    "probabilities, sum": lambda logits, y: F.cross_entropy(
        logits, F.one_hot(y, CLASSES) * 0.8, reduction="sum", weight=weight(logits), label_smoothing=0.1
    ),
    "casts": lambda logits, y: F.cross_entropy(logits.float().to(torch.float64).float().contiguous(), y),
    "temperature": lambda logits, y: F.cross_entropy(logits / 0.7 * 2, y),
    "picked": lambda logits, y: F.cross_entropy(logits[y > 10], y[y > 10]),
    "indexed": lambda logits, y: F.cross_entropy(logits[ROW_NUMBERS], y[ROW_NUMBERS]),
    "reshaped": lambda logits, y: F.cross_entropy(logits.view(3, 4, -1).flatten(0, 1), y),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_the_loss_without_the_logits(loss):
    check(loss, bound=32 if loss is LOSSES["casts"] else ULPS)


SEQUENCES = {
    "flat": lambda logits, y: F.cross_entropy(logits.view(-1, CLASSES), y.view(-1)),
    "shifted": lambda logits, y: F.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), y[:, 1:].reshape(-1)),
    "transposed": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y),
    "permuted": lambda logits, y: F.cross_entropy(logits.permute(0, 2, 1), y, reduction="none"),
    "mT": lambda logits, y: F.cross_entropy(logits.float().mT, y, label_smoothing=0.1),
    "transposed probabilities": lambda logits, y: F.cross_entropy(
        logits.transpose(1, 2), F.one_hot(y, CLASSES).transpose(1, 2) * 1.0
    ),
}


@pytest.mark.parametrize("loss", SEQUENCES.values(), ids=SEQUENCES)
def test_a_head_of_sequences_has_the_same_loss_and_gradients(loss):
    check(loss, 3, 4)


# --------------------------------------------------------------------------------- anything else is right as well


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def saved(logits):
    file = io.BytesIO()
    torch.save(logits, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def z_loss(logits, y):
    return F.cross_entropy(logits, y) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


USES = {
    "softmax": lambda logits, y: F.nll_loss(logits.softmax(-1).log(), y),
    "log_softmax": lambda logits, y: F.nll_loss(F.log_softmax(logits, dim=-1), y),
    "z-loss": z_loss,
    "index of a class": lambda logits, y: logits[..., 3].sum() + logits[0, 1],
    "index of everything": lambda logits, y: logits[()].sum() + logits[..., None].sum() + logits[:, 2:5].sum(),
    "mask of everything": lambda logits, y: logits[torch.ones(ROWS, CLASSES).bool()].sin().sum(),
    "gather": lambda logits, y: logits.gather(-1, y[:, None]).sum(),
    "in place": lambda logits, y: F.cross_entropy(logits.div_(0.5), y),
    "operator in place": lambda logits, y: F.cross_entropy(logits.__imul__(2.0), y),
    "list of rows": lambda logits, y: F.cross_entropy(logits[[3, 1, 3]], y[[3, 1, 3]]),
    "mask of NumPy": lambda logits, y: F.cross_entropy(logits[(y > 10).numpy()], y[y > 10]),
    "multiplied by rows": lambda logits, y: F.cross_entropy(logits * y[:, None], y),
    "with a gradient": lambda logits, y: F.cross_entropy(logits * torch.ones(CLASSES, requires_grad=True), y),
    "two logits": lambda logits, y: F.cross_entropy(logits + logits.tanh(), y),
    "from a number": lambda logits, y: F.cross_entropy(1 - logits, y),
    "stacked": lambda logits, y: torch.stack([logits, logits * 2]).sin().sum(),
    "clone": lambda logits, y: F.cross_entropy(Double.apply(logits.clone()), y),
    "transposed twice": lambda logits, y: F.cross_entropy(logits.t().t().contiguous(), y),
    "other dtype view": lambda logits, y: logits.sum() + logits.view(torch.int32).sum() * 0,
    "view of one dimension": lambda logits, y: logits.view(-1).sin().sum(),
    "out": lambda logits, y: torch.mul(logits.detach(), 2.0, out=torch.empty(0)).sum() + logits.sin().sum(),
}


@pytest.mark.parametrize("loss", USES.values(), ids=USES)
def test_any_other_use_makes_the_logits_and_is_right(loss):
    check(loss, lazy=False)


def test_looking_at_the_logits():
    model, x = Head(), inputs()[0]
    expected, logits = model(x), tiled(model)(x)
    assert isinstance(logits, LazyLogits)
    assert isinstance(logits, torch.Tensor)
    assert (logits.shape, logits.dtype, logits.device, logits.ndim, len(logits), logits.numel(), logits.size(-1)) == (
        expected.shape, torch.float32, expected.device, 2, ROWS, expected.numel(), CLASSES,
    )  # fmt: skip
    assert logits.requires_grad
    assert logits.nbytes == expected.nbytes
    assert not logits.recipe.projection.computed, "none of these needs a value"
    assert repr(logits) == repr(expected)
    assert logits.type() == "torch.FloatTensor"
    assert bits(logits.argmax(-1)) == bits(expected.argmax(-1))
    assert bits(logits.detach()) == bits(expected.detach())
    assert bits(torch.from_numpy(logits.detach().numpy())) == bits(expected.detach())
    assert bits(saved(logits.detach())) == bits(expected.detach())
    assert logits.tolist() == expected.tolist()
    assert bits([*logits]) == bits([*expected])
    assert bool((logits == expected).all())
    fresh = tiled(model)(x)
    assert bits(saved(fresh)) == bits(expected)
    with torch.no_grad():
        for copied in (copy.deepcopy(tiled(model)(x)), pickle.loads(pickle.dumps(tiled(model)(x)))):
            assert type(copied) is torch.Tensor
            assert bits(copied) == bits(model(x))
    with pytest.raises(RuntimeError, match="grad"):
        tiled(model)(x).numpy()


@pytest.mark.parametrize("func", ["retain_grad", "register_hook"])
def test_the_gradient_of_the_logits_themselves(func):
    model, (x, y) = Head(), inputs()
    seen = []
    for fn in (model, tiled(model)):
        logits = fn(x)
        if func == "retain_grad":
            logits.retain_grad()
        else:
            logits.register_hook(seen.append)
        F.cross_entropy(logits, y).backward()
        if func == "retain_grad":
            seen.append(logits.grad)
    assert bits(seen[0]) == bits(seen[1])


def test_a_function_of_autograd_raises_and_does_not_lose_the_gradient():
    x, y = inputs()
    logits = tiled(Head())(x)
    for through in (logits, tiled(Head())(x) / 2.0):
        with pytest.raises(ms.TransformError, match=r"pass it logits\.clone\(\) to make them real first"):
            F.cross_entropy(Double.apply(through), y).backward()
    with pytest.raises(ms.TransformError, match=r"torch\.autograd\.Function"):
        torch.autograd.grad(Double.apply(tiled(Head())(x)).sum(), x)
    with pytest.raises(ms.TransformError, match="hides their use"), torch._C.DisableTorchFunctionSubclass():
        logits.sin()


def test_a_metric_under_no_grad_does_not_cut_the_graph():
    model = Head()

    def loss(logits, y):
        logits = logits * 1.5
        with torch.no_grad():
            assert not (logits + 1).requires_grad
            logits.argmax(-1)
        with torch.inference_mode():
            (logits * 2).softmax(-1)
        return F.cross_entropy(logits, y)

    check(loss, model=model, lazy=False)
    x, y = inputs()
    logits = tiled(model)(x)
    with torch.no_grad():
        derived = logits * 2.0
    assert not derived.requires_grad
    assert not F.cross_entropy(derived, y).requires_grad
    assert not derived.softmax(-1).requires_grad


def test_what_was_taken_from_the_logits_before_they_changed():
    model, (x, y) = Head(), inputs()

    def loss(logits):
        copied, view, picked = logits * 2.0, logits[2:], logits[torch.arange(ROWS) > 4]
        of_copy = copied[1:]
        logits.mul_(0.1)
        copied.mul_(3.0)
        return sum(F.cross_entropy(part, y[-len(part) :]) for part in (copied, of_copy, view, picked, logits))

    close(results(model, x, loss), results(tiled(model), x, loss))
    found = []
    for fn in (model, tiled(model)):
        factor, mask, logits = torch.tensor(3.0), torch.arange(ROWS) > 4, fn(x)
        scaled, picked = logits / factor, logits[mask]
        factor.zero_(), mask.zero_()
        found.append(bits((scaled.detach(), picked.detach())))
    assert found[0] == found[1]
    logits = tiled(model)(x)
    scaled = logits * 2.0
    logits.detach().zero_()
    with pytest.raises(ms.CorrectnessError, match=r"changed in place, through an alias such as logits\.detach\(\)"):
        F.cross_entropy(scaled, y)


# -------------------------------------------------------------------------------------------------- other heads


class LoRA(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.base, self.scale = nn.Linear(WIDTH, CLASSES).requires_grad_(False), 0.5
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + self.b(self.a(self.dropout(x))) * self.scale


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(x @ self.embed.weight[:WIDTH]))


def without_bias():
    return Head(nn.Linear(WIDTH, CLASSES, bias=False))


def frozen(*, weight, bias):
    model = Head()
    model.head.weight.requires_grad_(not weight)
    model.head.bias.requires_grad_(not bias)
    return model


HEADS = {
    "without bias": without_bias,
    "frozen weight": lambda: frozen(weight=True, bias=False),
    "frozen bias": lambda: frozen(weight=False, bias=True),
    "frozen head": lambda: frozen(weight=True, bias=True),
    "tied": Tied,
    "lora": lambda: Head(LoRA()),
    "two projections": lambda: Head(nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, CLASSES))),
}


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("loss", [LOSSES["mean"], LOSSES["none"], USES["z-loss"]], ids=["mean", "none", "z-loss"])
def test_every_head_has_the_same_loss_and_gradients(make, loss):
    check(loss, model=make(), lazy=loss is not USES["z-loss"])


LINEAR = nn.Linear(WIDTH, CLASSES)


class Patched(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


def hooked():
    module = nn.Linear(WIDTH, CLASSES)
    module.register_forward_hook(lambda module, args, out: out.relu())
    return module


def instance_patched():
    module = nn.Linear(WIDTH, CLASSES)
    module.forward = lambda x: F.linear(x, module.weight).relu()
    return module


class Positions(nn.Module):
    """Adds a row's own constant; the number of rows is that of the probe."""

    def __init__(self, rows):
        super().__init__()
        self.linear, self.positions = nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.randn(rows, CLASSES))

    def forward(self, x):
        return self.linear(x) + self.positions


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.linear(x) * self.linear(x)


NOT_PROJECTIONS = {
    "function of a linear": lambda: lambda x: torch.relu(LINEAR(x)),
    "functools.wraps": lambda: functools.wraps(LINEAR.forward)(lambda x: torch.relu(LINEAR(x))),
    "subclass": lambda: Patched(WIDTH, CLASSES),
    "hook": hooked,
    "instance forward": instance_patched,
    "positions 6": lambda: Positions(6),
    "positions 7": lambda: Positions(7),
    "squared": Squared,
    "norm": lambda: nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.LayerNorm(CLASSES)),
    "dropout": lambda: LoRA(dropout=0.5),
}


@pytest.mark.parametrize("make", NOT_PROJECTIONS.values(), ids=NOT_PROJECTIONS)
def test_what_only_looks_like_a_projection_is_not_lazy(make):
    fn = make()
    x, _ = inputs(4, fn.positions.shape[0] if isinstance(fn, Positions) else 3)
    torch.manual_seed(1)
    out = tile(chunks=2)(fn)(x)
    assert type(out) is torch.Tensor
    if not isinstance(fn, LoRA):
        assert ulps(fn(x), out) <= ULPS
        close([torch.autograd.grad(fn(x).sin().sum(), x)[0]], [torch.autograd.grad(out.sin().sum(), x)[0]])
    else:
        assert isinstance(tile(chunks=2)(fn.eval())(x), LazyLogits)


@pytest.mark.parametrize(
    "how",
    [
        compose(tile(chunks=5), ms.cast(compute=torch.bfloat16)),
        compose(ms.cast(compute=torch.bfloat16), tile(chunks=5)),
        compose(tile(chunks=5), checkpoint()),
        compose(checkpoint(), tile(chunks=5)),
        compose(tile(chunks=2), tile(chunks=3)),
    ],
    ids=repr,
)
def test_a_composed_head_has_the_same_loss_and_gradients(how):
    model, (x, y) = Head(), inputs()
    untiled = ms.transform(model, {"head": ms.cast(compute=torch.bfloat16)}) if "cast" in repr(how) else model
    found = [
        results(fn, x, lambda logits: F.cross_entropy(logits, y))
        for fn in (untiled, ms.transform(model, {"head": how}))
    ]
    # A weight gradient summed in bfloat16 piece by piece has bfloat16's units, which are 2 ** 16 of float32's.
    close(*found, bound=2**17 if "cast" in repr(how) else ULPS)


# -------------------------------------------------------------------------------------------- what backward does


def test_retain_graph_scaling_and_accumulation():
    model, (x, y) = Head(), inputs()
    found = []
    for fn in (model, tiled(model)):
        model.zero_grad()
        loss = F.cross_entropy(fn(x), y)
        loss.backward(retain_graph=True)
        (loss * 3).backward(retain_graph=True)
        (loss * 0.5).backward()
        F.cross_entropy(fn(x), y).backward()
        found.append([parameter.grad for parameter in model.parameters()])
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    close(*found)


def test_the_gradient_of_a_tied_weight_arrives_once():
    model = Tied()
    fit, fired = tiled(model), []
    for name, parameter in fit.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    x, y = inputs()
    F.cross_entropy(fit(x), y).backward()
    assert fired == ["embed.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["by rows", "by classes"])
@pytest.mark.parametrize("what", ["weight", "hidden"])
def test_a_change_in_place_raises(what, dtype):
    model, (x, y) = Head().to(dtype), inputs()
    target = {"weight": model.head.weight, "hidden": (hidden := x.detach().to(dtype)).requires_grad_()}[what]
    named = {"weight": "weight or bias", "hidden": "hidden states"}[what]
    fit = tiled(model).head
    for use in (lambda logits: F.cross_entropy(logits, y), lambda logits: logits.softmax(-1)):
        logits = fit(hidden)
        with torch.no_grad():
            target.add_(1)
        with pytest.raises(ms.CorrectnessError, match=f"the {named} of a tiled output projection, b?float"):
            use(logits)
    loss = F.cross_entropy(fit(hidden), y)
    with torch.no_grad():
        target.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


def test_torch_func_computes_the_logits():
    model, (x, y) = Head(), inputs()
    found = []
    for fn, state in (ms.functional(model), ms.functional(tiled(model))):

        def loss(state, x, y, fn=fn):
            return F.cross_entropy(fn(state, x), y)

        found.append([*torch.func.grad(loss)(state, x, y).values()])
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        found[-1] += per_sample(state, x[:, None], y[:, None]).values()
    close(*found)


def test_a_checkpoint_around_a_tiled_head_computes_the_logits_under_torch_func():
    model, (x, _) = Head(), inputs()
    fit = ms.transform(model, {"head": compose(checkpoint(), tile(chunks=5))})
    close(*[[torch.func.grad(lambda x, fn=fn: fn(x).square().sum())(x)] for fn in (model, fit)])


@pytest.mark.parametrize("inside", [True, False], ids=["loss in the region", "loss of the whole"])
def test_a_loss_in_a_checkpointed_region(inside):
    model, (x, y) = Head(), inputs()
    fit = tiled(model)

    def loss(fn):
        return checkpoint()(lambda x: F.cross_entropy(fn(x), y)) if inside else lambda x: F.cross_entropy(fn(x), y)

    outer = checkpoint()(loss(fit))
    found = [torch.autograd.grad(f(x), [x, *model.parameters()]) for f in (loss(model), outer)]
    close(*found)


def test_autocast_left_before_the_loss():
    model, (x, y) = Head(), inputs()
    found = []
    for fn in (model, tiled(model)):
        with torch.autocast("cpu", torch.bfloat16):
            logits = fn(x)
        assert logits.dtype == torch.bfloat16
        loss = F.cross_entropy(logits.float(), y)
        found.append([loss.detach(), *torch.autograd.grad(loss, model.parameters())])
    close(found[0][:1], found[1][:1])
    for before, after in zip(*found, strict=True):
        assert ulps(before.bfloat16(), after.bfloat16()) <= 4


# ---------------------------------------------------------------------------------------------- 16-bit precision


def test_gradients_of_any_16_bit_head_are_summed_in_float32_and_kept_in_16_bits():
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 400, bias=False)).bfloat16()
    x, y = torch.randn(512, 32).bfloat16(), torch.randint(0, 400, (512,))
    fit, found, kept = ms.transform(head, {"": tile(chunks=64)}), [], []
    for fn, dtype in ((copy.deepcopy(head).double(), torch.float64), (head, torch.bfloat16), (fit, torch.bfloat16)):
        value = F.cross_entropy(fn(x.to(dtype)), y) if dtype == torch.float64 else F.cross_entropy(fn(x).float(), y)
        found.append(torch.autograd.grad(value, list(fn.parameters())))
    for truth, plain, ours in zip(*found, strict=True):
        assert (ours - truth).norm() <= 1.5 * (plain - truth).norm()  # each piece's share is rounded, too
    trace = measure(lambda: kept.append(F.cross_entropy(fit(x).float(), y)))
    assert trace.end_bytes - trace.start_bytes <= sum(p.nbytes for p in head.parameters()) + 16 * len(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_that_require_a_gradient(dtype):
    torch.manual_seed(0)
    model, (x, _) = Head().to(dtype), inputs()
    teacher, found = torch.randn(ROWS, CLASSES).softmax(-1).requires_grad_(), []
    for fn in (model, tiled(model)):
        value = F.cross_entropy(fn(x.to(dtype)).float(), teacher)
        found.append([value.detach(), *torch.autograd.grad(value, [teacher, *model.parameters()])])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5 if dtype == torch.float32 else 2**-6, atol=1e-4)


# --------------------------------------------------------------------------------------------------------- memory


def test_the_logits_never_exist():
    rows, classes = 512, 1000
    model = Head(nn.Linear(WIDTH, classes))
    x, y = torch.randn(rows, WIDTH), torch.randint(0, classes, (rows,))
    loss_bytes = {}
    for name, fn in (("plain", model), ("tiled", tiled(model, chunks=16)), ("none", tiled(model, chunks=16))):
        reduction = "none" if name == "none" else "mean"

        def step(fn=fn, reduction=reduction):
            F.cross_entropy(fn(x).float(), y, reduction=reduction).sum().backward()
            model.zero_grad()

        step()
        loss_bytes[name] = (measure(step).growth_bytes, largest_bytes(step))
    logits_bytes = rows * classes * 4
    assert loss_bytes["plain"][0] >= 2 * logits_bytes
    assert loss_bytes["plain"][1] == logits_bytes
    piece_bytes, weight_bytes = logits_bytes // 16, classes * WIDTH * 4
    for name in ("tiled", "none"):
        assert loss_bytes[name][1] <= max(piece_bytes, weight_bytes), name
        assert loss_bytes[name][0] <= 4 * piece_bytes + 3 * weight_bytes + 8 * rows * WIDTH * 4, name


def largest_bytes(step):
    """The largest single allocation of `step`."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recording:
        step()
    sizes = []
    pending = list(recording.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        sizes.append(getattr(event.extra_fields, "alloc_size", 0))
        pending.extend(event.children)
    return max(sizes)


# -------------------------------------------------------------------------------------------- Hugging Face models

VOCABULARY, LENGTH, BATCH = 1009, 16, 4


@dataclasses.dataclass(frozen=True)
class Architecture:
    name: str
    head: str
    config: tuple
    automatic: str = "AutoModelForCausalLM"

    def make(self):
        transformers = pytest.importorskip("transformers", reason="needs transformers")
        torch.manual_seed(0)
        config = getattr(transformers, self.name)(vocab_size=VOCABULARY, **dict(self.config))
        model = getattr(transformers, self.automatic).from_config(config)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.eval()


def settings(**fields):
    return tuple(fields.items())


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}

ARCHITECTURES = [
    Architecture("GPT2Config", "lm_head", settings(n_embd=16, n_layer=1, n_head=2, n_positions=64)),
    Architecture("LlamaConfig", "lm_head", settings(**SMALL)),
    Architecture("Gemma2Config", "lm_head", settings(**SMALL, num_key_value_heads=2, head_dim=8)),
    Architecture("BertConfig", "cls.predictions.decoder", settings(**SMALL), "AutoModelForMaskedLM"),
    Architecture(
        "T5Config", "lm_head", settings(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
                                        decoder_start_token_id=0), "AutoModelForSeq2SeqLM",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.deep] * (each.name not in ("GPT2Config", "T5Config")))
        for each in ARCHITECTURES
    ],
)
def test_hugging_face_models_as_they_ship(architecture):
    model = architecture.make()
    fit = ms.transform(model, {architecture.head: tile(chunks=4)})
    ids = torch.randint(10, VOCABULARY, (BATCH, LENGTH))
    labels = ids.masked_fill(torch.arange(LENGTH) < 3, -100)
    padding = (torch.arange(LENGTH) < 13).long().expand(BATCH, LENGTH)
    batch = {"input_ids": ids, "attention_mask": padding, "labels": labels}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step(fn):
        loss = fn(**batch).loss
        return [loss.detach(), *torch.autograd.grad(loss, parameters, allow_unused=True)]

    expected, actual = step(model), step(fit)
    assert [grad is None for grad in expected] == [grad is None for grad in actual]
    close(*([tensor for tensor in found if tensor is not None] for found in (expected, actual)), bound=256)
    out = fit(**batch)
    assert type(out.logits) is LazyLogits
    assert out.logits.shape == (BATCH, LENGTH, VOCABULARY)
    assert largest_bytes(lambda: step(model)) >= BATCH * (LENGTH - 1) * VOCABULARY * 4
    embedding_bytes = VOCABULARY * 16 * 4
    assert largest_bytes(lambda: step(fit)) <= max(BATCH * LENGTH * VOCABULARY * 4 // 4, embedding_bytes)
    assert bits(out.logits) == bits(model(**batch).logits)
    with torch.no_grad():
        close([model(**batch).loss], [fit(**batch).loss])
    if architecture.automatic != "AutoModelForMaskedLM":
        arguments = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        assert bits(fit.generate(ids, **arguments)) == bits(model.generate(ids, **arguments))
        sampled = []
        for fn in (model, fit):
            torch.manual_seed(3)
            sampled.append(bits(fn.generate(ids, **{**arguments, "do_sample": True}, top_k=5, temperature=0.7)))
        assert sampled[0] == sampled[1]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_backward_with_a_graph_of_a_tied_head(dtype, reduction):
    """The hidden states come from the weight too: what goes through them is counted once."""
    torch.manual_seed(0)
    embed, body, head = nn.Embedding(200, 16), nn.Linear(16, 16), nn.Linear(16, 200, bias=False)
    head.weight = embed.weight
    model, ids = nn.Sequential(embed, body, nn.Tanh(), head).to(dtype), torch.randint(0, 200, (24,))
    found = []
    for each in (model, ms.transform(model, {"3": ms.tile(chunks=4)})):
        weights = list(model.parameters())
        loss = F.cross_entropy(each(ids), ids, reduction=reduction).mean()
        directions = torch.tensor([1.0, 2.0], dtype=dtype)
        batched = torch.autograd.grad(loss, weights, directions, is_grads_batched=True, retain_graph=True)
        first = torch.autograd.grad(loss, weights, create_graph=True)
        second = torch.autograd.grad(sum(grad.square().sum() for grad in first), weights)
        found.append([each.double() for each in (*batched, *first, *second)])
    for expected, actual in zip(*found, strict=True):
        assert (expected - actual).norm() <= (1e-12 if dtype is torch.float64 else 0.02) * expected.norm()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(16, 200), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.linear(x) * self.scale


def test_weights_that_come_from_one_another():
    torch.manual_seed(0)
    model, x, ids = nn.Sequential(Scaled()).double(), torch.randn(24, 16, dtype=torch.float64), torch.arange(24)
    made = torch.randn(200, 16, dtype=torch.float64, requires_grad=True)
    found = []
    for each in (model, ms.transform(model, {"0": tile(chunks=4)})):
        weight = made * 0.1
        weights = {"0.linear.weight": weight, "0.linear.bias": weight.sum(1), "0.scale": weight.square().mean()}
        loss = F.cross_entropy(torch.func.functional_call(each, weights, (x,)), ids)
        found.append(torch.autograd.grad(loss, made)[0])
    torch.testing.assert_close(*found)


class DropsPaths(nn.Module):
    """Leaves a layer out by chance, drawn by `draw`."""

    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw = nn.Linear(4, 4), draw

    def forward(self, x):
        return x if self.draw() > 0.5 else self.linear(x)


DRAWS = {"Python": random.random, "its own": random.Random(0).random, "PyTorch": lambda: torch.rand(())}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_what_draws_is_no_projection_and_asking_draws_nothing(draw):
    own = getattr(getattr(draw, "__self__", None), "getstate", int)
    model, x = DropsPaths(draw), torch.randn(6, 4)
    before = generators(), own()
    assert not is_projection(model, x)
    assert (generators(), own()) == before


def test_a_tiled_head_without_rows_has_the_loss_of_the_plain_one():
    with torch.no_grad():
        assert F.cross_entropy(tiled(Head())(inputs()[0])[:0], torch.zeros(0, dtype=torch.long)).isnan()
    model, (x, y) = Head(), inputs()
    value = F.cross_entropy(tiled(model)(x)[:0], y[:0], reduction="sum")
    value.backward()
    assert value == 0


def test_only_the_head_is_trained():
    model, (x, y) = Head(), inputs()
    model.body.requires_grad_(False)
    found = [results(fn, x.detach(), lambda logits: F.cross_entropy(logits, y)) for fn in (model, tiled(model))]
    close(*found)
