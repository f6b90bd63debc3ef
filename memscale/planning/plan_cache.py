"""The plan cache: answers of earlier searches on disk. Every plan that is read is simulated again before its use."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from memscale.algebra import Plan
from memscale.core import Argument, BudgetError, DiskCache, MemscaleError
from memscale.hardware import Hardware
from memscale.planning.evidence.evidence import Figures
from memscale.planning.evidence.proven import ProvenPlan
from memscale.planning.parts.candidates import Candidate
from memscale.simulation import Profile, few_collections

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """The result of one request to an engine: plans, or the error that says why no plan fits.

    Attributes:
        plans: the plans, with their evidence; empty if there is a `fault`.
        fault: the error if no plan fits; None if a plan fits.
    """

    plans: tuple[ProvenPlan, ...] = ()
    fault: BudgetError | None = None

    def plan(self) -> ProvenPlan:
        """Returns the first plan, which is the only plan of a request for one.

        Raises:
            BudgetError: no plan fits the budget.
        """
        if self.fault is not None:
            # A copy: the traceback of a raised error leads to every frame it passes, and to the tensors held there.
            raise copy.copy(self.fault)
        return self.plans[0]


class Proofs:
    """Proves cached answers: simulates each cached plan on the present step and compares the figures.

    Args:
        simulate: returns the profile of the step with a plan.
        plain: the profile of the step without a plan.
        hardware: the device, with its present free memory.
        allowed: the techniques that plans may use, as in `Candidate.techniques`.
    """

    def __init__(
        self, simulate: Callable[[Plan], Profile], plain: Profile, hardware: Hardware, allowed: Collection[str]
    ) -> None:
        self._simulate = simulate
        self._plain = plain
        self._hardware = hardware
        self._allowed = frozenset(allowed)

    def proven(self, answer: Answer) -> Answer | None:
        """Returns the answer for the present free memory; None if a plan's simulated figures differ by one byte."""
        try:
            if answer.fault is not None:
                found = self._profile(answer.fault.plan)
                return answer if found.taken_bytes == answer.fault.peak_bytes else None
            return Answer(tuple(map(self._same, answer.plans)))
        except (MemscaleError, ValueError) as error:  # the step has changed, or the plan does not apply to this model
            _log.debug("a plan that was kept does not hold: %s", error)
            return None

    def _same(self, plan: ProvenPlan) -> ProvenPlan:
        evidence = plan.evidence
        profile = self._profile(plan)
        shown = (Figures.of(self._plain), Figures.of(profile), dict(profile.by_tier), self._hardware)
        if shown != (evidence.plain, evidence.planned, dict(evidence.by_tier), evidence.hardware):
            raise ValueError("the evidence is of another step")
        return ProvenPlan(plan, dataclasses.replace(evidence, hardware=self._hardware), plan.decision)

    def _profile(self, plan: Plan) -> Profile:
        techniques = Candidate(tuple((rule.pattern, rule.transform) for rule in plan)).techniques
        if not techniques <= self._allowed:
            raise ValueError(f"{sorted(techniques - self._allowed)} are not allowed")
        return self._simulate(plan) if plan else self._plain


class PlanCache:
    """The cache of the answers of one engine, shared on disk by all engines with the same fingerprint."""

    def __init__(self) -> None:
        self._disk = DiskCache("plans")
        self._about: Mapping[str, str] | None = None

    @few_collections()  # also between simulations, where the garbage collector would take a tenth of planning
    def answer(
        self,
        request: str,
        find: Callable[[], Answer],
        *,
        about: Callable[[], Mapping[str, str]],
        proofs: Callable[[], Proofs],
    ) -> Answer:
        """Returns the answer to `request`, from disk if a proven answer is there, else from `find`.

        Args:
            request: the arguments of the request, as text.
            find: returns the answer by a search.
            about: returns the fingerprint of all that the engine's answers depend on.
            proofs: returns the proofs for the engine's step.
        """
        if self._disk.folder is None:
            return find()
        try:
            self._about = self._about or about()
        except Exception as error:  # the fingerprint reads attributes of the caller's classes, which may raise
            _log.debug("this plan is not kept: %s", error)
            return find()
        name = hashlib.sha256(json.dumps([self._about, request], sort_keys=True).encode()).hexdigest()
        known = _read(self._disk.read(name))
        if known is not None and (proven := proofs().proven(known)) is not None:
            return proven
        found = find()
        self._disk.write(name, _as_data(found))
        return found


def _as_data(answer: Answer) -> dict[str, Any]:
    fault = answer.fault
    plan = None if fault is None or fault.plan is None else json.loads(fault.plan.to_json())
    return {
        "plans": [json.loads(plan.to_json()) for plan in answer.plans],
        "fault": None
        if fault is None
        else {"message": str(fault), "arguments": fault.arguments, "peak_bytes": fault.peak_bytes, "plan": plan},
    }


def _read(data: Any) -> Answer | None:
    """Returns the answer from the data of `_as_data`; None for any other data, such as a damaged file's."""
    try:
        if data["fault"] is None:
            return Answer(tuple(ProvenPlan.from_json(json.dumps(plan)) for plan in data["plans"]))
        named = data["fault"]["arguments"]
        arguments = [
            Argument(of, name, tuple(value) if isinstance(value, list) else value) for of, name, value in named
        ]
        fault = BudgetError(data["fault"]["message"]).naming(*arguments)
        fault.peak_bytes = data["fault"]["peak_bytes"]
        fault.plan = Plan.from_json(json.dumps(data["fault"]["plan"]))
    except (KeyError, TypeError, ValueError, MemscaleError):
        return None
    return Answer(fault=fault)
