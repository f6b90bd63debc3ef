"""What a processor's caches hold, as tried: by the clock alone, within the memory there is."""

import itertools

import pytest

from memscale.simulation.dispatch.host_memory import CacheContents
from memscale.simulation.dispatch.trace_builder import StorageRecord
from memscale.simulation.kernels import caches

MIB = 1 << 20


class Reads:
    """A clock by which the reads that are timed take `seconds`, so many times each."""

    def __init__(self, *seconds, times=5):
        self.now = 0.0
        self.steps = itertools.chain.from_iterable((0.0, each) for each in seconds for _ in range(times))

    def __call__(self):
        self.now += next(self.steps)
        return self.now


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(caches, "_MOST_BYTES", 8 * MIB)


def test_trying_takes_an_eighth_of_the_memory_that_is_free(monkeypatch):
    monkeypatch.setattr(caches, "available_host_bytes", lambda: 16 * MIB)
    assert caches.tried(Reads(1.0, 2.0, 2.0)).nbytes == (0, MIB, 2 * MIB)
    monkeypatch.setattr(caches, "available_host_bytes", lambda: 0)
    assert caches.tried(Reads(1.0, 2.0)).nbytes == (0, MIB)


def test_what_was_found_is_remembered_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMSCALE_CACHE", str(tmp_path))
    own = caches.Caches((0, MIB), (0.0, 1.0))
    found = iter([own])
    monkeypatch.setattr(caches, "tried", lambda _: next(found))
    for _ in range(2):
        caches._remembered.cache_clear()
        assert caches.own_caches() == own
    caches._remembered.cache_clear()  # what other tests find is theirs


def test_an_operator_misses_what_others_have_driven_out():
    def shares(*uses):
        contents = CacheContents(caches.Caches((0, MIB, 4 * MIB, 64 * MIB), (0.0, 0.0, 0.4, 1.0)))
        records = {}
        for size in dict.fromkeys(uses):
            records[size] = StorageRecord(size, -1)
            records[size].used_at = -1
        return [round(contents.missing_share([(records[size], size)]), 3) for size in uses]

    assert shares(MIB, MIB) == [1.0, 0.0]
    assert shares(MIB, 3 * MIB, MIB)[-1] == 0.4  # in the next level
    assert shares(MIB, 63 * MIB, MIB)[-1] == 1.0
    # The half of a large operand is in no cache even if it was used just now, which its own time knows.
    assert shares(34 * MIB, 34 * MIB) == [1.0, 0.0]
    assert 0.0 < shares(34 * MIB, 10 * MIB, 34 * MIB)[-1] < 1.0
