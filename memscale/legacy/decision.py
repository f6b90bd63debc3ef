"""What `wrap` decides for one batch, in one place: nothing, a plan that fits, or the rule where no plan can be made."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.config import Config
from memscale.core import BudgetError, batches, format_bytes, tensors
from memscale.hardware import Hardware, knows_copies
from memscale.history import Run
from memscale.legacy.huggingface import checkpointing_off, checkpointing_on
from memscale.legacy.log import LOG, say
from memscale.legacy.offloading import can_move
from memscale.optimizers import quantize_states
from memscale.planning import DecisionEngine, planned, shorthands
from memscale.simulation import MemoryProfiler, Profile

_NO_BLOCKS = "no repeated blocks: nothing in the model is worth recomputing or moving"


@dataclass(frozen=True, eq=False)
class Verdict:
    """What is to be done to a model.

    Attributes:
        plan: to install.
        profile: of the model's own step; None where it is not known.
        step_bytes: what that step takes or, without a profile, what stays on the device from step to step.
        skipped: why the plan is empty; None if it is not.
        for_all: whether it holds for every batch.
        limit_bytes: what the step may take; None where that decided nothing.
        planned_bytes: what the step takes under the plan; None where no simulation has told.
        run: of the history, where this is recorded.
    """

    plan: Plan
    profile: Profile | None
    step_bytes: int
    skipped: str | None
    for_all: bool = False
    limit_bytes: int | None = None
    planned_bytes: int | None = None
    run: Run | None = None


def decide(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    hardware: Hardware,
    *,
    moving: bool,
    budget: int | None = None,
    keeps_output: bool = True,
) -> Verdict:
    """The plan for a step of `model` with `batch`.

    Args:
        model: not transformed.
        batch: None where it is not known.
        optimizer: None where it is not known; AdamW stands for it.
        config: what is allowed.
        hardware: the model's device.
        moving: whether the caller asks for offloading by name.
        budget: the bytes that a step may take; None is what the config says of the device.
        keeps_output: whether the caller's loop keeps the output, as in `plan`.

    Warns:
        RuntimeWarning: the step is too large, and no plan could be made for it: it gets the rule.
    """
    rule = _rule(model, config, hardware, moving)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, profile, trouble = None, None, ""
    if trained and batch is not None:
        engine, profile, trouble = _simulated(model, batch, optimizer, trained, config, hardware, moving, keeps_output)
    step_bytes = profile.taken_bytes if profile is not None else resident_bytes(model, optimizer)
    if (reason := _nothing_to_do(config, hardware, moving, bool(trained), rule)) is not None:
        return Verdict(Plan(), profile, step_bytes, reason, for_all=True)
    if batch is None and config.force_optimize:
        return Verdict(rule, None, step_bytes, None, for_all=True)
    limit, said = budget, "the budget"
    if limit is None:
        limit = min(hardware.usable_bytes, int(config.target_gpu_utilization * hardware.memory_bytes))
        said = f"target_gpu_utilization={config.target_gpu_utilization}"
    if step_bytes <= limit and not config.force_optimize:
        unmeasured = "" if profile is not None else "; the first training call shows what activations take"
        reason = (
            f"the step fits: about {step_bytes} bytes of {limit} usable ({said} of {hardware.memory_bytes})"
            f"{unmeasured}; "
            "Config(force_optimize=True) transforms it all the same"
        )
        return Verdict(Plan(), profile, step_bytes, reason, limit_bytes=limit)
    if config.enable_checkpointing and checkpointing_off(model):
        try:  # what follows takes the place of the model's own checkpointing
            return decide(
                model, batch, optimizer, config, hardware, moving=moving, budget=budget, keeps_output=keeps_output
            )
        finally:
            checkpointing_on(model)
    if step_bytes <= limit:
        return Verdict(rule, profile, step_bytes, None)
    # The link's speed decides how much may move. Where it is not known, who asks for offloading gets it by the rule.
    if engine is not None and not (moving and not knows_copies(hardware)):
        try:
            return _planned(engine, profile, step_bytes, limit, said)
        except Exception as error:  # of the solver, or of a step that only the simulation provokes
            trouble = _first_line(error)
    if trouble:
        does = f"trains under wrap()'s rule {rule!r}, whose peak is not known" if rule else "stays as it is"
        warnings.warn(
            f"this {type(model).__name__} takes {format_bytes(step_bytes)} of the {format_bytes(limit)} that "
            f"{said} allows, and {does}: no plan could be made ({trouble}); make smaller batches, or write a plan for "
            "transform(model, plan)",
            RuntimeWarning,
            stacklevel=2,
        )
    return Verdict(rule, profile, step_bytes, None if rule else _NO_BLOCKS)


def _planned(engine: DecisionEngine, profile: Profile | None, step_bytes: int, limit: int, said: str) -> Verdict:
    plan: Plan
    planned_bytes: int | None
    try:
        plan = proven = engine.plan(limit)
        planned_bytes = proven.evidence.planned.taken_bytes
    except BudgetError as error:
        # Training may still go through: other tensors may be smaller than thought, or the target is below the device.
        plan, planned_bytes = error.plan or Plan(), error.peak_bytes
        LOG.warning("%s; the model runs under the smallest plan, above %s", error, said)
    if not plan:
        reason = "no transform that the config allows lowers the peak of the step"
        return Verdict(plan, profile, step_bytes, reason)
    return Verdict(plan, profile, step_bytes, None, limit_bytes=limit, planned_bytes=planned_bytes)


def _simulated(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    trained: list[nn.Parameter],
    config: Config,
    hardware: Hardware,
    moving: bool,
    keeps_output: bool,
) -> tuple[DecisionEngine | None, Profile | None, str]:
    """The engine that plans the step, and the step's profile; or what kept either of them from being made."""
    trains = optimizer or torch.optim.AdamW(trained)
    trouble = "use_static_profiling=False"
    if config.use_static_profiling:
        # Another device steps to other bits than an accelerator, so that states move where the caller has said so.
        stepping = ("step_in_groups", "offload_states") if moving else ("step_in_groups",)
        allowed = config
        if moving:
            allowed = dataclasses.replace(config, enable_offloading=True)
        elif "offload" in config.eligible() and knows_copies(hardware) and not can_move(model, config):
            allowed = dataclasses.replace(config, enable_offloading=False, async_offload=False)
        try:
            engine = DecisionEngine(
                model,
                batch,
                optimizer=trains,
                loss=any_loss,
                config=allowed,
                hardware=hardware,
                keeps_output=keeps_output,
                stepping=() if optimizer is None else stepping,
                streams=False,  # taken off, the parameters would have to come back, and with them optimizer states
            )
            return engine, engine.plain, ""
        except Exception as error:  # wrap goes on with what it knows: the step that really trains may be another one
            trouble = _first_line(error)
            say(config, f"the step cannot be planned: {trouble}")
    try:
        profiler = MemoryProfiler(
            model, trains, loss=any_loss, hardware=hardware, config=config, keeps_output=keeps_output
        )
        return None, profiler.profile(batch), trouble
    except Exception as error:  # the model's own: what follows is said below
        trouble = _first_line(error)
        LOG.warning(
            "the step cannot be profiled: %s; what stays from step to step decides, and activations may not fit. "
            "Give a sample_input that the model trains on, or write a plan for transform(model, plan)",
            trouble,
        )
        return None, None, trouble


def _rule(model: nn.Module, config: Config, hardware: Hardware, moving: bool) -> Plan:
    """What is done without a simulation: to the repeated blocks, and what else the caller asks for by name."""
    named = {
        "checkpoint": config.enable_checkpointing,
        "tile": config.enable_tiling and "enable_tiling" in config.given,
        "cast": config.use_mixed_precision,
        "offload": moving,
    }
    rules = shorthands(model, hardware)
    found = planned({name: rules[name] for name, wanted in named.items() if wanted and name in rules})
    if not config.use_8bit_optimizer:
        return found
    return Plan([*((rule.pattern, rule.transform) for rule in found), ("", quantize_states())])


def _nothing_to_do(config: Config, hardware: Hardware, moving: bool, trains: bool, rule: Plan) -> str | None:
    usable = config.eligible()
    if not moving and (hardware.device_type == "cpu" or not knows_copies(hardware)):
        usable -= {"offload"}  # the tier below a host is its disk, which is for those who ask for it
    if not usable:
        return (
            "enable_checkpointing is False and nothing is offloaded: no transform is left; async_offload=True adds one"
        )
    if not trains:
        return "nothing to train: no parameter requires a gradient"
    return _NO_BLOCKS if config.force_optimize and not rule else None


def hardware_of(model: nn.Module) -> Hardware:
    """The device that `model` is on; the one at hand for a model on ``meta``."""
    parameter = next(model.parameters(), None)
    return Hardware.detect(None if parameter is None or parameter.is_meta else parameter.device)


def any_loss(output: Any, _: Any) -> torch.Tensor:
    """A loss for a model whose loss is not known: the output's own, else a sum that needs all of the output."""
    own = batches.own_loss(output)
    if isinstance(own, torch.Tensor) and own.numel() == 1:
        return own
    return torch.stack([tensor.sum().real.float() for tensor in tensors(output) if tensor.requires_grad]).sum()


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """What stays on the device from step to step: parameters, buffers, gradients, the optimizer's states.

    Those of an optimizer that has not stepped yet count as two Adam moments.
    """
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    states = tensors([dict(state) for state in optimizer.state.values()]) if optimizer is not None else []
    state_bytes = sum(tensor.nbytes for tensor in states) or 2 * gradient_bytes
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) + gradient_bytes + state_bytes


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
