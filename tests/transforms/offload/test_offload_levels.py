"""`offload()` alone under `torch.func`: the numbers of the function, rounding included, and bytes that move."""

import gc

import pytest
import torch

import memscale as ms
from tests.support.checks import bits
from tests.transforms.offload.test_offload_func import TRANSFORMS, chain, inputs, layer, runtime

ALONE = ms.offload(min_bytes=0)


def smooth(x, w):
    """Rounds at every step, saves inputs and outputs, and uses its input twice: the order of sums shows."""
    return torch.softmax((x @ w).exp().tanh(), -1) * x


def single(x, w):
    return smooth(x.float() * 0.3, w.float()).double()


LAYERS = {"exact": layer, "float64": smooth, "float32": single}


@pytest.mark.parametrize("fn", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("of", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_numbers_are_those_of_the_function_and_residuals_move(of, fn):
    where = runtime()
    expected = of(chain([fn] * 3))(*inputs())
    assert bits(of(chain([ALONE.on(where)(fn)] * 3))(*inputs())) == bits(expected)
    stats = where.stats()["cpu"]
    assert stats.out_bytes["disk"] > 0
    assert stats.in_bytes["disk"] > 0
    where.settle()
    assert where.stats()["cpu"].live_bytes == {"disk": 0}


@pytest.mark.parametrize("fn", LAYERS.values(), ids=LAYERS)
def test_what_moves_is_what_moves_in_plain_autograd(fn):
    func, plain = runtime(), runtime()
    torch.func.grad(chain([ALONE.on(func)(fn)] * 3))(*inputs())
    x, w = inputs()
    chain([ALONE.on(plain)(fn)] * 3)(x.requires_grad_(), w).backward()
    moved = [(stats.out_bytes, stats.in_bytes) for stats in (func.stats()["cpu"], plain.stats()["cpu"])]
    assert moved[0] == moved[1]


def third(f):
    return torch.func.grad(lambda x, w: torch.func.grad(lambda x: torch.func.grad(f)(x, w).sin().sum())(x).cos().sum())


def per_sample_of_grad(f):
    def inner(x, w):
        return torch.func.grad(lambda x: torch.func.grad(f)(x[None], w).sin().sum())(x)

    return torch.func.vmap(lambda x, w: inner(x, w), in_dims=(1, None), out_dims=1)


def grad_of_per_sample(f):
    samples = torch.func.vmap(torch.func.grad(lambda x, w: f(x[None], w)), in_dims=(0, None))
    return torch.func.grad(lambda x, w: samples(x, w).sin().sum(), argnums=(0, 1))


def plain_around(f):
    """Plain autograd differentiates what torch.func differentiated: the history is below every level."""

    def run(x, w):
        x.requires_grad_(), w.requires_grad_()
        samples = torch.func.vmap(torch.func.grad(lambda x, w: f(x[None], w)), in_dims=(0, None))(x * 1, w * 1)
        return torch.autograd.grad(samples.sin().sum() + torch.func.grad(f)(x * 1, w * 1).sin().sum(), (x, w))

    return run


def vjp_twice(f):
    def run(x, w):
        pullback = torch.func.vjp(f, x, w)[1]
        return pullback(torch.tensor(1.5)), pullback(torch.tensor(-0.5))

    return run


def hessian(f):
    return torch.func.jacrev(torch.func.jacrev(f, argnums=(0, 1)), argnums=(0, 1))


DEEPER = {
    "third order": third,
    "per sample of grad of grad": per_sample_of_grad,
    "grad of per sample": grad_of_per_sample,
    "plain autograd around": plain_around,
    "a pullback called twice": vjp_twice,
    "jacrev of jacrev": hessian,
}


@pytest.mark.parametrize("of", DEEPER.values(), ids=DEEPER)
def test_deeper_levels(of):
    where = runtime()
    expected = of(chain([smooth] * 2))(*inputs())
    assert bits(of(chain([ALONE.on(where)(smooth)] * 2))(*inputs())) == bits(expected)
    assert where.stats()["cpu"].in_bytes["disk"] > 0
    gc.collect()  # histories of higher order are circles of PyTorch's own
    where.settle()
    assert where.stats()["cpu"].live_bytes == {"disk": 0}


def test_a_region_in_a_region():
    where, how = runtime(), ms.compose(ALONE, ALONE)
    expected = TRANSFORMS["grad of grad"](chain([layer]))(*inputs())
    assert bits(TRANSFORMS["grad of grad"](chain([how.on(where)(layer)]))(*inputs())) == bits(expected)
    assert where.stats()["cpu"].in_bytes["disk"] > 0


def test_a_checkpoint_among_other_things_in_the_region():
    where = runtime()

    def region(inner):
        return lambda x, w: inner(x.exp(), w).sin() * x

    expected = torch.func.grad(chain([region(ms.checkpoint()(smooth))]))(*inputs())
    assert bits(torch.func.grad(chain([ALONE.on(where)(region(ms.checkpoint()(smooth)))]))(*inputs())) == bits(expected)
    assert where.stats()["cpu"].in_bytes["disk"] > 0


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("of", ["grad of grad", "per sample", "two batch dimensions", "jacrev"])
def test_what_functions_of_the_user_save_moves(of):
    where = runtime()

    def region(x, w):
        return Square.apply(x @ w)

    expected = TRANSFORMS[of](chain([region] * 2))(*inputs())
    assert bits(TRANSFORMS[of](chain([ALONE.on(where)(region)] * 2))(*inputs())) == bits(expected)
    assert where.stats()["cpu"].in_bytes["disk"] > 0


def test_a_module_under_functional_call():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)).double()
    where, x = runtime(), inputs()[0]
    fit = ms.transform(model, {"": ALONE}, runtime=where)

    def gradients(module):
        def loss(state, row):
            return torch.func.functional_call(module, state, (row,)).square().sum()

        state = {name: p.detach() for name, p in model.named_parameters()}
        return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(state, x)

    assert bits(gradients(fit)) == bits(gradients(model))
    assert where.stats()["cpu"].in_bytes["disk"] > 0


def test_a_residual_that_was_changed_is_an_error():
    def loss(x, change):
        y = x * 2
        out = ALONE.on(runtime())(lambda y: y.sin())(y)
        if change:
            y.mul_(2)
        return out.sum()

    torch.func.grad(loss)(inputs()[0], False)
    with pytest.raises(ms.CorrectnessError):
        torch.func.grad(loss)(inputs()[0], True)


def test_torch_func_in_the_region_is_refused_and_leaves_nothing_behind():
    def region(x):
        return torch.func.grad(lambda y: y.sin().sum())(x)

    with pytest.raises(ms.TransformError, match="the region of offload"):
        torch.func.grad(lambda x: ALONE(region)(x).sum())(inputs()[0])
    assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None

    def hooks_after(x):
        ALONE(torch.sin)(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return x.sum()

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(hooks_after)(inputs()[0])
