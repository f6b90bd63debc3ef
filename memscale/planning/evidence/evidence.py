"""`Evidence`: the figures, rules and decisions that a plan was returned on, as frozen data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memscale.hardware import Hardware
from memscale.simulation import Parallel, Profile


@dataclass(frozen=True)
class Figures:
    """The memory and the time of a simulated step.

    Attributes:
        taken_bytes: bytes that the device must have free: those that its caching allocator reserves, or `peak_bytes` on
            a device without a caching allocator.
        peak_bytes: the most bytes allocated at once.
        step_seconds: the time of the step.
        exposed_seconds: the part of `step_seconds` in which the device waits for copies.
    """

    taken_bytes: int
    peak_bytes: int
    step_seconds: float
    exposed_seconds: float = 0.0

    @classmethod
    def of(cls, profile: Profile) -> Figures:
        """Returns the figures of a profiled step."""
        exposed = sum(profile.exposed_seconds.get(cause, 0.0) for cause in ("input", "room", "disk"))
        return cls(profile.taken_bytes, profile.peak_bytes, profile.step_seconds or 0.0, exposed)


@dataclass(frozen=True)
class Decision:
    """A decision about one part of the model: the chosen candidate, and the next best.

    Attributes:
        path: the path of the part's module; "" is the rest of the model outside all parts, such as the loss head.
        chosen: the chosen candidate, in words.
        rule: the rule that chose the candidate, in words.
        kept_bytes, kept_bytes_before: bytes that the part keeps until backward, with the plan and without.
        seconds, seconds_before: seconds of the part's operators, forward and backward, with the plan and without.
        runner_up: the next best candidate, in words; "" if the part has one candidate only.
        runner_up_seconds: the value of `seconds` with the runner-up.
        runner_up_peak_bytes: device memory of the step with the runner-up, estimated from the costs of the candidates.
    """

    path: str
    chosen: str
    rule: str
    kept_bytes: int
    kept_bytes_before: int
    seconds: float
    seconds_before: float
    runner_up: str = ""
    runner_up_seconds: float = 0.0
    runner_up_peak_bytes: int = 0


@dataclass(frozen=True)
class Evidence:
    """The evidence for a plan: the budget, the figures of the simulated steps, and the decisions with their runners-up.

    Attributes:
        budget_bytes: bytes that the step may take.
        hardware: the device that was simulated.
        planned: the figures of the step with the plan.
        plain: the figures of the step without the plan.
        bound_seconds: a lower bound of the step's time under any plan of these candidates within the budget, by the
            sum of the candidates' costs.
        by_tier: the most bytes on each tier below the device, by the tier's name.
        trace: the rules that decided, in order, each with its numbers.
        decisions: one decision for each part, in the order of the step.
        rejected: the candidates that are impossible, each with the reason.
        notes: the assumptions of the simulation.
        simulations: the number of simulated steps.
        parallel: the parallel spec if the step is one process of several; None for a single process.
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
    parallel: Parallel | None = None

    @property
    def gap(self) -> float:
        """Returns an upper bound of the plan's slowdown against the fastest plan, as a share of the fastest's time."""
        return max(0.0, self.planned.step_seconds / self.bound_seconds - 1) if self.bound_seconds else 0.0

    def to_data(self) -> dict[str, Any]:
        """Returns the evidence as JSON data."""
        return {
            **vars(self),
            "hardware": json.loads(self.hardware.to_json()),
            "planned": vars(self.planned),
            "plain": vars(self.plain),
            "decisions": [vars(each) for each in self.decisions],
            "by_tier": dict(self.by_tier),
            "rejected": dict(self.rejected),
            "parallel": None if self.parallel is None else self.parallel.to_data(),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Evidence:
        """Returns the evidence from the data of `to_data`."""
        parallel = data.get("parallel")
        return cls(
            **{
                **data,
                "hardware": Hardware.from_json(json.dumps(data["hardware"])),
                "planned": Figures(**data["planned"]),
                "plain": Figures(**data["plain"]),
                "trace": tuple(data["trace"]),
                "decisions": tuple(Decision(**each) for each in data["decisions"]),
                "notes": tuple(data["notes"]),
                "parallel": None if parallel is None else Parallel.from_data(parallel),
            }
        )
