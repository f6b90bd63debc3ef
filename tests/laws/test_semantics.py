"""Exactness: every transform × model kind × call pattern leaves what the untransformed model leaves, bit for bit."""

import gc
import itertools
import types
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import checkpoint, compose, offload, policies
from memscale.transforms.checkpoint import recompute
from tests.support.checks import bits, check_same
from tests.support.coverings import DEEP, in_turn, pairwise
from tests.support.models import CONVNET, KINDS, LARGE, MLP, SMALL, TRANSFORMER, mlp, numbers
from tests.support.patterns import ALL, autocast, autocast_without_cache

BOTH = policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("kept"))
OFFLOAD = offload(min_bytes=0)  # moves even what is a few bytes large
PARAMS = offload(what="params", min_bytes=0)
TRANSFORMS = {
    "checkpoint": checkpoint(),
    "everything": checkpoint(policy=policies.everything_saveable),
    "dots": checkpoint(policy=policies.dots_saveable),
    "dots without batch": checkpoint(policy=policies.dots_with_no_batch_dims_saveable),
    "names": checkpoint(policy=policies.save_only_these_names("kept")),
    "all but names": checkpoint(policy=policies.save_any_names_but_these("kept")),
    "both policies": checkpoint(policy=BOTH),
    "checkpoint twice": compose(checkpoint(), checkpoint()),
    "offload": OFFLOAD,
    "offload twice": compose(OFFLOAD, offload(min_bytes=64)),
    "offload checkpoint": compose(OFFLOAD, checkpoint()),
    "offload dots": compose(OFFLOAD, checkpoint(policy=policies.dots_saveable)),
    "checkpoint offload": compose(checkpoint(), OFFLOAD),
    "dots offload": compose(checkpoint(policy=policies.dots_saveable), OFFLOAD),
    "params": PARAMS,
    "params checkpoint": compose(PARAMS, checkpoint()),
    "checkpoint params": compose(checkpoint(), PARAMS),
    "params dots": compose(PARAMS, checkpoint(policy=policies.dots_saveable)),
    "params offload": compose(PARAMS, OFFLOAD),
    "offload params": compose(OFFLOAD, PARAMS),
}


def plans(kind):
    nested = {"": checkpoint(), **dict.fromkeys(kind.regions, checkpoint())}
    return {
        **{name: dict.fromkeys(kind.regions, how) for name, how in TRANSFORMS.items()},
        "nested": nested,
        "nested policies": {**nested, "": TRANSFORMS["dots"]},
        "policies nested": {**nested, **dict.fromkeys(kind.regions, TRANSFORMS["dots"])},
        "offload around regions": {**nested, "": OFFLOAD},
        "params around regions": {**nested, "": PARAMS},
        "regions around params": {**dict.fromkeys(kind.regions, PARAMS), "": checkpoint()},
    }


def fit_for(pattern, name):
    """Autocast keeps the cast of a parameter, on the device, until its context ends, and adds up the gradients of all
    of its uses in the lower precision. One that is streamed is cast at each use."""
    return autocast_without_cache if pattern is autocast and "params" in name else pattern


PLANS = {kind: plans(kind) for kind in KINDS}
# Each pair of a call pattern and one transform of each sort; the others in turn.
SORTS = ("checkpoint", "dots", "offload", "checkpoint offload", "params", "params checkpoint", "nested policies")
# Hugging Face models are slow to run: each meets call patterns and transforms in turn.
SLOW_SORTS = ("checkpoint", "dots", "nested policies", "offload", "offload checkpoint", "params")
CASES = [
    pytest.param(kind, fit_for(pattern, name), PLANS[kind][name], id=f"{kind}-{pattern.__name__}-{name}")
    for kind, pattern, name in dict.fromkeys(
        [
            *pairwise(itertools.product(SMALL, ALL, PLANS[MLP] if DEEP else SORTS)),
            *in_turn(SMALL, ALL, PLANS[MLP]),
            *in_turn(LARGE, ALL, SLOW_SORTS),
        ]
    )
]


@pytest.mark.parametrize(("kind", "pattern", "plan"), CASES)
def test_same_as_untransformed(kind, pattern, plan):
    check_same(kind, pattern, plan)


# ------------------------------------------------------------------------------- what PyTorch refuses is refused


REFUSED = {
    "a parameter": lambda model, x: model[0].weight.add_(1),
    "a parameter of an inner module": lambda model, x: model[1][0].weight.mul_(2),
    "the input": lambda model, x: x.add_(1),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("how", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("pattern", ["", "*"])
def test_a_change_in_place_before_backward_raises(change, how, pattern):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    for model in (plain, ms.transform(plain, {pattern: how})):
        x = numbers(3, 4) * 1.0
        loss = model(x).sum()
        with torch.no_grad():
            change(model, x)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


def test_the_error_for_a_changed_parameter_names_it_and_is_ours():
    fit = ms.transform(mlp(), {"": checkpoint()})
    loss = fit(numbers(3, 6)).sum()
    with torch.no_grad():
        fit[0].weight.add_(1)
    with pytest.raises(
        ms.CorrectnessError, match=r"parameter '0\.weight' of Sequential, float32\[12, 6\], is at version"
    ):
        loss.backward()


# --------------------------------------------------------------------------------------------------- closures


@pytest.mark.parametrize("how", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_captured_tensor_gets_its_gradient(how):
    x, w = numbers(3, 4), numbers(4, 4)

    def fn(x):
        return torch.tanh(x @ w).exp()

    expected = torch.autograd.grad(fn(x).sum(), (x, w))
    assert bits(torch.autograd.grad(how(fn)(x).sum(), (x, w))) == bits(expected)


@pytest.mark.parametrize("captured", [True, False], ids=["closure", "attribute of a plain object"])
def test_a_captured_tensor_that_changes_before_backward_raises(captured):
    w = numbers(4, 4) * 1.0
    holder = types.SimpleNamespace(w=w)
    fn = (lambda x: torch.tanh(x @ w).exp()) if captured else (lambda x: torch.tanh(x @ holder.w).exp())
    loss = checkpoint()(fn)(numbers(3, 4)).sum()
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()


@pytest.mark.parametrize("how", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_closure_sees_the_variable_as_it_was_when_the_region_ran(how):
    x = numbers(4)

    def run(transform):
        out = x
        for power in range(1, 4):
            scale = power * 2.0
            out = transform(lambda t: torch.sin(t * scale) ** power)(out)  # noqa: B023 (late binding is the point)
        return torch.autograd.grad(out.sum(), x)

    assert bits(run(how)) == bits(run(ms.identity))


# ------------------------------------------------------------------------------------------------ the recompute


def test_the_recompute_stops_after_the_last_tensor_that_backward_needs():
    log = []

    def fn(x):
        hidden = torch.sin(x)
        log.append("needed")
        hidden = torch.sin(hidden)
        log.append("not needed")
        return hidden + 1

    x = numbers(4)
    checkpoint()(fn)(x).sum().backward()
    assert log == ["needed", "not needed"], "the list is brought back after the recompute"

    class Log:
        lines: ClassVar[list[str]] = []

    def noted(x):
        hidden = torch.sin(x)
        Log.lines.append("needed")
        hidden = torch.sin(hidden)
        Log.lines.append("not needed")
        return hidden + 1

    checkpoint()(noted)(x).sum().backward()
    assert Log.lines == ["needed", "not needed", "needed"]


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_what_an_operator_fills_after_it_was_saved_is_filled_in_the_recompute(policy):
    def slopes(how):  # those of rrelu, which its backward reads
        torch.manual_seed(0)
        x = numbers(50)
        output = how(torch.nn.RReLU())(x)
        return [output, *torch.autograd.grad(output.sum(), x, retain_graph=True), output.grad_fn._saved_noise]

    assert bits(slopes(checkpoint(policy=policy))) == bits(slopes(ms.identity))


class Unsteady:
    """Does something else at its second run, through state that no snapshot sees."""

    runs: ClassVar[list[int]] = []


def _other_shape(x):
    Unsteady.runs.append(1)
    return torch.sin(x.sin()[: 5 - len(Unsteady.runs)]).cos()


def _fewer(x):
    Unsteady.runs.append(1)
    return x.sin().exp() if len(Unsteady.runs) == 1 else x * 2


def _other_operator(x):
    Unsteady.runs.append(1)
    return (x @ x if len(Unsteady.runs) == 1 else x.sin()).sin().exp()


@pytest.mark.parametrize(
    ("fn", "policy", "message"),
    [
        (
            _other_shape,
            None,
            r"saved tensor 1 of the region was torch\.float32\[4, 4\] and is now torch\.float32\[3, 4\]",
        ),
        (_fewer, None, r"it saved \d tensors where the run had saved at least 2"),
        (_other_operator, policies.dots_saveable, r"it saved 3 tensors where the run had saved at least 4"),
    ],
    ids=["another shape", "fewer tensors", "another operator"],
)
def test_a_recompute_that_differs_says_what_differed(fn, policy, message):
    Unsteady.runs.clear()
    loss = checkpoint(policy=policy)(fn)(numbers(4, 4)).sum()
    with pytest.raises(ms.CorrectnessError, match=message):
        loss.backward()


def test_a_second_backward_without_retain_graph_is_refused():
    loss = checkpoint()(lambda x: x.sin().exp())(numbers(4)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()


# ------------------------------------------------------------------------------------------------------ leaks


def new_frames():
    """The regions' records that were made since `gc.freeze()` and are alive."""
    return sum(type(thing) is recompute._Frame for thing in gc.get_objects())


@pytest.mark.parametrize(
    "plan", [{"*": checkpoint()}, {"*": TRANSFORMS["dots"]}, {"": checkpoint(), "*": checkpoint()}]
)
@pytest.mark.parametrize("ending", ["backward", "dropped", "retained then dropped", "interrupted"])
@pytest.mark.parametrize("kind", [MLP, CONVNET, TRANSFORMER], ids=str)
def test_nothing_outlives_its_graph(kind, plan, ending):
    fit = ms.transform(kind.make(), plan)
    for x in (kind.arguments()[0][0], kind.arguments()[0][0]):  # the first call of a region learns what it does
        hidden = x * 1.0
        watched = weakref.ref(hidden)
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            out = fit(hidden)
            assert new_frames() > 0
            if ending == "interrupted":
                handle = fit[1].register_forward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    fit(hidden)
                handle.remove()
            del hidden
            if ending != "dropped":
                out.sum().backward(retain_graph=ending.startswith("retained"))
            del out
            assert (new_frames(), watched()) == (0, None)
        finally:
            gc.enable()
