"""FSDP2 and DDP over two processes: a recompute must see the gathered parameters, and gradients must come once."""

import functools

import torch
from torch import nn

import memscale as ms
from tests.support.coverings import DEEP
from tests.support.whole_run import true_peaks


def build() -> nn.Module:
    torch.manual_seed(0)
    block = lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))  # noqa: E731
    return nn.Sequential(block(), block(), nn.Linear(8, 4))


def train(model: nn.Module, rank: int, how: ms.Transform = ms.identity, *, by_rule: bool = False) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if by_rule:
        same, optimizer = ms.transform(model, {"": how}, optimizer=optimizer)
        assert same is model
    else:
        optimizer = how(optimizer)
    losses = []
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in (*model[:2], model):
        fully_shard(block)
    return model


def wrap_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def split(model: nn.Module) -> nn.Module:
    """Weights over both processes, as DTensors whose parts the operators see."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))
    for block in model[:2]:
        whole = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(block, mesh, {"0": whole, "3": RowwiseParallel(input_layouts=Replicate())})
    return model


def shard_all(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[2])
    return shard(model)


def shard_layers(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for each in (model[0][0], model[1][0], model):
        fully_shard(each)
    return model


OFFLOAD = ms.offload(min_bytes=0)
DOTS = ms.checkpoint(policy=ms.policies.dots_saveable)

# Regions around several sharded modules; those inside of one are in orders.py.
SHAPES = {
    "fsdp root": (shard, {"": ms.checkpoint()}),
    "fsdp root offload": (shard, {"": OFFLOAD}),
    "fsdp root, around regions around sharded layers": (shard_layers, dict.fromkeys(("", "0", "1"), ms.checkpoint())),
    "split weights": (split, {"0": DOTS, "1": OFFLOAD}),
    "fsdp root offload, blocks checkpoint": (shard, {"": OFFLOAD, "0": ms.checkpoint(), "1": ms.checkpoint()}),
}

# Regions around modules whose parameters come and go in their middle, or that need a weight when it has gone.
AROUND = {
    "policy": (shard, {"": DOTS}, "among which a policy does not find its own"),
    "tile": (shard, {"": ms.tile(chunks=2)}, "gathered and freed with every piece"),
    "head": (shard_all, {"2": ms.tile(chunks=2)}, "whose weight is freed after its forward"),
}

# Of the optimizer: each rank's part of a gradient is complete once it was averaged over all.
OPTIMIZERS = {"fsdp step in backward": ms.step_in_backward(), "fsdp step in groups": ms.step_in_groups(group_bytes=64)}
# What sees no sharded parameter, or gradients before they are averaged.
REFUSED = {
    "ddp step in backward": (wrap_ddp, ms.step_in_backward(), "is averaged over them after it is complete here"),
    "fsdp offload states": (shard, ms.offload_states(), "is a DTensor, whose states it cannot move"),
}


def kept_to(rank: int) -> dict[str, float]:
    """What a plan of a model that is sharded already allows and takes: as simulated, and as the allocator has it."""
    block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))  # noqa: E731
    rows = lambda: torch.randn(512, 64, generator=torch.Generator().manual_seed(rank))  # noqa: E731
    steps = {}

    def made(plan: ms.Plan | None = None) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(block(), block())
        return shard(model if plan is None else ms.transform(model, plan))

    def step_of(plan: ms.Plan | None):
        model, x = made(plan), rows()
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[plan] = model
        return step

    model, x = made(), rows()
    asked = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": lambda y, _: y.square().mean()}
    asked["keeps_output"] = False
    engine = ms.DecisionEngine(model, x, config=ms.Config(mode="conservative"), **asked)
    budget = int(0.8 * engine.plain.peak_bytes)
    plan = engine.plan(budget)
    # The least of some steps: a thread that reduces gradients lets go of what it was given when the kernel lets it run.
    plain, planned = (min(true_peaks(lambda each=each: step_of(each), steps=5)[1:]) for each in (None, plan))
    weights = [[each.full_tensor() for each in steps[which].parameters()] for which in (None, plan)]
    return {
        "budget": budget,
        "plain": plain,
        "planned": planned,
        "said": plan.evidence.planned.peak_bytes,
        "same": all(map(torch.equal, *weights)),
    }


# Of rank 0 and of rank 1; None trains the model as written.
PLANS = {
    "fsdp other plans": (shard, {"0": ms.checkpoint()}, {"1": ms.checkpoint()}),
    "fsdp a plan and none": (shard, {"": ms.checkpoint()}, {}),
    "ddp other plans": (wrap_ddp, {"0": ms.checkpoint()}, {"0": OFFLOAD}),
    "each its own": (lambda model: model, {"0": ms.checkpoint()}, {"1": ms.checkpoint()}),
}


def agreed(distribute, plans, rank: int) -> str:
    """What the first step says where the processes have these plans."""
    try:
        train(distribute(ms.transform(build(), plans[rank])), rank)
    except ms.TransformError as error:
        return str(error)
    return ""


def saved(distribute, plan) -> list[tuple[str, torch.Tensor]]:
    """What `torch.distributed.checkpoint` has of a trained model."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = build()
    model = distribute(model if plan is None else ms.transform(model, plan))
    train(model, 0)
    return [(name, value.full_tensor().clone()) for name, value in get_model_state_dict(model).items()]


@functools.cache
def plainly(distribute, rank: int) -> torch.Tensor:
    return train(distribute(build()), rank)


def run(rank: int, folder: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, (distribute, plan) in SHAPES.items():
        try:
            ours = train(distribute(ms.transform(build(), plan)), rank)
            found[name] = (ours - plainly(distribute, rank)).abs().max().item()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    for name, how in OPTIMIZERS.items():
        ours = train(shard(build()), rank, how, by_rule=True)
        found[name] = (ours - plainly(shard, rank)).abs().max().item()
    for name, (distribute, how, _) in REFUSED.items():
        try:
            train(distribute(build()), rank, how)
        except ms.TransformError as error:
            found[name] = str(error)
    for name, (distribute, plan, _) in AROUND.items():
        found[name] = agreed(distribute, (plan, plan), rank)
    for name, (distribute, *plans) in PLANS.items():
        found[name] = agreed(distribute, plans, rank)
    plain, ours = (saved(shard, plan) for plan in (None, {"0": ms.checkpoint(), "1": OFFLOAD}))
    found["saved"] = [name for name, _ in plain] == [name for name, _ in ours] and all(
        torch.equal(one, other) for (_, one), (_, other) in zip(plain, ours, strict=True)
    )
    if DEEP:
        found["kept to"] = kept_to(rank)
    replica = ms.transform(wrap_ddp(build()), {"module.0": ms.checkpoint(), "module.1": OFFLOAD})
    found["transformed replica"] = torch.equal(train(replica, rank), plainly(wrap_ddp, rank))
    return found
