"""offload(what="params"): which bytes are on the device and when, and which move."""

import pytest
import torch
from layers import HOWS, LAYER, LAYERS, PARAMS, SMALL, WEIGHT, layers, moved, rows, streamed, trained

import memscale as ms
from memscale import checkpoint, compose
from memscale.profiling._allocator import measure
from memscale.runtime import Runtime, home_of
from memscale.runtime._simulated import Link, SimulatedBackend


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_one_region_at_a_time_is_on_the_device(how):
    """By PyTorch's allocator: nothing of a region stays between forward and backward, nor after it."""
    fit, _ = streamed(how)
    fit(rows())  # gives the parameters their homes
    for _ in range(2):
        losses = []
        forward = measure(lambda losses=losses: losses.append(fit(rows()).square().sum()))
        backward = measure(lambda losses=losses: losses.pop().backward())
        assert LAYER <= forward.peak_bytes < LAYER + SMALL
        assert forward.end_bytes < SMALL
        # A layer's weight, and its gradient until that is out.
        assert 2 * WEIGHT <= backward.peak_bytes < 2 * LAYER + SMALL
        assert backward.end_bytes <= 0
    peak = measure(lambda: layers()(rows()).square().sum().backward()).peak_bytes
    assert peak > 2 * LAYERS * LAYER, "without the transform"


def test_as_many_regions_as_the_depth_says_are_loaded_ahead():
    peaks = {}
    for depth in (0, 1, 2):
        backend = SimulatedBackend(lambda n: 0, {"pinned": 1 << 22}, link=Link(1e6, 0.0))
        runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=depth), backend=backend)
        fit = ms.transform(layers(), {"*": PARAMS}, runtime=runtime)
        with torch.no_grad():
            for _ in range(3):
                peaks[depth] = measure(lambda fit=fit: fit(rows())).peak_bytes // LAYER
    assert peaks == {0: 1, 1: 2, 2: 3}


def test_the_cast_of_a_streamed_weight_is_not_kept():
    fit, _ = streamed()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        fit(rows())
        kept = []
        assert measure(lambda: kept.append(fit(rows()).square().sum())).end_bytes < SMALL
    kept.pop().backward()


# ---------------------------------------------------------------------------------------------- bytes that move


def test_a_step_moves_each_parameter_in_twice_and_its_gradient_out_once():
    fit, runtime = streamed()
    for step in range(1, 4):
        trained(fit)
        # Backward needs no bias, and no weight of the first layer, whose input asks for no gradient.
        assert moved(runtime)[:2] == (step * (LAYERS * LAYER + (LAYERS - 1) * WEIGHT), step * LAYERS * LAYER)


@pytest.mark.parametrize("how", [compose(checkpoint(), PARAMS), compose(PARAMS, checkpoint())], ids=repr)
def test_a_recompute_brings_whole_regions_back(how):
    fit, runtime = streamed(how)
    trained(fit, 2)
    assert moved(runtime)[:2] == (4 * LAYERS * LAYER, 2 * LAYERS * LAYER)


def test_with_loads_ahead_the_last_region_stays_for_the_backward_that_begins_with_it():
    fit, runtime = streamed(depth=1)
    trained(fit)
    before = moved(runtime)
    trained(fit)
    in_bytes, out_bytes = (now - then for now, then in zip(moved(runtime)[:2], before[:2], strict=True))
    assert (in_bytes, out_bytes) == (LAYERS * LAYER + (LAYERS - 2) * WEIGHT, LAYERS * LAYER)


def test_the_second_step_asks_for_the_next_region_before_it_is_needed():
    """On the virtual clock, a copy takes a second, and so does the computation of a layer."""
    exposed = {}
    for depth in (0, 2):
        link = Link(bytes_per_second=LAYER, latency_seconds=0.0)
        backend = SimulatedBackend(lambda n: 0, {"pinned": 1 << 22}, link=link)
        runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=depth), backend=backend)
        fit = ms.transform(layers(), {"*": PARAMS}, runtime=runtime)
        for layer in fit:
            layer.register_forward_hook(lambda *_, backend=backend: backend.compute(1.0))
        for _ in range(2):
            before = runtime.stats().get("cpu")
            with torch.no_grad():
                fit(rows())
        exposed[depth] = runtime.stats()["cpu"].exposed_seconds - before.exposed_seconds
    assert exposed[0] == pytest.approx(LAYERS)
    assert exposed[2] == pytest.approx(1.0), "the first, which nothing can hide"


def test_what_is_loaded_ahead_is_noted_before_the_wait_for_it():
    fit, runtime = streamed(depth=2)
    trained(fit)
    asked, enter = [], runtime.engine(torch.empty(0)).homes.enter
    engine = runtime.engine(torch.empty(0))
    load = engine.load
    names = {id(home_of(p).entry): name for name, p in fit.named_parameters()}
    engine.load = lambda entry, **options: (asked.append(names[id(entry)]), load(entry, **options))[1]
    engine.homes.enter = lambda homes: (asked.append("enter"), enter(homes))[1]
    with torch.no_grad():
        fit(rows())
    order = [(f"{layer}.weight", f"{layer}.bias") for layer in range(LAYERS)]
    assert asked[:7] == ["enter", *order[0], *order[1], *order[2]]
    assert asked[7:] == ["enter", *order[3], "enter", "enter"]
