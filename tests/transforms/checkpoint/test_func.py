"""Regions inside torch.func: every transform of torch.func gives what it gives without the region, bit for bit."""

import itertools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves as pytree_leaves

import memscale as ms
from memscale import checkpoint, compose, policies
from tests.support.checks import bits
from tests.support.coverings import pairwise
from tests.support.models import ConvBlock, mlp

# Integer-valued polynomials in float64 are exact in whatever order they are summed. The order does change: a tensor
# that a region uses twice gets one gradient from the region, which is then added to those from outside.
X = torch.tensor([[1.0, 0, -1, 1], [0, 1, 1, -1], [-1, 1, 0, 1]], dtype=torch.float64)
W = torch.tensor([[1.0, 0, -1, 1], [0, -1, 1, 1], [1, 1, 0, -1], [-1, 0, 1, 0]], dtype=torch.float64)


def layer(x, w):
    hidden = x @ w
    return hidden * hidden + hidden


def regions(how):
    """A function with one region, with regions in sequence, with regions in a region, and with a captured tensor."""

    def nested(x, w):
        inner = how(layer)
        return inner(inner(x, w), w.T).square()

    def capturing(x, w):
        return how(lambda x: layer(x, w) * (w * w).sum())(x)

    return {
        "one": how(layer),
        "in sequence": lambda x, w: how(layer)(how(layer)(x, w), w * 2),
        "nested": how(nested),
        "capturing": capturing,
        "saving its input": lambda x, w: how(lambda x: x * x * x)(x) @ w,
    }


def autograd_of_grad(f):
    w = W.clone().requires_grad_()
    return torch.autograd.grad(grad(lambda x: f(x, w).pow(2).sum())(X).sum(), w)


def grad_over_tangents(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(grad(lambda w: f(X, w).sum())(forward_ad.make_dual(W, W + 1)))


def pulled_back(f):
    """The inner `vjp` runs its backward after its transform has ended, inside the outer transform."""
    return lambda w: vjp(lambda v: f(v, W), w)[1](W)[0]


LEVELS = {
    "grad": lambda f: grad(lambda w: f(X, w).sum())(W),
    "grad of both": lambda f: grad(lambda x, w: f(x, w).sum(), argnums=(0, 1))(X, W),
    "vjp": lambda f: vjp(f, X, W)[1](X),
    "jvp": lambda f: jvp(f, (X, W), (X, W)),
    "jacrev": lambda f: jacrev(f)(X, W),
    "jacfwd": lambda f: jacfwd(f, argnums=1)(X, W),
    "hessian": lambda f: hessian(lambda w: f(X, w).sum())(W),
    "vmap": lambda f: vmap(f, in_dims=(0, None))(X, W),
    "vmap(grad)": lambda f: vmap(grad(lambda w, x: f(x[None], w).sum()), in_dims=(None, 0))(W, X),
    "grad(grad)": lambda f: grad(lambda w: grad(lambda x: f(x, w).sum())(X).pow(2).sum())(W),
    "grad(vmap)": lambda f: grad(lambda w: vmap(f, in_dims=(0, None))(X, w).sum())(W),
    "vjp(vjp)": lambda f: vjp(pulled_back(f), W)[1](W),
    "jvp(vjp)": lambda f: jvp(pulled_back(f), (W,), (W,)),
    "vmap(vjp)": lambda f: vmap(pulled_back(f))(torch.stack([W, W + 1])),
    "autograd of grad": autograd_of_grad,
    "jvp(jvp)": lambda f: jvp(lambda x: jvp(lambda x: f(x, W), (x,), (X,))[1], (X,), (X,)),
    "grad(jacfwd(jacfwd))": lambda f: grad(lambda w: jacfwd(jacfwd(lambda w: f(X[:1], w).sum()))(w).sum())(W),
    "grad over tangents": grad_over_tangents,
    "functionalize": lambda f: functionalize(f)(X, W),
}

HOWS = {
    "checkpoint": checkpoint(),
    "dots": checkpoint(policy=policies.dots_saveable),
    "twice": compose(checkpoint(), checkpoint()),
}


# Forward mode compiles its rules at first use, with a function that PyTorch itself has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("level", "shape", "how"), pairwise(itertools.product(LEVELS, regions(ms.identity), HOWS)))
def test_same_as_untransformed(level, shape, how):
    expected = LEVELS[level](regions(ms.identity)[shape])
    assert bits(LEVELS[level](regions(HOWS[how])[shape])) == bits(expected)


@pytest.mark.parametrize("pattern", ["", "*", "**"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_functional_call_over_a_transformed_module(pattern, per_sample):
    model = mlp(4).double()
    state = {name: p.detach() * 0.5 for name, p in model.named_parameters()}

    def gradients(model):
        def loss(state, x):
            return functional_call(model, state, (x,)).sin().sum()

        return vmap(grad(loss), in_dims=(None, 0))(state, X) if per_sample else grad(loss)(state, X)

    assert bits(gradients(ms.transform(model, {pattern: checkpoint()}))) == bits(gradients(model))


@pytest.mark.parametrize("level", [grad, lambda f: vmap(grad(f)), jacrev], ids=["grad", "vmap(grad)", "jacrev"])
def test_a_captured_tensor_that_cannot_be_followed_is_an_error(level):
    class holder:
        pass

    def loss(w):
        holder.w = w
        return checkpoint()(lambda x: torch.sin(x * holder.w))(X).sum()

    with pytest.raises(ms.TransformError, match=r"a way memscale cannot follow.*pass it to the region as an argument"):
        level(loss)(W)


def test_a_region_that_changes_its_input_in_place_is_an_error():
    with pytest.raises(ms.TransformError, match=r"changes an input of shape \[3, 4\] in place.*clone the input"):
        grad(lambda x: checkpoint()(lambda t: t.mul_(2).sin())(x * 1).sum())(X)


def test_batchnorm_buffers_are_updated_once():
    model = ConvBlock()
    x = torch.randn(2, 4, 5, 5)

    def step(model):
        model.calls, model.seen = 0, []
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        found = grad(lambda p, b: functional_call(model, (p, b), (x,)).pow(2).sum())(parameters, buffers)
        return found, buffers, model.calls, model.seen

    expected = step(model)
    assert expected[2] == 1
    assert int(expected[1]["norm.num_batches_tracked"]) == 1
    assert bits(step(ms.transform(model, {"": checkpoint()}))) == bits(expected)
    assert bits(step(ms.transform(model, {"": checkpoint(), "*": checkpoint()}))) == bits(expected)


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("per_sample_gradients", [False, True])
def test_dropout_under_vmap_draws_the_same(randomness, per_sample_gradients):
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2)).double()
    state = {name: p.detach() for name, p in model.named_parameters()}

    def run(model):
        torch.manual_seed(5)

        def fn(state, x):
            return functional_call(model, state, (x,))

        each = grad(lambda s, x: fn(s, x).sum()) if per_sample_gradients else fn
        return vmap(each, in_dims=(None, 0), randomness=randomness)(state, X), torch.get_rng_state()

    assert bits(run(ms.transform(model, {"": checkpoint()}))) == bits(run(model))


@pytest.mark.parametrize("wanted", [grad, jvp], ids=["grad", "jvp"])
@pytest.mark.parametrize(
    "drop",
    [
        F.dropout,
        lambda h: F.dropout(input=h, inplace=True) + h,
        lambda h: torch.alpha_dropout(h, 0.5, True),
        lambda h: F.dropout(h).transpose(0, 1).view(3, 20),
        lambda h: F.dropout(h, training=False, inplace=True) + h,
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True),
    ],
    ids=["dropout", "in place", "alpha", "view", "eval", "encoder"],
)
def test_dropout_of_a_tensor_with_another_order_in_memory_has_one_mask(drop, wanted):
    """PyTorch draws the mask of such a tensor in another order inside torch.func than outside."""
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    fn = drop if isinstance(drop, nn.Module) else lambda x: drop((x * 1.5).transpose(0, 1))

    def program(fn):
        torch.manual_seed(1)
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no forward mode
            if wanted is jvp:
                return jvp(fn, (x,), (torch.ones_like(x),))
            return grad(lambda x: (fn(x).square().sum(), fn(x)), has_aux=True)(x)

    plain, same = program(fn), program(checkpoint()(fn))
    torch.testing.assert_close(same, plain)


@pytest.mark.parametrize("in_dims", [0, 1, None])
@pytest.mark.parametrize("randomness", ["same", "different"])
@pytest.mark.parametrize("inplace", [False, True])
def test_dropout_of_a_tensor_with_another_order_in_memory_has_one_mask_under_vmap(in_dims, randomness, inplace):
    """There the run is at a level of torch.func as well, so its mask is that of the recompute already."""
    if inplace and in_dims is None and randomness == "different":
        pytest.skip("PyTorch refuses it: one tensor in place, with several masks")
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)).transpose(0, 1)

    def slopes(how):
        fn = how(lambda x, scale: F.dropout(x * 1.5, 0.5, True, inplace) * scale)

        def value(x, scale):
            out = fn(x, scale)
            return out.square().sum(), out

        torch.manual_seed(1)
        return vmap(grad(value, has_aux=True), in_dims=(in_dims, 0), randomness=randomness)(
            x, torch.ones(5 - 2 * (in_dims or 0))
        )

    assert bits(slopes(checkpoint())) == bits(slopes(ms.identity))


@pytest.mark.parametrize("fn", [lambda x: (x, x.argmax()), lambda x: x], ids=["counts", "nothing"])
def test_forward_mode_through_a_region_that_returns_what_it_is_given(fn):
    value, slope = jvp(lambda x: pytree_leaves(checkpoint()(fn)(x))[0], (X,), (W[:3],))
    assert torch.equal(value, X)
    assert torch.equal(slope, W[:3])


def test_a_transform_that_is_compiled_around_a_region():
    region = checkpoint()(lambda x: layer(x, W) * W.sum())
    slope = grad(lambda x: region(x).sum())
    assert torch.equal(torch.compile(slope, fullgraph=True, backend="eager")(X), slope(X))


# ------------------------------------------------------------------------ what a region leaves in arguments and outputs


def same_gradients(loss, x):
    wanted = torch.func.grad(lambda x: loss(ms.identity, x))(x)
    assert torch.equal(torch.func.grad(lambda x: loss(checkpoint(), x))(x), wanted)


def test_a_run_that_fails_leaves_no_inner_tensor_behind():
    cache = types.SimpleNamespace(entries=[], total=torch.zeros(3))
    before = dict(vars(cache))

    def fn(x, cache):
        cache.total = x.sin()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        torch.func.grad(lambda x: checkpoint()(fn)(x, cache))(torch.ones(3))
    assert vars(cache) == before


@pytest.mark.parametrize("kind", [list, dict])
def test_a_list_that_the_region_is_given_keeps_what_is_put_there(kind):
    x = torch.linspace(0, 1, 4)

    def loss(transform, x):
        found = kind()

        def fn(x, found):
            found.append(x.sin()) if kind is list else found.update(a=x.sin())
            return x.cos()

        y = transform(fn)(x, found)
        return (y * sum(found if kind is list else found.values())).sum()

    same_gradients(loss, x)


def test_an_object_that_is_returned_carries_gradients():
    x = torch.linspace(0, 1, 4)

    def loss(transform, x):
        y, entry = transform(lambda x: (x.cos(), types.SimpleNamespace(value=[x.sin()])))(x)
        return (y * entry.value[0]).sum()

    same_gradients(loss, x)


def test_an_input_can_be_returned_as_it_is():
    x = torch.linspace(0, 1, 4)

    def loss(transform, x):
        y, same = transform(lambda x: (x.cos(), x))(x * 2)
        return (y * same).sum()

    same_gradients(loss, x)


def given_twice(transform, x):
    """A tensor that is two arguments of `grad`, and returned as the one, as the other, and in a list."""

    def loss(a, b):
        kept = []
        first, second, product = transform(lambda a, b, kept: (kept.extend([b, a]), (a, b, a * b))[1])(a, b, kept)
        return (2 * first + 3 * second + product + 5 * kept[0] + 7 * kept[1]).sum()

    return grad(loss, argnums=(0, 1))(x, x)


def differentiated_and_captured(transform, x):
    return grad(lambda a: transform(lambda a: (a * x, a))(a)[1].pow(3).sum())(x)


def of_two_levels(transform, x):
    return grad(lambda a: grad(lambda b: transform(lambda b: (a, b))(b)[1].pow(3).sum())(a).sum())(x)


@pytest.mark.parametrize("program", [given_twice, differentiated_and_captured, of_two_levels])
def test_one_tensor_that_torch_func_gives_a_region_as_two_is_returned_as_the_right_one(program):
    x = torch.arange(4.0)
    torch.testing.assert_close(program(checkpoint(), x), program(ms.identity, x), rtol=0, atol=0)


def asks_for_attribute(x, p):
    return x * p * getattr(p, "scale", 1.0)


def asks_for_class(x, p):
    return x * p * (5.0 if isinstance(p, nn.Parameter) else 1.0)


def asks_for_requires_grad(x, p):
    return x * p * (5.0 if p.requires_grad else 1.0)


def once(loss, x, p):
    return grad(loss)(x)


def twice(loss, x, p):
    return grad(lambda x: grad(loss)(x).square().sum())(x)


def to_the_captured_one_too(loss, x, p):
    value, pull = vjp(loss, x)
    return *pull(torch.ones(())), *torch.autograd.grad(value, p)


@pytest.mark.parametrize("level", [once, twice, to_the_captured_one_too])
@pytest.mark.parametrize("fn", [asks_for_attribute, asks_for_class, asks_for_requires_grad])
def test_a_captured_tensor_has_its_class_and_attributes_in_the_recompute(fn, level):
    x, p = torch.arange(1.0, 4.0), nn.Parameter(torch.arange(2.0, 5.0))
    p.scale = 3.0
    results = [
        level(lambda x, how=how: how(lambda x: fn(x, p))(x).pow(2).sum(), x, p) for how in (ms.identity, checkpoint())
    ]
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_differentiated_argument_has_its_attributes():
    def loss(how, x):
        x = x * 2
        x.scale = 3.0
        return how(lambda x: asks_for_attribute(x.sin(), x))(x).sum()

    same_gradients(loss, torch.arange(3.0))


def test_forward_mode_through_a_batchnorm_in_eval_mode():
    norm, x = nn.BatchNorm1d(3).eval(), torch.arange(12.0).view(4, 3)
    torch.testing.assert_close(jvp(checkpoint()(norm), (x,), (x,)), jvp(norm, (x,), (x,)), rtol=0, atol=0)


def test_a_rerun_that_leaves_other_tensors_is_refused():
    class hidden:  # memscale does not see what a class keeps
        runs = []  # noqa: RUF012

    def fn(x, cache):
        hidden.runs.append(1)
        cache.entries.extend([x.sin()] * len(hidden.runs))
        return x.cos()

    with pytest.raises(ms.CorrectnessError, match=r"the region left 4 tensors .* and the run had left 3"):
        torch.func.grad(lambda x: checkpoint()(fn)(x, types.SimpleNamespace(entries=[], total=torch.zeros(3))).sum())(
            torch.ones(3)
        )
