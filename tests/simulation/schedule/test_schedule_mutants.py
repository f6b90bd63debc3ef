"""Clocks that are wrong in one place: what holds of every schedule must notice each of them."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.simulation.schedule import clock as clock_module
from memscale.simulation.schedule.clock import Clock
from tests.support.hosts import QUICK_HOST

LINK = 20e9
CARD = dataclasses.replace(
    ms.Hardware.named("h100"),
    host_to_device_bytes_per_second=LINK,
    device_to_host_bytes_per_second=LINK,
    call_seconds=QUICK_HOST,
)
LAYERS = 6


def profiled(how, width=2048, rows=8192, card=CARD):
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)]).bfloat16()
    batch = torch.empty(rows, width, device="meta", dtype=torch.bfloat16)
    return ms.profile(model, batch, loss=lambda y, _: y.float().sum(), plan={"*": how}, hardware=card)


def check():
    """What holds of every schedule, on four steps."""
    moved, paged = profiled(ms.offload()), profiled(ms.offload(tier="pageable"))
    assert moved.step_seconds >= moved.pinned_bytes / LINK
    assert paged.step_seconds > 1.1 * moved.step_seconds
    for profile in (moved, paged):
        schedule = profile.schedule
        computed = sum(operator.seconds for operator in schedule.operators)
        assert computed + sum(profile.exposed_seconds.values()) == pytest.approx(profile.step_seconds)
        assert {"input", "room"} <= set(profile.exposed_seconds)
        for direction in ("out", "in"):
            copies = sorted((copy for copy in schedule.copies if copy.direction == direction), key=lambda c: c.begin)
            for before, after in itertools.pairwise(copies):
                assert after.begin >= before.begin + before.seconds - 1e-12
            assert copies[0].begin > 0  # nothing leaves, or comes back, before it was computed
    last = max(operator.begin for operator in moved.schedule.operators if operator.phase == "forward")
    assert min(copy.begin for copy in moved.schedule.copies if copy.direction == "in") > last / 2
    small = profiled(ms.identity, width=64, rows=16, card=ms.Hardware.named("h100"))
    assert small.exposed_seconds["host"] > 0.1 * small.step_seconds
    assert "host" not in profiled(ms.identity).exposed_seconds


def test_the_clock_passes():
    check()


def _copies_take_no_time(patch):
    patch.setattr(clock_module, "copy_seconds", lambda *args: 0.0)


def _all_tiers_are_pinned(patch):
    right = clock_module.copy_seconds
    patch.setattr(clock_module, "copy_seconds", lambda nbytes, tier, *rest: right(nbytes, "pinned", *rest))


def _nothing_waits_for_a_copy(patch):
    patch.setattr(Clock, "come_after", lambda self, transfer: None)


def _a_wait_is_counted_twice(patch):
    right = Clock._stand_still

    def twice(self, begin, end, cause):
        right(self, begin, end, cause)
        return right(self, begin, end, cause)

    patch.setattr(Clock, "_stand_still", twice)


def _copies_overtake(patch):
    right = Clock.copy

    def at_once(self, *args, **kwargs):
        self._link_ends = {"out": 0.0, "in": 0.0}
        return right(self, *args, **kwargs)

    patch.setattr(Clock, "copy", at_once)


def _copies_do_not_wait_for_what_they_copy(patch):
    right = Clock.copy
    patch.setattr(Clock, "copy", lambda self, *args, ready, **kwargs: right(self, *args, ready=0.0, **kwargs))


def _the_host_takes_no_time(patch):
    patch.setattr(clock_module, "host_calls", lambda hardware: clock_module._NO_SECONDS)


def _the_device_waits_for_the_host_to_see_it_done(patch):
    right = Clock.operator

    def synchronous(self, seconds):
        right(self, seconds)
        self.now = max(self.now, self._end)

    patch.setattr(Clock, "operator", synchronous)


MUTANTS = [
    _copies_take_no_time,
    _all_tiers_are_pinned,
    _nothing_waits_for_a_copy,
    _a_wait_is_counted_twice,
    _copies_overtake,
    _copies_do_not_wait_for_what_they_copy,
    _the_host_takes_no_time,
    _the_device_waits_for_the_host_to_see_it_done,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_mutant_does_not_pass(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check()
