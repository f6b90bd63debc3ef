"""A plain model, asked about: one process's part of it under FSDP2 or DDP, in a process group that is not there."""

from __future__ import annotations

import copy
import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from memscale.algebra import placing_in
from memscale.core import ConfigError, RuntimeUnavailable, TransformError, is_own_thread, matches, own_threads
from memscale.optimizers import without_states
from memscale.simulation.parallel.sharded import check_followed, mesh_of
from memscale.simulation.parallel.tensor import check_tensor, split
from memscale.simulation.sandbox.process_state import placed

Parallel = Literal["ddp", "fsdp2"]
_KNOWN = ("ddp", "fsdp2")


@dataclass(frozen=True)
class Ranks:
    """How a step is one process's of several.

    >>> print(Ranks("fsdp2", 64))
    fsdp2 over 64 processes

    Args:
        parallel: ``"fsdp2"`` or ``"ddp"``.
        world: how many processes.
        shard: patterns of the modules that FSDP2 shards beside the root; None is the repeated blocks.
        tensor: over how many of them each weight is split besides, by the model's ``tp_plan``.
    """

    parallel: Parallel
    world: int
    shard: tuple[str, ...] | None = None
    tensor: int = 1

    def __str__(self) -> str:
        beside = "" if self.shard is None else f", sharding {', '.join(self.shard)}"
        beside = f", tensors over {self.tensor} of them{beside}" if self.tensor > 1 else beside
        return f"{self.parallel} over {self.world} process{'es' * (self.world > 1)}{beside}"

    @classmethod
    def of(cls, model: Any, parallel: Any, world: Any, shard: Any, tensor: Any, *, caller: str) -> Ranks | None:
        """What the arguments of `caller` mean for `model`; None for a step that is trained as it is.

        Raises:
            ConfigError: `parallel`, `world`, `shard`, `tensor` or `model` is not what it takes.
        """
        if parallel is None:
            about = {"world": world, "shard": shard, "tensor": tensor}
            if given := [(name, value) for name, value in about.items() if value is not None]:
                name, value = given[0]
                raise ConfigError(
                    f"{caller}({name}={value!r}) is about several processes; say which: parallel='fsdp2' or 'ddp'"
                )
            return None
        if parallel not in _KNOWN:
            raise ConfigError(
                f"{caller}(parallel={parallel!r}) is none of {list(_KNOWN)}; for another way, distribute the model "
                "yourself in a process group of the fake backend, and profile that"
            )
        if isinstance(world, bool) or not isinstance(world, int) or world < 1:
            raise ConfigError(
                f"{caller}(parallel={parallel!r}, world={world!r}) takes the number of processes, an int above 0"
            )
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{caller}(parallel={parallel!r}) needs a module; distribute it inside the function")
        for module in model.modules():
            check_followed(module)  # its copy would be a plain model, of the parts that one process has
        if is_distributed(model):
            raise ConfigError(
                f"{caller}(parallel={parallel!r}) takes a plain model, and this is distributed already; leave parallel "
                "out"
            )
        if tensor not in (None, 1):
            check_tensor(model, parallel, world, tensor, caller=caller)
        return cls(parallel, world, _patterns(model, parallel, shard, caller), tensor or 1)

    @classmethod
    def of_distributed(cls, model: Any) -> Ranks | None:
        """How `model` is one process's of several already: its owner sharded or replicated it; None if neither."""
        for module in model.modules() if isinstance(model, nn.Module) and dist.is_available() else ():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                return cls("ddp", dist.get_world_size(module.process_group))
            if (mesh := mesh_of(module)) is not None:
                # Weights that are split besides are on a mesh of both dimensions.
                return cls("fsdp2", max(mesh.size(), *(each.device_mesh.size() for each in _spread(model))))
        return None

    def is_like(self, other: Ranks | None) -> bool:
        """Whether a plan for these processes is one for `other`, of which nobody may know what was sharded."""
        return other is not None and (self.parallel, self.world) == (other.parallel, other.world)

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments of whatever takes them."""
        return {"parallel": self.parallel, "world": self.world, "shard": self.shard, "tensor": self.tensor}


def is_distributed(model: Any) -> bool:
    """Whether parts of `model` are a process's of several, by FSDP2, DDP or DTensors of its owner's."""
    if not isinstance(model, nn.Module):
        return False
    return Ranks.of_distributed(model) is not None or bool(_spread(model))


def _spread(model: nn.Module) -> list[Any]:
    """The parameters of `model` that are DTensors."""
    return [parameter for parameter in model.parameters() if hasattr(parameter, "device_mesh")]


def arguments_of(ranks: Ranks | None) -> dict[str, Any]:
    """`Ranks.arguments`, nothing for a step that is trained as it is."""
    return {} if ranks is None else ranks.arguments()


def _patterns(model: nn.Module, parallel: str, shard: Any, caller: str) -> tuple[str, ...] | None:
    if shard is None:
        return None
    if parallel != "fsdp2":
        raise ConfigError(f"{caller}(shard={shard!r}) is for parallel='fsdp2'; {parallel} keeps every module whole")
    found = (shard,) if isinstance(shard, str) else tuple(shard) if isinstance(shard, Iterable) else (shard,)
    paths = [path for path, _ in model.named_modules()]
    for pattern in found:
        if not isinstance(pattern, str):
            raise ConfigError(
                f"{caller}(shard={shard!r}) takes patterns of module paths, such as ('layers.*',); the root is sharded "
                "besides"
            )
        if not any(matches(pattern, path) for path in paths):
            near = ", ".join(map(repr, difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3)))
            raise ConfigError(
                f"{caller}(shard=...): {pattern!r} matches no module" + (f"; the nearest are {near}" if near else "")
            )
    return found


@contextmanager
def one_rank(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer | None]]:
    """The first process's part of `model`, on meta, and an optimizer like `optimizer` over that.

    The arguments stay as they are. FSDP2 shards the modules that are asked for and the root, each on its own; the first
    process has the most where shards differ.

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

    if ranks.parallel == "fsdp2":
        check_places(model)
    part = _on_meta(model)
    on_error = sys.excepthook  # of which PyTorch puts one that says "[rank0]" around, each time, and leaves it there
    with own_threads(), _of_these_threads():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks.world)
        sys.excepthook = on_error
        try:
            yield _part(model, part, optimizer, ranks)
        finally:
            dist.destroy_process_group()


@contextmanager
def _of_these_threads() -> Iterator[None]:
    """Tell other threads of no process group: there is none but the simulation's."""
    world: Any = type(dist.distributed_c10d._world)
    default = world.default_pg

    def read(self: Any) -> Any:
        return default.fget(self) if is_own_thread() else None

    with placed(world, "default_pg", property(read, default.fset)):
        yield


def _part(
    model: nn.Module, part: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    if ranks.parallel == "fsdp2":
        mesh = _mesh(ranks)
        if ranks.tensor > 1:
            split(part, mesh["tensor"])
            mesh = mesh["data"]
        _shard(part, mesh, ranks)
        runs = part
    else:
        # Nothing to agree on with the others: they have no numbers either.
        runs = nn.parallel.DistributedDataParallel(part, init_sync=False)
    return runs, None if optimizer is None else _over(optimizer, model, part)


def check_places(model: nn.Module) -> None:
    """Raise TransformError for a region of `model` that moves parameters, which FSDP2 has."""
    if placing := [path for path, each in model.named_modules() if placing_in(each)]:
        raise TransformError(
            f"the plan moves the parameters of {placing[0] or 'the model'!r} with offload(what='params'), and "
            "fully_shard() would take them: two cannot decide where they live. Leave what='params' out of the plan, or "
            "shard with CPUOffloadPolicy() in a process group of your own"
        )


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters take no memory; buffers, whose values may decide something, are copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach() if buffer.is_meta else buffer.detach().to("cpu", copy=True)
    return copy.deepcopy(model, memo)


def _mesh(ranks: Ranks) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    # Of what the simulation has, whatever is in this machine.
    if ranks.tensor == 1:
        return init_device_mesh("cpu", (ranks.world,))
    return init_device_mesh("cpu", (ranks.world // ranks.tensor, ranks.tensor), mesh_dim_names=("data", "tensor"))


def _shard(model: nn.Module, mesh: Any, ranks: Ranks) -> None:
    from torch.distributed.fsdp import fully_shard

    if ranks.shard is None:
        chosen = _blocks(model)
    else:
        patterns = ranks.shard
        named = [(path, module) for path, module in model.named_modules() if path]
        # Those inside of others first.
        named.sort(key=lambda each: -each[0].count("."))
        chosen = [module for path, module in named if any(matches(pattern, path) for pattern in patterns)]
    for block in chosen:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


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
