"""Collectives on the clock: over which links, behind what, and what the device waits for."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memscale as ms
from memscale.hardware import COLLECTIVES

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")

CARD = ms.Hardware.named("h100")
WIDTH, BLOCKS = 2048, 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
                                     for _ in range(BLOCKS)])  # fmt: skip
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


BLOCK_BYTES = 4 * (8 * WIDTH * WIDTH + 5 * WIDTH)


def profiled(parallel="fsdp2", world=8, *, rows=8192, card=CARD, **options):
    with torch.device("meta"):
        model = Model()
    options.setdefault("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    return ms.profile(model, torch.empty(rows, WIDTH, device="meta"), loss=lambda y, _: y.sum(), hardware=card,
                      parallel=parallel, world=world, **options)  # fmt: skip


def linked(share):
    fields = ("node_bytes_per_second", "network_bytes_per_second", "peer_bytes_per_second")
    return dataclasses.replace(CARD, **{field: share * getattr(CARD, field) for field in fields})


def of(profile, kind):
    return [each for each in profile.schedule.collectives if each.kind == kind]


def test_blocks_are_gathered_twice_and_reduced_once():
    profile = profiled()
    gathered, scattered = of(profile, "all-gather"), of(profile, "reduce-scatter")
    assert sum(each.nbytes == BLOCK_BYTES for each in gathered) == 2 * BLOCKS
    assert sum(each.nbytes == BLOCK_BYTES for each in scattered) == BLOCKS
    assert {each.size for each in profile.schedule.collectives} == {8}
    # All are of one group, which does one after the other.
    runs = sorted(profile.schedule.collectives, key=lambda each: each.begin)
    assert all(a.begin + a.seconds <= b.begin + 1e-12 for a, b in itertools.pairwise(runs))
    rate = 0.82 * CARD.node_bytes_per_second
    assert gathered[1].seconds == pytest.approx(7 / 8 * BLOCK_BYTES / rate, rel=0.1)


def test_what_is_computed_and_what_is_waited_for_are_the_step():
    for profile in (profiled(), profiled("ddp"), profiled(world=64), profiled(card=linked(0.01))):
        computed = sum(each.seconds for each in profile.schedule.operators if each.queue == "device")
        assert computed + sum(profile.exposed_seconds.values()) == pytest.approx(profile.step_seconds)
        assert set(profile.exposed_seconds) & set(COLLECTIVES)


def test_what_is_prefetched_hides_behind_the_compute():
    wide, narrow = profiled(rows=1 << 16), profiled(rows=64)
    sent = sum(each.seconds for each in wide.schedule.collectives)
    hidden = sent - sum(wide.exposed_seconds[kind] for kind in ("all-gather", "reduce-scatter"))
    # All but the first gathered and the last scattered.
    assert hidden > 0.7 * sent
    assert sum(narrow.exposed_seconds.values()) > 0.4 * narrow.step_seconds
    assert narrow.step_seconds >= sum(each.seconds for each in narrow.schedule.collectives)


def test_slower_links_are_never_faster():
    found = [profiled(card=linked(share)) for share in (1e3, 1.0, 0.1, 0.005)]
    seconds = [profile.step_seconds for profile in found]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 3 * seconds[1]
    assert len({profile.peak_bytes for profile in found}) == 1


def test_more_nodes_cost_more_and_two_processes_use_the_link_between_them():
    waits = [sum(profiled(world=world).exposed_seconds.values()) for world in (2, 8, 64, 512)]
    assert waits[1] < waits[2] < waits[3]
    alone = profiled(world=1)
    assert not of(alone, "all-gather")
    assert not set(alone.exposed_seconds) & set(COLLECTIVES)


def test_buckets_are_reduced_during_backward_and_waited_for_at_its_end():
    profile = profiled("ddp", rows=1 << 15)
    reduced = of(profile, "all-reduce")
    assert len(reduced) > 1
    last = max(each.begin + each.seconds for each in reduced)
    backward = [each for each in profile.schedule.operators if each.phase == "backward" and each.seconds]
    updates = [each for each in profile.schedule.operators if each.phase == "optimizer" and each.seconds]
    assert reduced[0].begin < backward[-1].begin
    assert min(each.begin for each in updates) >= last - 1e-12
    assert profile.exposed_seconds["all-reduce"] < sum(each.seconds for each in reduced)


def test_a_functional_collective_is_waited_for_where_its_result_is_used(group):
    from torch.distributed import _functional_collectives as functional

    group(16)
    weight = torch.empty(4096, 4096, device="meta", requires_grad=True)
    found = []
    for first in (True, False):

        def step(first=first):
            y = weight * 2.0
            reduced = functional.all_reduce(y.detach(), "sum", dist.group.WORLD)
            if first:
                reduced = reduced.wait() if hasattr(reduced, "wait") else reduced
                reduced = reduced + 0.0
            z = weight @ weight
            (z + (reduced + 0.0)).sum().backward()
            weight.grad = None

        found.append(ms.profile(step, hardware=CARD))
    early, late = found
    assert [each.kind for each in early.schedule.collectives] == ["all-reduce"]
    assert early.exposed_seconds["all-reduce"] > late.exposed_seconds.get("all-reduce", 0.0)


def test_what_is_not_known_of_links_is_told():
    plain = dataclasses.replace(CARD, network_bytes_per_second=None)
    profile = profiled(world=16, card=plain)
    assert not profile.schedule.collectives
    assert any("replace(hardware, network_bytes_per_second=...)" in note for note in profile.notes)
    profile = profiled(world=4, card=ms.Hardware.named("rtx-4090"))
    assert of(profile, "all-gather")
    assert any("all 4 were taken to be in one" in note for note in profile.notes)
    assert not any("taken to be" in note or "not known" in note for note in profiled(world=16).notes)


def test_the_schedule_is_written_drawn_and_said(tmp_path):
    profile = profiled(card=linked(0.1))
    assert ms.Profile.from_json(profile.to_json()) == profile
    assert "all-gathers" in str(profile)
    profile.trace(tmp_path / "step.json")
    text = (tmp_path / "step.json").read_text()
    assert '"all-gather"' in text
    assert "waits for reduce-scatter" in text
    profile.html(tmp_path / "step.html")
    assert "waits for all-gather" in (tmp_path / "step.html").read_text()
