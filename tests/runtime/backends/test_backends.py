"""What every backend promises of memory that the CPU reads and writes in place, and of waiting on the host."""

import contextlib
import gc
import os
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from memscale.runtime.backends import cuda as _cuda
from memscale.runtime.backends import host as _host
from memscale.runtime.backends.cuda import CudaBackend
from memscale.runtime.backends.host import HostBackend
from memscale.runtime.storage.budget import HostBudget
from tests.support.adversarial_device import AdversarialDevice
from tests.support.fake_cuda import FakeCupy

MIB = 1024**2
CAP = 40 * MIB
# One byte, a little more than a page, and more than all pieces that a copy is cut into.
SIZES = [1, 4097, 16 * MIB + 5]
pytestmark = pytest.mark.filterwarnings("ignore:.* is in RAM")


def cuda_on(tmp_path, **options):
    budget = HostBudget(2 * CAP, kept_free_bytes=0, available_bytes=lambda: None)
    settings = {"pinned_bytes": CAP, "budget": budget, "disk_bytes": CAP, "disk_directory": tmp_path}
    return CudaBackend(**{**settings, **options})


def host(tmp_path, monkeypatch, disk_bytes=CAP):
    return HostBackend(tmp_path, disk_bytes=disk_bytes), "cpu"


def fake_cuda(tmp_path, monkeypatch, disk_bytes=CAP):
    FakeCupy().install(monkeypatch)
    monkeypatch.setattr(_cuda, "_STAGING_BYTES", MIB)
    return cuda_on(tmp_path, disk_bytes=disk_bytes), "cpu"


def cuda(tmp_path, monkeypatch):
    return cuda_on(tmp_path), "cuda"


def simulated(seed):
    def make(tmp_path, monkeypatch):
        return AdversarialDevice(random.Random(seed).randrange, {"pinned": CAP, "disk": CAP}), "cpu"

    return pytest.param(make, id=f"simulated-{seed}")


def lazy(tmp_path, monkeypatch):
    """Nothing happens before somebody waits for it."""
    return AdversarialDevice(lambda n: n - 1, {"pinned": CAP, "disk": CAP}), "cpu"


REAL = [host, fake_cuda, pytest.param(cuda, marks=pytest.mark.cuda)]


@pytest.fixture(params=[*REAL, lazy, simulated(0)])
def backend(request, tmp_path, monkeypatch):
    return request.param(tmp_path, monkeypatch)


def noise(nbytes, device="cpu"):
    return torch.randint(256, (nbytes,), dtype=torch.uint8).to(device)


def mapped(backend, nbytes, tier):
    buffer = backend.allocate(nbytes, tier)
    assert buffer.tier == tier
    return buffer, torch.from_numpy(backend.map(buffer))


def load(backend, buffer, device):
    """What a copy in brings to the device, and its event."""
    target = backend.empty(buffer.nbytes, torch.empty(0, dtype=torch.uint8, device=device))
    event = backend.copy(buffer, target, "in", after=[backend.record()])
    backend.wait(event)
    return target.cpu(), event


# ------------------------------------------------------------------------------------------------ what is there


@pytest.mark.parametrize("nbytes", SIZES)
def test_bytes_that_the_cpu_wrote_come_in_and_those_that_go_out_are_the_cpus_to_read(backend, nbytes):
    backend, device = backend
    for tier in backend.tiers:
        buffer = backend.allocate(nbytes, tier)
        array = backend.map(buffer)
        assert (array.dtype, array.shape, array.flags.writeable) == (np.uint8, (nbytes,), True)
        written = noise(nbytes)
        array[:] = written.numpy()
        found, arrived = load(backend, buffer, device)
        assert torch.equal(found, written)
        backend.synchronize(arrived)
        assert np.array_equal(array, written.numpy()), "a copy in leaves what it read"

        source = noise(nbytes, device)
        left = backend.copy(source, buffer, "out", after=[backend.record()])
        backend.synchronize(left)
        assert left.done()
        assert left.error() is None
        assert np.array_equal(array, source.cpu().numpy())
        backend.free(buffer, after=[arrived, left])


@pytest.mark.parametrize("make", [fake_cuda, lazy])
def test_nothing_but_synchronize_lets_a_copy_happen(tmp_path, monkeypatch, make):
    """On devices that do only what somebody waits for, the array shows whether anybody did."""
    backend, _ = make(tmp_path, monkeypatch)
    buffer, tensor = mapped(backend, 5000, "pinned")
    tensor.fill_(1)
    source = torch.full((5000,), 7, dtype=torch.uint8)
    event = backend.copy(source, buffer, "out", after=[backend.record()])
    assert tensor.unique().tolist() == [1]
    assert not event.done()
    backend.synchronize(event)
    assert tensor.unique().tolist() == [7]


def test_events_say_when_they_are_done_and_when_that_was(backend):
    backend, device = backend
    for tier in backend.tiers:
        before = backend.clock()
        buffer, source = backend.allocate(100, tier), noise(100, device)
        event = backend.copy(source, buffer, "out", after=[backend.record()])
        backend.wait(event)
        if device == "cuda":
            torch.cuda.synchronize()
        assert event.done()
        begin, end = event.span()
        # A device's own clock is about as good as this.
        assert before - 1e-3 <= begin <= end <= backend.clock() + 1e-3
        mark = backend.record()
        backend.wait(mark)
        if device == "cuda":
            torch.cuda.synchronize()
        assert mark.done()
        assert mark.error() is None
        backend.free(buffer, after=[event])


# ------------------------------------------------------------------------------------------ how long it is there


def test_a_tensor_made_of_it_has_its_own_storage_and_keeps_it(backend):
    backend, _ = backend
    for tier in backend.tiers:
        buffer = backend.allocate(5000, tier)
        array = backend.map(buffer)
        alive, tensor = weakref.ref(array), torch.from_numpy(array)
        del array
        assert alive() is not None
        assert tensor.untyped_storage().nbytes() == 5000
        tensor.fill_(5)
        part = tensor.view(torch.int32)[100:]
        del tensor
        gc.collect()
        assert part.unique().tolist() == [0x05050505]


def test_a_place_that_was_given_back_serves_again(backend):
    """Mapped, then not, then mapped again; what was there before does not come back."""
    backend, device = backend
    for tier in backend.tiers:
        for _ in range(2):
            buffer, tensor = mapped(backend, 3 * MIB, tier)
            tensor.copy_(noise(3 * MIB))
            found, event = load(backend, buffer, device)
            assert torch.equal(found, tensor)
            backend.free(buffer, after=[event])
            tensor.fill_(9)  # the last that is done with it before the copy out of another goes to the same place
            del tensor
            buffer, source = backend.allocate(3 * MIB, tier), noise(3 * MIB, device)
            left = backend.copy(source, buffer, "out", after=[backend.record()])
            backend.wait(left)
            found, event = load(backend, buffer, device)
            assert torch.equal(found, source.cpu())
            backend.free(buffer, after=[left, event])


def test_mapping_takes_no_room_and_freeing_gives_all_of_it_back(backend):
    backend, _ = backend
    counts = []
    for is_mapped in (False, True, True):
        held = []
        while (buffer := backend.allocate(4 * MIB, "auto")) is not None:
            held.append((buffer, backend.map(buffer) if is_mapped else None))
        counts.append([buffer.tier for buffer, _ in held])
        for buffer, array in held:
            if is_mapped:
                array[:] = 1
            backend.free(buffer, after=[])
    # The budget of RAM is twice the cap of what is pinned, so pageable memory gets the other half.
    assert counts == [[tier for tier in backend.tiers for _ in range(10)]] * 3


@pytest.mark.parametrize("make", REAL)
def test_the_array_outlives_the_backend(tmp_path, monkeypatch, make):
    backend, device = make(tmp_path, monkeypatch)
    tensors = []
    for tier in backend.tiers:
        for nbytes in (5000, 3 * MIB):
            buffer, tensor = mapped(backend, nbytes, tier)
            tensors.append(tensor.fill_(len(tensors) + 1))
            backend.synchronize(load(backend, buffer, device)[1])
    alive = weakref.ref(backend)
    del backend, buffer, tensor
    gc.collect()
    assert alive() is None
    for index, tensor in enumerate(tensors):
        assert tensor.unique().tolist() == [index + 1]
        assert tensor.add_(100).unique().tolist() == [index + 101]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("backend", [host, fake_cuda], indirect=True)
def test_a_fork_reads_what_its_parent_wrote_and_shares_what_is_on_disk(backend):
    backend, _ = backend
    held = {tier: mapped(backend, 2 * MIB + 3, tier) for tier in backend.tiers}
    for _, tensor in held.values():
        tensor.fill_(3)
    load(backend, held["disk"][0], "cpu")  # which sends it out of RAM
    child = os.fork()
    if child == 0:
        found = [tensor.min() == tensor.max() == 3 for _, tensor in held.values()]
        for _, tensor in held.values():
            tensor[1_000_000:] = 4
        tensor = None
        held.clear()
        gc.collect()  # unmapped there, not here
        os._exit(0 if all(found) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    expected = torch.full((2 * MIB + 3,), 3, dtype=torch.uint8)
    expected[1_000_000:] = 4
    assert torch.equal(held["disk"][1], expected)
    assert torch.equal(load(backend, held["disk"][0], "cpu")[0], expected)


# ---------------------------------------------------------------------------------------------- on disk, not in RAM


def resident_bytes(tensor):
    """What of the mapping behind a tensor is in this process's memory, from the kernel's own books."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, stop = (int(number, 16) for number in first.split("-"))
            inside = start <= tensor.data_ptr() < stop
        elif inside and first == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no mapping has this address")


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc/self/smaps")
@pytest.mark.parametrize("make", [host, fake_cuda])
def test_copies_leave_nothing_of_a_disk_buffer_in_ram(tmp_path, monkeypatch, make):
    backend, device = make(tmp_path, monkeypatch, disk_bytes=64 * MIB)
    buffer, tensor = mapped(backend, 64 * MIB, "disk")
    assert resident_bytes(tensor) == 0
    tensor.copy_(noise(64 * MIB))
    assert resident_bytes(tensor) > 32 * MIB  # all of it, where the kernel is not short of memory
    found, _ = load(backend, buffer, device)
    assert resident_bytes(tensor) < MIB
    assert torch.equal(found, tensor)
    assert resident_bytes(tensor) > 32 * MIB
    source = found.add_(1)
    backend.synchronize(backend.copy(source, buffer, "out", after=[]))
    assert resident_bytes(tensor) < MIB
    assert torch.equal(source, tensor)


# ---------------------------------------------------------------------------------------------------- threads


def test_transfers_of_mapped_memory_run_beside_the_interpreter(tmp_path):
    """An optimizer's thread touches one buffer while others are copied, and nothing of it is lost."""
    backend = HostBackend(tmp_path, disk_bytes=CAP)
    (mine, my_tensor), *others = (mapped(backend, 4 * MIB, "disk") for _ in range(4))
    my_tensor.zero_()

    def optimize():
        for _ in range(50):
            my_tensor.add_(1)

    thread = threading.Thread(target=optimize)
    thread.start()
    for value in range(5):
        sources = [torch.full((4 * MIB,), value + index, dtype=torch.uint8) for index in range(3)]
        leaves = [
            backend.copy(source, buffer, "out", after=[]) for source, (buffer, _) in zip(sources, others, strict=True)
        ]
        for event, source, (_, tensor) in zip(leaves, sources, others, strict=True):
            backend.synchronize(event)
            assert torch.equal(tensor, source)
    thread.join()
    assert my_tensor.unique().tolist() == [50]
    assert load(backend, mine, "cpu")[0].unique().tolist() == [50]


def test_threads_that_ask_for_disk_first_get_it_of_one_slab(tmp_path, monkeypatch):
    """As the optimizers of two models do that train beside each other with their states on disk."""
    both = threading.Barrier(2, timeout=0.2)

    class Slow(_host.DiskSlab):
        def __init__(self, *args, **options):
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait()  # for another thread that makes one
            super().__init__(*args, **options)

    monkeypatch.setattr(_host, "DiskSlab", Slow)
    backend = HostBackend(tmp_path, disk_bytes=CAP)
    with ThreadPoolExecutor(2) as threads:
        buffers = list(threads.map(lambda _: backend.allocate(MIB, "disk"), range(2)))
    for buffer in buffers:
        backend.copy(torch.zeros(MIB, dtype=torch.uint8), buffer, "out", after=[]).wait()
        backend.free(buffer, after=[])
