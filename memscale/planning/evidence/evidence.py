"""`Evidence`: why a plan was returned, as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memscale.hardware import Hardware
from memscale.simulation import Parallel, Profile


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

    @classmethod
    def of(cls, profile: Profile) -> Figures:
        """The figures of the step that `profile` is about."""
        exposed = sum(profile.exposed_seconds.get(cause, 0.0) for cause in ("input", "room", "disk"))
        return cls(profile.taken_bytes, profile.peak_bytes, profile.step_seconds or 0.0, exposed)


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
        runner_up_seconds: what `seconds` would be with it.
        runner_up_peak_bytes: what the step would take with it, by what the parts' costs add up to.
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
        parallel: how the step is one process's of several; None if it is not.
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
            "parallel": None if self.parallel is None else self.parallel.to_data(),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Evidence:
        """The evidence that `to_data` made."""
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
