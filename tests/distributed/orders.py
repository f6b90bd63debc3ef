"""`wrap` before and after DDP and FSDP2, which a model then trains under with passes that are not averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memscale as ms
from memscale.legacy import wrapped
from tests.support.coverings import DEEP

TRANSFORMS = {
    "checkpoint": ms.checkpoint(),
    "offload of checkpoint": ms.compose(ms.offload(min_bytes=0), ms.checkpoint()),
    "tile": ms.tile(chunks=2),
    "cast": ms.cast(),
}


class Net(nn.Module):
    def __init__(self, spare: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8))  # noqa: E731
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.spare = block() if spare else None  # which no pass uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in self.blocks:
            x = x + each(x)
        return x


def replica(**given: Any) -> Callable[[Net], nn.Module]:
    return lambda model: nn.parallel.DistributedDataParallel(model, **given)


def sharded(**given: Any) -> Callable[[Net], nn.Module]:
    def shard(model: Net) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        settings = {"mp_policy": MixedPrecisionPolicy(**given)} if given else {}
        for each in (*model.blocks, model):
            fully_shard(each, **settings)
        return model

    return shard


# How it is distributed, and the transforms that it is tried with.
KINDS = {
    "ddp": (replica(), ["offload of checkpoint", "tile", *(["cast"] if DEEP else [])]),
    "ddp, graph as it was": (replica(static_graph=True), ["offload of checkpoint"]),
    **({"ddp, views of buckets": (replica(gradient_as_bucket_view=True), ["offload of checkpoint"])} if DEEP else {}),
    "ddp, some unused": (replica(find_unused_parameters=True), ["checkpoint"]),
    "fsdp": (sharded(), ["offload of checkpoint", "cast", *(["tile"] if DEEP else [])]),
    "fsdp in bf16": (sharded(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), ["offload of checkpoint"]),
}
CASES = [(kind, how, first) for kind, (_, hows) in KINDS.items() for how in hows for first in (True, False)]


def made(kind: str, how: ms.Transform | None, first: bool) -> nn.Module:
    model = Net(spare="unused" in kind)
    quiet = ms.Config(enable_logging=False)

    def under_plan(model: nn.Module, path: str) -> None:
        if how is not None:
            executor = wrapped(model, quiet, sample_input=None, plan=ms.Plan({path: how}))
            assert len(executor.regions) == 3

    if first:
        under_plan(model, "blocks.*")
    distributed = KINDS[kind][0](model)
    if not first:
        under_plan(distributed, "blocks.*" if distributed is model else "module.blocks.*")
    return distributed


def averaging(model: Any, does: bool) -> contextlib.AbstractContextManager[None]:
    """Whether a pass's gradients are averaged over the processes."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return contextlib.nullcontext() if does else model.no_sync()
    model.set_requires_gradient_sync(does)
    return contextlib.nullcontext()


def numbers(model: nn.Module, rank: int) -> list[torch.Tensor]:
    """Losses, parameters, states of the optimizer, and the random state, after steps of two passes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    losses = []
    # A graph that stays as it was begins with a pass that is averaged.
    for step, passes in enumerate(([True], [False, True], [False, True])):
        for each in passes:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank + 5 * each))
            with averaging(model, each):
                loss = model(x).square().mean()
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in (*model.parameters(), *states)]
    return [torch.stack(losses), *(each.detach().double() for each in whole), torch.get_rng_state()]


def run(rank: int, folder: str) -> dict[Any, float]:
    """By how much the numbers of each case are off those without a plan."""
    found = {}
    plain = {kind: numbers(made(kind, None, True), rank) for kind in KINDS}
    for kind, how, first in CASES:
        ours = numbers(made(kind, TRANSFORMS[how], first), rank)
        pairs = zip(ours, plain[kind], strict=True)
        found[kind, how, first] = max((one.double() - other.double()).abs().max().item() for one, other in pairs)
    return found
