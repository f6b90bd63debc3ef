"""`StepComparison`: measures a planned step, compares it with the prediction, and passes the figures to the history."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from memscale.core import device_type, format_bytes, tensors
from memscale.history import keep_measured
from memscale.legacy.decide import Verdict
from memscale.legacy.log import say
from memscale.legacy.terms import Terms
from memscale.optimizers import TransformedOptimizer
from memscale.planning import ProvenPlan

_OFF = 0.05  # the largest relative error of a prediction without a warning
_LEAST_BYTES = 1 << 20  # and the largest absolute one; smaller errors are the allocator's granularity


class StepComparison:
    """Compares once, after the first step that begins with optimizer states, which is the second.

    Args:
        model: the model, before its first step under the plan.
        verdict: the verdict in force.
        terms: say whether and where to log, and in which history the measured figures are kept.

    Attributes:
        peak_bytes: the peak of the device's memory in that step; None until measured, and without CUDA.
        peak_error: the error of the predicted peak as a share of the real one; None until measured.
        text: the comparison as text; empty until measured.
    """

    def __init__(self, model: nn.Module, verdict: Verdict, terms: Terms) -> None:
        self.peak_bytes: int | None = None
        self.peak_error: float | None = None
        self.text = ""
        self._config, self._run, self._history = terms.config, verdict.run, terms.history
        self._predicted: dict[str, int] = {}
        if terms.config.enable_logging and verdict.profile is not None and isinstance(verdict.plan, ProvenPlan):
            live = verdict.profile.timeline.live_bytes
            roles = ("parameter", "buffer", "gradient", "optimizer state")
            self._predicted = {role: int(live[role].max()) for role in roles if role in live}
            self._predicted["peak"] = verdict.plan.evidence.planned.peak_bytes
        self._first: weakref.ref[torch.optim.Optimizer] | None = None  # its steps are those of the loop
        self._ends: list[float] = []  # the times in seconds at which steps ended
        self._former_peak_bytes = _peak_bytes(model)

    def after_step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, own: Iterable[torch.optim.Optimizer]
    ) -> bool:
        """Called after each step of one of the model's `own` optimizers, `optimizer`. Returns whether it was measured.

        Notes the time of the first step of the loop, and measures and compares the second.
        """
        self._first = self._first or weakref.ref(optimizer)
        if self._first() is not optimizer or len(self._ends) == 2:
            return False
        self._ends.append(self._now(model))
        if len(self._ends) < 2:
            return False
        found = _resident(model, own) if self._predicted or self._run is not None else {}
        peak = _peak_bytes(model)
        if peak > self._former_peak_bytes:  # otherwise an earlier moment of the process had the highest peak
            found["peak"] = self.peak_bytes = peak
            self.peak_error = self._predicted["peak"] / peak - 1 if self._predicted else None
        if self._predicted:
            self._report(found)
        if self._run is not None and self._history is not None:
            measured = {f"{name.replace(' ', '_')}_bytes": float(nbytes) for name, nbytes in found.items()}
            keep_measured(self._run, self._history, {**measured, "step_seconds": self._ends[1] - self._ends[0]})
        return True

    def _now(self, model: nn.Module) -> float:
        """Returns the time in seconds, after the device has finished the step if the time is recorded."""
        if self._run is not None and (device := _cuda_of(model)) is not None:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def _report(self, found: dict[str, int]) -> None:
        rows = [(name, self._predicted[name], nbytes) for name, nbytes in found.items() if name in self._predicted]
        off = [row for row in rows if abs(row[2] - row[1]) > max(_OFF * row[1], _LEAST_BYTES)]
        peak = f"peak {format_bytes(found['peak'])}" if "peak" in found else "the peak is measured on CUDA only"
        if not off:
            worst = max((abs(real - thought) / max(thought, 1) for _, thought, real in rows if thought), default=0.0)
            named = ", ".join(row[0] for row in rows)
            self.text = f"the real step's bytes ({named}) are within {worst:.1%} of the prediction; {peak}"
            say(self._config, self.text)
            return
        lines = [f"the real step differs from the prediction; {peak}", f"  {'':<16} {'predicted':>10} {'real':>10}"]
        lines += [f"  {name:<16} {format_bytes(thought):>10} {format_bytes(real):>10}" for name, thought, real in rows]
        lines.append("  wrap assumed a loss and an optimizer; optimize(model, optimizer) uses yours")
        self.text = "\n".join(lines)
        say(self._config, self.text, logging.WARNING)


def _resident(model: nn.Module, own: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
    """Returns the bytes on the device between steps, by role."""
    parameters, states, below = list(model.parameters()), [], set()
    for optimizer in own:
        states += [dict(optimizer.state[parameter]) for parameter in parameters if parameter in optimizer.state]
        below |= {id(tensor) for tensor in optimizer.below()} if isinstance(optimizer, TransformedOptimizer) else set()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # The optimizer may have freed gradients, and sparse ones are planned as dense ones.
    are_planned = gradients and not any(gradient.is_sparse for gradient in gradients)
    return {
        "parameter": _nbytes(parameters),
        "buffer": _nbytes(model.buffers()),
        **({"gradient": _nbytes(gradients)} if are_planned else {}),
        "optimizer state": _nbytes(tensor for tensor in tensors(states) if id(tensor) not in below),
    }


def _nbytes(found: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in found}
    return sum(storages.values())


def _peak_bytes(model: nn.Module) -> int:
    device = _cuda_of(model)
    return 0 if device is None else torch.cuda.max_memory_allocated(device)


def _cuda_of(model: nn.Module) -> torch.device | None:
    first = next(model.parameters(), None)
    return first.device if first is not None and device_type(first) == "cuda" else None
