"""How a step is one process's of several, as a value: under FSDP2 or DDP, over how many processes."""

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
    """How a step is one process's of several.

    >>> print(Parallel("fsdp2", 64))
    fsdp2 over 64 processes

    Args:
        kind: ``"fsdp2"`` or ``"ddp"``.
        world: how many processes.
        shard: patterns of the modules that FSDP2 shards beside the root; None is the repeated blocks.
        tensor: over how many of them each weight is split besides, by the model's ``tp_plan``.
    """

    kind: ParallelKind
    world: int
    shard: tuple[str, ...] | None = None
    tensor: int = 1

    def __str__(self) -> str:
        beside = "" if self.shard is None else f", sharding {', '.join(self.shard)}"
        beside = f", tensors over {self.tensor} of them{beside}" if self.tensor > 1 else beside
        return f"{self.kind} over {self.world} process{'es' * (self.world > 1)}{beside}"

    @classmethod
    def of(cls, model: Any, parallel: Any, world: Any, shard: Any, tensor: Any, *, caller: str) -> Parallel | None:
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
    def of_distributed(cls, model: Any) -> Parallel | None:
        """How `model` is one process's of several already: its owner sharded or replicated it; None if neither."""
        for module in model.modules() if isinstance(model, nn.Module) and dist.is_available() else ():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                return cls("ddp", dist.get_world_size(module.process_group))
            if (mesh := mesh_of(module)) is not None:
                # Weights that are split besides are on a mesh of both dimensions.
                return cls("fsdp2", max(mesh.size(), *(each.device_mesh.size() for each in _spread(model))))
        return None

    def is_like(self, other: Parallel | None) -> bool:
        """Whether a plan for these processes is one for `other`, of which nobody may know what was sharded."""
        return other is not None and (self.kind, self.world) == (other.kind, other.world)

    def among(self, model: nn.Module) -> Parallel:
        """The same for a model that lacks some modules: without the patterns that match nothing in it."""
        if self.shard is None:
            return self
        paths = [path for path, _ in model.named_modules()]
        kept = tuple(pattern for pattern in self.shard if any(matches(pattern, path) for path in paths))
        return dataclasses.replace(self, shard=kept)

    def to_data(self) -> dict[str, Any]:
        """The value as JSON data."""
        return {"parallel": self.kind, "world": self.world, "shard": self.shard, "tensor": self.tensor}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Parallel:
        """The value that `to_data` wrote."""
        shard = None if data["shard"] is None else tuple(data["shard"])
        return cls(data["parallel"], data["world"], shard, data.get("tensor") or 1)


def is_distributed(model: Any) -> bool:
    """Whether parts of `model` are a process's of several, by FSDP2, DDP or DTensors of its owner's."""
    if not isinstance(model, nn.Module):
        return False
    return Parallel.of_distributed(model) is not None or bool(_spread(model))


def _spread(model: nn.Module) -> list[Any]:
    """The parameters of `model` that are DTensors."""
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


# The names that transformers gives styles of `torch.distributed.tensor.parallel`, in its versions.
_COLUMNS, _WHOLE, _ROWS, _LOOK_UP = "colwise", ("colwise_rep", "colwise_gather_output"), "rowwise", "embedding_rowwise"
_STYLES = (_COLUMNS, *_WHOLE, _ROWS, _LOOK_UP)
_HEADS = ("num_attention_heads", "num_key_value_heads")


def check_tensor(model: nn.Module, parallel: str, world: int, tensor: Any, *, caller: str) -> None:
    """Raise ConfigError where `tensor` processes cannot split the weights of `model`."""
    asked = f"{caller}(parallel={parallel!r}, world={world}, tensor={tensor!r})"
    if isinstance(tensor, bool) or not isinstance(tensor, int) or tensor < 1:
        raise ConfigError(f"{asked} takes over how many processes each weight is split, an int above 0")
    if parallel != "fsdp2":
        raise ConfigError(f"{asked}: weights that are split are sharded by FSDP2 besides; say parallel='fsdp2'")
    if world % tensor:
        raise ConfigError(
            f"{asked}: {world} processes are no whole groups of {tensor}; take a world that {tensor} divides"
        )
    own = (
        "; split it with parallelize_module() in a process group of the fake backend yourself, and profile or plan that"
    )
    styles = dict(_styles(model))
    if not styles:
        raise ConfigError(
            f"{asked} splits weights as the model's tp_plan says, and this {type(model).__name__} has none that names "
            f"its modules{own}"
        )
    if unknown := sorted({style for _, style in styles.values() if style not in _STYLES}):
        raise ConfigError(f"{asked}: the model's tp_plan has styles that are not DTensor's, {', '.join(unknown)}{own}")
    for path, (module, _) in styles.items():
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise ConfigError(
                f"{asked}: {path} is a {type(module).__name__}, which DTensor splits in no such style{own}"
            )
    # DTensor splits rows unevenly where it must, but a head is on one process.
    for name in _HEADS:
        heads = getattr(getattr(model, "config", None), name, None)
        if isinstance(heads, int) and heads % tensor:
            raise ConfigError(
                f"{asked}: {name} = {heads} cannot be split over {tensor} processes; take a divisor of it"
            )


def split(model: nn.Module, mesh: Any) -> None:
    """Split the weights of `model` over `mesh`; what several modules share stays one."""
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
    """The modules that the model's plan splits, by their paths, and how."""
    plan = getattr(model, "tp_plan", None) or {}
    for path, module in model.named_modules():
        for pattern, style in plan.items():
            if matches(pattern, path):
                yield path, (module, style)
                break
