"""`Reality`: what a planned step takes in truth, next to what was predicted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.config import Config
from memscale.core import device_type, format_bytes, tensors
from memscale.legacy.log import say
from memscale.optimizers import TransformedOptimizer
from memscale.planning import ProvenPlan
from memscale.simulation import Profile

_OFF = 0.05  # the share by which a prediction may be off without a warning
_LEAST_BYTES = 1 << 20  # and the bytes: less is the allocator's granularity


class Reality:
    """Compares once, after the first step that begins with optimizer states.

    Args:
        predicted: bytes by what they are for; empty where that is not to be told.
        config: says whether and where to log.
        keep: gets what was found, by the names of a run's measurements; None where nothing is recorded.
    """

    def __init__(
        self, predicted: dict[str, int], config: Config, keep: Callable[[dict[str, float]], None] | None
    ) -> None:
        self.predicted = predicted
        self.config = config
        self.keep = keep
        self._steps = 0
        self._former_peak_bytes = 0
        self._began = 0.0
        self.peak_error: float | None = None  # as a share of the real peak, once that is known

    @classmethod
    def of(
        cls, plan: Plan, profile: Profile | None, config: Config, keep: Callable[[dict[str, float]], None] | None
    ) -> Reality | None:
        """For a plan with evidence, or what is recorded; None where nobody wants to know."""
        if not isinstance(plan, ProvenPlan) or profile is None or not config.enable_logging:
            return None if keep is None else cls({}, config, keep)
        live = profile.timeline.live_bytes
        names = ("parameter", "buffer", "gradient", "optimizer state")
        predicted = {name: int(live[name].max()) for name in names if name in live}
        return cls({**predicted, "peak": plan.evidence.planned.peak_bytes}, config, keep)

    def begin(self, model: nn.Module) -> None:
        """Note what was reached before the first step under the plan."""
        self._former_peak_bytes = _peak_bytes(model)

    def after_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Compare after a step of `optimizer`; whether that is done."""
        self._steps += 1
        if self._steps < 2:
            self._began = self._now(model)
            return False
        seconds = self._now(model) - self._began
        found = _resident(model, optimizer)
        peak = _peak_bytes(model)
        if peak > self._former_peak_bytes:  # else it was reached by something earlier, and says nothing of this step
            found["peak"] = peak
            self.peak_error = self.predicted["peak"] / peak - 1 if self.predicted else None
        if self.predicted:
            self._report(found)
        if self.keep is not None:
            self.keep(
                {f"{name.replace(' ', '_')}_bytes": nbytes for name, nbytes in found.items()}
                | {"step_seconds": seconds}
            )
        return True

    def _now(self, model: nn.Module) -> float:
        """The clock once the device is done with the step: waited for where that is recorded only."""
        if self.keep is None:
            return 0.0
        first = next(model.parameters(), None)
        if first is not None and device_type(first) == "cuda":
            torch.cuda.synchronize(first.device)
        return time.perf_counter()

    def _report(self, found: dict[str, int]) -> None:
        rows = [(name, self.predicted[name], nbytes) for name, nbytes in found.items() if name in self.predicted]
        off = [row for row in rows if abs(row[2] - row[1]) > max(_OFF * row[1], _LEAST_BYTES)]
        worst = max((abs(real - thought) / max(thought, 1) for _, thought, real in rows if thought), default=0.0)
        peak = f"peak {format_bytes(found['peak'])}" if "peak" in found else "the peak is not measured here"
        if not off:
            say(self.config, f"the step is as predicted, to {worst:.1%} in {len(rows)} categories; {peak}")
            return
        lines = [f"the step is not as predicted; {peak}", f"  {'':<16} {'predicted':>10} {'real':>10}"]
        lines += [f"  {name:<16} {format_bytes(thought):>10} {format_bytes(real):>10}" for name, thought, real in rows]
        lines.append(
            "  the loss and the optimizer that wrap assumed may be others: optimize(model, optimizer) knows yours"
        )
        say(self.config, "\n".join(lines), logging.WARNING)


def _resident(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    parameters = list(model.parameters())
    own = set(map(id, parameters))
    states = [dict(state) for parameter, state in optimizer.state.items() if id(parameter) in own]
    below = {id(tensor) for tensor in optimizer.below()} if isinstance(optimizer, TransformedOptimizer) else set()
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {
        "parameter": _nbytes(parameters),
        "buffer": _nbytes(list(model.buffers())),
        **({"gradient": _nbytes(gradients)} if gradients else {}),  # an optimizer may have dropped them by now
        "optimizer state": _nbytes(tensor for tensor in tensors(states) if id(tensor) not in below),
    }


def _nbytes(found: Iterable[torch.Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in found}
    return sum(storages.values())


def _peak_bytes(model: nn.Module) -> int:
    first = next(model.parameters(), None)
    if first is None or device_type(first) != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(first.device)
