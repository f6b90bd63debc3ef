"""The arena, the free ranges under it, and the host budget: against models that only count."""

import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memscale.core import machine
from memscale.core.errors import RuntimeUnavailable
from memscale.runtime.storage.arena import PAGE_BYTES, Arena, page_aligned_memory
from memscale.runtime.storage.budget import HostBudget

KIB = 1024


class Event:
    def __init__(self, happened=False):
        self.happened = happened

    def done(self):
        return self.happened


class Slabs:
    """A system with so many bytes, which counts what it handed out."""

    def __init__(self, system_bytes=10**9):
        self.system_bytes = system_bytes
        self.sizes = []

    def allocate(self, nbytes):
        if sum(self.sizes) + nbytes > self.system_bytes:
            raise MemoryError
        self.sizes.append(nbytes)
        return page_aligned_memory(nbytes)

    def release(self, slab):
        self.sizes.remove(slab.nbytes)


def arena_of(slabs, *, cap_bytes=256 * KIB, slab_bytes=32 * KIB, alignment=512):
    return Arena(
        slabs.allocate, cap_bytes=cap_bytes, slab_bytes=slab_bytes, alignment=alignment, release_slab=slabs.release
    )


def pending_bytes(arena):
    """The bytes of blocks that were given back and wait for their events."""
    return sum(block.nbytes for block, _ in arena._given)


def live_bytes(arena):
    return arena._in_use_bytes - pending_bytes(arena)


class AnArena(RuleBasedStateMachine):
    """Blocks are filled with a number of their own when taken, and must still hold it when given back."""

    @initialize(
        alignment=st.sampled_from([64, 512, PAGE_BYTES]),
        slab=st.integers(1, 40_000),
        cap=st.integers(0, 400_000),
        system=st.integers(0, 500_000),
    )
    def start(self, alignment, slab, cap, system):
        self.alignment, self.cap = alignment, cap
        self.slabs = Slabs(system)
        self.arena = arena_of(self.slabs, cap_bytes=cap, slab_bytes=slab, alignment=alignment)
        self.blocks = []  # (block, what it was filled with)
        self.pending = []  # (span as start and stop addresses, bytes, events)
        self.count = 0
        self.high_water = 0

    def span(self, nbytes):
        return max(self.alignment, -(-nbytes // self.alignment) * self.alignment)

    def waiting(self):
        return [item for item in self.pending if not all(event.happened for event in item[2])]

    @rule(nbytes=st.one_of(st.integers(0, 3_000), st.integers(0, 60_000)))
    def take(self, nbytes):
        before = self.arena.usage()
        block = self.arena.take(nbytes)
        if block is None:
            # Neither a hole nor a new slab could hold it. Slabs that are wholly free make way for a new one.
            span = self.span(nbytes)
            assert before.largest_free_bytes < span
            assert self.blocks or self.waiting() or span > min(self.cap, self.slabs.system_bytes)
            return
        assert (block.nbytes, block.tensor.nbytes, block.tensor.dtype) == (nbytes, nbytes, torch.uint8)
        start = block.tensor.data_ptr() if nbytes else None
        if nbytes:
            assert start % self.alignment == 0
            for (low, high), _, _ in self.waiting():
                assert start + nbytes <= low or high <= start, "memory that an event still protects"
        self.count = self.count % 255 + 1
        block.tensor.fill_(self.count)
        self.blocks.append((block, self.count))
        used = sum(held.nbytes for held, _ in self.blocks) + sum(item[1] for item in self.waiting())
        self.high_water = max(self.high_water, used)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), late=st.integers(0, 2))
    def give(self, data, late):
        block, filled = self.blocks.pop(data.draw(st.integers(0, len(self.blocks) - 1)))
        assert (block.tensor == filled).all()
        start = block.tensor.data_ptr()
        events = [Event() for _ in range(late)]
        self.pending.append(((start, start + block.nbytes), block.nbytes, events))
        self.arena.give(block, after=iter(events))
        with pytest.raises(AssertionError, match="was given back"):
            _ = block.tensor
        with pytest.raises(AssertionError, match="given back twice"):
            self.arena.give(block)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def happen(self, data):
        waiting = self.waiting()
        for event in waiting[data.draw(st.integers(0, len(waiting) - 1))][2]:
            event.happened = True

    @rule()
    def replan(self):
        reserved = self.arena.usage().reserved_bytes
        if self.arena.replan():
            assert not self.blocks
            assert not self.waiting()
            assert self.arena.usage().reserved_bytes < reserved

    @invariant()
    def counts(self):
        stats = self.arena.usage()
        assert live_bytes(self.arena) == sum(block.nbytes for block, _ in self.blocks)
        assert pending_bytes(self.arena) == sum(item[1] for item in self.waiting())
        assert stats.reserved_bytes == sum(self.slabs.sizes) <= min(self.cap, self.slabs.system_bytes)
        assert stats.high_water_bytes >= self.high_water
        for block, filled in self.blocks:
            assert (block.tensor == filled).all()

    def teardown(self):
        """Everything given back joins again: what was there in pieces is there in one."""
        for block, _ in self.blocks:
            self.arena.give(block)
        for _, _, events in self.pending:
            for event in events:
                event.happened = True
        assert self.arena.usage().largest_free_bytes == max(self.slabs.sizes, default=0)


TestArena = AnArena.TestCase


def test_an_event_that_fails_loses_no_block():
    class Fails(Event):
        def done(self):
            if not self.happened:
                raise RuntimeError("the device is gone")
            return True

    arena, event = arena_of(Slabs(), cap_bytes=32 * KIB), Fails()
    arena.give(arena.take(32 * KIB), after=[event])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the device is gone"):
            arena.take(32 * KIB)
    event.happened = True
    assert arena.take(32 * KIB) is not None


def test_giving_back_inside_the_arena_itself_does_not_lock_it():
    """A finalizer may run at any moment, in the thread that holds the lock too."""
    slabs = Slabs()
    arena = None

    class Graph:
        def __init__(self, block):
            self.cycle = self
            weakref.finalize(self, lambda: arena.give(block))

    def allocate(nbytes):
        gc.collect()
        return slabs.allocate(nbytes)

    arena = Arena(allocate, cap_bytes=128 * KIB, slab_bytes=16 * KIB)
    Graph(arena.take(16 * KIB))
    worker = threading.Thread(target=lambda: arena.take(16 * KIB), daemon=True)
    worker.start()
    worker.join(30)
    assert not worker.is_alive()
    arena.usage()
    assert live_bytes(arena) == 16 * KIB


class Machine:
    """What a machine says is available, and what a budget made of it."""

    def __init__(self, available_bytes):
        self.available_bytes = available_bytes

    def __call__(self):
        return self.available_bytes


@given(st.integers(0, 100), st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=30))
def test_a_budget_never_grants_more_than_its_cap(cap, moves):
    budget, granted = HostBudget(cap, available_bytes=lambda: None), []
    for is_release, nbytes in moves:
        if is_release and granted:
            budget.release(granted.pop())
        elif budget.reserve(nbytes):
            granted.append(nbytes)
            assert sum(granted) <= cap
        else:
            assert sum(granted) + nbytes > cap
        assert budget.reserved_bytes == sum(granted)


def test_a_budget_grants_only_what_is_there():
    machine = Machine(1000)
    budget = HostBudget(None, kept_free_bytes=100, available_bytes=machine)
    assert not budget.reserve(901)
    assert budget.reserve(900)
    machine.available_bytes = 100
    assert not budget.reserve(1)
    assert budget.reserved_bytes == 900
    assert HostBudget(10**18, kept_free_bytes=0).reserve(10**17) is False  # of this machine's own RAM


def test_no_cap_on_a_machine_that_says_nothing_is_refused():
    with pytest.raises(RuntimeUnavailable, match="install psutil, or set max_cpu_offload_gb"):
        HostBudget(None, available_bytes=lambda: None)


def test_without_proc_psutil_says_what_is_available(monkeypatch, tmp_path):
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "none")
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 12345})())
    assert machine.available_host_bytes() == 12345
    monkeypatch.setitem(__import__("sys").modules, "psutil", None)
    assert machine.available_host_bytes() is None
    (tmp_path / "none").write_text("MemTotal: 10 kB\nMemAvailable:       7 kB\n")
    assert machine.available_host_bytes() == 7 * KIB


def test_a_cgroup_lowers_what_is_available(monkeypatch):
    monkeypatch.setattr(machine, "cgroup_limits", lambda *_: iter([(10_000, 4_000), (20_000, 1_000)]))
    assert machine.available_host_bytes() == 6_000
    assert machine.cgroup_limit_bytes() == 10_000
