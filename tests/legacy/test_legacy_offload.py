"""wrap with offloading: who can ask for it, what then moves and with which engine, and that nothing of it stays."""

import copy
import gc
import itertools
import logging
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memscale as ms
from memscale import AsyncOffloadConfig, Config, ConfigError, RuntimeUnavailable
from memscale.hardware.device import Hardware
from memscale.legacy.verbs import detach, wrap
from memscale.runtime import default_runtime
from tests.legacy.test_legacy import backward_flops, conv_batch, convnet, equal, gpt2, gpt2_batch, traces, train
from tests.support.coverings import pairwise

EVERYTHING = AsyncOffloadConfig(min_bytes=0)
WIDTH, ROWS, BLOCKS = 16, 32, 4
INPUT_BYTES = ROWS * WIDTH * 4
# What a block saves besides its parameters: its input, and the input and the result of the sigmoid.
BLOCK_BYTES = INPUT_BYTES + 2 * INPUT_BYTES

CHECKPOINTED = ms.checkpoint()
BOTH = ms.compose(ms.offload(), ms.checkpoint())
MOVED = ms.offload()


def stack():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.Flatten()) for _ in range(BLOCKS)
    ]
    return nn.Sequential(nn.Linear(8, WIDTH), *blocks)


def rows():
    return torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))


def force(**fields):
    return Config(force_optimize=True, **fields)


def wrapped(config, **arguments):
    model = wrap(stack(), config, **arguments)
    model._memscale_executor.kept = model  # an executor does not keep its model alive
    return model._memscale_executor


def transforms(executor):
    return {rule.transform for rule in executor.plan}


def moved(runtime):
    """Bytes out, bytes in, bytes that are still there."""
    stats = runtime.stats()["cpu"]
    return tuple(sum(counter.values()) for counter in (stats.out_bytes, stats.in_bytes, stats.live_bytes))


def depth(runtime):
    return runtime.engine(torch.ones(1)).depth


# ------------------------------------------------------------------------------------------------------- who asks


@pytest.mark.parametrize(
    ("fields", "async_offload", "variable", "how", "expected_depth"),
    [
        # Nobody asks: that a mode makes offloading eligible does not add it.
        ({}, None, None, CHECKPOINTED, None),
        ({"max_cpu_offload_gb": 1}, None, None, CHECKPOINTED, None),
        ({"async_offload": False}, None, "1", CHECKPOINTED, None),
        ({"enable_offloading": False}, None, None, CHECKPOINTED, None),
        # The argument, the field, the switch, the environment.
        ({}, True, None, BOTH, 2),
        ({"async_offload": False}, True, None, BOTH, 2),
        ({"enable_offloading": True}, None, None, BOTH, 0),
        ({"enable_offloading": True}, False, "1", BOTH, 0),
        ({"enable_offloading": True}, None, "1", BOTH, 2),
        ({}, None, "1", BOTH, 2),
        ({}, None, " Yes ", BOTH, 2),
        # A field of the caller wins over the mode.
        ({"mode": "conservative", "async_offload": True}, None, None, BOTH, 2),
        ({"mode": "conservative", "enable_offloading": True}, None, None, BOTH, 0),
        # Where checkpointing is not eligible, offload() stays alone.
        ({"enable_checkpointing": False}, True, None, MOVED, 2),
        ({"enable_checkpointing": False, "enable_offloading": True}, None, None, MOVED, 0),
        # How deep: the config's where it is asynchronous, and 0 where it is not.
        ({"async_offload": True, "async_config": AsyncOffloadConfig(prefetch_depth=5)}, None, None, BOTH, 5),
        ({"enable_offloading": True, "async_config": AsyncOffloadConfig(prefetch_depth=5)}, None, None, BOTH, 0),
    ],
)
def test_who_asks_and_what_comes_of_it(fields, async_offload, variable, how, expected_depth, monkeypatch, caplog):
    if variable is not None:
        monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", variable)
    executor = wrapped(force(**fields), async_offload=async_offload)
    assert executor.plan == ms.Plan(dict.fromkeys(map(str, range(1, BLOCKS + 1)), how))
    if expected_depth is None:
        assert executor.runtime is None
    else:
        assert depth(executor.runtime) == expected_depth
        assert executor.config.async_offload is (expected_depth > 0 or "async_offload" in fields)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_contradiction_names_both_fields():
    message = (
        r"^Config\(async_offload=True, enable_offloading=False\) contradict each other: .*; leave one of the two unset"
    )
    with pytest.raises(ConfigError, match=message):
        Config(async_offload=True, enable_offloading=False)
    model = stack()
    with pytest.raises(ConfigError, match=message):
        wrap(model, Config(enable_offloading=False), async_offload=True)
    assert not hasattr(model, "_memscale_executor")


@pytest.mark.parametrize("fields", [{"enable_offloading": False}, {"mode": "conservative"}])
def test_the_environment_gives_way_to_a_config_that_rules_offloading_out(fields, monkeypatch, caplog):
    monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", "1")
    config = force(**fields)
    executor = wrapped(config)
    assert caplog.messages == [
        f"MEMSCALE_ASYNC_OFFLOAD is set, but {config!r} rules offloading out; this model runs without it"
    ]
    assert (executor.runtime, transforms(executor)) == (None, {CHECKPOINTED})
    assert executor.config is config


def test_the_environment_must_be_readable(monkeypatch):
    monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", "maybe")
    model = stack()
    with pytest.raises(ConfigError, match="MEMSCALE_ASYNC_OFFLOAD='maybe' must be 1 or 0"):
        wrap(model)
    assert not hasattr(model, "_memscale_executor")
    wrap(model, async_offload=False)


# ------------------------------------------------------------------------------------------------------ what moves


@pytest.mark.parametrize(
    ("fields", "block_bytes", "recomputes"),
    [
        ({"enable_offloading": True}, INPUT_BYTES, True),
        ({"enable_offloading": True, "enable_checkpointing": False}, BLOCK_BYTES, False),
    ],
)
def test_what_moves_is_what_the_plan_says(fields, block_bytes, recomputes):
    executor = wrapped(force(async_config=EVERYTHING, **fields))
    loss = executor.model(rows()).square().mean()
    executor.runtime.settle()
    assert moved(executor.runtime) == (BLOCKS * block_bytes, 0, BLOCKS * block_bytes)
    loss.backward()
    assert moved(executor.runtime) == (BLOCKS * block_bytes, BLOCKS * block_bytes, 0)
    assert (backward_flops(executor.model, rows()) > backward_flops(stack(), rows())) is recomputes


BATCHES = {stack: rows, convnet: conv_batch, gpt2: gpt2_batch}


@pytest.mark.parametrize(
    ("make", "overlap", "checkpointing"), pairwise(itertools.product(BATCHES, [True, False], [True, False]))
)
def test_trains_to_the_same_bits(make, overlap, checkpointing):
    make_batch = BATCHES[make]
    plain = train(make(), make_batch(), steps=3)
    config = force(
        enable_offloading=True, async_offload=overlap, async_config=EVERYTHING, enable_checkpointing=checkpointing
    )
    model = wrap(make(), config)
    assert equal(train(model, make_batch(), steps=3), plain)
    out_bytes, in_bytes, live_bytes = moved(model._memscale_executor.runtime)
    assert out_bytes > 0
    assert live_bytes == 0
    if make is stack:  # of two blocks' inputs one stays, and the other may not have left yet
        assert in_bytes > 0


def test_two_wrapped_models_have_a_runtime_each_and_leave_the_default_one_alone():
    before = default_runtime().stats()
    first, second = (wrapped(force(enable_offloading=True, async_config=EVERYTHING)) for _ in range(2))
    train(first.model, rows(), steps=1)
    assert moved(first.runtime)[0] > 0
    assert second.runtime.stats() == {}
    assert default_runtime().stats() == before


@pytest.mark.parametrize(
    ("gigabytes", "expected"),
    [
        (None, {"pinned": 3 * INPUT_BYTES}),  # of four; the last one stays for backward
        (2 * INPUT_BYTES / 10**9, {"pinned": 2 * INPUT_BYTES, "disk": INPUT_BYTES}),
        ((2 * INPUT_BYTES - 1) / 10**9, {"pinned": INPUT_BYTES, "disk": 2 * INPUT_BYTES}),
        (0, {"disk": 3 * INPUT_BYTES}),
    ],
)
def test_the_cap_is_of_ram_that_an_accelerators_tensors_take(gigabytes, expected):
    executor = wrapped(force(enable_offloading=True, async_config=EVERYTHING, max_cpu_offload_gb=gigabytes))
    again = pickle.loads(pickle.dumps(executor.model))
    for model in (executor.model, copy.deepcopy(executor.model), again):
        assert ms.profile(model, rows(), loss=lambda y, _: y.square().mean(), hardware="a100-40").by_tier == expected


# ------------------------------------------------------------------------------------------------- where it cannot


class Elsewhere(nn.Parameter):
    """A parameter of another device, for all who ask, whose numbers are on the CPU."""

    device = torch.device("mps:0")


class NoDevice(Elsewhere):
    device = torch.device("cuda:0")


@pytest.fixture(params=[(Elsewhere, "there is no backend for 'mps' here"), (NoDevice, "needs a CUDA device")])
def somewhere_else(request, monkeypatch):
    """A model whose tensors nothing moves, and what the error says of it."""
    kind, reason = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        Hardware, "detect", lambda device=None: Hardware(name="small", device_type="cpu", memory_bytes=1)
    )
    model = stack()
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            module._parameters[name] = kind(parameter.detach())
    return model, reason


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"async_offload": True}, "async_offload=True: "),
        ({"enable_offloading": True}, "enable_offloading=True: "),
        ({"async_offload": True, "enable_offloading": True}, "async_offload=True and enable_offloading=True: "),
    ],
)
def test_what_was_asked_for_and_cannot_be_is_refused_at_once(somewhere_else, fields, named):
    model, reason = somewhere_else
    wrap(model)
    before = traces(model)
    with pytest.raises(RuntimeUnavailable, match=f"^{named}offload.* .*{reason}.*; or leave that unset"):
        wrap(model, Config(**fields))
    assert traces(model) == before, "what wrap did before is still there"
    detach(model)


def test_the_environment_cannot_make_wrap_fail(somewhere_else, monkeypatch, caplog):
    model, reason = somewhere_else
    monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", "1")
    config = Config()
    executor = wrap(model, config)._memscale_executor
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("MEMSCALE_ASYNC_OFFLOAD is set, but offload() ")
    assert reason in caplog.messages[0]
    assert (executor.runtime, transforms(executor)) == (None, {CHECKPOINTED})
    assert executor.config is config
    assert "nothing is offloaded" in wrap(model, Config(enable_checkpointing=False))._memscale_executor.skipped


# --------------------------------------------------------------------------------------------- report, copies, detach


def test_the_report_says_what_moved(caplog):
    caplog.set_level(logging.INFO, logger="memscale")
    executor = wrapped(force(enable_offloading=True, async_config=EVERYTHING, max_cpu_offload_gb=3))
    assert str(executor).splitlines()[-1] == "offloaded so far: 0 bytes out, 0 bytes in, 0.000 s exposed"
    loss = executor.model(rows()).square().mean()
    executor.runtime.settle()
    nbytes = BLOCKS * INPUT_BYTES
    assert f"offloaded so far: {nbytes} bytes out, 0 bytes in, " in str(executor)
    loss.backward()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # nothing moves on a device without numbers
        executor.model(torch.ones(ROWS, 8, requires_grad=True))
    assert sum(executor.runtime.stats()["fake cpu"].out_bytes.values()) > 0
    seconds = executor.runtime.stats()["cpu"].exposed_seconds
    line = f"offloaded so far: {nbytes} bytes out, {nbytes} bytes in, {seconds:.3f} s exposed"
    assert str(executor).splitlines()[-2:] == [str(executor.plan).splitlines()[-1], line]
    del mode
    detach(executor.model)
    assert caplog.messages[-1] == f"detached Sequential; {line}"


@pytest.mark.parametrize("overlap", [True, False])
def test_detach_restores_every_object_and_lets_go_of_the_runtime(overlap):
    model = stack()
    before = traces(model)
    executor = wrap(
        model, force(enable_offloading=True, async_offload=overlap, async_config=EVERYTHING)
    )._memscale_executor
    runtime = weakref.ref(executor.runtime)
    model(rows()).sum().backward()
    detach(model)
    assert traces(model) == before
    assert executor.runtime is None
    gc.collect()
    assert runtime() is None


def test_a_graph_outlives_the_detach():
    plain, model = stack(), wrap(stack(), force(async_offload=True, async_config=EVERYTHING))
    loss = model(rows()).square().mean()
    runtime = model._memscale_executor.runtime
    detach(model)
    assert moved(runtime)[2] > 0
    loss.backward()
    plain(rows()).square().mean().backward()
    assert equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    assert moved(runtime)[2] == 0


def test_a_deep_copy_shares_the_runtime():
    model = wrap(stack(), force(enable_offloading=True, async_config=EVERYTHING))
    runtime = model._memscale_executor.runtime
    other = copy.deepcopy(model)
    assert other._memscale_executor.runtime is runtime
    train(other, rows(), steps=1)
    out_bytes = moved(runtime)[0]
    assert out_bytes > 0
    detach(other)
    assert model._memscale_executor.runtime is runtime
    train(other, rows(), steps=1)
    assert moved(runtime)[0] == out_bytes
    assert equal(train(model, rows(), steps=1), train(stack(), rows(), steps=1))
    assert moved(runtime)[0] == 2 * out_bytes
