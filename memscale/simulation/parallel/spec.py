"""The parallel spec of a step as a value: FSDP2 or DDP, over how many processes."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from memscale.core import ConfigError, matches
from memscale.simulation.parallel.sharded import check_followed, mesh_of

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
