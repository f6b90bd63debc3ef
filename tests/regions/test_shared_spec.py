"""Objects that are given to one region after the other: what each call remembers of them, in the short way."""

import gc
import weakref

import pytest
import torch

from memscale.regions.argument_spec import arguments
from memscale.regions.captures import Captures
from memscale.regions.shared_spec import SharedSpec, shared_spec


class Thing:
    pass


def layer(*tensors):
    thing = Thing()
    thing.tensors, thing.count, thing.shape = list(tensors), len(tensors), (1, 2)
    return thing


def made():
    cache = Thing()
    cache.layers, cache.by_name = [layer(), layer(torch.zeros(1))], {"first": torch.ones(1)}
    return cache


def another_tensor(cache):
    cache.by_name["first"] = torch.full((1,), 7.0)


def another_list(cache):
    cache.layers = list(cache.layers)


def another_order(cache):
    cache.layers.reverse()


def other_layers(cache):
    cache.layers = [layer(torch.zeros(2)), layer()]


def a_layer_twice(cache):
    cache.layers.append(cache.layers[0])


def grown(cache):
    cache.layers.append(layer(torch.ones(3), cache.by_name["first"]))


def a_way_back(cache):
    cache.layers[0].cache = cache


def an_attribute_less(cache):
    cache.layers[-1].__dict__.pop("count", None)


def one_list_twice(cache):  # what an outline cannot say, from here on
    cache.other = cache.layers


def tensors_in_a_tuple(cache):
    cache.pair = torch.ones(1), torch.zeros(1)


def larger_than_state(cache):
    cache.layers += [0] * 2000


CHANGES = [
    another_tensor,
    another_list,
    another_order,
    other_layers,
    a_layer_twice,
    grown,
    a_way_back,
    an_attribute_less,
]
NOT_PLAIN = [one_list_twice, tensors_in_a_tuple, larger_than_state]


def seen(value, known):
    """`value` as data, with things by the order in which they are met."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (Thing, list, dict)):
        if id(value) in known:
            return known[id(value)]
        known[id(value)] = f"thing {len(known)}"
        inside = value.__dict__ if isinstance(value, Thing) else value
        pairs = inside.items() if isinstance(inside, dict) else enumerate(inside)
        return [type(value).__name__, *[(key, seen(each, known)) for key, each in pairs]]
    return [seen(each, known) for each in value] if isinstance(value, tuple) else value


@pytest.mark.parametrize("last", [*CHANGES, *NOT_PLAIN])
def test_every_call_is_remembered_as_it_was(last):
    cache, x = made(), torch.ones(1)
    calls, wanted = [], []
    for change in (None, *CHANGES, last):
        if change is not None:
            change(cache)
        call = arguments((x, cache), {"size": 3, "pair": (x, None)}, Captures(torch.sin))
        assert isinstance(call, SharedSpec) == (change not in NOT_PLAIN)
        calls.append((call, call.take_tensors()))
        wanted.append(seen((x, cache), {}))
    now = seen(cache, {})
    for (call, tensors), then in reversed([*zip(calls, wanted, strict=True)]):
        with call.again([tensor.clone() for tensor in tensors]) as (args, kwargs):
            assert args[1] is cache
            assert seen(tuple(args), {}) == then
            assert kwargs["pair"][0] is args[0]
            args[1].layers, args[1].left = None, "by the rerun"
        assert seen(cache, {}) == now


def test_nothing_is_kept_alive():
    gc.disable()
    try:
        cache = made()
        call = shared_spec((torch.ones(1), cache), {}, Captures(torch.sin))
        tensor = weakref.ref(cache.by_name["first"])
        call.take_tensors()
        cache.by_name.clear()
        assert tensor() is None
        watched = weakref.ref(cache)
        del cache
        assert watched() is None
        with call.again([torch.zeros(1)] * 3) as (args, _):  # made again
            assert args[1].by_name["first"].tolist() == [0.0]
    finally:
        gc.enable()


def test_what_two_arguments_share_is_one_thing():
    a, b = made(), made()
    a.only, b.only = 1, 2
    assert isinstance(arguments((a, b), {}, Captures(torch.sin)), SharedSpec)
    b.layers.append(a.layers[0])
    call = arguments((a, b), {}, Captures(torch.sin))
    assert not isinstance(call, SharedSpec)
    with call.again(call.take_tensors()) as (args, _):
        assert args[1].layers[-1] is args[0].layers[0]


def test_what_the_region_captures_too_is_left_to_its_captures():
    cache = made()
    layers = cache.layers

    def region(given):
        return layers, given

    assert shared_spec((cache,), {}, Captures(region)) is None
