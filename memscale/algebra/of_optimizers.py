"""Applies the rules of a plan for an optimizer, by matching them with the paths of its parameters in the model."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import nn

from memscale.algebra.composition import Transform, chain
from memscale.algebra.plan import Plan
from memscale.core import PlanError, TransformError
from memscale.runtime import Runtime


def under_rules(
    model: nn.Module, rules: Plan, optimizer: torch.optim.Optimizer | None, runtime: Runtime | None
) -> torch.optim.Optimizer | None:
    """Returns a transformed optimizer, each parameter under its `rules`; `optimizer` itself if there are no rules.

    Raises:
        PlanError: there are rules and no optimizer, or patterns that match none of its parameters.
        TransformError: the optimizer has parameters that the model lacks, or is of a class that cannot be transformed.
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TransformError(
            f"transform(optimizer=...) must be a torch.optim.Optimizer or None, got {type(optimizer).__name__}; pass "
            "the optimizer itself"
        )
    if optimizer is not None and not trains(optimizer, model):
        raise TransformError(
            f"this {type(optimizer).__name__} has none of the parameters of the {type(model).__name__}; build it on "
            "this model's parameters"
        )
    if not rules:
        return optimizer
    found = rules_by_parameter(model, rules, optimizer, runtime)
    applier: Any = chain(rules.rules[0].transform)[0]
    return applier.by_rules(optimizer, found)  # type: ignore[no-any-return]


def trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    """Whether `optimizer` has parameters of `model`."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def rules_by_parameter(
    model: nn.Module, rules: Plan, optimizer: torch.optim.Optimizer | None, runtime: Runtime | None
) -> list[tuple[str, torch.Tensor, list[Transform]]]:
    """Returns (path, parameter, transforms innermost first) of each parameter of `model`.

    Parameters without a group are included, because `add_param_group` may add them later.

    Raises:
        PlanError, TransformError: as `under_rules`.
    """
    if optimizer is None:
        raise PlanError(
            "; ".join(f"the rule {rule.pattern!r}: {rule.transform!r} is for an optimizer" for rule in rules)
            + "; pass it too: model, optimizer = transform(model, plan, optimizer=optimizer)"
        )
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # A shared parameter is under the rules of all its paths.
    paths: dict[int, list[str]] = {}
    parameters = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        paths.setdefault(id(parameter), []).append(path)
        parameters[id(parameter)] = parameter
    _check_known(model, optimizer, paths)
    found: dict[int, list[Transform]] = {}
    unmatched = []
    for rule in rules:
        hits = [key for key, its in paths.items() if any(rule.matches(at) for path in its for at in _upwards(path))]
        if not any(key in own for key in hits):
            unmatched.append((rule.pattern, bool(hits)))
        for key in hits:
            found.setdefault(key, []).append(rule.transform.on(runtime))
    if unmatched:
        known = sorted({at for key in own for path in paths[key] for at in _upwards(path) if at})
        raise PlanError("; ".join(_no_match(pattern, trains, known) for pattern, trains in unmatched))
    return [(paths[key][0], parameters[key], found.get(key, [])) for key in paths]


def _check_known(model: nn.Module, optimizer: torch.optim.Optimizer, paths: dict[int, list[str]]) -> None:
    unknown = [
        f"{(group.get('param_names') or {at: f'{at} of group {number}'})[at]} {list(parameter.shape)}"
        for number, group in enumerate(optimizer.param_groups)
        for at, parameter in enumerate(group["params"])
        if id(parameter) not in paths
    ]
    if unknown:
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        raise TransformError(
            f"this {type(optimizer).__name__} has {len(unknown)} of {total} parameters that the {type(model).__name__} "
            f"lacks, so no rule can name these: {', '.join(unknown[:5])}"
            f"{', ...' if len(unknown) > 5 else ''}; build it on this model's parameters, or apply the transform to "
            "the optimizer itself, as in step_in_backward()(optimizer)"
        )


def _upwards(path: str) -> list[str]:
    """Returns a parameter's path and the paths of the modules around it, innermost first.

    >>> _upwards("layers.0.weight")
    ['layers.0.weight', 'layers.0', 'layers', '']
    """
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _no_match(pattern: str, matches_others: bool, known: list[str]) -> str:
    if matches_others:
        return f"the plan's path {pattern!r} matches parameters that this optimizer does not have"
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
    return (
        f"the plan's path {pattern!r} matches no parameter of this optimizer, nor a module with one; the nearest are "
        f"{', '.join(map(repr, near))} ('*' is one segment, '**' any number)"
    )
