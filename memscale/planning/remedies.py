"""What might lower the peak of a step: candidates only, since which of them do is for the simulation to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan, Transform, chain, compose
from memscale.core import batches, matches, pytrees
from memscale.hardware import Hardware
from memscale.planning.blocks import repeated_blocks
from memscale.planning.candidates import loss_head
from memscale.transforms import cast, checkpoint, offload, tile

_CHUNKS = 8

Rules = Mapping[str, Transform]


@dataclass(frozen=True)
class Remedy:
    """A change of the step.

    Attributes:
        action: what to do, in words.
        parts: what it consists of; one that frees no more than some of its parts is not worth telling.
        plan: the plan to apply instead of the caller's, None to keep that.
        options: settings of the optimizer's parameter groups.
        in_parts: whether the batch is taken in parts, as many as it needs.
    """

    action: str
    parts: frozenset[str]
    plan: Plan | None = None
    options: Mapping[str, bool] = field(default_factory=dict)
    in_parts: bool = False


def remedies(
    model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer | None, batch: Any, hardware: Hardware
) -> list[Remedy]:
    """The changes worth a simulation: transforms alone and together, the optimizer's other loops, smaller batches."""
    rules = plan_rules(model, plan, hardware)
    loops = list(_other_loops(optimizer)) if optimizer is not None else []
    found = [*(planned(plan, {name: rules[name]}) for name in rules), *loops]
    if len(rules) == 3:
        found.append(planned(plan, {name: rules[name] for name in ("checkpoint", "tile")}))
    if len(rules) > 1:
        found.append(planned(plan, rules))
    if rules and loops:
        everything, loop = planned(plan, rules), loops[0]
        action = f"{everything.action}, and {loop.action}"
        found.append(Remedy(action, everything.parts | loop.parts, everything.plan, loop.options))
    if split(batch, 2) is not None:
        found.append(Remedy("accumulate gradients", frozenset({"accumulate"}), in_parts=True))
    return found


def plan_rules(model: nn.Module, plan: Plan, hardware: Hardware) -> dict[str, Rules]:
    """Rules that `plan` does not have yet, by transform: for the repeated blocks, the loss head, the whole model."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    patterns = repeated_blocks(model)
    blocks = [path for path in paths if any(matches(pattern, path) for pattern in patterns)]
    head = loss_head(model, blocks)
    found: dict[str, Rules] = {
        "checkpoint": {
            pattern: checkpoint()
            for pattern in patterns
            if not any(_has(plan, "checkpoint", path) for path in blocks if matches(pattern, path))
        },
        "tile": {} if head is None or _has(plan, "tile", head) else {head: tile(chunks=_CHUNKS)},
    }
    wide = any(parameter.dtype in (torch.float32, torch.float64) for parameter in model.parameters())
    # A card's rates name the dtypes that it computes in: a V100 or a T4 has no bfloat16.
    if wide and "bfloat16" in (hardware.flops_per_second or ("bfloat16",)) and not _casts(plan):
        found["cast"] = {"": cast()}
    return {name: rules for name, rules in found.items() if rules}


def shorthands(model: nn.Module, hardware: Hardware) -> dict[str, Rules]:
    """The rules that `model` can have on `hardware`, by the name of their transform."""
    moved: Rules = {pattern: offload() for pattern in repeated_blocks(model)}
    return {**plan_rules(model, Plan(), hardware), **({"offload": moved} if moved else {})}


def planned(plan: Plan, rules: Mapping[str, Rules]) -> Remedy:
    """The remedy that adds `rules` to `plan`."""
    inner = [part for name, part in rules.items() if name != "offload" or "checkpoint" not in rules]
    merged = {pattern: how for part in inner for pattern, how in part.items()}
    if "checkpoint" in rules and "cast" in rules:
        # Inside its own cast a block makes its copies of the weights again in the recompute, and none is kept.
        merged |= {pattern: compose(how, cast()) for pattern, how in rules["checkpoint"].items()}
    if "checkpoint" in rules and "offload" in rules:
        # Around its block's checkpoint, so that what that keeps moves.
        merged |= {pattern: compose(how, merged[pattern]) for pattern, how in rules["offload"].items()}
    lines = [f"{how!r} on {pattern or 'the whole model'}" for pattern, how in merged.items()]
    own = [(rule.pattern, rule.transform) for rule in plan]
    return Remedy(", ".join(lines), frozenset(rules), Plan([*own, *merged.items()]))


def split(batch: Any, parts: int) -> Any | None:
    """The first of `parts` equal parts of the batch along its first dimension, None if it cannot be cut so.

    Every tensor as long as the first is cut. The parts are views: the whole batch stays on the device, as in a loop
    that cuts it there.
    """
    leaves, spec = batches.flatten(batch)
    rows = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), 0)
    if rows < parts or rows % parts:
        return None
    cut = [leaf[: rows // parts] if _is_long(leaf, rows) else leaf for leaf in leaves]
    return pytrees.unflatten(spec, cut)


@contextmanager
def optimizer_options(optimizer: torch.optim.Optimizer | None, options: Mapping[str, bool]) -> Iterator[None]:
    """The optimizer with other settings of all its groups; its own are back afterwards."""
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


def _other_loops(optimizer: torch.optim.Optimizer) -> Iterator[Remedy]:
    groups = optimizer.param_groups
    if all("fused" in group and not group["fused"] for group in groups):
        options = {"fused": True, "foreach": False}
        yield Remedy("build the optimizer with fused=True", frozenset({"fused"}), options=options)
    if all(group.get("foreach", False) is not False and not group.get("fused") for group in groups):
        yield Remedy("build the optimizer with foreach=False", frozenset({"foreach"}), options={"foreach": False})


def _has(plan: Plan, spelling: str, path: str) -> bool:
    return any(rule.matches(path) and spelling in _spellings(rule.transform) for rule in plan)


def _casts(plan: Plan) -> bool:
    return any("cast" in _spellings(rule.transform) for rule in plan)


def _spellings(transform: Transform) -> set[str]:
    return {part.spelling for part in chain(transform)}


def _is_long(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
