"""offload(): which bytes move, which stay, and what it says where it cannot."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import memscale as ms
from memscale import checkpoint, compose, identity, offload, policies
from memscale.runtime import Runtime, default_runtime
from tests.support.checks import bits
from tests.support.models import TRANSFORMER, TransformerBlock, mlp, numbers

NBYTES = 4096


def synchronous(**config):
    return Runtime(ms.AsyncOffloadConfig(**{"min_bytes": 0, "prefetch_depth": 0, **config}), disk_bytes=1 << 24)


def totals(runtime):
    """Bytes moved out, moved back, and alive on the tier."""
    stats = runtime.stats().get("cpu")
    if stats is None:
        return 0, 0, 0
    return tuple(sum(counter.values()) for counter in (stats.out_bytes, stats.in_bytes, stats.live_bytes))


# ------------------------------------------------------------------------------------------------ which bytes move


def block(x, w):
    """Saves the input of the sine, its result, the result of `tanh` and that of `exp`, and `w` twice."""
    return torch.exp(torch.tanh(torch.sin(ms.name(x @ w, "up")) @ w)) * 2


KEPT = policies.save_only_these_names("up")
MOVED = policies.save_and_offload_only_these_names(names_which_can_be_offloaded=["up"])

# What moves: the values of `block`, each 4 KiB. `x` is an activation: its caller computes it and lets go of it.
MOVES = {
    "identity": (identity, ""),
    "offload": (offload(), "x up sine tanh exp"),
    "offload, checkpoint": (compose(offload(), checkpoint()), "x"),
    "checkpoint, offload": (compose(checkpoint(), offload()), ""),
    "offload, a policy that keeps": (compose(offload(), checkpoint(policy=KEPT)), "x up"),
    "a policy that keeps, offload": (compose(checkpoint(policy=KEPT), offload()), ""),
    "a policy that moves": (checkpoint(policy=MOVED), "up"),
    "offload, a policy that moves": (compose(offload(), checkpoint(policy=MOVED)), "x up"),
    "checkpoint, a policy that moves": (compose(checkpoint(), checkpoint(policy=MOVED)), ""),
    "offload, everything": (compose(offload(), checkpoint(policy=policies.everything_saveable)), "x up sine tanh exp"),
    "offload twice": (compose(offload(), offload()), "x up sine tanh exp"),
    "large only": (offload(min_bytes=NBYTES + 1), ""),
    "large only, then all": (compose(offload(), offload(min_bytes=NBYTES + 1)), "x up sine tanh exp"),
}


def check_moves(how, expected):
    start, w = numbers(32, 32), numbers(32, 32)

    def step(x, w):
        return how(block)(x * 1.0, w)

    runtime = synchronous()
    how = how.on(runtime)
    out = step(start, w)
    runtime.settle()  # as the next region would: only now has the caller let go of the region's input
    moved = totals(runtime)
    assert moved == (expected * NBYTES, 0, expected * NBYTES)
    found = torch.autograd.grad(out.sum(), (start, w))
    assert totals(runtime) == (expected * NBYTES, expected * NBYTES, 0)
    assert bits(found) == bits(torch.autograd.grad(block(start * 1.0, w).sum(), (start, w)))


@pytest.mark.parametrize(("how", "values"), MOVES.values(), ids=MOVES)
def test_exactly_these_values_move_and_come_back(how, values):
    check_moves(how, len(values.split()))


def test_a_stack_moves_the_inputs_of_its_regions_and_nothing_else():
    depth = 4
    gc.collect()
    held = totals(default_runtime())
    model = nn.Sequential(*[TransformerBlock() for _ in range(depth)])
    runtime = synchronous()
    fit = ms.transform(model, {"*": compose(offload(), checkpoint())}, runtime=runtime)
    x = numbers(2, 4, 8)
    out = fit(x * 1.0)
    # Each block has the input of the one before it move, once it has gone out of use. While the model runs, its
    # caller holds the first, and the loop over the blocks the last.
    assert totals(runtime)[0] == (depth - 2) * x.nbytes
    runtime.settle()
    assert totals(runtime) == (depth * x.nbytes, 0, depth * x.nbytes)
    out.sum().backward()
    assert totals(runtime) == (depth * x.nbytes, depth * x.nbytes, 0)
    assert totals(default_runtime()) == held


def test_what_the_caller_holds_and_what_is_trained_does_not_move():
    held = []

    def fn(x, w):
        hidden = x * 2
        held.append(hidden)
        return hidden @ w @ w.t() + (w.t() * hidden).exp()

    x, w = numbers(32, 32), numbers(32, 32)
    runtime = synchronous()
    out = offload().on(runtime)(fn)(x, w)
    # `hidden @ w` only: `hidden` is held, `w` and its transpose are a leaf's, and what `exp` saves was added away.
    assert totals(runtime)[0] == 2 * NBYTES
    out.sum().backward()
    assert runtime.stats()["cpu"].held_bytes == NBYTES


def test_saved_residuals_shows_what_is_left_on_the_device():
    x, w = numbers(32, 32), numbers(32, 32)

    def kept(how):
        return [r.nbytes for r in ms.saved_residuals(how(block), x, w) if r.source == "intermediate"]

    assert kept(identity) == [NBYTES] * 4
    assert kept(offload(min_bytes=NBYTES)) == []
    assert kept(offload(min_bytes=NBYTES + 1)) == [NBYTES] * 4


def test_hooks_around_the_region_get_what_does_not_move():
    x, w = numbers(32, 32), numbers(32, 32)
    for how, expected in ((offload(min_bytes=0), {"w"}), (offload(), {"w", "x", "up", "sine", "tanh", "exp"})):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t) or t, lambda t: t):
            out = how.on(synchronous())(block)(x * 1.0, w) if expected == {"w"} else how(block)(x * 1.0, w)
        assert len({t.untyped_storage()._cdata for t in seen if t is not w}) == len(expected) - 1
        out.sum().backward()


# --------------------------------------------------------------------------------------------------- where it runs


def test_a_transformed_model_uses_the_runtime_it_was_given():
    runtime = synchronous()
    before = totals(default_runtime())
    model = TRANSFORMER.make()
    fit = ms.transform(model, {"*": offload()}, runtime=runtime)
    again = pickle.loads(pickle.dumps(fit))
    for module, uses in ((fit, True), (copy.deepcopy(fit), True), (again, False)):
        moved = totals(runtime)[0]
        torch.manual_seed(1)
        out = module(numbers(2, 4, 8))
        out.sum().backward()
        assert (totals(runtime)[0] > moved) is uses
    regions = [getattr(m.__dict__.get("forward"), "fn", None) for m in again.modules()]
    (own,) = {region.runtime for region in regions if hasattr(region, "runtime")}
    assert totals(own)[0] > 0, "a pickled model has one runtime, with the settings of the one it was given"
    assert totals(default_runtime()) == before
    assert repr(offload().on(runtime)).startswith("offload().on(<")


def test_without_gradient_nothing_is_done():
    runtime = synchronous()
    with torch.no_grad():
        offload().on(runtime)(block)(numbers(4, 4), numbers(4, 4))
        assert torch.func.vmap(offload().on(runtime)(torch.sin))(torch.zeros(3)).tolist() == [0.0] * 3
    assert runtime.stats() == {}


@pytest.mark.parametrize("ending", ["backward", "dropped", "retained", "interrupted", "interrupted in backward"])
def test_nothing_is_left_when_the_graph_is_gone(ending):
    runtime = synchronous(prefetch_depth=2)
    x, w = numbers(32, 32), numbers(32, 32)

    def fn(x, w):
        out = block(x, w)
        if ending == "interrupted":
            raise ZeroDivisionError
        return out

    for _ in range(2):
        try:
            out = offload().on(runtime)(fn)(x * 1.0, w)
            if ending == "interrupted in backward":
                out.register_hook(lambda _: None)
                handle = w.register_hook(lambda _: 1 / 0)
                try:
                    out.sum().backward()
                finally:
                    handle.remove()
            elif ending != "dropped":
                out.sum().backward(retain_graph=ending == "retained")
        except ZeroDivisionError:
            assert ending.startswith("interrupted")
        out = None
        runtime.settle()
        assert totals(runtime)[2] == 0


def test_a_moved_value_that_the_region_changed_raises_as_autograd_does():
    def fn(x):
        hidden = x * 1
        out = hidden.sin()
        hidden.add_(1)
        return out.sum()

    x = numbers(32, 32)
    for transform in (identity, offload(min_bytes=0)):
        loss = transform(fn)(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# ----------------------------------------------------------------------------------------------- what it refuses


def test_sparse_tensors_are_refused():
    matrix = torch.eye(4).to_sparse()
    with pytest.raises(ms.TransformError, match=r"a tensor of layout torch\.sparse_coo, .* moves strided tensors"):
        offload()(lambda x: torch.sparse.mm(matrix, x))(numbers(4, 4))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.nested.nested_tensor([x[0], x[1, :3]]),
        lambda x: torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged),
    ],
    ids=["strided", "jagged"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_come_back_right(make):
    x = torch.randn(2, 4)

    def gradient(how):
        nested = make(x).requires_grad_()
        out = how.on(synchronous())(lambda t: (t * 2).sin())(nested)
        (grad,) = torch.autograd.grad(out, nested, torch.ones_like(out))
        return [bits(part) for part in grad.unbind()]

    assert gradient(offload()) == gradient(identity)


# ------------------------------------------------------------------------------------------------------ subclasses


class Noted(torch.Tensor):
    """A subclass with nothing of its own but its type."""


def test_a_subclass_made_of_tensors_moves_in_parts():
    runtime = synchronous()
    a, b = torch.randn(32, 32), torch.randn(32, 32)

    def gradient(how):
        x = TwoTensor(a.clone(), b.clone()).requires_grad_()
        out = how(lambda x: (x * 2).sin())(x)
        if how is not identity:
            assert totals(runtime)[0] == 2 * NBYTES
        out.sum().backward()
        return x.grad

    expected, found = gradient(identity), gradient(offload().on(runtime))
    assert type(found) is TwoTensor
    assert bits((found.a, found.b)) == bits((expected.a, expected.b))
    assert totals(runtime)[2] == 0


def test_a_subclass_that_is_changed_in_place_raises_as_autograd_does():
    for how in (identity, offload(min_bytes=0)):
        hidden = TwoTensor(torch.ones(8), torch.ones(8)).requires_grad_() * 2
        out = how(torch.sin)(hidden)
        with torch.no_grad():
            hidden.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_a_subclass_that_cannot_be_taken_apart_stays_and_is_right():
    runtime = synchronous()
    x = torch.randn(32, 32).as_subclass(Noted).requires_grad_()
    (found,) = torch.autograd.grad(offload().on(runtime)(lambda x: (x * 2).sin().sum())(x), x)
    (expected,) = torch.autograd.grad((x * 2).sin().sum(), x)
    assert torch.equal(found, expected)


# -------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("outside", [True, False], ids=["compiled around it", "compiled inside it"])
def test_it_works_with_torch_compile(outside):
    runtime = synchronous()
    x, w = numbers(32, 32), numbers(32, 32)
    try:
        if outside:
            region = offload().on(runtime)(block)
            out = torch.compile(lambda x, w: region(x * 1.0, w) + 1, backend="aot_eager")(x, w)
        else:
            region = offload().on(runtime)(torch.compile(block, backend="aot_eager"))
            out = region(x * 1.0, w) + 1
        moved = totals(runtime)[0]
        assert moved >= 4 * NBYTES
        found = torch.autograd.grad(out.sum(), (x, w))
        assert totals(runtime)[1:] == (moved, 0)
        expected = torch.autograd.grad((block(x * 1.0, w) + 1).sum(), (x, w))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    finally:
        torch._dynamo.reset()


def test_a_model_trains_to_the_same_bits_with_the_default_settings():
    """Storages of 1 MiB and more, prefetching, and a tail that stays."""

    def train(plan):
        torch.manual_seed(0)
        model = nn.Sequential(*[mlp(256) for _ in range(4)])
        fit = ms.transform(model, plan, runtime=runtime)
        optimizer = torch.optim.AdamW(fit.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            fit(torch.randn(512, 256)).square().mean().backward()
            optimizer.step()
        return bits(dict(model.named_parameters()))

    runtime = Runtime(disk_bytes=1 << 26)
    assert train({"*": offload()}) == train({})
    moved, back, live = totals(runtime)
    assert moved > 0
    assert 0 < back < moved, "what was still on its way out when backward asked for it did not have to come back"
    assert live == 0


def test_vmap_inside_a_region_is_right():
    x, w = numbers(4, 8), numbers(8)

    def fn(x, w):
        return torch.func.vmap(lambda row: (row * w).sin().exp())(x)

    runtime = synchronous()
    found = torch.autograd.grad(offload().on(runtime)(fn)(x, w).sum(), (x, w))
    assert bits(found) == bits(torch.autograd.grad(fn(x, w).sum(), (x, w)))
    assert totals(runtime)[0] > 0


def test_an_inference_tensor_among_the_arguments_comes_back():
    """PyTorch lets an alias of an inference tensor count versions, from 0, while the tensor itself has none."""
    with torch.inference_mode():
        features = torch.randn(4, 4)
    x = torch.randn(4, 4, requires_grad=True)

    def gradient(fn):
        return torch.autograd.grad(fn(features, x).sum(), x)[0]

    def region(features, x):
        return (x * features.sum()).exp()

    how = compose(offload(), checkpoint()).on(synchronous())
    assert torch.equal(gradient(how(region)), gradient(region))


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_nothing_moves_under_make_fx_whose_graph_would_hold_constants(mode):
    def step(fn):
        return lambda x: torch.autograd.grad(fn(x).sum(), x)[0]

    def region(x):
        return (x * 2).sin().exp()

    moved = step(offload().on(synchronous())(region))
    traced = make_fx(moved, tracing_mode=mode)(torch.ones(8, requires_grad=True))
    x = torch.randn(8, requires_grad=True)
    assert torch.equal(traced(x), step(region)(x))
