"""What a processor's caches hold, as tried: by the clock alone, within the memory there is."""

import itertools

import pytest

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
    monkeypatch.setattr(caches, "_MOST_BYTES", 64 * MIB)


def test_what_is_read_as_fast_after_so_much_else_is_still_there():
    # After 4, 8, 16, 32 and 64 MiB of others.
    assert caches.tried_cache_bytes(Reads(1.0, 1.1, 1.2, 2.0, 2.1)) == 16 * MIB
    assert caches.tried_cache_bytes(Reads(1.0, 2.0, 2.0, 2.0, 2.0)) == 4 * MIB
    assert caches.tried_cache_bytes(Reads(1.0, 1.0, 1.0, 1.0, 2.0)) == 32 * MIB
    # What disturbed a read of one size says nothing of those beyond it.
    assert caches.tried_cache_bytes(Reads(1.0, 1.6, 1.0, 2.0, 2.0)) == 16 * MIB


def test_trying_takes_an_eighth_of_the_memory_that_is_free(monkeypatch):
    monkeypatch.setattr(caches, "available_host_bytes", lambda: 64 * MIB)
    assert caches.tried_cache_bytes(Reads(1.0, 2.0)) == 4 * MIB
    monkeypatch.setattr(caches, "available_host_bytes", lambda: 0)
    assert caches.tried_cache_bytes(Reads(1.0)) == 4 * MIB


def test_a_flush_is_some_times_as_large_as_what_is_held(monkeypatch):
    monkeypatch.setattr(caches, "cache_bytes", lambda: 8 * MIB)
    assert caches.flush().nbytes == 32 * MIB
    monkeypatch.setattr(caches, "cache_bytes", lambda: 32 * MIB)
    assert caches.flush().nbytes == 64 * MIB


def test_what_was_found_is_remembered_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMSCALE_CACHE", str(tmp_path))
    found = iter([16 * MIB])
    monkeypatch.setattr(caches, "tried_cache_bytes", lambda _: next(found))
    for _ in range(2):
        caches._remembered.cache_clear()
        assert caches.cache_bytes() == 16 * MIB
    caches._remembered.cache_clear()  # what other tests find is theirs
