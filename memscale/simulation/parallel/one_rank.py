"""The first rank's part of a plain model under FSDP2 or DDP, in a fake process group."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from memscale.algebra import placing_in
from memscale.core import RuntimeUnavailable, TransformError, is_own_thread, matches, own_threads
from memscale.optimizers import without_states
from memscale.simulation.parallel.spec import Parallel, split
from memscale.simulation.process.process_state import placed


@contextmanager
def one_rank(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, spec: Parallel
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer | None]]:
    """Yields rank 0's part of `model`, on meta, and an optimizer like `optimizer` over that part.

    The arguments stay unchanged. FSDP2 shards each module of `spec.shard` and the root by itself; where shards differ
    in size, rank 0 has the largest.

    Raises:
        RuntimeUnavailable: PyTorch lacks `torch.distributed`, or this process has a process group already.
    """
    if not dist.is_available():
        raise RuntimeUnavailable("profile(parallel=...) needs torch.distributed, which this PyTorch was built without")
    if dist.is_initialized():
        raise RuntimeUnavailable(
            "profile(parallel=...) makes a process group for itself, and this process has one already; distribute the "
            "model in that and profile it without parallel, or ask in another process"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if spec.kind == "fsdp2":
        check_places(model)
    part = _on_meta(model)
    on_error = sys.excepthook  # init_process_group() wraps the hook to print "[rank0]", and never unwraps it
    with own_threads(), _of_these_threads():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=spec.world)
        sys.excepthook = on_error
        try:
            yield _part(model, part, optimizer, spec)
        finally:
            dist.destroy_process_group()


@contextmanager
def _of_these_threads() -> Iterator[None]:
    """Hides the simulation's process group from other threads, which see no default group."""
    world: Any = type(dist.distributed_c10d._world)
    default = world.default_pg

    def read(self: Any) -> Any:
        return default.fget(self) if is_own_thread() else None

    with placed(world, "default_pg", property(read, default.fset)):
        yield


def _part(
    model: nn.Module, part: nn.Module, optimizer: torch.optim.Optimizer | None, spec: Parallel
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    if spec.kind == "fsdp2":
        mesh = _mesh(spec)
        if spec.tensor > 1:
            split(part, mesh["tensor"])
            mesh = mesh["data"]
        _shard(part, mesh, spec)
        runs = part
    else:
        # init_sync would compare and broadcast parameters, which are on meta.
        runs = nn.parallel.DistributedDataParallel(part, init_sync=False)
    return runs, None if optimizer is None else _over(optimizer, model, part)


def check_places(model: nn.Module) -> None:
    """Raises TransformError for a region of `model` that moves parameters, which FSDP2 moves too."""
    if placing := [path for path, each in model.named_modules() if placing_in(each)]:
        raise TransformError(
            f"the plan moves the parameters of {placing[0] or 'the model'!r} with offload(what='params'), and "
            "fully_shard() would take them: two cannot decide where they live. Leave what='params' out of the plan, or "
            "shard with CPUOffloadPolicy() in a process group of your own"
        )


def _on_meta(model: nn.Module) -> nn.Module:
    """Returns a copy of `model` with parameters on meta and buffers on the CPU, since control flow may read buffers."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach() if buffer.is_meta else buffer.detach().to("cpu", copy=True)
    return copy.deepcopy(model, memo)


def _mesh(spec: Parallel) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    # The mesh is always of CPU devices, since all simulated tensors are on the CPU.
    if spec.tensor == 1:
        return init_device_mesh("cpu", (spec.world,))
    return init_device_mesh("cpu", (spec.world // spec.tensor, spec.tensor), mesh_dim_names=("data", "tensor"))


def _shard(model: nn.Module, mesh: Any, spec: Parallel) -> None:
    from torch.distributed.fsdp import fully_shard

    if spec.shard is None:
        chosen = _blocks(model)
    else:
        patterns = spec.shard
        named = [(path, module) for path, module in model.named_modules() if path]
        # fully_shard() has to be called on inner modules before the modules around them.
        named.sort(key=lambda each: -each[0].count("."))
        chosen = [module for path, module in named if any(matches(pattern, path) for pattern in patterns)]
    for block in chosen:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the outermost repeated modules: children of a list that share their class, such as transformer layers."""
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
