"""`OOMPrediction`: whether a training step fits on a device, and what would free how much, as frozen data."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memscale.algebra import Plan
from memscale.core import Argument, ConfigError, Document, format_bytes, format_seconds, format_unlike, wrapped
from memscale.simulation import Profile

_DOCUMENT = Document("prediction", version=1, writer="OOMPrediction.to_json()", error=ConfigError)
_ROWS = 5  # categories that a prediction prints


class OOMRisk(enum.IntEnum):
    """How close a step's peak comes to the capacity; ordered, so that risks compare.

    ========  =================================  =====================================================================
    LOW       peak at most 85% of the capacity
    MODERATE  above 85%, at most 95%             there is little room for a longer batch
    HIGH      above 95%, at most 100%            it fits by less than the 5% by which a prediction may be off on CUDA
    CRITICAL  above 100%                         it does not fit
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
        """The risk of a peak on a device that gives `capacity_bytes`."""
        percents = ((85, cls.LOW), (95, cls.MODERATE), (100, cls.HIGH))
        return next((risk for percent, risk in percents if 100 * peak_bytes <= percent * capacity_bytes), cls.CRITICAL)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Recommendation:
    """One change that lowers the peak, as the simulation of the changed step found.

    Attributes:
        action: what to do.
        freed_bytes: by how much the peak falls, more than 0.
        peak_bytes: the peak after it.
        plan: the whole plan to give to `transform`, with the rules that the predictor had; None if it stays.
        optimizer_options: what to build the optimizer with, such as ``{"fused": True}``.
        parts: into how many equal parts to cut the batch, their gradients accumulated.
        step_seconds: the estimated time of the step after it, None if the hardware's speed is not known.
        arguments: of `plan`, `profile` and the optimizer, that the caller has to write beside the plan.
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
    """Whether a step fits. Prints as a short report; the whole table is ``profile``'s.

    Attributes:
        profile: the memory of the step, with what is held at its peak.
        capacity_bytes: what the step may take.
        recommendations: changes that free something, the one that frees most first; empty when none was asked for.
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
        """What the step takes of the device at its most; see `Profile.taken_bytes`."""
        return self.profile.taken_bytes

    @property
    def headroom_bytes(self) -> int:
        """What is left of the capacity at the peak; below 0 if the step does not fit."""
        return self.capacity_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the capacity."""
        return self.headroom_bytes >= 0

    @property
    def risk(self) -> OOMRisk:
        """How close the peak comes to the capacity."""
        return OOMRisk.of(self.peak_bytes, self.capacity_bytes)

    @property
    def message(self) -> str:
        """The verdict in a sentence."""
        peak, capacity = format_unlike(self.peak_bytes, self.capacity_bytes)
        left = format_bytes(abs(self.headroom_bytes))
        device = self.profile.hardware.name
        steps = any(name == "optimizer" for name, _ in self.profile.timeline.phases)
        step = "the step" if steps else "the step, without an optimizer,"
        if not self.fits:
            return f"{step} does not fit: its peak of {peak} is {left} above the {capacity} of {device}"
        return f"{step} fits: its peak of {peak} leaves {left} of the {capacity} of {device}"

    def to_json(self) -> str:
        """The prediction as JSON text, with a schema version; what is derived (`risk`, `fits`, ...) is in it too."""
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
        """The prediction that `to_json` wrote.

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
        """Whether the step fits, and what is held at its peak, as lines of text: the first part of its ``str``."""
        profile = self.profile
        lines = [f"{self.risk}: {self.message}"]
        if profile.reserved_peak_bytes is not None:
            lines.append(f"  {format_bytes(profile.peak_bytes)} of it in tensors, the rest kept by the allocator")
        parts = sorted(profile.by_category.items(), key=lambda item: -item[1])[:_ROWS]
        lines.append(f"at the peak, {profile.moment}")
        lines += [f"  {name:<16} {format_bytes(nbytes):>10}" for name, nbytes in parts if nbytes]
        return "\n".join(lines)

    def advice(self) -> str:
        """What would free memory, and the notes, as lines of text: the second part of its ``str``."""
        lines, seconds = [], self.profile.step_seconds
        if self.recommendations:
            timed = [each for each in self.recommendations if self._fits(each) and each.step_seconds is not None]
            fastest = min(timed, key=lambda each: each.step_seconds or 0.0) if len(timed) > 1 else None
            base = f" (step times are multiples of {format_seconds(seconds)})" if seconds else ""
            lines = [
                f"what would free memory{base}",
                *(f"  {self._line(each)}{' (fastest)' * (each is fastest)}" for each in self.recommendations),
            ]
        return "\n".join([*lines, *(f"note: {note}" for note in (*self.profile.notes, *self.notes))])

    def _fits(self, each: Recommendation) -> bool:
        return each.peak_bytes <= self.capacity_bytes

    def _line(self, each: Recommendation) -> str:
        verdict = "fits" if self._fits(each) else "does not fit"
        before, after = self.profile.step_seconds, each.step_seconds
        pace = f", step time × {after / before:.2f}" if before and after else ""
        return (
            f"{format_bytes(each.freed_bytes):>8}  {each.action}: peak {format_bytes(each.peak_bytes)}, {verdict}{pace}"
        )


def _recommendation(data: dict[str, Any]) -> Recommendation:
    plan = data["plan"]
    arguments = tuple(
        Argument(of, name, tuple(value) if isinstance(value, list) else value)
        for of, name, value in data.get("arguments", ())
    )
    plan = None if plan is None else Plan.from_json(json.dumps(plan))
    return Recommendation(**{**data, "plan": plan, "arguments": arguments})
