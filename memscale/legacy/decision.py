"""What `wrap` decides for one batch: nothing, a plan that fits, or the rule where no step can be simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.config import Config
from memscale.core import BudgetError, batches, tensors
from memscale.hardware import Hardware, knows_copies
from memscale.history import Run
from memscale.legacy.huggingface import checkpointing_off, checkpointing_on
from memscale.legacy.log import LOG, say
from memscale.legacy.offloading import can_move
from memscale.optimizers import quantize_states
from memscale.planning import DecisionEngine, planned, shorthands
from memscale.simulation import MemoryProfiler, Profile


@dataclass(frozen=True, eq=False)
class Verdict:
    """What is to be done to a model.

    Attributes:
        plan: to install.
        profile: of the model's own step; None where it is not known.
        step_bytes: what that step takes or, without a profile, what stays on the device from step to step.
        skipped: why the plan is empty; None if it is not.
        for_all: whether it holds for every batch.
        run: of the history, where this is recorded.
    """

    plan: Plan
    profile: Profile | None
    step_bytes: int
    skipped: str | None
    for_all: bool = False
    run: Run | None = None


def decide(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    config: Config,
    hardware: Hardware,
    *,
    moving: bool,
) -> Verdict:
    """The plan for a step of `model` with `batch`.

    Args:
        model: not transformed.
        batch: None where it is not known.
        optimizer: None where it is not known; AdamW stands for it.
        config: what is allowed.
        hardware: the model's device.
        moving: whether the caller asks for offloading by name.
    """
    rule = _rule(model, config, hardware, moving)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, profile = None, None
    hopeless = _nothing_to_do(config, hardware, moving, bool(trained), rule)
    if trained and batch is not None:
        stepping = _stepping(optimizer, config)
        trains = optimizer or torch.optim.AdamW(trained)
        engine, profile = _simulated(model, batch, trains, config, hardware, moving, stepping)
    step_bytes = profile.taken_bytes if profile is not None else resident_bytes(model, optimizer)
    if hopeless is not None:
        return Verdict(Plan(), profile, step_bytes, hopeless, for_all=True)
    if batch is None and config.force_optimize:
        return Verdict(rule, None, step_bytes, None, for_all=True)
    limit = min(hardware.usable_bytes, int(config.target_gpu_utilization * hardware.memory_bytes))
    if step_bytes <= limit and not config.force_optimize:
        return Verdict(Plan(), profile, step_bytes, _fits(step_bytes, limit, config, hardware, profile))
    if config.enable_checkpointing and checkpointing_off(model):
        try:  # what follows takes the place of the model's own checkpointing
            return decide(model, batch, optimizer, config, hardware, moving=moving)
        finally:
            checkpointing_on(model)
    if step_bytes <= limit:
        return Verdict(rule, profile, step_bytes, None)
    # The link's speed decides how much may move. Where it is not known, who asks for offloading gets it by the rule.
    if engine is not None and not (moving and not knows_copies(hardware)):
        try:
            return _planned(engine, profile, step_bytes, limit, config)
        except Exception as error:  # of the solver, or of a step that only the simulation provokes
            LOG.warning("no plan could be made, the rule takes its place: %s", _first_line(error))
    if not rule:
        return Verdict(Plan(), profile, step_bytes, _NO_BLOCKS)
    return Verdict(rule, profile, step_bytes, None)


_NO_BLOCKS = "no repeated blocks: nothing in the model is worth recomputing or moving"


def _planned(engine: DecisionEngine, profile: Profile | None, step_bytes: int, limit: int, config: Config) -> Verdict:
    plan: Plan
    try:
        plan = engine.plan(limit)
    except BudgetError as error:
        # Training may still go through: other tensors may be smaller than thought, or the target is below the device.
        plan = Plan() if error.plan is None else error.plan
        LOG.warning(
            "%s; the model runs under the smallest plan, above target_gpu_utilization=%s",
            error,
            config.target_gpu_utilization,
        )
    skipped = None if plan else "no transform that the config allows lowers the peak of the step"
    return Verdict(plan, profile, step_bytes, skipped)


def _simulated(
    model: nn.Module,
    batch: Any,
    optimizer: torch.optim.Optimizer,
    config: Config,
    hardware: Hardware,
    moving: bool,
    stepping: tuple[str, ...],
) -> tuple[DecisionEngine | None, Profile | None]:
    """The engine that plans the step, and the step's profile; without an engine where it cannot be simulated."""
    if config.use_static_profiling:
        try:
            engine = DecisionEngine(
                model,
                batch,
                optimizer=optimizer,
                loss=any_loss,
                config=_for_engine(model, config, hardware, moving),
                hardware=hardware,
                stepping=stepping,
                streams=False,  # taken off, the parameters would have to come back, and with them optimizer states
            )
        except Exception as error:  # wrap goes on with what it knows: the step that really trains may be another one
            say(config, f"the step cannot be planned: {_first_line(error)}")
        else:
            return engine, engine.plain
    try:
        profiler = MemoryProfiler(model, optimizer, loss=any_loss, hardware=hardware, config=config)
        return None, profiler.profile(batch)
    except Exception as error:
        LOG.warning("the step cannot be profiled: %s", _first_line(error))
        return None, None


def _stepping(optimizer: torch.optim.Optimizer | None, config: Config) -> tuple[str, ...]:
    """What a plan may do to an optimizer that is known, beside what the config says, with no change to loop or bits.

    Another device steps to other bits than an accelerator, so that states move where the caller has said so.
    """
    if optimizer is None:
        return ()
    moves = config.enable_offloading and ("enable_offloading" in config.given or config.async_offload)
    return ("step_in_groups", "offload_states") if moves else ("step_in_groups",)


def _for_engine(model: nn.Module, config: Config, hardware: Hardware, moving: bool) -> Config:
    """The config for the engine: with offloading only where it can be, and set where the caller asks for it."""
    fields = {name: getattr(config, name) for name in config.given}
    if moving:
        fields["enable_offloading"] = True
    elif "offload" in config.eligible() and knows_copies(hardware) and not can_move(model, config):
        fields |= {"enable_offloading": False, "async_offload": False}
    return Config(**fields)


def _rule(model: nn.Module, config: Config, hardware: Hardware, moving: bool) -> Plan:
    """What is done without a simulation: to the repeated blocks, and what else the caller asks for by name."""
    named = {
        "checkpoint": config.enable_checkpointing,
        "tile": config.enable_tiling and "enable_tiling" in config.given,
        "cast": config.use_mixed_precision,
        "offload": moving,
    }
    rules = shorthands(model, hardware)
    chosen = {name: rules[name] for name, wanted in named.items() if wanted and name in rules}
    found = planned(chosen)
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


def _fits(step_bytes: int, limit: int, config: Config, hardware: Hardware, profile: Profile | None) -> str:
    unmeasured = "" if profile is not None else "; the first training call shows what activations take"
    return (
        f"the step fits: about {step_bytes} bytes of {limit} usable "
        f"(target_gpu_utilization={config.target_gpu_utilization} of {hardware.memory_bytes})"
        f"{unmeasured}; "
        "Config(force_optimize=True) transforms it all the same"
    )


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
