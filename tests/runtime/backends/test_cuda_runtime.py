"""The CUDA backend: on a fake CuPy whose streams do nothing by themselves, and on a device where there is one."""

import errno
import gc
import os
import random
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from memscale.core.errors import RuntimeUnavailable, TransformError
from memscale.runtime.backends import cuda, host_tiers
from memscale.runtime.backends.cuda import CudaBackend
from memscale.runtime.storage.budget import HostBudget
from memscale.runtime.storage.disk import DiskTierFull, FileIO
from tests.support.checking.checked_engine import CheckedEngine
from tests.support.checking.hazards import Checked
from tests.support.coverings import DEEP
from tests.support.fake_cuda import FakeCupy
from tests.support.schedules import Program, results

MIB = 1024**2
PIECE = 8192
pytestmark = pytest.mark.filterwarnings("ignore:.* is in RAM")


@pytest.fixture
def cupy(monkeypatch):
    fake = FakeCupy()
    fake.install(monkeypatch)
    monkeypatch.setattr(cuda, "_STAGING_BYTES", PIECE)
    return fake


def budget(nbytes=64 * MIB):
    return HostBudget(nbytes, kept_free_bytes=0, available_bytes=lambda: None)


def backend_on(tmp_path, **options):
    return CudaBackend(
        **{"pinned_bytes": MIB, "budget": budget(), "disk_bytes": MIB, "disk_directory": tmp_path, **options}
    )


ALIVE = []


@pytest.fixture(autouse=True)
def _alive():
    """A copy that nothing waits for may happen as late as when its backend goes; its tensor must still be there."""
    yield
    gc.collect()
    ALIVE.clear()


def noise(nbytes, device="cpu"):
    ALIVE.append(torch.randint(256, (nbytes,), dtype=torch.uint8, device=device))
    return ALIVE[-1]


# ------------------------------------------------------------------------------ several tensors in one buffer


@pytest.mark.parametrize("tier", ["pinned", "pageable", "disk"])
def test_several_tensors_go_to_one_buffer_one_behind_the_other(cupy, tmp_path, tier):
    backend = backend_on(tmp_path)
    sources = [noise(nbytes) for nbytes in (64, 1, 1000, 130)]
    expected = [source.clone() for source in sources]
    starts = [0, 64, 128, 1152]
    buffer = backend.allocate(starts[-1] + 130, tier)
    out = backend.gather(sources, buffer, after=[backend.record()])
    target = backend.empty(buffer.nbytes, torch.empty(0))
    back = backend.copy(buffer, target, "in", after=[backend.record(), out])
    backend.wait(out)
    for source in sources:
        source.fill_(0)  # its bytes are out by now
    backend.wait(back)
    for start, source in zip(starts, expected, strict=True):
        assert torch.equal(target[start : start + source.nbytes], source)
    backend.free(buffer, after=[out, back])


# ---------------------------------------------------------------------------- the CUDA backend on a fake CuPy


def test_the_default_stream_is_that_of_the_backends_device(cupy, tmp_path):
    """Its pointer is 0 on every device, so the one that is current decides."""
    backend = backend_on(tmp_path, device=torch.device("cuda", 1))
    cupy.compute_stream = 0
    cupy.log.clear()
    for stream in (None, backend.compute_stream()):
        event = backend.copy(noise(10), backend.allocate(10, "pinned"), "out", after=[backend.record(stream)])
        backend.wait(event, stream)
    assert cupy.device() == 0
    calls = [call for call in cupy.log if call[0] in ("record", "wait")]
    assert calls == [("record", "the default of 1"), ("wait", "the default of 1")] * 2


def test_pinned_memory_is_exact_registered_once_and_for_all_devices(cupy, tmp_path):
    backend = backend_on(tmp_path, pinned_bytes=100 * 4096)
    held = [backend.allocate(nbytes, "pinned") for nbytes in (5, 4096, 100_000)]
    assert [call for call in cupy.log if call[0] == "register"] == [("register", 100 * 4096, 1)]
    assert {buffer.tier for buffer in held} == {"pinned"}
    for buffer in held:
        backend.free(buffer, after=[])
    # The next step is like the last: the slab shrinks to what that held.
    assert backend.allocate(100, "pinned").tier == "pinned"
    assert [call for call in cupy.log if call[0] != "copy"][-2:] == [
        ("unregister", 100 * 4096),
        ("register", (512 + 4096 + 100_352 + 4095) // 4096 * 4096, 1),
    ]


def test_what_the_system_does_not_pin_is_pageable_and_then_on_disk(cupy, tmp_path):
    cupy.pin_limit_bytes = 0
    shared = budget(100_000)
    backend = backend_on(tmp_path, budget=shared)
    held = [backend.allocate(40_000, "auto") for _ in range(3)]
    assert [buffer.tier for buffer in held] == ["pageable", "pageable", "disk"]
    assert shared.reserved_bytes <= 100_000
    assert cupy.registered == {}
    high_water = {tier: use.high_water_bytes for tier, use in backend.usage().items()}
    assert high_water == {"pinned": 0, "pageable": 80_000, "disk": 40_960}


def test_what_is_freed_on_disk_serves_again_only_when_its_copies_are_done(cupy, tmp_path):
    backend = backend_on(tmp_path, disk_bytes=8192)
    buffer, copy = backend.allocate(8192, "disk"), SimpleNamespace(done=lambda: is_done)
    backend.free(buffer, after=[copy])
    is_done = False
    assert backend.allocate(8192, "disk") is None
    is_done = True
    assert backend.allocate(8192, "disk") is not None


def test_the_budget_counts_pinned_memory_and_gets_it_back(cupy, tmp_path):
    shared = budget(600_000)
    first = backend_on(tmp_path, budget=shared, pinned_bytes=400_000, disk_bytes=0)
    second = backend_on(tmp_path, budget=shared, pinned_bytes=400_000, disk_bytes=0)
    buffers = [backend.allocate(350_000, "auto") for backend in (first, second)]
    assert [buffer and buffer.tier for buffer in buffers] == ["pinned", None]
    first.free(buffers[0], after=[])
    first.allocate(1, "auto")  # what was more than a step needs goes
    assert shared.reserved_bytes == 352_256
    assert second.allocate(240_000, "auto") is not None


_host_tiers_disk = host_tiers.DiskSlab


class Failing(FileIO):
    def __init__(self, **fails):
        self.fails = fails  # call -> at which one

    def _count(self, kind):
        self.fails[kind] = self.fails.get(kind, 0) - 1
        if self.fails[kind] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    def write(self, descriptor, buffers, offset):
        self._count("write")
        return super().write(descriptor, buffers, offset)

    def read(self, descriptor, buffers, offset):
        self._count("read")
        return super().read(descriptor, buffers, offset)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_disk_that_fails_is_the_events_error_and_loses_nothing(cupy, tmp_path, monkeypatch, kind, at):
    io = Failing()
    monkeypatch.setattr(host_tiers, "DiskSlab", lambda *args, **options: _host_tiers_disk(*args, io=io, **options))
    backend = backend_on(tmp_path)
    source, target = noise(3 * PIECE), noise(3 * PIECE)
    expected = source.clone()
    buffer = backend.allocate(source.nbytes, "disk")
    io.fails[kind] = at
    out = backend.copy(source, buffer, "out", after=[])
    backend.wait(out)
    if kind == "write":
        assert isinstance(out.error(), DiskTierFull)
        out = backend.copy(source, buffer, "out", after=[])  # again
        backend.wait(out)
    assert out.error() is None
    back = backend.copy(buffer, target, "in", after=[out])
    backend.wait(back)
    if kind == "read":
        assert isinstance(back.error(), DiskTierFull)
        back = backend.copy(buffer, target, "in", after=[out])
        backend.wait(back)
    assert back.error() is None
    assert torch.equal(target.cpu(), expected.cpu())


def test_no_disk_to_be_had_is_a_tier_without_room_unless_it_was_named(cupy, tmp_path, monkeypatch):
    monkeypatch.setattr("memscale.core.machine.is_in_memory", lambda folder: True)
    backend = backend_on(tmp_path, disk_directory=None, disk_bytes=None)
    assert backend.allocate(100, "disk") is None
    assert backend.allocate(100, "disk") is None
    backend = backend_on(tmp_path, disk_directory=tmp_path / "nowhere")
    with pytest.raises(RuntimeUnavailable, match=r"no file can be made in .*nowhere"):
        backend.allocate(100, "disk")
    monkeypatch.setattr(host_tiers, "DiskSlab", _raise_full)
    assert backend_on(tmp_path).allocate(100, "disk") is None


def _raise_full(*args, **options):
    raise DiskTierFull("no room")


def test_use_inside_a_graph_capture_is_refused(cupy, tmp_path):
    backend = backend_on(tmp_path, device=torch.device("cuda", 1))
    buffer = backend.allocate(10, "auto")
    cupy.capturing = 0  # which is none of this backend's business
    backend.record()
    cupy.capturing = 1  # while the current device is 0
    for use in (
        lambda: backend.allocate(10, "auto"),
        lambda: backend.copy(noise(10), buffer, "out", after=[]),
        lambda: backend.record(),  # what asks for a copy back calls this first, with the new memory in hand
    ):
        with pytest.raises(TransformError, match="inside a CUDA graph capture"):
            use()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_is_refused_and_unregisters_nothing(cupy, tmp_path):
    backend = backend_on(tmp_path)
    buffer = backend.allocate(10, "auto")
    child = os.fork()
    if child == 0:
        says = ""
        try:
            backend.copy(noise(10), buffer, "out", after=[])
        except TransformError as error:
            says = str(error)
        cupy.log.clear()
        ended = weakref.ref(backend)
        del backend, buffer
        gc.collect()
        os._exit(0 if "of which it is a fork" in says and ended() is None and cupy.log == [] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_is_missing_is_named_with_its_remedy(cupy, monkeypatch):
    cupy.available = False
    with pytest.raises(RuntimeUnavailable, match=r"CuPy 14.0 finds no CUDA device where PyTorch, built for CUDA 13.0"):
        CudaBackend(pinned_bytes=1)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeUnavailable, match=r"needs CuPy .*; run: pip install cupy-cuda13x"):
        CudaBackend(pinned_bytes=1)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(RuntimeUnavailable, match=r"pip install cupy-cuda12x"):
        CudaBackend(pinned_bytes=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeUnavailable, match="PyTorch finds no CUDA device; use a machine that has one"):
        CudaBackend(pinned_bytes=1)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeUnavailable, match="this PyTorch is built without CUDA"):
        CudaBackend(pinned_bytes=1)


class Moody(CudaBackend):
    """Between operators the fake device does something, or nothing."""

    def __init__(self, cupy, draw, **options):
        super().__init__(**options)
        self.fake, self.draw = cupy, draw

    def compute(self, seconds):
        with self.fake.lock:
            busy = [stream for stream, queue in self.fake.queues.copy().items() if queue]
            if busy and self.draw.random() < 0.5:
                self.fake.step(self.draw.choice(busy))


@pytest.mark.parametrize("chunk", range(20 if DEEP else 2))
@pytest.mark.filterwarnings(r"ignore:offload\(\) keeps a tensor:RuntimeWarning")
def test_random_programs_through_the_engine(cupy, tmp_path, chunk):
    """Bitwise the results of PyTorch, no hazard and no leak."""
    for seed in range(chunk * 20, chunk * 20 + 20):
        draw = random.Random(seed)
        backend = Moody(
            cupy,
            draw,
            pinned_bytes=draw.choice([0, 8 * 512, MIB]),
            budget=budget(draw.choice([0, 4096, MIB])),
            disk_bytes=draw.choice([0, MIB]),
            disk_directory=tmp_path,
        )
        engine = CheckedEngine(Checked(backend), depth=draw.randrange(4))
        program = Program(seed)
        assert results(program, engine) == results(program, None), f"case {seed}"
        assert set(engine.stats().live_bytes.values()) <= {0}, f"case {seed}"
        assert engine.backend.finish() == [], f"case {seed}"


# ------------------------------------------------------------------------------------------------- on a device


@pytest.mark.cuda
@pytest.mark.values
def test_side_streams_on_a_device(tmp_path):
    """Computed, moved and used on streams of the caller's, with nothing but events in between."""
    backend = backend_on(tmp_path, pinned_bytes=64 * MIB)
    source = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
    buffer = backend.allocate(source.nbytes, "auto")
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        torch.cuda._sleep(50_000_000)
        source.fill_(3)
        out = backend.copy(source, buffer, "out", after=[backend.record()])
        assert not out.done()  # the host was not held up
        backend.wait(out)
        source.fill_(4)
    with torch.cuda.stream(second):
        target = backend.empty(source.nbytes, source)
        back = backend.copy(buffer, target, "in", after=[backend.record(), out])
        backend.wait(back)
        total = target.sum(dtype=torch.int64)
        assert total.item() == 3 * source.nbytes  # read on this stream: others do not wait for it
    assert back.done()
    (_, out_end), (back_begin, _) = out.span(), back.span()
    assert out_end <= back_begin + 1e-3


@pytest.mark.cuda
def test_memory_that_was_registered_is_pinned_for_pytorch_too(tmp_path):
    backend = backend_on(tmp_path, pinned_bytes=128 * MIB, budget=budget(256 * MIB))
    source = torch.zeros(128 * MIB, dtype=torch.uint8, device="cuda")
    buffer = backend.allocate(source.nbytes, "pinned")
    assert buffer.room.tensor.is_pinned()
    back = torch.empty_like(source)
    back.copy_(buffer.room.tensor, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back.cpu(), buffer.room.tensor)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_on_a_device_is_refused(tmp_path):
    backend = backend_on(tmp_path)
    buffer, source = backend.allocate(10, "auto"), noise(10, "cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(TransformError, match="inside a CUDA graph capture"), torch.cuda.graph(graph):
        backend.copy(source, buffer, "out", after=[])
