"""`ProvenPlan`: a plan with its evidence."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from memscale.algebra import Plan, as_plan, compose
from memscale.config import Config
from memscale.core import (
    Document,
    PlanError,
    format_bytes,
    format_seconds,
    in_rows,
    in_runs,
    matches,
    numbers,
    row_label,
    template,
)
from memscale.planning.evidence.evidence import Decision, Evidence
from memscale.planning.evidence.evidence_text import about_parts, explanation
from memscale.policy import StrategyDecision, select
from memscale.simulation import Parallel

_DOCUMENT = Document("plan", version=1, writer="Plan.to_json()", error=PlanError)


class ProvenPlan(Plan):
    """A plan with its evidence; equal to any plan with the same rules.

    Attributes:
        evidence: the figures and decisions that the plan was returned on.
        decision: the decision of the policy. Its ``decision_source`` is ``"user_config"`` if the config decided, which
            is so without ``auto_policy`` and on a CPU.
    """

    __slots__ = ("decision", "evidence")

    decision: StrategyDecision
    evidence: Evidence

    def __init__(self, plan: Plan, evidence: Evidence, decision: StrategyDecision | None = None) -> None:
        super().__init__([(rule.pattern, rule.transform) for rule in plan])
        object.__setattr__(self, "evidence", evidence)
        object.__setattr__(self, "decision", decision or select(None, Config()))

    __hash__ = Plan.__hash__

    @property
    def parallel(self) -> Parallel | None:
        """Returns the parallel spec of the step that the plan was made for; None for a single process."""
        return self.evidence.parallel

    def __reduce__(self) -> Any:
        return (ProvenPlan, (Plan([(rule.pattern, rule.transform) for rule in self]), self.evidence, self.decision))

    def to_json(self) -> str:
        """Returns the plan and its evidence as JSON text, which `Plan.from_json` reads as a plan without evidence."""
        data = json.loads(super().to_json())
        parts = {"evidence": self.evidence.to_data(), "decision": self.decision.to_data()}
        return _DOCUMENT.write({"rules": data["rules"], **parts}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> ProvenPlan:
        """Returns the plan that `to_json` wrote, with its evidence.

        Raises:
            PlanError: as in `Plan.from_json`, or the text has no evidence.
        """
        plan = Plan.from_json(text)
        data = _DOCUMENT.read(text)
        if "evidence" not in data:
            raise PlanError("this plan has no evidence: it was written by hand; read it with Plan.from_json")
        with _DOCUMENT.parts():
            decision = StrategyDecision.from_data(data["decision"]) if "decision" in data else None
            return cls(plan, Evidence.from_data(data["evidence"]), decision)

    def to_python(self) -> str:
        """Returns the Python code of `Plan.to_python` after a comment with the budget, the device and the figures."""
        evidence = self.evidence
        before, after = evidence.plain, evidence.planned
        ranks = "" if evidence.parallel is None else f", {evidence.parallel}"
        return (
            f"# For {format_bytes(evidence.budget_bytes)} on {evidence.hardware.name}{ranks}: the simulated step takes "
            f"{format_bytes(after.taken_bytes)} and {format_seconds(after.step_seconds)}\n"
            f"# (as written, {format_bytes(before.taken_bytes)} and {format_seconds(before.step_seconds)}).\n"
            f"{super().to_python()}"
        )

    def explain(self, path: str | None = None) -> str:
        """Returns the explanation of the plan as text: the rules with their numbers, and each part with its runner-up.

        Args:
            path: the parts to explain: the path of a part or a pattern of paths; a module inside a part, for that part;
                a module around parts, for those parts; ``""`` or the loss head's path, for the rest of the model
                outside all parts; None for everything.

        Raises:
            PlanError: the plan has no decision about `path`.
        """
        evidence = self.evidence
        if path is None:
            decided = "; ".join(each.chosen for each in evidence.decisions if not each.path)
            whole = [
                f"{'the optimizer' if rule in stepping else 'the whole model'}: {rule.transform!r}\n"
                for stepping in [self.of_optimizers().rules]
                for rule in self
                if not rule.pattern and repr(rule.transform) not in decided
            ]
            by_policy = self.decision.decision_source != "user_config"
            policy = [f"{self.decision.explain()}\n"] if by_policy else []
            return "".join([*policy, *whole, explanation(evidence)])
        return about_parts(self._about(path), evidence)

    def _about(self, path: str) -> list[Decision]:
        decisions = self.evidence.decisions
        for found in (
            [each for each in decisions if each.path == path or matches(path, each.path)],
            [each for each in decisions if each.path and path.startswith(f"{each.path}.")],
            [each for each in decisions if path and each.path.startswith(f"{path}.")],
            # A rule for a module outside all parts, such as the loss head: its decision has the path "".
            [each for each in decisions if not each.path and any(path == rule.pattern for rule in self)],
        ):
            if found:
                return found
        if not decisions:
            raise PlanError(f"nothing was decided about {path!r}, nor about any part: the step fits unchanged")
        rows = in_rows([each.path for each in decisions], lambda part: part, lambda _: None)
        parts = ", ".join(row_label(row) for row in rows)
        raise PlanError(f"nothing was decided about {path!r}; the parts of this plan are {parts}")

    def diff(self, other: Plan) -> str:
        """Returns the differences of `other` from this plan as text, a line for each row of modules."""
        other = as_plan(other)
        parts = [
            each.path for plan in (self, other) if isinstance(plan, ProvenPlan) for each in plan.evidence.decisions
        ]
        paths = sorted({path for plan in (self, other) for path in _paths(plan, parts)}, key=_place)
        changes = [(path, _done(self, path), _done(other, path)) for path in paths]
        lines = [
            f"{row_label([path or '(root)' for path, _, __ in row])}: {row[0][1]} -> {row[0][2]}"
            for row in in_runs(
                [change for change in changes if change[1] != change[2]],
                lambda change: change[0] or "(root)",
                lambda change: change[1:],
            )
        ]
        if isinstance(other, ProvenPlan):
            before, after = self.evidence.planned, other.evidence.planned
            lines.append(
                f"takes {format_bytes(before.taken_bytes)} -> {format_bytes(after.taken_bytes)}, "
                f"step {format_seconds(before.step_seconds)} -> {format_seconds(after.step_seconds)}"
            )
        return "\n".join(lines) or "no difference"


def _paths(plan: Plan, parts: Sequence[str]) -> Iterator[str]:
    """Yields the module paths that a plan names; a pattern is expanded to the `parts` that the pattern matches."""
    for rule in plan:
        segments = rule.pattern.split(".")
        found = []
        for part in parts if "*" in rule.pattern else ():
            depth = part.count(".") + 1
            head, inside = ".".join(segments[:depth]), segments[depth:]
            if part and matches(head, part) and "*" not in "".join(inside):
                found.append(".".join([part, *inside]))
        yield from found or [rule.pattern]


def _done(plan: Plan, path: str) -> str:
    rules = [rule.transform for rule in plan if rule.pattern == path or rule.matches(path)]
    return repr(compose(*reversed(rules))) if rules else "as written"


def _place(path: str) -> tuple[str, list[int]]:
    return template(path), numbers(path)
