"""Laws, over random transforms, random plans and random models."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memscale as ms
from memscale import checkpoint, compose, identity, offload, policies
from tests.support.checks import bits, check_argument_untouched, seed
from tests.support.models import FrozenHalves, Polynomial, TransformerBlock, integers, mlp, numbers

NAMESPACE = {name: getattr(ms, name) for name in ms.__all__} | {"torch": torch}  # the names load when asked for

names = st.lists(st.sampled_from(["up", "down", "it's", 'a"b', "é"]), min_size=1, max_size=3, unique=True)
constants = st.sampled_from(
    [
        policies.nothing_saveable,
        policies.everything_saveable,
        policies.dots_saveable,
        policies.dots_with_no_batch_dims_saveable,
    ]
)
named = st.one_of(
    names.map(lambda labels: policies.save_only_these_names(*labels)),
    names.map(lambda labels: policies.save_any_names_but_these(*labels)),
)
simple = st.one_of(constants, named)
moving = st.builds(
    lambda labels: policies.save_and_offload_only_these_names(
        names_which_can_be_saved=labels[1:], names_which_can_be_offloaded=labels[:1]
    ),
    names,
)
any_policy = st.one_of(simple, st.builds(policies.save_from_both_policies, simple, simple), moving)
offloads = st.builds(
    lambda tier, least: offload(tier=tier, min_bytes=least),
    st.sampled_from(["auto", "pageable", "disk"]),
    st.sampled_from([0, 0, 100, None]),
)


checkpoints = st.builds(lambda p: checkpoint(policy=p), st.one_of(st.none(), any_policy))
transforms = st.recursive(
    st.one_of(st.just(identity), checkpoints, offloads),
    lambda inner: st.lists(inner, max_size=3).map(lambda some: compose(*some)),
    max_leaves=4,
)
dims = st.recursive(st.none() | st.integers(-3, 3), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
tiles = st.builds(
    lambda count, by_size, **rest: ms.tile(**{"size" if by_size else "chunks": count}, **rest),
    st.integers(1, 9),
    st.booleans(),
    dim=st.integers(-3, 3),
    in_dims=st.just(...) | dims,
    out_dims=st.just(...) | dims,
    reduce=st.sampled_from([None, "sum", "mean"]),
    recompute=st.booleans(),
)
casts = st.builds(
    ms.cast,
    compute=st.sampled_from([torch.bfloat16, torch.float64, "bfloat16", "torch.float16"]),
    output=st.sampled_from([None, torch.float32, "float64"]),
    params=st.sampled_from([None, torch.float32]),
    keep=st.sampled_from([("<norms>",), (), ("<norms>", "head.*"), ["**"]]),
)
values = st.lists(st.one_of(transforms, tiles, casts), max_size=3).map(lambda some: compose(*some))
segments = st.sampled_from(["layers", "0", "*", "**", "h*", "mlp"])
patterns = st.lists(segments, max_size=3).map(".".join)
plans = st.one_of(st.dictionaries(patterns, values, max_size=3), st.lists(st.tuples(patterns, values), max_size=4)).map(
    ms.Plan
)


@given(values, values, values)
def test_composition_is_a_monoid(a, b, c):
    assert compose(a, compose(b, c)) == compose(compose(a, b), c) == compose(a, b, c)
    assert compose(a, identity) == a == compose(identity, a) == compose(a)
    assert compose() == identity
    assert hash(compose(a, compose(b, c))) == hash(compose(a, b, c))


@given(transforms, transforms)
def test_composition_is_application(a, b):
    composed, applied = compose(a, b)(torch.mm), a(b(torch.mm))
    assert repr(composed) == repr(applied), "the regions nest in the same order"
    x, w = integers(2, 3), integers(3, 3)
    assert bits(composed(x, w)) == bits(applied(x, w))
    assert identity(torch.mm) is torch.mm


@given(values)
def test_a_transform_is_a_value(transform):
    for again in (eval(repr(transform), NAMESPACE), pickle.loads(pickle.dumps(transform)), copy.deepcopy(transform)):
        assert again == transform
        assert hash(again) == hash(transform)
    assert transform != compose(transform, checkpoint())
    with pytest.raises(AttributeError):
        transform.policy = None


@given(plans)
def test_a_plan_is_a_value(plan):
    assert eval(repr(plan), NAMESPACE) == plan
    for again in (pickle.loads(pickle.dumps(plan)), ms.Plan.from_json(plan.to_json())):
        assert again == plan
        assert hash(again) == hash(plan)
        assert repr(again) == repr(plan)
        assert str(again) == str(plan)


@st.composite
def models(draw, exact):
    """A stack of random blocks, some of them nested, and an input for it."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    width = 3 if exact else 8
    choices = [Polynomial] if exact else [mlp, TransformerBlock, nn.LayerNorm, lambda w: nn.Dropout(0.5), FrozenHalves]
    depth = st.integers(1, 2 if exact else 3)
    parts = [
        nn.Sequential(*[draw(st.sampled_from(choices))(width) for _ in range(draw(depth))]) for _ in range(draw(depth))
    ]
    # The weights of a fresh LayerNorm or Dropout alone could leave nothing to train.
    model = nn.Sequential(*parts) if exact else nn.Sequential(*parts, nn.Linear(width, width))
    return model, integers(2, width) if exact else numbers(draw(st.sampled_from([1, 2])), 3, width)


def rules_for(model):
    return st.lists(
        st.tuples(st.sampled_from([path for path, _ in model.named_modules()] + ["*", "**"]), transforms), max_size=4
    )


def step(model, x):
    seed()
    out = model(x)
    trained = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    return out, torch.autograd.grad(out.square().sum(), trained), torch.get_rng_state()


@pytest.mark.filterwarnings("ignore:.*this is said once:RuntimeWarning")  # a tier that a host has not
@pytest.mark.parametrize("exact", [True, False], ids=["integers", "floats"])
@given(st.data())
def test_values_and_gradients_of_any_plan_on_any_model(exact, data):
    model, x = data.draw(models(exact))
    rules = data.draw(rules_for(model))
    check_argument_untouched(model, rules)
    assert bits(step(ms.transform(model, rules), x)) == bits(step(model, x))


@given(st.data())
def test_the_code_of_a_plan_applies_it(data):
    model, x = data.draw(models(False))
    plan = ms.Plan(data.draw(rules_for(model)))
    namespace = {"model": model}
    exec(plan.to_python(), namespace)
    assert namespace["plan"] == plan
    assert bits(step(namespace["fit"], x)) == bits(step(model, x))
