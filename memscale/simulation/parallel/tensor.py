"""Weights that are split over processes beside what FSDP2 does, as the model's own ``tp_plan`` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from memscale.core import ConfigError, matches

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
