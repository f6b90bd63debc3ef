"""`ProvenPlan`: a plan with the evidence that it was returned on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memscale.algebra import Plan
from memscale.core import Document, PlanError, format_bytes, format_seconds, matches
from memscale.hardware import Hardware

_DOCUMENT = Document("plan", version=1, writer="Plan.to_json()", error=PlanError)


@dataclass(frozen=True)
class Figures:
    """What a simulated step takes.

    Attributes:
        taken_bytes: what the device has to give: what its caching allocator reserves, where it has one.
        peak_bytes: the most that is allocated at once.
        step_seconds: the time of the step.
        exposed_seconds: the part of it in which the device waits for copies.
    """

    taken_bytes: int
    peak_bytes: int
    step_seconds: float
    exposed_seconds: float = 0.0


@dataclass(frozen=True)
class Decision:
    """What was decided about one part of the model, and what else could have been.

    Attributes:
        path: of the part's module; "" is what is outside of all parts, such as the loss head.
        chosen: what is done to it, in words.
        rule: why.
        kept_bytes, kept_bytes_before: what it keeps until backward, with the plan and without.
        seconds, seconds_before: the time of its operators, forward and backward.
        runner_up: the next best candidate, "" if there is none.
        runner_up_verdict: why it is not that.
    """

    path: str
    chosen: str
    rule: str
    kept_bytes: int
    kept_bytes_before: int
    seconds: float
    seconds_before: float
    runner_up: str = ""
    runner_up_verdict: str = ""


@dataclass(frozen=True)
class Evidence:
    """Why a plan was returned: what was asked for, what its simulated step takes, and what was decided against.

    Attributes:
        budget_bytes: what the step may take.
        hardware: the device that was simulated.
        planned: the step with the plan.
        plain: the step without.
        bound_seconds: no plan of these candidates within the budget is faster, as far as their costs add up.
        by_tier: the most bytes on each tier below the device.
        trace: the rules that decided, in order, each with its numbers.
        decisions: about each part, in the order of the step.
        rejected: candidates that cannot be, with the reason.
        notes: what the simulation assumed.
        simulations: how many steps were simulated.
    """

    budget_bytes: int
    hardware: Hardware
    planned: Figures
    plain: Figures
    bound_seconds: float
    by_tier: Mapping[str, int]
    trace: tuple[str, ...]
    decisions: tuple[Decision, ...]
    rejected: Mapping[str, str]
    notes: tuple[str, ...]
    simulations: int

    @property
    def gap(self) -> float:
        """By what share of the step's time the plan may be slower than the fastest."""
        return max(0.0, self.planned.step_seconds / self.bound_seconds - 1) if self.bound_seconds else 0.0

    def to_data(self) -> dict[str, Any]:
        """The evidence as JSON data."""
        return {
            **vars(self),
            "hardware": json.loads(self.hardware.to_json()),
            "planned": vars(self.planned),
            "plain": vars(self.plain),
            "decisions": [vars(each) for each in self.decisions],
            "by_tier": dict(self.by_tier),
            "rejected": dict(self.rejected),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Evidence:
        """The evidence that `to_data` made."""
        return cls(
            **{
                **data,
                "hardware": Hardware.from_json(json.dumps(data["hardware"])),
                "planned": Figures(**data["planned"]),
                "plain": Figures(**data["plain"]),
                "trace": tuple(data["trace"]),
                "decisions": tuple(Decision(**each) for each in data["decisions"]),
                "notes": tuple(data["notes"]),
            }
        )


class ProvenPlan(Plan):
    """A plan with the evidence that it was returned on; equal to any plan with the same rules.

    Attributes:
        evidence: see `Evidence`.
    """

    __slots__ = ("evidence",)

    evidence: Evidence

    def __init__(self, plan: Plan, evidence: Evidence) -> None:
        super().__init__([(rule.pattern, rule.transform) for rule in plan])
        object.__setattr__(self, "evidence", evidence)

    __hash__ = Plan.__hash__

    def __reduce__(self) -> Any:
        return (ProvenPlan, (Plan([(rule.pattern, rule.transform) for rule in self]), self.evidence))

    def to_json(self) -> str:
        """The plan and its evidence as JSON text; `Plan.from_json` reads the plan of it."""
        data = json.loads(super().to_json())
        return _DOCUMENT.write({"rules": data["rules"], "evidence": self.evidence.to_data()}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> ProvenPlan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: as `Plan.from_json`; or the text has no evidence.
        """
        plan = Plan.from_json(text)
        data = _DOCUMENT.read(text)
        if "evidence" not in data:
            raise PlanError("this plan has no evidence: it was written by hand; read it with Plan.from_json")
        with _DOCUMENT.parts():
            return cls(plan, Evidence.from_data(data["evidence"]))

    def explain(self, path: str | None = None) -> str:
        """How the plan was decided, as text: the rules with their numbers, and each part with its runner-up.

        Args:
            path: of a module, for what was decided about it alone; None is everything.

        Raises:
            PlanError: nothing was decided about `path`.
        """
        evidence = self.evidence
        if path is None:
            lines = [*evidence.trace, "", *_table(evidence.decisions)]
            lines += [f"rejected: {candidate}: {reason}" for candidate, reason in evidence.rejected.items()]
            lines += [f"note: {note}" for note in evidence.notes]
            return "\n".join(lines)
        about = [each for each in evidence.decisions if each.path == path or matches(path, each.path)]
        if not about:
            parts = ", ".join(each.path or "(outside)" for each in evidence.decisions)
            raise PlanError(f"nothing was decided about {path!r}; the parts of this plan are {parts}")
        return "\n\n".join(_paragraph(each) for each in about)

    def diff(self, other: Plan) -> str:
        """What `other` does differently, a line for each path."""
        mine = {rule.pattern: repr(rule.transform) for rule in self}
        theirs = {rule.pattern: repr(rule.transform) for rule in other}
        lines = [
            f"{path or '(root)'}: {mine.get(path, 'as it is')} -> {theirs.get(path, 'as it is')}"
            for path in {**mine, **theirs}
            if mine.get(path) != theirs.get(path)
        ]
        if isinstance(other, ProvenPlan):
            before, after = self.evidence.planned, other.evidence.planned
            lines.append(
                f"takes {format_bytes(before.taken_bytes)} -> {format_bytes(after.taken_bytes)}, "
                f"step {format_seconds(before.step_seconds)} -> {format_seconds(after.step_seconds)}"
            )
        return "\n".join(lines) or "no difference"


def _table(decisions: tuple[Decision, ...]) -> list[str]:
    """One line for each row of parts that stand together and have the same decision."""
    rows: list[list[Decision]] = []
    for each in decisions:
        if rows and rows[-1][-1].chosen == each.chosen and rows[-1][-1].path and each.path:
            rows[-1].append(each)
        else:
            rows.append([each])
    found = [("part", "what", "keeps", "of", "seconds", "of")]
    for row in rows:
        first, last = row[0].path or "(outside)", row[-1].path
        found.append(
            (
                first if len(row) == 1 else f"{first} ... {last}",
                row[0].chosen,
                format_bytes(sum(each.kept_bytes for each in row)),
                format_bytes(sum(each.kept_bytes_before for each in row)),
                format_seconds(sum(each.seconds for each in row)),
                format_seconds(sum(each.seconds_before for each in row)),
            )
        )
    widths = [max(len(line[at]) for line in found) for at in range(len(found[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in found]


def _paragraph(decision: Decision) -> str:
    lines = [
        f"{decision.path or '(outside of the parts)'}: {decision.chosen}",
        f"  rule: {decision.rule}",
        f"  keeps {format_bytes(decision.kept_bytes)} until backward, of {format_bytes(decision.kept_bytes_before)}",
        f"  takes {format_seconds(decision.seconds)}, of {format_seconds(decision.seconds_before)}",
    ]
    if decision.runner_up:
        lines.append(f"  runner-up: {decision.runner_up}: {decision.runner_up_verdict}")
    return "\n".join(lines)
