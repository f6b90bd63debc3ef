"""The engine on a real disk: what moves and what not, what comes back, and what happens when something goes wrong."""

import json
import types

import pytest
import torch

import memscale as ms
from memscale.runtime import Runtime
from memscale.runtime.backends.host import HostBackend
from memscale.runtime.engine.loader import LoadState
from tests.support.adversarial_device import AdversarialDevice, LinkSpeed
from tests.support.checking.checked_engine import CheckedEngine
from tests.support.checking.hazards import Checked
from tests.support.checks import bits
from tests.support.coverings import DEEP
from tests.support.schedules import run_case

NBYTES = 4096


@pytest.fixture
def engine():
    """Synchronous, and checked for hazards."""
    return CheckedEngine(Checked(HostBackend(disk_bytes=1 << 24)), depth=0)


def stashed(engine, make, *views):
    """Handles on views of what `make` makes, which nobody else holds."""
    tensor = make()
    handles = [engine.stash(view(tensor)) for view in views or [lambda t: t]]
    del tensor
    engine.look_again()
    return handles


def out_bytes(engine):
    return sum(engine.stats().out_bytes.values())


# -------------------------------------------------------------------------------------------- what comes back

KINDS = {
    "float32": lambda: torch.randn(8, 8),
    "bfloat16": lambda: torch.randn(8, 8).bfloat16(),
    "float8": lambda: torch.randn(8, 8).to(torch.float8_e4m3fn),
    "bool": lambda: torch.randn(8, 8) > 0,
    "uint8": lambda: torch.randint(0, 255, (3, 5), dtype=torch.uint8),
    "int64": lambda: torch.randint(-9, 9, (3, 5)),
    "complex": lambda: torch.randn(8, 8, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(8, 8, dtype=torch.complex128).conj(),
    "negative": lambda: torch.randn(8, 8, dtype=torch.complex64).conj().imag,
    "transposed": lambda: torch.randn(8, 4).t(),
    "a slice": lambda: torch.randn(100)[7:90:3],
    "zero stride": lambda: torch.randn(5, 1).expand(5, 7),
    "overlapping": lambda: torch.randn(20).unfold(0, 5, 1),
    "scalar": lambda: torch.tensor(3.0),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "odd bytes": lambda: torch.arange(7, dtype=torch.int8)[1:],
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_any_strided_tensor_comes_back_as_it_was(engine, make):
    torch.manual_seed(0)
    expected = make()
    torch.manual_seed(0)
    (handle,) = stashed(engine, make)
    assert handle.entry.state is LoadState.OFFLOADED
    found = engine.fetch(handle)
    assert (found.dtype, found.stride(), found.is_conj(), found.is_neg()) == (
        expected.dtype,
        expected.stride(),
        expected.is_conj(),
        expected.is_neg(),
    )
    assert bits(found.resolve_conj().resolve_neg()) == bits(expected.resolve_conj().resolve_neg())


def test_views_move_once_and_come_back_as_views_of_one_storage(engine):
    handles = stashed(engine, lambda: torch.arange(1024.0), lambda t: t[:512], lambda t: t[256:].view(3, 256).t())
    assert out_bytes(engine) == NBYTES
    x = torch.ones(1, requires_grad=True)

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            first, second = map(engine.fetch, handles)
            assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
            assert torch.equal(second.t().reshape(-1)[:256], first[256:])
            return grad

    Both.apply(x).backward()
    assert sum(engine.stats().in_bytes.values()) == NBYTES


def test_of_a_large_storage_only_the_part_that_is_wanted_moves(engine):
    (handle,) = stashed(engine, lambda: torch.arange(100_000.0), lambda t: t[5000:5256])
    # From the multiple of 64 bytes at or below byte 20 000, to byte 21 024.
    assert out_bytes(engine) == 1024 + 20_000 % 64
    assert engine.fetch(handle).tolist() == [*range(5000, 5256)]


# ----------------------------------------------------------------------------------------- what moves and what not


@pytest.mark.parametrize("keep", [lambda t: t, lambda t: t[3:4], lambda t: t.detach(), lambda t: t.numpy()])
def test_what_something_else_keeps_is_not_moved_until_it_lets_go(engine, keep):
    tensor = torch.arange(1024.0)
    kept = keep(tensor)
    handle = engine.stash(tensor)
    del tensor
    engine.look_again()
    assert out_bytes(engine) == 0
    assert torch.equal(engine.fetch(handle), torch.arange(1024.0))
    del kept
    engine.look_again()
    assert out_bytes(engine) == NBYTES
    assert torch.equal(engine.fetch(handle), torch.arange(1024.0))


# --------------------------------------------------------------------------------------------------- lifetimes


@pytest.mark.parametrize("depth", range(4))
def test_random_programs_on_a_real_disk(depth):
    """The programs of the simulated device, in the order in which the threads of this machine happen to run."""
    engine = CheckedEngine(Checked(HostBackend(disk_bytes=1 << 22)), depth=depth)
    for seed in range(depth, 100 if DEEP else 40, 4):
        assert run_case(seed, engine) == [], f"case {seed}"
    assert out_bytes(engine) > 0


# ------------------------------------------------------------------------------------------------ order is a hint


def chain_step(engine, backend, order):
    """Stash ten tensors of a second each on the link, then use them in `order`, with a second of compute after each."""
    handles = {}
    for index in range(10):
        handles[index] = engine.stash(torch.full((64,), float(index)))
        backend.compute(1.0)
    engine.look_again()
    engine.settle()
    x = torch.ones(1, requires_grad=True)
    before = engine.stats().exposed_seconds

    class Use(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            for index in order:
                assert engine.fetch(handles[index])[0] == index
                del handles[index]
                backend.compute(1.0)
            return grad

    Use.apply(x).backward()
    return engine.stats().exposed_seconds - before


def test_the_order_of_backward_is_learned():
    order = [3, 9, 1, 7, 5, 0, 8, 2, 6, 4]
    backend = AdversarialDevice(
        lambda n: 0, {"pinned": 1 << 20}, link=LinkSpeed(bytes_per_second=256, latency_seconds=0.0)
    )
    engine = CheckedEngine(Checked(backend), depth=2)
    first, second = (chain_step(engine, backend, order) for _ in range(2))
    # The guess of the first backward, that it runs the other way than forward, is wrong everywhere here.
    assert first == pytest.approx(5.0)
    assert second == pytest.approx(1.0)  # the first load, which nothing can hide
    assert engine.backend.finish() == []


def test_the_tail_of_the_forward_stays_from_the_second_step_on():
    engine = CheckedEngine(Checked(HostBackend(disk_bytes=1 << 24)), depth=2)
    moved = []
    for _ in range(3):
        before = out_bytes(engine)
        handles = [handle for _ in range(5) for handle in stashed(engine, lambda: torch.ones(1024))]
        engine.settle()  # so that no copy still waits for its turn
        moved.append((out_bytes(engine) - before) // NBYTES)
        del handles
    assert moved == [5, 3, 3]
    assert engine.stats().resident_bytes == 4 * NBYTES


# ------------------------------------------------------------------------------------- a tensor that is stashed twice


def test_equal_views_share_a_handle_and_all_others_have_their_own(engine):
    tensor = torch.randn(4, 6, dtype=torch.complex64)
    first = engine.stash(tensor.view(24))
    assert engine.stash(tensor.view(24)) is first
    other = [tensor, tensor[1:], tensor.view(24).conj(), torch.view_as_real(tensor), tensor.data.view(24)]
    handles = [engine.stash(view) for view in other]
    assert len({first, *handles}) == 6
    expected = [bits(view.resolve_conj()) for view in other]
    del tensor, other
    engine.look_again()
    assert [bits(engine.fetch(handle).resolve_conj()) for handle in handles] == expected


def test_a_view_that_was_changed_since_has_a_handle_and_a_verdict_of_its_own(engine):
    tensor = torch.zeros(8)
    before = engine.stash(tensor.view(8))
    tensor.add_(1)
    after = engine.stash(tensor.view(8))
    apart = engine.stash(tensor.data)  # with a version counter of its own
    del tensor
    engine.look_again()
    assert bits(engine.fetch(after)) == bits(engine.fetch(apart)) == bits(torch.ones(8))
    with pytest.raises(ms.CorrectnessError, match="is at version 1"):
        engine.fetch(before)


# ---------------------------------------------------------------------------------------- small ones travel together


def together(bytes_together, depth=0, **caps):
    device = AdversarialDevice(lambda n: 0, caps or {"pinned": 1 << 20}, together_bytes=bytes_together)
    return CheckedEngine(Checked(device), depth=depth)


def test_small_storages_share_a_copy_each_way_and_come_back_as_they_were():
    engine = together(NBYTES)
    expected = [torch.randn(size)[1:].t() for size in range(2, 9)]
    handles = [engine.stash(tensor.clone()) for tensor in expected]
    assert out_bytes(engine) == 0, "less than the limit waits for the region's end"
    engine.look_again()
    assert len({handle.entry for handle in handles}) == 1
    assert out_bytes(engine) == 64 * 6 + 4 * 7
    for handle, tensor in zip(handles, expected, strict=True):
        found = engine.fetch(handle)
        assert (bits(found), found.stride(), found.data_ptr() % 64) == (bits(tensor), tensor.stride(), 0)
    assert sum(engine.stats().in_bytes.values()) == 7 * out_bytes(engine), "outside of backward each fetch loads all"
    del handles[1:], handle
    assert sum(engine.stats().live_bytes.values()) == out_bytes(engine), "the first one still needs the buffer"
    assert bits(engine.fetch(handles[0])) == bits(expected[0])
    handles.clear()
    assert engine.backend.finish() == []
    assert engine.stats().live_bytes == {"pinned": 0}


@pytest.mark.parametrize("depth", [0, 2])
def test_small_storages_travel_in_whatever_order_their_numbers_are(depth):
    numbers = torch.arange(24.0)
    views = [
        lambda t: t.view(4, 6).t(),
        lambda t: t.view(2, 3, 4).permute(2, 0, 1),
        lambda t: t[:9].as_strided((3, 3), (2, 2)),  # as many bytes as its numbers have, with gaps and repeats
        lambda t: t.as_strided((2, 3), (0, 4)),
        lambda t: t[2:].view(2, 11).t(),
        lambda t: t.view(4, 6).to(torch.complex64).t(),
    ]
    engine = together(NBYTES, depth)
    handles = [engine.stash(view(numbers.clone())) for view in views]
    engine.look_again()
    assert len({handle.entry for handle in handles}) == 1
    for handle, view in zip(handles, views, strict=True):
        found, expected = engine.fetch(handle), view(numbers)
        assert (bits(found), found.stride()) == (bits(expected), expected.stride())
        del found
    del handle
    handles.clear()
    assert engine.backend.finish() == []


def test_a_few_integers_stay_where_they_are():
    engine = together(NBYTES)
    seed, mask = engine.stash(torch.tensor([7, 9])), None
    engine.look_again()
    assert (out_bytes(engine), engine.stats().by_region) == (0, {"": {"small": 16}})
    mask = engine.stash(torch.ones(600, dtype=torch.bool))
    engine.look_again()
    assert (out_bytes(engine), bits(engine.fetch(seed))) == (600, bits(torch.tensor([7, 9])))
    del seed, mask
    assert engine.backend.finish() == []


def test_one_that_changed_in_place_does_not_blame_its_companions():
    engine = together(NBYTES)
    tensor = torch.ones(4)
    changed, unchanged = engine.stash(tensor), engine.stash(torch.ones(5))
    tensor.add_(1)
    del tensor
    engine.look_again()
    assert changed.entry is unchanged.entry
    assert bits(engine.fetch(unchanged)) == bits(torch.ones(5))
    with pytest.raises(ms.CorrectnessError, match=r"float32\[4\], is at version 1"):
        engine.fetch(changed)


def test_without_room_or_after_a_failure_all_of_them_stay():
    full = together(NBYTES, pinned=64)
    handles = [full.stash(torch.ones(16)), full.stash(torch.zeros(16)), full.stash(torch.ones(64))]
    with pytest.warns(RuntimeWarning, match="no tier of"):
        full.look_again()
    assert [float(full.fetch(handle).sum()) for handle in handles] == [16.0, 0.0, 64.0]
    assert full.stats().by_region == {"": {"no room": 384}}
    failures = [OSError(28, "No space left on device")]
    device = AdversarialDevice(lambda n: 0, {"disk": 1 << 16}, fails=lambda: failures[0], together_bytes=NBYTES)
    broken = CheckedEngine(Checked(device), depth=0)
    handles = [broken.stash(torch.ones(16)), broken.stash(torch.zeros(16))]
    with pytest.warns(RuntimeWarning, match="the copy failed"):
        broken.look_again()
    assert [float(broken.fetch(handle).sum()) for handle in handles] == [16.0, 0.0]
    assert broken.stats().by_region == {"": {"moved": 0, "no room": 128}}
    handles.clear()
    assert broken.backend.finish() == []


# ------------------------------------------------------------------------------------------- other backends, reports


def test_a_step_can_be_written_for_a_trace_viewer(tmp_path):
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=0), disk_bytes=1 << 20)
    fn = ms.offload().on(runtime)(lambda x: (x * 2).sin())
    x = torch.ones(1024, requires_grad=True)
    fn(x).sum().backward()
    with runtime.record() as timeline:
        fn(x).sum().backward()
    fn(x).sum().backward()
    timeline.write(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    copies = [event for event in events if event["ph"] == "X" and event["name"] != "waiting"]
    assert [(event["name"], event["args"]["nbytes"]) for event in copies] == [
        ("to disk", NBYTES),
        ("from disk", NBYTES),
    ]
    assert copies[0]["ts"] + copies[0]["dur"] <= copies[1]["ts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": 3}, r"Runtime\(config=3\) must be an AsyncOffloadConfig"),
        ({"disk_bytes": -1}, r"Runtime\(disk_bytes=-1\) must be an int of at least 0"),
        ({"host_bytes": 1.5}, r"Runtime\(host_bytes=1\.5\) must be an int of at least 0"),
        ({"disk_bytes": True}, r"Runtime\(disk_bytes=True\) must be an int"),
    ],
)
def test_a_runtime_refuses_what_it_cannot_use(arguments, message):
    with pytest.raises(ms.ConfigError, match=message):
        Runtime(**arguments)


def test_a_device_without_a_backend_is_named():
    tensor = types.SimpleNamespace(device=torch.device("mps:0"))
    with pytest.raises(ms.RuntimeUnavailable, match=r"cannot move tensors of device 'mps:0': there is no backend"):
        Runtime().engine(tensor)
