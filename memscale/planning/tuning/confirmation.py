"""What a real step under a plan takes, where the model and its device are there: nothing is left of it afterwards."""

from __future__ import annotations

from typing import Any

import torch

from memscale.config import Config
from memscale.core import MemscaleError, available_host_bytes, batches, format_unlike, pytrees
from memscale.hardware import Hardware
from memscale.planning.evidence.proven import ProvenPlan
from memscale.planning.tuning.tuning import Confirmation
from memscale.simulation import Target, TrainingStep, profile_of

# Of what is free, for what the simulation does not count: a process's own memory, the copies that are put back.
_SHARE = 0.8


def confirmed(step: TrainingStep, batch: Any, plan: ProvenPlan, hardware: Hardware) -> tuple[Confirmation | None, str]:
    """Two real steps, of which the first makes the optimizer's states; or None, and why there were none.

    No step is begun that what is free has no room for.
    """
    assert step.module is not None, "a function is not tuned"
    parameter = next(step.module.parameters())
    if parameter.is_meta:
        return None, "not confirmed by a real step: the model is on meta"
    if parameter.device.type != hardware.device_type:
        return None, f"not confirmed by a real step: the model is on {parameter.device}, not on {hardware.name}"
    needed = plan.evidence.planned.taken_bytes
    free_bytes = _free_bytes(parameter.device)
    if free_bytes is not None and needed > _SHARE * free_bytes:
        takes, free = format_unlike(needed, free_bytes)
        return None, f"not confirmed by a real step: it takes {takes}, and {free} are free"
    config = Config(use_static_profiling=False, warmup_steps=0, enable_logging=False)
    try:
        real = profile_of(step.on(_real(batch, parameter.device)), plan, Target.of(hardware), config)
    except (MemscaleError, RuntimeError) as error:  # PyTorch's error for too little memory is a RuntimeError
        return None, f"not confirmed by a real step, which failed: {str(error).splitlines()[0]}"
    # What other parts of the program hold is no part of the step.
    peak_bytes = max(real.first_step_peak_bytes, real.peak_bytes) - real.by_category.get("other", 0)
    return Confirmation(peak_bytes, real.step_seconds or 0.0), ""


def _real(batch: Any, device: torch.device) -> Any:
    """The batch with tensors of zeros, and of True, where it has some on ``meta``: a token, a label, an open mask."""
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
