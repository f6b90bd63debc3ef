"""The text about a wrapped model: the one line that `wrap` prints, and parts of its report."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from memscale.algebra import Plan, chain
from memscale.config import Config
from memscale.core import format_bytes, format_unlike, matches, wrapped
from memscale.legacy.decide import Verdict
from memscale.planning import ProvenPlan, repeated_blocks
from memscale.runtime import Runtime


def headline(model: nn.Module, verdict: Verdict, regions: Iterable[str]) -> str | None:
    """Returns the line, or None if the batch that decides has not come yet.

    Args:
        model: the wrapped model.
        verdict: the verdict about its step.
        regions: the paths of the regions of the verdict's plan.
    """
    plan = verdict.plan
    if verdict.skipped is not None:
        if verdict.limit_bytes is None:
            return f"stays unchanged: {verdict.skipped}"
        size, limit = format_unlike(verdict.step_bytes, verdict.limit_bytes)
        return None if verdict.profile is None else f"fits unchanged, {size} of {limit}"
    done = ", ".join([*_techniques(model, plan, regions), *(repr(rule.transform) for rule in plan.of_optimizers())])
    taken_bytes, limit_bytes = verdict.planned_bytes, verdict.limit_bytes
    if taken_bytes is None or limit_bytes is None:
        return f"{done}; its peak is unknown"
    above = f", above the {format_bytes(limit_bytes)} allowed" if taken_bytes > limit_bytes else ""
    return f"{format_bytes(verdict.step_bytes)} → {format_bytes(taken_bytes)}{above}{_times(plan)}: {done}"


def step_text(verdict: Verdict) -> str:
    """Returns one line about the memory of the untransformed step."""
    if verdict.profile is None:
        return f"step without memscale: {format_bytes(verdict.step_bytes)} plus activations of unknown size"
    return f"step without memscale: {format_bytes(verdict.step_bytes)} at its peak, {verdict.profile.moment}"


def planned_text(verdict: Verdict, config: Config) -> list[str]:
    """Returns the simulated step under the plan of `verdict`, and what may be faster; empty without a simulation."""
    if verdict.planned_bytes is None or verdict.limit_bytes is None:
        return []
    takes, allowed = format_unlike(verdict.planned_bytes, verdict.limit_bytes)
    of = " of" if verdict.planned_bytes <= verdict.limit_bytes else ", above"
    text = f"step with the plan: {takes}{of} the {allowed} allowed{_times(verdict.plan)}"
    if not verdict.plan.of_functions():
        return [text]
    rounds = "" if "tile" in config.eligible() else ", enable_tiling=True (which rounds differently)"
    return [text, wrapped(f"faster: a larger budget, fewer rows a batch{rounds}")]


def moved_text(runtime: Runtime) -> str:
    """Returns one line about what a runtime has moved so far."""
    # Engines of simulated devices count bytes without moving them.
    engines = [stats for device, stats in runtime.stats().items() if not device.startswith("fake ")]
    out_bytes = sum(sum(stats.out_bytes.values()) for stats in engines)
    in_bytes = sum(sum(stats.in_bytes.values()) for stats in engines)
    exposed_seconds = sum(stats.exposed_seconds for stats in engines)
    return f"offloaded so far: {out_bytes} bytes out, {in_bytes} bytes in, {exposed_seconds:.3f} s exposed"


def _times(plan: Plan) -> str:
    """Returns the time of the planned step as a multiple of the time of the step as written."""
    if not isinstance(plan, ProvenPlan) or not plan.evidence.plain.step_seconds:
        return ""
    return f", step × {plan.evidence.planned.step_seconds / plan.evidence.plain.step_seconds:.2f}"


def _techniques(model: nn.Module, plan: Plan, regions: Iterable[str]) -> Iterable[str]:
    """Yields each technique of the plan with its place: the number of the model's blocks, and other modules."""
    patterns = repeated_blocks(model)
    blocks = {path for path, _ in model.named_modules() if any(matches(pattern, path) for pattern in patterns)}
    places: dict[str, set[str]] = {}
    for path in regions:
        block = next((each for each in blocks if f"{path}.".startswith(f"{each}.")), path)
        transforms = [rule.transform for rule in plan.of_functions() if rule.matches(path)]
        for name in [getattr(each, "spelling", repr(each)) for how in transforms for each in chain(how)]:
            places.setdefault(name, set()).add(block)
    for name, found in places.items():
        inside, others = found & blocks, sorted(found - blocks)
        where = [f"{len(inside)} of {len(blocks)} blocks"] if inside else []
        where += [repr(path) if path else "the whole model" for path in others[:2]]
        where += [f"{len(others) - 2} more modules"] if len(others) > 2 else []
        yield f"{name} on {' and '.join(where)}"
