"""The parallel spec of a step as a value: FSDP2 or DDP, over how many processes.

`one_rank` makes the first rank's part of a plain model under a spec, in a fake process group.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from memscale.algebra import placing_in
from memscale.core import (
    Argument,
    ConfigError,
    RuntimeUnavailable,
    TransformError,
    internals,
    is_own_thread,
    matches,
    own_threads,
)
from memscale.optimizers import without_states
from memscale.simulation.parallel.sharded import check_followed, mesh_of
from memscale.simulation.process.process_state import placed

ParallelKind = Literal["ddp", "fsdp2"]
_KNOWN = ("ddp", "fsdp2")


@dataclass(frozen=True)
class Parallel:
    """The parallel spec of a distributed step: the kind of parallelism and the numbers of processes.

    >>> print(Parallel("fsdp2", 64))
    fsdp2 over 64 processes

    Args:
        kind: ``"fsdp2"`` or ``"ddp"``.
        world: the number of processes.
        shard: patterns of the modules that FSDP2 shards besides the root; None means the repeated blocks.
        tensor: the number of processes over which each weight is split by the model's ``tp_plan``; 1 splits none.
    """

    kind: ParallelKind
    world: int
    shard: tuple[str, ...] | None = None
    tensor: int = 1

    def __str__(self) -> str:
        sharding = "" if self.shard is None else f", sharding {', '.join(self.shard)}"
        sharding = f", tensors over {self.tensor} of them{sharding}" if self.tensor > 1 else sharding
        return f"{self.kind} over {self.world} process{'es' * (self.world > 1)}{sharding}"

    @classmethod
    def of(cls, model: Any, parallel: Any, world: Any, shard: Any, tensor: Any, *, caller: str) -> Parallel | None:
        """Returns the spec that the arguments of `caller` describe for `model`; None where `parallel` is None.

        Raises:
            ConfigError: `parallel`, `world`, `shard`, `tensor` or `model` has a wrong type or value.
        """
        if parallel is None:
            about = {"world": world, "shard": shard, "tensor": tensor}
            if given := [(name, value) for name, value in about.items() if value is not None]:
                one, kinds = Argument(caller, *given[0]), [Argument("", "parallel", kind) for kind in _KNOWN]
                message = f"{one} is about several processes; add {' or '.join(map(str, kinds))}"
                raise ConfigError(message).naming(one, *kinds)
            return None
        if parallel not in _KNOWN:
            raise ConfigError(
                f"{caller}(parallel={parallel!r}) is none of {list(_KNOWN)}; for another kind, distribute the model "
                "yourself in a process group of the fake backend, and profile that"
            )
        if isinstance(world, bool) or not isinstance(world, int) or world < 1:
            several, number = Argument(caller, "parallel", parallel), Argument("", "world")
            message = f"{several} needs {number}, the number of processes, an int above 0; got {world!r}"
            raise ConfigError(message).naming(several, number)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{caller}(parallel={parallel!r}) needs a module; distribute it inside the function")
        for module in model.modules():
            check_followed(module)  # a copy of a distributed module would be a plain model of one rank's parts
        if is_distributed(model):
            raise ConfigError(
                f"{caller}(parallel={parallel!r}) takes a plain model, and this is distributed already; leave parallel "
                "out"
            )
        if tensor not in (None, 1):
            check_tensor(model, parallel, world, tensor, caller=caller)
        return cls(parallel, world, _patterns(model, parallel, shard, caller), tensor or 1)

    @classmethod
    def of_distributed(cls, model: Any) -> Parallel | None:
        """Returns the spec of a `model` that its owner has distributed by FSDP2 or DDP; None for any other model."""
        for module in model.modules() if isinstance(model, nn.Module) and dist.is_available() else ():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                return cls("ddp", dist.get_world_size(module.process_group))
            if (mesh := mesh_of(module)) is not None:
                # Weights with tensor parallelism are on a mesh with both dimensions, of more processes.
                return cls("fsdp2", max(mesh.size(), *(each.device_mesh.size() for each in _spread(model))))
        return None

    def is_like(self, other: Parallel | None) -> bool:
        """Whether a plan for this spec fits `other`: equal `kind` and `world`, since `other.shard` may be unknown."""
        return other is not None and (self.kind, self.world) == (other.kind, other.world)

    def among(self, model: nn.Module) -> Parallel:
        """Returns this spec for `model`, which may lack modules: without the patterns that match nothing in `model`."""
        if self.shard is None:
            return self
        paths = [path for path, _ in model.named_modules()]
        kept = tuple(pattern for pattern in self.shard if any(matches(pattern, path) for path in paths))
        return dataclasses.replace(self, shard=kept)

    def to_data(self) -> dict[str, Any]:
        """Returns the spec as JSON data."""
        return {"parallel": self.kind, "world": self.world, "shard": self.shard, "tensor": self.tensor}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Parallel:
        """Returns the spec that `to_data` wrote."""
        shard = None if data["shard"] is None else tuple(data["shard"])
        return cls(data["parallel"], data["world"], shard, data.get("tensor") or 1)


def is_distributed(model: Any) -> bool:
    """Whether the owner of `model` has distributed it, by FSDP2, DDP or DTensors."""
    if not isinstance(model, nn.Module):
        return False
    return Parallel.of_distributed(model) is not None or bool(_spread(model))


def _spread(model: nn.Module) -> list[Any]:
    """Returns the parameters of `model` that are DTensors."""
    return [parameter for parameter in model.parameters() if hasattr(parameter, "device_mesh")]


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


# The names in transformers (of several versions) of the styles of `torch.distributed.tensor.parallel`.
_COLUMNS, _WHOLE, _ROWS, _LOOK_UP = "colwise", ("colwise_rep", "colwise_gather_output"), "rowwise", "embedding_rowwise"
_STYLES = (_COLUMNS, *_WHOLE, _ROWS, _LOOK_UP)
_HEADS = ("num_attention_heads", "num_key_value_heads")


def check_tensor(model: nn.Module, parallel: str, world: int, tensor: Any, *, caller: str) -> None:
    """Raises ConfigError where `tensor` processes cannot split the weights of `model`."""
    call = f"{caller}(parallel={parallel!r}, world={world}, tensor={tensor!r})"
    if isinstance(tensor, bool) or not isinstance(tensor, int) or tensor < 1:
        raise ConfigError(f"{call}: tensor is the number of processes that split each weight, an int above 0")
    if parallel != "fsdp2":
        raise ConfigError(f"{call}: FSDP2 shards the split weights; say parallel='fsdp2'")
    if world % tensor:
        raise ConfigError(
            f"{call}: {world} processes do not divide into groups of {tensor}; take a world that {tensor} divides"
        )
    own = (
        "; split it with parallelize_module() in a process group of the fake backend yourself, and profile or plan that"
    )
    styles = dict(_styles(model))
    if not styles:
        raise ConfigError(
            f"{call} splits weights as the model's tp_plan says, and this {type(model).__name__} has none that names "
            f"its modules{own}"
        )
    if unknown := sorted({style for _, style in styles.values() if style not in _STYLES}):
        raise ConfigError(f"{call}: the model's tp_plan has styles that are not DTensor's, {', '.join(unknown)}{own}")
    for path, (module, _) in styles.items():
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise ConfigError(
                f"{call}: {path} is a {type(module).__name__}, which DTensor splits in no such style{own}"
            )
    # DTensor can split rows unevenly, but every attention head has to be whole on one process.
    for name in _HEADS:
        heads = getattr(getattr(model, "config", None), name, None)
        if isinstance(heads, int) and heads % tensor:
            raise ConfigError(f"{call}: {name} = {heads} cannot be split over {tensor} processes; take a divisor of it")


def split(model: nn.Module, mesh: Any) -> None:
    """Split the weights of `model` over `mesh` by its ``tp_plan``; a weight that several modules share stays shared."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    made: dict[str, Callable[[], Any]] = {
        _COLUMNS: ColwiseParallel,
        **dict.fromkeys(_WHOLE, lambda: ColwiseParallel(output_layouts=Replicate())),
        _ROWS: RowwiseParallel,
        _LOOK_UP: lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    shared: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                shared.setdefault(id(parameter), []).append((module, name))
    for _, (module, style) in _styles(model):
        parallelize_module(module, mesh, made[style]())
    for (module, name), *others in shared.values():
        for other, its_name in others:
            if getattr(other, its_name).placements != getattr(module, name).placements:
                raise ConfigError(
                    f"a weight that {type(module).__name__} and {type(other).__name__} share is split in two ways by "
                    "the model's tp_plan; untie it"
                )
            other._parameters[its_name] = module._parameters[name]


def _styles(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Yields (path, (module, style)) for each module that the model's ``tp_plan`` splits."""
    plan = getattr(model, "tp_plan", None) or {}
    for path, module in model.named_modules():
        for pattern, style in plan.items():
            if matches(pattern, path):
                yield path, (module, style)
                break


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
    internals.needs_parallel()
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
