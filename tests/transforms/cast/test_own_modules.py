"""A cast region runs on the user's own modules, in and outside of a compiled graph: whoever refers to one finds it."""

import copy
import functools
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms

BF16 = torch.bfloat16


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class SkipsOneOfAList(Pair):
    def __init__(self):
        super().__init__()
        self.skipped = [self.a]

    def forward(self, x):
        for layer in self.children():
            if layer not in self.skipped:
                x = layer(x)
        return x


class ScalesByATable(Pair):
    def __init__(self):
        super().__init__()
        self.scales = {self.a: 2.0, self.b: 0.5}

    def forward(self, x):
        return self.b(self.a(x) * self.scales[self.a]) * self.scales[self.b]


class OrdersByAList(Pair):
    def __init__(self):
        super().__init__()
        self.order = [self.b, self.a]

    def forward(self, x):
        for layer in self.order:
            x = layer(x)
        return x


class CallsABoundMethod(Pair):
    def __init__(self):
        super().__init__()
        self.ways = {"plain": self.run, "doubled": functools.partial(self.run, scale=2.0)}

    def run(self, x, scale=1.0):
        return self.b(self.a(x)) * scale

    def forward(self, x):
        return self.ways["plain"](x) + self.ways["doubled"](x)


class Helper:
    def __init__(self, module):
        self.module = module

    def run(self, x):
        return F.linear(x, self.module.a.weight)


class AsksAHelper(Pair):
    def __init__(self):
        super().__init__()
        self.helper = Helper(self)

    def forward(self, x):
        return self.b(self.helper.run(x))


class Child(nn.Module):
    def __init__(self, parent, held):
        super().__init__()
        self.parent = held(parent)

    def forward(self, x):
        parent = self.parent[0] if isinstance(self.parent, list) else self.parent()
        return F.linear(x, parent.a.weight)


class ChildWithItsParent(Pair):
    def __init__(self):
        super().__init__()
        self.b = Child(self, lambda parent: [parent])


WITH_REFERENCES = [
    SkipsOneOfAList,
    ScalesByATable,
    OrdersByAList,
    CallsABoundMethod,
    AsksAHelper,
    ChildWithItsParent,
]


@pytest.mark.parametrize("kind", WITH_REFERENCES)
def test_references_to_modules_find_the_cast_state(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4)
    expected = copy.deepcopy(model).to(BF16)(x.to(BF16)).float()
    assert torch.equal(ms.cast(keep=())(model)(x), expected)


@pytest.mark.usefixtures("cast_in_one_graph")
@pytest.mark.parametrize("how", [ms.cast(keep=()), ms.compose(ms.checkpoint(), ms.cast(keep=()))], ids=repr)
@pytest.mark.parametrize(
    "kind", [SkipsOneOfAList, *(pytest.param(kind, marks=pytest.mark.deep) for kind in WITH_REFERENCES[1:])]
)
def test_in_a_compiled_graph_too(kind, how):
    """A layer in a list was another object than the layer that ran, so it was not skipped, and the result was wrong."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4)
    expected = copy.deepcopy(model).to(BF16)(x.to(BF16)).float()
    assert torch.equal(torch.compile(how(model), backend="aot_eager", fullgraph=True)(x), expected)


def test_a_child_with_a_weak_reference_to_its_parent():
    torch.manual_seed(0)
    model, x = Pair(), torch.randn(3, 4).to(BF16)
    model.b = Child(model, weakref.ref)
    weight, bias = model.a.weight.to(BF16), model.a.bias.to(BF16)
    assert torch.equal(ms.cast(keep=())(model)(x), F.linear(torch.tanh(F.linear(x, weight, bias)), weight))


def test_hooks_get_the_module_whose_weights_are_cast():
    fit, seen = ms.transform(Pair(), {"": ms.cast()}), {}
    names = {module: name for name, module in fit.named_modules()}

    def note(module, args, output):
        seen[names[module]] = module.weight.dtype

    for module in (fit.a, fit.b):
        module.register_forward_hook(note)
    fit(torch.randn(3, 4))
    assert seen == {"a": BF16, "b": BF16}


class KeepsItsModule(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.module.seen.append(("function", grad.dtype))
        return grad * 2, None


class SeesItsGradients(Pair):
    def __init__(self):
        super().__init__()
        self.seen = []
        self.a.register_full_backward_hook(lambda layer, *_: setattr(layer, "ran_backward", True))

    def forward(self, x):
        y = KeepsItsModule.apply(self.a(x), self)
        y.register_hook(lambda grad: setattr(self, "grad_dtype", grad.dtype))
        return self.b(y)


def test_what_backward_writes_to_a_module_stays():
    model = SeesItsGradients()
    ms.cast()(model)(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert (model.a.ran_backward, model.seen, model.grad_dtype) == (True, [("function", BF16)], BF16)


class Registers(Pair):
    """Beside a floating buffer, it counts in a buffer of integers and registers another one when it first runs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls = self.calls + 1
        if "mask" not in self._buffers:
            self.register_buffer("mask", torch.ones(4, dtype=torch.int64), persistent=False)
        return super().forward(x) * self.scale * self.mask


def test_buffers_of_integers_beside_cast_ones_are_the_regions_to_replace():
    fit = ms.transform(Registers(), {"": ms.cast()})
    for _ in range(2):
        fit(torch.randn(3, 4))
    assert (int(fit.calls), fit.mask.dtype, fit.scale.dtype) == (2, torch.int64, torch.float32)


class Hidden(Pair):
    """It calls a module outside of its tree, which only its code leads to."""

    def __init__(self):
        super().__init__()
        self.hidden = [nn.Linear(4, 4)]

    def forward(self, x):
        return self.hidden[0](super().forward(x))


class Listed(Pair):
    """It uses a weight from a list."""

    def __init__(self):
        super().__init__()
        self.weights = [self.a.weight]

    def forward(self, x):
        return (x[:, None] * self.weights[0]).sum(-1)


@pytest.mark.parametrize("kind", [Hidden, Listed])
def test_state_outside_of_the_tables_of_a_tree_is_left_to_python(kind):
    """A compiler would compute with what is no copy, in its own dtype."""
    torch._dynamo.reset()
    region, x = ms.cast(keep=())(kind()), torch.randn(3, 4)
    assert torch.equal(torch.compile(region, backend="aot_eager")(x), region(x))


def writes_of(code):
    names = {"update", "clear", "object_setattr_ignore_descriptor", "object_delattr_ignore_descriptor"}
    return names.intersection(code.co_names)


@pytest.mark.usefixtures("cast_in_one_graph")
@pytest.mark.parametrize("how", [ms.cast(), ms.compose(ms.checkpoint(), ms.cast())], ids=repr)
def test_compiled_code_writes_nothing_to_modules(how):
    torch._dynamo.reset()
    fit = ms.transform(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), {"": how})
    made = []
    hook = torch._dynamo.convert_frame.register_bytecode_hook(lambda _, code: made.append(code))
    with hook:  # the model is a global of the compiled code, of whose tables the compiler writes all that changed
        torch.compile(lambda x: fit(x), backend="aot_eager", fullgraph=True)(torch.randn(2, 4))
    assert [writes_of(code) for code in made] == [set()]
