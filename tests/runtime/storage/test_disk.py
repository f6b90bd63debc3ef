"""The disk tier: bytes come back as they went whatever the system calls do, and a fault loses nothing."""

import errno
import gc
import os
import stat
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memscale.core import machine
from memscale.core.errors import CorrectnessError, RuntimeUnavailable
from memscale.runtime.backends.host import HostBackend
from memscale.runtime.storage.arena import PAGE_BYTES, page_aligned_memory
from memscale.runtime.storage.disk import DiskSlab, DiskTierError, DiskTierFull, FileIO
from tests.support import processes

# Where the tests' directory is in RAM they run all the same.
pytestmark = pytest.mark.filterwarnings("ignore:.* is in RAM")

CAP = 4 * 1024**2
SIZES = [0, 1, 4095, 4096, 4097, 300_000, 3 * 1024**2 + 5]


def noise(nbytes, *, shift=0):
    """Random bytes that start ``shift`` bytes into a page."""
    return page_aligned_memory(nbytes + shift)[shift:].random_(256)


class Buffered(FileIO):
    """A filesystem without unbuffered access."""

    def make_direct(self, descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")


class RefusesDirectTransfers(FileIO):
    """A filesystem that takes the flag and refuses what is asked for under it."""

    def __init__(self):
        self.is_direct = False

    def make_direct(self, descriptor):
        self.is_direct = True

    def make_buffered(self, descriptor):
        self.is_direct = False

    def write(self, descriptor, buffers, offset):
        if self.is_direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().write(descriptor, buffers, offset)


class Faulty(FileIO):
    """Does what a script says, call by call: a number is the most bytes of that call, an errno name fails it."""

    def __init__(self, *, write=(), read=()):
        self.script = {"write": list(write), "read": list(read)}
        self.armed = False

    def _play(self, kind, descriptor, buffers, offset):
        step = self.script[kind].pop(0) if self.armed and self.script[kind] else None
        if isinstance(step, str):
            raise OSError(getattr(errno, step), os.strerror(getattr(errno, step)))
        if step is not None:
            buffers = [buffers[0][:step]]  # which the kernel refuses under O_DIRECT where it is no page: see Partial
        return getattr(super(), kind)(descriptor, buffers, offset)

    def write(self, descriptor, buffers, offset):
        return self._play("write", descriptor, buffers, offset)

    def read(self, descriptor, buffers, offset):
        return self._play("read", descriptor, buffers, offset)


class Partial(FileIO):
    """Moves all, and reports as many bytes as a script says: what was not reported must move again."""

    def __init__(self, reports):
        self.script = {"write": list(reports), "read": list(reports)}
        self.armed = False

    def _report(self, kind, moved):
        return min(moved, self.script[kind].pop(0)) if self.armed and self.script[kind] else moved

    def write(self, descriptor, buffers, offset):
        return self._report("write", super().write(descriptor, buffers, offset))

    def read(self, descriptor, buffers, offset):
        return self._report("read", super().read(descriptor, buffers, offset))


@pytest.fixture
def make(tmp_path):
    made = []

    def make(io=None, **options):
        made.append(DiskSlab(tmp_path, io=io, **{"cap_bytes": CAP, **options}))
        if hasattr(io, "armed"):
            io.armed = True
        return made[-1]

    return make


def written(slab, source):
    """The future of a new extent that holds `source`."""
    return slab.write(source, slab.reserve(source.nbytes))


def used_bytes(slab):
    usage = slab.usage()
    return usage.reserved_bytes - usage.free_bytes


def round_trip(slab, source, *, shift=0):
    extent = written(slab, source).result()
    into = page_aligned_memory(source.nbytes + shift)[shift:]
    slab.read(extent, into).result()
    assert torch.equal(into, source)
    return extent


@pytest.mark.parametrize("io", [FileIO, Buffered, RefusesDirectTransfers])
def test_bytes_of_every_size_come_back_from_disk(make, io):
    slab = make(io())
    if io is not FileIO:
        assert not slab.direct
    for shift in (0, 1, 64, 512):
        for nbytes in SIZES:
            slab.free(round_trip(slab, noise(nbytes, shift=shift), shift=shift))
    assert used_bytes(slab) == 0


def test_a_read_leaves_the_bytes_around_its_tensor_alone(make):
    slab = make()
    source = noise(5000)
    extent = written(slab, source).result()
    around = torch.full((3 * PAGE_BYTES,), 7, dtype=torch.uint8)
    for shift in (0, -around.data_ptr() % PAGE_BYTES):
        around.fill_(7)
        slab.read(extent, around[shift : shift + 5000]).result()
        assert torch.equal(around[shift : shift + 5000], source)
        assert (around[:shift] == 7).all()
        assert (around[shift + 5000 :] == 7).all()


@given(
    st.lists(
        st.tuples(st.integers(1, 40_000), st.sampled_from([0, 1, 64, 512]), st.integers(0, 3)), min_size=1, max_size=12
    ),
    st.lists(st.integers(1, 30_000), max_size=20),
    st.booleans(),
)
def test_extents_never_share_bytes(tmp_path_factory, tensors, reports, buffered):
    class IO(Partial, *([Buffered] if buffered else [])):
        pass

    io = IO(reports)
    slab = DiskSlab(tmp_path_factory.mktemp("slab"), cap_bytes=40 * PAGE_BYTES, first_bytes=PAGE_BYTES, io=io)
    io.armed = buffered  # under O_DIRECT eight calls without a whole page are an error, which other tests cover
    held = []
    for nbytes, shift, drop in tensors:
        source = noise(nbytes, shift=shift)
        if (extent := slab.reserve(nbytes)) is None:
            assert used_bytes(slab) + nbytes > 20 * PAGE_BYTES
        else:
            held.append((source, slab.write(source, extent).result()))
        for _ in range(min(drop, len(held))):
            slab.free(held.pop(0)[1])
        for source, extent in held:
            into = torch.empty_like(source)
            slab.read(extent, into).result()
            assert torch.equal(into, source)
    assert used_bytes(slab) == sum(-(-source.nbytes // PAGE_BYTES) * PAGE_BYTES for source, _ in held)


def test_the_file_has_no_name_and_is_for_nobody_else(make, tmp_path):
    slab = make(Buffered())
    written(slab, noise(100)).result()
    assert os.listdir(tmp_path) == []
    facts = os.fstat(slab._file._descriptor)
    assert (facts.st_nlink, stat.S_IMODE(facts.st_mode)) == (0, 0o600)
    assert facts.st_blocks * 512 >= CAP  # preallocated
    assert not os.get_inheritable(slab._file._descriptor)


def test_without_unnamed_files_the_name_is_gone_at_once(make, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    slab = make()
    assert os.listdir(tmp_path) == []
    facts = os.fstat(slab._file._descriptor)
    assert (facts.st_nlink, stat.S_IMODE(facts.st_mode)) == (0, 0o600)
    round_trip(slab, noise(5000))


def test_nothing_survives_a_kill(tmp_path):
    code = (
        "import os, signal, sys, torch\n"
        "from memscale.runtime.storage.disk import DiskSlab\n"
        f"slab = DiskSlab({str(tmp_path)!r}, cap_bytes={CAP})\n"
        "slab.write(torch.ones(100_000, dtype=torch.uint8), slab.reserve(100_000)).result()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert processes.run(code).returncode == -9
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("script", [[1], [5000, 1, 1, 4095], [4096] * 5, [1] * 8])
def test_short_transfers_go_on(make, script):
    for io in (Partial(script), type("BufferedFaults", (Faulty, Buffered), {})(write=script, read=script)):
        round_trip(make(io), noise(50_000))
        assert io.script == {"write": [], "read": []}  # each was met


def test_a_transfer_that_makes_no_headway_ends(make):
    for reports in ([0], [1] * 9):
        slab = make(Partial(reports))
        if reports[0] and not slab.direct:
            continue  # a byte is headway there
        with pytest.raises(DiskTierError, match="the system moves no more than 0 of them"):
            written(slab, noise(50_000)).result()


@pytest.mark.parametrize(
    ("name", "error"), [("ENOSPC", DiskTierFull), ("EDQUOT", DiskTierFull), ("EIO", DiskTierError)]
)
@pytest.mark.parametrize("good", [0, 1])
def test_a_write_that_fails_loses_nothing(make, name, error, good):
    io = Faulty(write=[4096] * good + [name])
    slab = make(io)
    source = noise(50_000)
    copy = source.clone()
    with pytest.raises(error, match=os.strerror(getattr(errno, name))) as caught:
        written(slab, source).result()
    assert type(caught.value) is error
    assert torch.equal(source, copy)
    assert io.script["write"] == []
    round_trip(slab, source)  # the slab goes on

    io.script["write"] = [name]
    extent = slab.reserve(50_000)
    with pytest.raises(error):
        slab.write(source, extent).result()
    slab.write(source, extent).result()
    slab.free(extent)


def test_a_read_that_fails_can_be_tried_again(make):
    io = Faulty(read=[4096, "EIO"])
    slab = make(io)
    source, into = noise(50_000), noise(50_000)
    extent = written(slab, source).result()
    with pytest.raises(DiskTierError, match="Input/output error"):
        slab.read(extent, into).result()
    slab.read(extent, into).result()
    assert torch.equal(into, source)


def test_a_full_file_reserves_nothing_until_memory_is_freed(make):
    slab = make(cap_bytes=10 * PAGE_BYTES, first_bytes=PAGE_BYTES)
    kept = written(slab, noise(9 * PAGE_BYTES)).result()
    assert slab.reserve(PAGE_BYTES + 1) is None
    last = slab.reserve(PAGE_BYTES)
    assert slab.reserve(0) is None  # even nothing takes a page
    slab.free(last)
    slab.free(kept)
    assert used_bytes(slab) == 0
    assert slab.reserve(10 * PAGE_BYTES) is not None


def test_a_disk_that_fills_up_gives_what_it_has(make):
    class Small(FileIO):
        room = 5 * PAGE_BYTES

        def preallocate(self, descriptor, offset, nbytes):
            if offset + nbytes > self.room:
                raise OSError(errno.ENOSPC, "No space left on device")

    for first_bytes in (4 * PAGE_BYTES, 6 * PAGE_BYTES):
        slab = make(Small(), first_bytes=first_bytes)
        extents = [slab.reserve(PAGE_BYTES) for _ in range(6)]
        assert [extent is not None for extent in extents] == [True] * 5 + [False]
    Small.room = 0
    with pytest.raises(DiskTierFull, match="No space left on device"):
        make(Small(), first_bytes=PAGE_BYTES)


def test_a_host_whose_disk_is_full_keeps_its_tensors(monkeypatch):
    def full(self, descriptor, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileIO, "preallocate", full)
    assert HostBackend().allocate(1, "disk") is None


def test_what_was_not_written_cannot_be_read(make):
    slab = make()
    extent = slab.reserve(5000)
    with pytest.raises(CorrectnessError, match="5000 bytes are read from the disk tier where 0 were written"):
        slab.read(extent, noise(5000)).result()


class Held(FileIO):
    """Transfers wait for a gate."""

    def __init__(self):
        self.gate = threading.Event()
        self.gate.set()

    def write(self, descriptor, buffers, offset):
        assert self.gate.wait(30)
        return super().write(descriptor, buffers, offset)

    def read(self, descriptor, buffers, offset):
        assert self.gate.wait(30)
        return super().read(descriptor, buffers, offset)


def test_an_extent_freed_while_it_is_read_is_reused_only_afterwards(make):
    slab = make(io := Held(), cap_bytes=2 * PAGE_BYTES)
    source, into = noise(2 * PAGE_BYTES), noise(2 * PAGE_BYTES)
    extent = written(slab, source).result()
    io.gate.clear()
    reading = slab.read(extent, into)
    slab.free(extent)
    assert slab.reserve(1) is None
    io.gate.set()
    reading.result()
    assert torch.equal(into, source)
    assert slab.reserve(2 * PAGE_BYTES) is not None


def test_a_transfer_lets_go_of_its_tensor(make):
    for io in (FileIO(), Faulty(write=["EIO"])):
        slab, source = make(io), noise(100)
        extent, alive = slab.reserve(100), weakref.ref(source)
        future = slab.write(source, extent)
        del source
        if future.exception() is not None:
            del future
        assert alive() is None  # at once, and with no help of the garbage collector
        into = noise(100)
        alive, future = weakref.ref(into), slab.read(extent, into)
        del into
        assert future.exception() is None or isinstance(io, Faulty)
        del future
        assert alive() is None


def test_a_slab_that_is_dropped_closes_its_file_after_its_last_transfer(tmp_path):
    io = Held()
    slab = DiskSlab(tmp_path, cap_bytes=CAP, io=io)
    descriptor = slab._file._descriptor
    io.gate.clear()
    writing = written(slab, noise(100))
    threads = list(slab._copy_pool._pool._threads)
    del slab
    gc.collect()
    assert os.fstat(descriptor).st_nlink == 0  # still there
    io.gate.set()
    writing.result()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def mount(monkeypatch, tmp_path, filesystem):
    device = os.stat(tmp_path).st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /x rw master:1 - {filesystem} {filesystem} rw\n"
    monkeypatch.setattr(machine, "read_or_empty", lambda path: line)
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path))


def test_a_directory_in_ram_is_not_taken_by_itself_and_warned_of(monkeypatch, tmp_path):
    mount(monkeypatch, tmp_path, "ext4")
    DiskSlab(cap_bytes=CAP)
    assert os.path.samefile(tmp_path, machine.folder_on_disk())
    mount(monkeypatch, tmp_path, "tmpfs")
    with pytest.warns(UserWarning, match="is in RAM, so offloading to it frees nothing"):
        DiskSlab(tmp_path, cap_bytes=CAP)
    monkeypatch.setattr(machine, "is_in_memory", lambda folder: True)
    with pytest.raises(RuntimeUnavailable, match=r"are in RAM, .* set TMPDIR to one"):
        DiskSlab(cap_bytes=CAP)


# ------------------------------------------------------------------------------------------- used in place


def mapped(slab, nbytes):
    extent = slab.reserve(nbytes)
    return extent, torch.from_numpy(slab.map(extent))


class Mapless(FileIO):
    """After `armed`, all that goes past the page cache fails."""

    armed = False

    def write(self, descriptor, buffers, offset):
        assert not self.armed, "a mapped extent was written past its mapping"
        return super().write(descriptor, buffers, offset)

    def read(self, descriptor, buffers, offset):
        assert not self.armed, "a mapped extent was read past its mapping"
        return super().read(descriptor, buffers, offset)


@pytest.mark.parametrize("is_held", [True, False])
def test_transfers_of_a_mapped_extent_are_copies_of_its_memory(make, is_held):
    """Also when nobody holds the array any more: what was written in place may be in the page cache only."""
    slab = make(Mapless(), cap_bytes=16 * 1024**2)
    for nbytes in [*SIZES, 9 * 1024**2 + 1]:
        extent, tensor = mapped(slab, nbytes)
        source, into = noise(nbytes, shift=1), noise(nbytes, shift=3)
        tensor.copy_(source)
        if not is_held:
            del tensor
            gc.collect()
        slab.read(extent, into).result()
        assert torch.equal(into, source)
        source = noise(nbytes)
        assert slab.write(source, extent).result() is extent
        slab.read(extent, into).result()
        assert torch.equal(into, source)
        if is_held:
            assert torch.equal(tensor, source)
        slab.free(extent)


def test_a_mapping_goes_with_the_last_array_of_it(make):
    slab = make()
    extent, tensor = mapped(slab, 5000)
    part = tensor.numpy()[10:20].view(np.uint16)[1:]
    mapping = extent._mapping
    del tensor
    gc.collect()
    assert mapping() is not None
    address = mapping()._address
    assert is_mapped(address)
    del part
    gc.collect()
    assert mapping() is None
    assert not is_mapped(address)


def is_mapped(address):
    with open("/proc/self/maps") as maps:
        spans = [[int(number, 16) for number in line.split()[0].split("-")] for line in maps]
    return any(start <= address < stop for start, stop in spans)


def test_a_transfer_holds_the_mapping_until_it_is_done(make):
    slab, gate = make(threads=1), threading.Event()
    extent, tensor = mapped(slab, 5000)
    source, mapping = noise(5000), extent._mapping
    waiting = slab._copy_pool.submit(lambda: gate.wait(30))
    future = slab.write(source, extent)
    del tensor
    gc.collect()
    assert mapping() is not None
    gate.set()
    assert future.result() is extent
    assert waiting.result()
    del future
    assert mapping() is None  # at once, and with no help of the garbage collector
    slab.read(extent, into := noise(5000)).result()
    assert torch.equal(into, source)


def test_a_part_without_blocks_is_not_mapped(make):
    """Where the disk may be full when a page is first written, that would be a signal and not an error."""

    class LaterSparse(FileIO):
        def preallocate(self, descriptor, offset, nbytes):
            if offset == 2 * PAGE_BYTES:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            super().preallocate(descriptor, offset, nbytes)

    slab = make(LaterSparse(), first_bytes=2 * PAGE_BYTES)
    good, across, after = (slab.reserve(pages * PAGE_BYTES) for pages in (2, 2, 2))
    assert [extent.offset // PAGE_BYTES for extent in (good, across, after)] == [0, 2, 4]
    slab.map(good)[:] = 1
    for extent in (across, after):
        with pytest.raises(RuntimeUnavailable, match=r"does not preallocate blocks .* use another tier"):
            slab.map(extent)
        slab.write(source := noise(100), extent).result()  # it serves as before
        slab.read(extent, into := noise(100)).result()
        assert torch.equal(into, source)
