"""Confirms a plan by two real steps if the model is on the plan's device; the model's state is restored afterwards."""

from __future__ import annotations

from typing import Any

import torch

from memscale.config import Config
from memscale.core import MemscaleError, available_host_bytes, batches, format_unlike, pytrees
from memscale.hardware import Hardware
from memscale.planning.evidence.proven import ProvenPlan
from memscale.planning.tuning.tuning import Confirmation
from memscale.simulation import Target, TrainingStep, profile_of

# Share of the free bytes that a real step may take. The rest is for bytes outside the simulation: memory of the process
# itself, and the copies from which the model's state is restored. Assumed.
_SHARE = 0.8


def confirmed(step: TrainingStep, batch: Any, plan: ProvenPlan, hardware: Hardware) -> tuple[Confirmation | None, str]:
    """Returns the measurement of two real steps and ""; or None and the reason why no real step was measured.

    The first step creates the optimizer's states. Both steps run only if the plan needs at most `_SHARE` of the free
    bytes.

    Args:
        step: the training step, without its batch.
        batch: the batch; its tensors on ``meta`` are replaced by real ones.
        plan: the plan to confirm, with the simulated bytes as evidence.
        hardware: the device of the plan.
    """
    assert step.module is not None, "a function is not tuned"
    parameter = next(step.module.parameters())
    if parameter.is_meta:
        return None, "simulated only, since the model is on meta, without weights"
    if parameter.device.type != hardware.device_type:
        return None, f"simulated only, since the model is on {parameter.device}, not on {hardware.name}"
    needed = plan.evidence.planned.taken_bytes
    free_bytes = _free_bytes(parameter.device)
    if free_bytes is not None and needed > _SHARE * free_bytes:
        takes, free = format_unlike(needed, free_bytes)
        return None, f"simulated only: the step takes {takes}, and {free} are free"
    config = Config(use_static_profiling=False, warmup_steps=0, enable_logging=False)
    try:
        real = profile_of(step.on(_real(batch, parameter.device)), plan, Target.of(hardware), config)
    except (MemscaleError, RuntimeError) as error:  # PyTorch's error for too little memory is a RuntimeError
        return None, f"simulated only, since a real step failed: {str(error).splitlines()[0]}"
    # Category "other" is memory of other parts of the program: subtract it from the step's peak.
    peak_bytes = max(real.first_step_peak_bytes, real.peak_bytes) - real.by_category.get("other", 0)
    return Confirmation(peak_bytes, real.step_seconds or 0.0), ""


def _real(batch: Any, device: torch.device) -> Any:
    """Returns the batch with real tensors in place of ``meta`` ones: zeros (which are valid tokens) or True."""
    leaves, spec = batches.flatten(batch)
    found = [
        torch.full(leaf.shape, leaf.dtype == torch.bool, dtype=leaf.dtype, device=device)
        if isinstance(leaf, torch.Tensor) and leaf.is_meta
        else leaf
        for leaf in leaves
    ]
    return pytrees.unflatten(spec, found)


def _free_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return available_host_bytes()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    cached: int = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free_bytes + cached
