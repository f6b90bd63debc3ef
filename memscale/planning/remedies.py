"""Remedies without a search: plans by the name of a transform, equal parts of the batch, options of the optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan, Transform, compose
from memscale.core import batches, matches, pytrees
from memscale.hardware import Hardware, narrow_dtype
from memscale.planning.parts.blocks import repeated_blocks
from memscale.planning.parts.heads import loss_head
from memscale.transforms import cast, checkpoint, offload, tile

# Chunks of a loss head that is tiled by name: an eighth of the logits seldom decides the peak:
# benchmarks/bench_tile.py.
_CHUNKS = 8
# Transforms in a summary. By choice.
_MOST_NAMED = 3

Rules = Mapping[str, Transform]


def shorthands(model: nn.Module, hardware: Hardware) -> dict[str, Rules]:
    """Returns the rules that apply to `model` on `hardware`, by the name of their transform, without a simulation."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    patterns = repeated_blocks(model)
    head = loss_head(model, [path for path in paths if any(matches(pattern, path) for pattern in patterns)])
    wide = any(parameter.dtype in (torch.float32, torch.float64) for parameter in model.parameters())
    found: dict[str, Rules] = {
        "checkpoint": {pattern: checkpoint() for pattern in patterns},
        "tile": {} if head is None else {head: tile(chunks=_CHUNKS)},
        "cast": {"": cast(compute=narrow_dtype(hardware))} if wide else {},
        "offload": {pattern: offload() for pattern in patterns},
    }
    return {name: rules for name, rules in found.items() if rules}


def planned(rules: Mapping[str, Rules]) -> Plan:
    """Returns the plan that combines `rules`, a selection of the `shorthands`."""
    inner = [part for name, part in rules.items() if name != "offload" or "checkpoint" not in rules]
    merged = {pattern: how for part in inner for pattern, how in part.items()}
    if "checkpoint" in rules and "cast" in rules:
        # Each checkpointed block has its own cast inside: the recompute casts the weights again, so that no narrow copy
        # of the weights stays until backward. One cast around the whole model would keep all copies.
        merged |= {pattern: compose(how, rules["cast"][""]) for pattern, how in rules["checkpoint"].items()}
    if "checkpoint" in rules and "offload" in rules:
        # The offload is around the checkpoint, so that the input that the checkpoint saves is offloaded.
        merged |= {pattern: compose(how, merged[pattern]) for pattern, how in rules["offload"].items()}
    return Plan(merged)


def summary(plan: Plan) -> str:
    """Returns a plan as one line: its first transforms, each with its first path and the number of other paths.

    >>> import memscale as ms
    >>> summary(ms.Plan({"layers.0": ms.checkpoint(), "layers.1": ms.checkpoint(), "head": ms.tile(chunks=8)}))
    'checkpoint() on layers.0 and 1 more, tile(chunks=8) on head'
    """
    paths: dict[str, list[str]] = {}
    for rule in plan:
        paths.setdefault(repr(rule.transform), []).append(rule.pattern or "the whole model")
    phrases = [
        f"{how} on {where[0]}{f' and {len(where) - 1} more' if len(where) > 1 else ''}"
        for how, where in itertools.islice(paths.items(), _MOST_NAMED)
    ]
    return ", ".join(phrases) + (f", {len(paths) - _MOST_NAMED} other transforms" if len(paths) > _MOST_NAMED else "")


def split(batch: Any, parts: int) -> Any | None:
    """Returns the first of `parts` equal parts of the batch along dimension 0; None if `parts` does not divide it.

    All tensors with as many rows as the batch's first tensor are cut. The parts are views: the whole batch stays on the
    device, as in a training loop that cuts the batch there.
    """
    leaves, spec = batches.flatten(batch)
    rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
    if rows < parts or rows % parts:
        return None
    cut = [leaf[: rows // parts] if _is_long(leaf, rows) else leaf for leaf in leaves]
    return pytrees.unflatten(spec, cut)


@contextmanager
def optimizer_options(optimizer: torch.optim.Optimizer | None, options: Mapping[str, bool]) -> Iterator[None]:
    """Sets `options` in all parameter groups of the optimizer; the exit restores the caller's groups."""
    groups = optimizer.param_groups if optimizer is not None and options else []
    before = [dict(group) for group in groups]
    try:
        for group in groups:
            group.update(options)
        yield
    finally:
        for group, own in zip(groups, before, strict=True):
            group.clear()
            group.update(own)


def other_loops(optimizer: torch.optim.Optimizer | None) -> list[dict[str, bool]]:
    """Returns the options ``fused`` and ``foreach`` that would give the optimizer's step other temporaries."""
    groups = optimizer.param_groups if optimizer is not None else []
    found = []
    takes_fused = all(parameter.is_floating_point() for group in groups for parameter in group["params"])
    if groups and takes_fused and all("fused" in group and not group["fused"] for group in groups):
        found.append({"fused": True, "foreach": False})
    if groups and all(group.get("foreach", False) is not False and not group.get("fused") for group in groups):
        found.append({"foreach": False})
    return found


def _is_long(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
