"""`OOMPrediction`: frozen data that says whether a training step fits, and how much each change would free."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from memscale.algebra import Plan
from memscale.core import (
    Argument,
    ConfigError,
    Document,
    format_bytes,
    format_seconds,
    format_unlike,
    respelled,
    wrapped,
)
from memscale.simulation import Profile

_DOCUMENT = Document("prediction", version=1, writer="OOMPrediction.to_json()", error=ConfigError)
# Memory categories in a printed prediction. By choice.
_ROWS = 5


class OOMRisk(enum.IntEnum):
    """A level of risk, by the share of the capacity that a step's peak takes; risks are ordered.

    ========  =================================  =====================================================================
    LOW       peak at most 85% of the capacity
    MODERATE  above 85%, at most 95%             a longer batch has little room
    HIGH      above 95%, at most 100%            the margin is less than the 5% error of a prediction on CUDA
    CRITICAL  above 100%                         the step does not fit
    ========  =================================  =====================================================================

    >>> OOMRisk.of(85, 100), OOMRisk.of(86, 100), OOMRisk.of(96, 100), OOMRisk.of(101, 100)
    (<OOMRisk.LOW: 0>, <OOMRisk.MODERATE: 1>, <OOMRisk.HIGH: 2>, <OOMRisk.CRITICAL: 3>)
    >>> OOMRisk.HIGH > OOMRisk.LOW
    True
    """

    LOW = 0
    MODERATE = 1
    HIGH = 2
    CRITICAL = 3

    @classmethod
    def of(cls, peak_bytes: int, capacity_bytes: int) -> OOMRisk:
        """Returns the risk of a peak on a device with a capacity of `capacity_bytes`."""
        percents = ((85, cls.LOW), (95, cls.MODERATE), (100, cls.HIGH))
        return next((risk for percent, risk in percents if 100 * peak_bytes <= percent * capacity_bytes), cls.CRITICAL)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Recommendation:
    """A change of the step that lowers its peak, with figures from a simulation of the changed step.

    Attributes:
        action: the change, as text.
        freed_bytes: the bytes by which the peak falls, more than 0.
        peak_bytes: the peak of the changed step.
        plan: the whole plan to give to `transform`, with the rules that the predictor had; None to keep the plan.
        optimizer_options: arguments to build the optimizer with, such as ``{"fused": True}``.
        parts: the number of equal parts to cut the batch into; the loop accumulates their gradients.
        step_seconds: the estimated time of the changed step; None if the hardware's rates are unknown.
        arguments: arguments of `plan`, `profile` and the optimizer to write in addition to the plan.
    """

    action: str
    freed_bytes: int
    peak_bytes: int
    plan: Plan | None = None
    optimizer_options: Mapping[str, bool] = field(default_factory=dict)
    parts: int = 1
    step_seconds: float | None = None
    arguments: tuple[Argument, ...] = ()


@dataclass(frozen=True, repr=False)
class OOMPrediction:
    """A prediction whether a step fits. Prints as a short report; ``print(prediction.profile)`` has the whole table.

    Attributes:
        profile: the memory profile of the step.
        capacity_bytes: bytes that the step may take.
        recommendations: changes that lower the peak, in descending order of `freed_bytes`; empty without a search.
        notes: changes that could not be simulated, and why.

    >>> import torch, memscale as ms
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    >>> box = ms.Hardware(name="box", device_type="cpu", memory_bytes=100_000)
    >>> prediction = ms.OOMPredictor(model, loss=lambda y, _: y.mean(), hardware=box).predict(torch.ones(8, 64))
    >>> prediction
    OOMPrediction(risk=LOW, peak_bytes=37936, capacity_bytes=100000)
    >>> prediction.fits, prediction.headroom_bytes
    (True, 62064)
    >>> OOMPrediction.from_json(prediction.to_json()) == prediction
    True
    """

    profile: Profile
    capacity_bytes: int
    recommendations: tuple[Recommendation, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Returns the peak bytes of device memory that the step takes; see `Profile.taken_bytes`."""
        return self.profile.taken_bytes

    @property
    def headroom_bytes(self) -> int:
        """Returns the capacity less the peak, in bytes; below 0 if the step does not fit."""
        return self.capacity_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        """Returns whether the peak is at most the capacity."""
        return self.headroom_bytes >= 0

    @property
    def risk(self) -> OOMRisk:
        """Returns the risk level of the peak; see `OOMRisk`."""
        return OOMRisk.of(self.peak_bytes, self.capacity_bytes)

    @property
    def message(self) -> str:
        """Returns the verdict as a sentence: whether the step fits, its peak and the capacity."""
        peak, capacity = format_unlike(self.peak_bytes, self.capacity_bytes)
        left = format_bytes(abs(self.headroom_bytes))
        device = self.profile.hardware.name
        steps = any(name == "optimizer" for name, _ in self.profile.timeline.phases)
        step = "the step" if steps else "the step, without an optimizer,"
        if not self.fits:
            return f"{step} does not fit: its peak of {peak} is {left} above the {capacity} of {device}"
        return f"{step} fits: its peak of {peak} leaves {left} of the {capacity} of {device}"

    def to_json(self) -> str:
        """Returns the prediction as JSON text with a schema version, derived values (`risk`, `fits`, ...) included."""
        recommendations = [
            {**vars(each), "plan": None if each.plan is None else json.loads(each.plan.to_json())}
            for each in self.recommendations
        ]
        derived = ("peak_bytes", "headroom_bytes", "fits", "message")
        return _DOCUMENT.write(
            {
                "risk": str(self.risk),
                **{name: getattr(self, name) for name in derived},
                "capacity_bytes": self.capacity_bytes,
                "recommendations": recommendations,
                "notes": self.notes,
                "profile": json.loads(self.profile.to_json()),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> OOMPrediction:
        """Returns the prediction that `to_json` wrote.

        Raises:
            ConfigError: the text is not JSON, is of another schema version, or lacks a field.
        """
        data = _DOCUMENT.read(text)
        with _DOCUMENT.parts():
            return cls(
                Profile.from_json(json.dumps(data["profile"])),
                data["capacity_bytes"],
                tuple(_recommendation(each) for each in data["recommendations"]),
                tuple(data["notes"]),
            )

    def __repr__(self) -> str:
        return f"OOMPrediction(risk={self.risk}, peak_bytes={self.peak_bytes}, capacity_bytes={self.capacity_bytes})"

    def __str__(self) -> str:
        return wrapped("\n".join([self.verdict(), *filter(None, [self.advice()])]))

    def verdict(self) -> str:
        """Returns the first part of ``str(prediction)``: whether the step fits, and the categories at the peak."""
        profile = self.profile
        lines = [f"{self.risk}: {self.message}"]
        if profile.reserved_peak_bytes is not None:
            lines.append(f"  {format_bytes(profile.peak_bytes)} of it in tensors, the rest kept by the allocator")
        parts = sorted(profile.by_category.items(), key=lambda item: -item[1])[:_ROWS]
        lines.append(f"at the peak, {profile.moment}")
        lines += [f"  {name:<16} {format_bytes(nbytes):>10}" for name, nbytes in parts if nbytes]
        return "\n".join(lines)

    def advice(self, spell: Callable[[Argument], str] = str) -> str:
        """Returns the second part of ``str(prediction)``: the recommendations and the notes, as lines of text.

        Args:
            spell: writes an argument that a recommendation names; as Python by default.
        """
        lines, seconds = [], self.profile.step_seconds
        if self.recommendations:
            timed = [each for each in self.recommendations if self._fits(each) and each.step_seconds is not None]
            fastest = min(timed, key=lambda each: each.step_seconds or 0.0) if len(timed) > 1 else None
            base = f" (step times are multiples of {format_seconds(seconds)})" if seconds else ""
            lines = [
                f"what would free memory{base}",
                *(f"  {self._line(each, spell)}{' (fastest)' * (each is fastest)}" for each in self.recommendations),
            ]
        return "\n".join([*lines, *(f"note: {note}" for note in (*self.profile.notes, *self.notes))])

    def _fits(self, each: Recommendation) -> bool:
        return each.peak_bytes <= self.capacity_bytes

    def _line(self, each: Recommendation, spell: Callable[[Argument], str]) -> str:
        action = respelled(each.action, each.arguments, spell)
        verdict = "fits" if self._fits(each) else "does not fit"
        before, after = self.profile.step_seconds, each.step_seconds
        pace = f", step time × {after / before:.2f}" if before and after else ""
        return f"{format_bytes(each.freed_bytes):>8}  {action}: peak {format_bytes(each.peak_bytes)}, {verdict}{pace}"


def _recommendation(data: dict[str, Any]) -> Recommendation:
    plan = data["plan"]
    arguments = tuple(
        Argument(of, name, tuple(value) if isinstance(value, list) else value)
        for of, name, value in data.get("arguments", ())
    )
    plan = None if plan is None else Plan.from_json(json.dumps(plan))
    return Recommendation(**{**data, "plan": plan, "arguments": arguments})
