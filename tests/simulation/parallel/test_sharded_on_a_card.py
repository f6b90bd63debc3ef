"""What a card's allocator sees of a model that FSDP2 sharded: how its shards came there, and what a step reserves."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memscale as ms
from memscale.simulation import MemoryProfiler
from memscale.simulation.allocator.caching import replay

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


@pytest.fixture
def group():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def sharded(mesh_device, *, device="cpu", half=False, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options["mesh"] = init_device_mesh(mesh_device, (WORLD,))
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device(device):
        model = Model()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def rows(device="cpu"):
    return torch.zeros(256, WIDTH, device=device)


def test_whole_parameters_of_a_group_come_and_go_before_the_next_groups(group):
    model = sharded("cpu")
    ledger = MemoryProfiler(model, loss=loss, hardware="h100").simulated(rows()).ledger
    before = ledger.events[: ledger.steps[0][0]]
    live, most = 0, []
    for event in before:
        live += ledger.records[abs(event) - 1].nbytes * (1 if event > 0 else -1)
        most.append(live)
    shards = sum(parameter.to_local().nbytes for parameter in model.parameters())
    block, root = (sum(each.numel() for each in part.parameters()) * 4 for part in (model.blocks[0], model.head))
    assert sum(event < 0 for event in before) == sum(1 for _ in model.parameters())
    assert max(most) == pytest.approx(shards + max(block, root), rel=0.01)
    # The root's come last, as `fully_shard` is called on what is inside first.
    assert shards + root <= max(most[-8:]) <= max(most)
    assert most[-1] == shards + rows().nbytes
    on_meta = MemoryProfiler(sharded("cpu", device="meta"), loss=loss, hardware="h100").simulated(rows()).ledger
    assert all(event > 0 for event in on_meta.events[: on_meta.steps[0][0]])


def test_a_step_that_is_repeated_takes_from_the_same_streams(group):
    model = sharded("cpu")
    profiler = MemoryProfiler(model, torch.optim.AdamW(model.parameters()), loss=loss, hardware="h100")
    step = profiler.simulated(rows())
    records = step.ledger.records
    events = [
        (abs(event) - 1, records[abs(event) - 1].nbytes * (1 if event > 0 else -1)) for event in step.ledger.events
    ]
    once = replay(events, streams={number: record.stream for number, record in enumerate(records)})
    assert step.profile().reserved_peak_bytes == once.reserved_peak_bytes


@pytest.mark.cuda
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_card_reserves_what_was_predicted(group, half):
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def made():
        model = sharded("cuda", half=half)
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
    found = ms.profile(model, batch, optimizer=optimizer, loss=loss)
    assert (found.peak_bytes, found.reserved_peak_bytes) == pytest.approx(truth, rel=1e-3)
