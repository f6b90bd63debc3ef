"""A plain model, asked about: one process's part of it under FSDP2 or DDP, in a process group that is not there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from memscale.core import ConfigError, RuntimeUnavailable
from memscale.optimizers import without_states

Parallel = Literal["ddp", "fsdp2"]
_KNOWN = ("ddp", "fsdp2")


def check_parallel(model: Any, parallel: Any, world: Any) -> None:
    """Do nothing for what `one_rank` can make.

    Raises:
        ConfigError: `parallel`, `world` or `model` is not what it takes.
    """
    if parallel is None:
        if world is not None:
            raise ConfigError(
                f"profile(world={world!r}) is a number of processes; say which: parallel='fsdp2' or 'ddp'"
            )
        return
    if parallel not in _KNOWN:
        raise ConfigError(
            f"profile(parallel={parallel!r}) is none of {list(_KNOWN)}; for another way, distribute the model yourself "
            "in a process group of the fake backend, and profile that"
        )
    if isinstance(world, bool) or not isinstance(world, int) or world < 1:
        raise ConfigError(
            f"profile(parallel={parallel!r}, world={world!r}) takes the number of processes, an int above 0"
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"profile(parallel={parallel!r}) needs a module; distribute it inside the function")
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()) or isinstance(
        model, nn.parallel.DistributedDataParallel
    ):
        raise ConfigError(
            f"profile(parallel={parallel!r}) takes a plain model, and this is distributed already; leave parallel out"
        )


@contextmanager
def one_rank(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, parallel: Parallel, world: int
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer | None]]:
    """The first process's part of `model`, on meta, and an optimizer like `optimizer` over that.

    The arguments stay as they are. FSDP2 shards the repeated blocks and the root, each on its own; the first process
    has the most where shards differ.

    Raises:
        RuntimeUnavailable: there is no `torch.distributed`, or this process is one of several already.
    """
    if not dist.is_available():
        raise RuntimeUnavailable("profile(parallel=...) needs torch.distributed, which this PyTorch was built without")
    if dist.is_initialized():
        raise RuntimeUnavailable(
            "profile(parallel=...) makes a process group for itself, and this process has one already; distribute the "
            "model in that and profile it without parallel, or ask in another process"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    part = _on_meta(model)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        if parallel == "fsdp2":
            _shard(part)
            runs = part
        else:
            # Nothing to agree on with the others: they have no numbers either.
            runs = nn.parallel.DistributedDataParallel(part, init_sync=False)
        yield runs, None if optimizer is None else _over(optimizer, model, part)
    finally:
        dist.destroy_process_group()


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters take no memory; buffers, whose values may decide something, are copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach() if buffer.is_meta else buffer.detach().to("cpu", copy=True)
    return copy.deepcopy(model, memo)


def _shard(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    for block in _blocks(model):
        fully_shard(block)
    fully_shard(model)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost modules of one class in lists of them: the layers of a transformer, stages of a convnet."""
    found = []
    children = list(module.children())
    alike = isinstance(module, (nn.ModuleList, nn.Sequential))
    for child in children:
        if alike and _trains(child) and sum(type(child) is type(each) for each in children) > 1:
            found.append(child)
        else:
            found += _blocks(child)
    return list({id(block): block for block in found}.values())


def _trains(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _over(optimizer: torch.optim.Optimizer, model: nn.Module, part: nn.Module) -> torch.optim.Optimizer:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = dict(part.named_parameters())
    made = without_states(optimizer)
    made.param_groups = [
        {**group, "params": [parts[names[id(each)]] for each in group["params"] if id(each) in names]}
        for group in optimizer.param_groups
    ]
    return made
