"""What a card's allocator sees of a distributed model: how its parameters came there, and what a step reserves."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memscale as ms
from memscale.hardware import COLLECTIVES
from memscale.simulation import MemoryProfiler

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]

WORLD, WIDTH = 8, 512


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
                for _ in range(3)
            ]
        )
        self.head = nn.Linear(WIDTH, 4096)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss(output, _):
    return output.float().square().mean()


@pytest.fixture(autouse=True)
def _one_of_eight(group):
    group(WORLD)


def sharded(mesh_device, *, device="cpu", half=False, pins=None, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    options["mesh"] = init_device_mesh(mesh_device, (WORLD,))
    if pins is not None:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=pins)
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device(device):
        model = Model()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def rows(device="cpu"):
    return torch.zeros(256, WIDTH, device=device)


def offloaded(hardware="h100", **options):
    model = sharded("cpu", device="meta", pins=True, **options)
    before = [id(parameter) for parameter in model.parameters()]
    profile = ms.profile(model, rows(), optimizer=torch.optim.AdamW(model.parameters()), loss=loss, hardware=hardware)
    assert [id(parameter) for parameter in model.parameters()] == before
    assert all(parameter.is_meta for parameter in model.parameters())
    return model, profile


def test_offloaded_shards_are_copied_where_they_are_gathered_and_reduced():
    model, profile = offloaded()
    shards = [parameter.to_local().nbytes for parameter in model.parameters()]
    blocks = [parameter.to_local().nbytes for parameter in model.blocks.parameters()]
    copies = {way: [each for each in profile.schedule.copies if each.direction == way] for way in ("in", "out")}
    assert sorted(each.nbytes for each in copies["out"]) == sorted(shards)
    # The root stays gathered until its backward is done, as FSDP2 keeps it.
    assert sorted(each.nbytes for each in copies["in"]) == sorted(shards + blocks)
    gathers = [each for each in profile.schedule.collectives if each.kind == "all-gather"]
    assert copies["in"][0].begin + copies["in"][0].seconds <= gathers[0].begin
    assert profile.by_category["parameter"] == profile.by_category.get("gradient", 0) == 0
    assert profile.by_category["optimizer state"] == 0
    rounded = sum(1 << (nbytes - 1).bit_length() for nbytes in shards)
    assert profile.by_tier["pinned"] == 2 * rounded  # with gradients
    # AdamW's states, and two temporaries of its loop over single tensors.
    assert profile.by_tier["pageable"] == pytest.approx(2 * sum(shards) + 2 * max(shards), rel=1e-3)
    on_host = [each for each in profile.schedule.operators if each.queue == "host"]
    assert {each.phase for each in on_host} == {"optimizer"}
    updates = [each.queue for each in profile.schedule.operators if each.name == "aten::addcdiv_"]
    assert updates == ["host"] * len(shards)


def test_a_slow_link_holds_an_offloaded_step_up():
    card = ms.Hardware.named("h100")
    slow = dataclasses.replace(card, host_to_device_bytes_per_second=1e8, device_to_host_bytes_per_second=1e8)
    seconds = [offloaded(each)[1].step_seconds for each in (card, slow)]
    moved = sum(parameter.to_local().nbytes for parameter in sharded("cpu", device="meta").parameters())
    assert seconds[1] > seconds[0] + moved / 1e8


def test_a_wait_for_a_shards_copy_is_not_told_as_one_for_the_collective_behind_it():
    card = ms.Hardware.named("h100")
    slow = dataclasses.replace(card, host_to_device_bytes_per_second=1e8, device_to_host_bytes_per_second=1e8)
    profile = offloaded(slow)[1]
    copied = sum(each.seconds for each in profile.schedule.copies if each.direction == "in")
    assert profile.exposed_seconds["input"] == pytest.approx(copied, rel=0.05)
    assert sum(profile.exposed_seconds.get(kind, 0.0) for kind in COLLECTIVES) < 0.01 * copied
    by_host = [each for each in profile.schedule.waits if each.queue == "host" and each.cause != "host"]
    assert {"input", "room", "reduce-scatter"} <= {each.cause for each in by_host}, "for gradients, and what is before"
    sent = sum(each.seconds for each in profile.schedule.collectives)
    assert sum(each.seconds for each in by_host if each.cause in COLLECTIVES) <= sent


def test_what_ddp_sends_when_it_is_made_comes_and_goes_before_the_step():
    model = nn.parallel.DistributedDataParallel(Model())
    model.broadcast_bucket_size = 1 << 22
    trace = MemoryProfiler(model, loss=loss, hardware="h100").simulated(rows())
    before = trace.events[: trace.steps[0][0]]
    pieces = [trace.storages[-event - 1].nbytes for event in before if event < 0]
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert sum(pieces) == whole - model.module.head.bias.nbytes  # the last, alone: it is sent from where it is
    assert len(pieces) > 2
    # The third is put together when the first was sent.
    sent = {-event - 1 for event in before if event < 0}
    order = [event for event in before if abs(event) - 1 in sent]
    assert [event > 0 for event in order[:4]] == [True, True, False, True]


@pytest.mark.cuda
@pytest.mark.parametrize("pins", [None, True, False], ids=["on the card", "pinned", "pageable"])
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_card_reserves_what_was_predicted(half, pins):
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def made():
        model = sharded("cuda", half=half, pins=pins)
        return model, rows("cuda"), torch.optim.AdamW(model.parameters())

    model, batch, optimizer = made()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        loss(model(batch), None).backward()
        optimizer.step()
        optimizer.zero_grad()
    truth = torch.cuda.max_memory_allocated() - before[0], torch.cuda.max_memory_reserved() - before[1]
    del model, batch, optimizer
    model, batch, optimizer = made()
    found = ms.profile(model, batch, keeps_output=False, optimizer=optimizer, loss=loss)
    assert (found.peak_bytes, found.reserved_peak_bytes) == pytest.approx(truth, rel=1e-3)
