"""`compose(offload(), checkpoint())` under `torch.func`: the numbers of the function, and bytes that really move."""

import pytest
import torch

import memscale as ms
from memscale.runtime import Runtime
from tests.support.checks import bits

HOW = ms.compose(ms.offload(min_bytes=0), ms.checkpoint())
ROWS, WIDTH = 4, 4  # of one size: a batch dimension that is taken for another would not be noticed by its size


def runtime(**options):
    return Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=0, **options), disk_bytes=1 << 24)


def chain(regions):
    """Two regions in sequence, of tensors that nobody else keeps."""

    def f(x, w):
        for region in regions:
            x = region(x * 2, w)
        return x.square().sum()

    return f


def layer(x, w):
    """Exact in float64 for small integers, in whichever order gradients are summed."""
    return (x @ w).square() - x


def inputs():
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randint(-1, 2, (ROWS, WIDTH), generator=draw).double() for _ in range(2))


def per_sample(f):
    return torch.func.vmap(torch.func.grad(lambda x, w: f(x[None], w), argnums=(0, 1)), in_dims=(0, None))


def last_dimension(f):
    return torch.func.vmap(torch.func.grad(lambda x, w: f(x[None], w)), in_dims=(1, None), out_dims=1)


def twice(f):
    return torch.func.grad(lambda x, w: torch.func.grad(f)(x, w).square().sum(), argnums=(0, 1))


def batch_twice(f):
    inner = torch.func.vmap(torch.func.grad(lambda x, w: f(x * w[:1], w)), in_dims=(0, None))
    return torch.func.vmap(inner, in_dims=(1, None))


def vjp(f):
    return lambda x, w: torch.func.vjp(f, x, w)[1](torch.tensor(2.0))


TRANSFORMS = {
    "grad": torch.func.grad,
    "grad of both": lambda f: torch.func.grad(f, argnums=(0, 1)),
    "jacrev": lambda f: torch.func.jacrev(f, argnums=(0, 1)),
    "jacrev of grad": lambda f: torch.func.jacrev(torch.func.grad(f)),
    "grad of grad": twice,
    "per sample": per_sample,
    "per sample, last dimension": last_dimension,
    "two batch dimensions": batch_twice,
    "vjp": vjp,
}


def test_tangents_from_outside_are_refused_and_not_lost():
    region = ms.offload(min_bytes=0).on(runtime())(lambda x: x.sin().exp())
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(*inputs())
        with pytest.raises(ms.TransformError, match="forward mode"):
            torch.func.grad(lambda x: region(x).sum())(x)


@pytest.mark.parametrize("of", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_numbers_are_those_of_the_function_and_inputs_move(of):
    where = runtime()
    expected = of(chain([layer] * 2))(*inputs())
    assert bits(of(chain([HOW.on(where)(layer)] * 2))(*inputs())) == bits(expected)
    stats = where.stats()["cpu"]
    assert stats.out_bytes["disk"] > 0
    assert stats.in_bytes["disk"] > 0
    where.settle()
    assert where.stats()["cpu"].live_bytes == {"disk": 0}


def test_what_moves_is_what_moves_in_plain_autograd():
    func, plain = runtime(), runtime()
    torch.func.grad(chain([HOW.on(func)(layer)] * 4))(*inputs())
    x, w = inputs()
    chain([HOW.on(plain)(layer)] * 4)(x.requires_grad_(), w).backward()
    moved = [(stats.out_bytes, stats.in_bytes) for stats in (func.stats()["cpu"], plain.stats()["cpu"])]
    assert moved[0] == moved[1] == ({"disk": 3 * x.nbytes},) * 2  # the caller has the last one until the forward ends


def rounded(x, w):
    return torch.softmax((x @ w).exp().tanh(), -1) * x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_sums_round_only_higher_orders_of_a_shared_tensor_differ_from_the_checkpoint_and_by_roundings(dtype):
    # A token is an operator of its own on the way to a shared tensor, whose second-order terms come in another order.
    draw = torch.Generator().manual_seed(1)
    given = tuple(torch.randn(8, 8, generator=draw).to(dtype) for _ in range(2))
    checkpointed, moved = chain([ms.checkpoint()(rounded)] * 3), chain([HOW.on(runtime())(rounded)] * 3)
    for of in (TRANSFORMS["grad of both"], TRANSFORMS["jacrev of grad"], per_sample):
        assert bits(of(moved)(*given)) == bits(of(checkpointed)(*given))
    for got, expected in zip(twice(moved)(*given), twice(checkpointed)(*given), strict=True):
        assert (got - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own, when jvp is first used
def test_forward_mode_is_refused():
    x, w = inputs()
    with pytest.raises(ms.TransformError, match="in reverse mode"):
        torch.func.jvp(lambda x: chain([HOW(layer)])(x, w), (x,), (x,))


def test_a_region_inside_the_checkpoint_keeps_nothing_of_its_own():
    where = runtime()
    region = HOW.on(where)(layer)
    outer = ms.checkpoint()(lambda x, w: region(x.exp(), w))
    expected = torch.func.grad(chain([lambda x, w: layer(x.exp(), w)]))(*inputs())
    assert bits(torch.func.grad(chain([outer]))(*inputs())) == bits(expected)
    assert where.stats() == {}


def test_a_transform_that_is_compiled_around_a_region():
    region = ms.offload(min_bytes=0)(lambda x: x.sin() * x)
    x = torch.randn(3)

    def slope(x):
        return torch.func.vjp(lambda x: region(x * 2).sum(), x)[1](torch.ones(()))[0]

    assert torch.equal(torch.compile(slope, fullgraph=True, backend="eager")(x), slope(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo's own look at tensors, in PyTorch 2.10
def test_a_transform_that_is_compiled_around_streamed_parameters():
    fit = ms.transform(torch.nn.Linear(3, 2), {"": ms.offload(what="params", min_bytes=0)})
    x = torch.randn(3)

    def slope(x):
        return torch.func.vjp(lambda x: fit(x * 2).sum(), x)[1](torch.ones(()))[0]

    assert torch.equal(torch.compile(slope, backend="eager")(x), slope(x))
