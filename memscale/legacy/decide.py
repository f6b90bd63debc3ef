"""`decide`: what `wrap` does for one batch: nothing, a plan that fits, or the rule where no plan can be made."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.core import BudgetError, MemscaleError, format_bytes, format_unlike, tensors, wrapped
from memscale.hardware import knows_copies
from memscale.history import Run, keep
from memscale.legacy.assumed import any_loss, or_adamw, with_dense_gradients
from memscale.legacy.huggingface import without_checkpointing
from memscale.legacy.log import LOG, say
from memscale.legacy.terms import Terms, why_none_moves
from memscale.optimizers import quantize_states
from memscale.planning import DecisionEngine, planned, shorthands
from memscale.simulation import Profile, Target, TrainingStep, profile_of

_NO_BLOCKS = "no repeated blocks: nothing in the model is worth recomputing or moving"


@dataclass(frozen=True, eq=False)
class Verdict:
    """The decision of `wrap` about a model.

    Attributes:
        plan: the plan to install.
        profile: the profile of the untransformed step, or None if unknown.
        step_bytes: the bytes of that step; without a profile, the bytes that stay on the device between steps.
        skipped: why the plan is empty, or None if it is not.
        for_all: whether the verdict holds for every batch.
        limit_bytes: the bytes that the step may take, or None if they decided nothing.
        planned_bytes: the bytes of the step under the plan, or None without a simulation.
        refusal: what to warn of where no plan fits, or None.
        run: the recorded run, or None.
    """

    plan: Plan
    profile: Profile | None
    step_bytes: int
    skipped: str | None = None
    for_all: bool = False
    limit_bytes: int | None = None
    planned_bytes: int | None = None
    refusal: str | None = None
    run: Run | None = None


def decide(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None, terms: Terms) -> Verdict:
    """Decides on the plan for a step of `model` with `batch`, and records it if `terms` ask for that.

    Args:
        model: the untransformed model.
        batch: a batch, or None if unknown.
        optimizer: the optimizer, or None if unknown; a simulation then uses AdamW.
        terms: the settings of `wrap`.

    Warns:
        RuntimeWarning: the step is too large and could not be planned, so the rule applies.
    """
    if not terms.may_step:
        model = with_dense_gradients(model, batch, terms.config)
    verdict = _decided(model, batch, optimizer, terms)
    profile, plan = verdict.profile, verdict.plan
    if terms.history is None or profile is None:
        return verdict
    try:
        step = _step(model, batch, optimizer, terms)
        if plan:  # the planner's evidence has figures only; the record also needs what holds the memory
            profile = profile_of(step, plan, Target.of(terms.hardware), terms.config)
        run = keep(profile, terms.history, model, batch, plan=plan, optimizer=step.optimizer, config=terms.config)
    except MemscaleError as error:  # a failure to record never stops training
        LOG.warning("this step is not recorded: %s", error)
        return verdict
    return dataclasses.replace(verdict, run=run)


def _decided(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None, terms: Terms) -> Verdict:
    config = terms.config
    rule, trains = _rule(model, terms), trained_bytes(model) > 0
    engine, profile, trouble = None, None, ""
    if trains and batch is not None:
        engine, profile, trouble = _simulated(model, batch, optimizer, terms)
    step_bytes = profile.taken_bytes if profile is not None else resident_bytes(model, optimizer)
    if (reason := _nothing_to_do(terms, trains)) is not None:
        return Verdict(Plan(), profile, step_bytes, reason, for_all=trains)  # parameters may be trained later
    ruled = Verdict(rule, profile, step_bytes, None if rule else _NO_BLOCKS)
    if batch is None and config.force_optimize:
        return dataclasses.replace(ruled, for_all=terms.budget is None)
    limit, said = terms.limit
    if step_bytes <= limit and not config.force_optimize:
        takes, allowed = format_unlike(step_bytes, limit)
        unmeasured = "" if profile is not None else "; the first training call shows what activations take"
        reason = (
            f"the step fits: {takes} of the {allowed} that {said} allows{unmeasured}; "
            "Config(force_optimize=True) transforms it all the same"
        )
        return Verdict(Plan(), profile, step_bytes, reason, limit_bytes=limit)
    # The plan replaces the model's own checkpointing, so it is made for the model without.
    if config.enable_checkpointing and (uncheckpointed := without_checkpointing(model)) is not None:
        return _decided(uncheckpointed, batch, optimizer, terms)
    if step_bytes <= limit:
        return ruled
    # Without known copy speeds a plan cannot decide how much to move; a caller who asks for offloading gets the rule.
    if engine is not None and (knows_copies(terms.hardware) or not terms.offloads):
        try:
            return _planned(engine, profile, step_bytes, limit, said)
        except MemscaleError as error:  # a step that fails in a simulation only
            trouble = _first_line(error)
    ruled_bytes = _bytes_under(engine, rule)
    if trouble or (ruled_bytes or 0) > limit:
        known = f"under which it takes {format_bytes(ruled_bytes or 0)}"
        takes = "whose peak is not known" if ruled_bytes is None else known
        does = f"trains under wrap()'s rule {rule!r}, {takes}" if rule else "stays unchanged"
        warnings.warn(
            f"this {type(model).__name__} takes {format_bytes(step_bytes)} of the {format_bytes(limit)} that "
            f"{said} allows, and {does}: no plan could be made ({trouble or 'the speed of its copies is not known'}); "
            "make smaller batches, or write a plan for transform(model, plan)",
            RuntimeWarning,
            stacklevel=3,
        )
    return ruled


def _bytes_under(engine: DecisionEngine | None, rule: Plan) -> int | None:
    """Returns the simulated peak of the step under the rule, or None if unknown."""
    try:
        return None if engine is None else engine.steps.profile(rule).taken_bytes
    except MemscaleError:
        return None


def _planned(engine: DecisionEngine, profile: Profile | None, step_bytes: int, limit: int, said: str) -> Verdict:
    refusal: str | None = None
    try:
        plan: Plan = (proven := engine.plan(limit))
        planned_bytes: int | None = proven.evidence.planned.taken_bytes
    except BudgetError as error:
        # Training may still succeed: real tensors may be smaller, and the limit is below the device's memory.
        plan, planned_bytes = error.plan or Plan(), error.peak_bytes
        refusal = f"{wrapped(str(error))}\n  the model runs under the smallest plan, above {said}"
    if not plan:
        skipped = "no transform that the config allows lowers the peak of the step"
        return Verdict(plan, profile, step_bytes, skipped, refusal=refusal)
    return Verdict(plan, profile, step_bytes, limit_bytes=limit, planned_bytes=planned_bytes, refusal=refusal)


def _simulated(
    model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None, terms: Terms
) -> tuple[DecisionEngine | None, Profile | None, str]:
    """Returns the planning engine and the step's profile; each is None on failure, for the reason in the third item."""
    trouble = "use_static_profiling=False"
    if terms.config.use_static_profiling:
        try:
            engine = _engine(_step(model, batch, optimizer, terms), terms)
            return engine, engine.plain, ""
        except MemscaleError as error:  # go on with what is known: the real step may differ from the simulated one
            trouble = _first_line(error)
            say(terms.config, f"the step cannot be planned: {trouble}")
    try:
        step = _step(model, batch, optimizer, terms)
        return None, profile_of(step, Plan(), Target.of(terms.hardware), terms.config), trouble
    except MemscaleError as error:  # with the model's own error; the caller warns about the consequences
        trouble = _first_line(error)
        LOG.warning(
            "the step cannot be profiled: %s; what stays from step to step decides, and activations may not fit. "
            "Give a sample_input that the model trains on, or write a plan for transform(model, plan)",
            trouble,
        )
        return None, None, trouble


def _step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None, terms: Terms) -> TrainingStep:
    loop, trained = terms.loop, or_adamw(model, optimizer)
    return TrainingStep.of(
        model, trained, loss=any_loss, accumulate=loop.passes, keeps_output=loop.keeps_output, caller="plan"
    ).on(batch)


def _engine(step: TrainingStep, terms: Terms) -> DecisionEngine:
    config = terms.config
    assert step.module is not None
    assert terms.runtime is not None, "a detached model is not planned"
    may_offload = "offload" in config.eligible() and knows_copies(terms.hardware)
    if terms.offloads:
        config = dataclasses.replace(config, enable_offloading=True)
    elif may_offload and (missing := why_none_moves(step.module, terms.runtime)) is not None:
        say(config, f"plans for this {type(step.module).__name__} offload nothing: {missing}")
        config = dataclasses.replace(config, enable_offloading=False, async_offload=False)
    # A CPU step rounds differently from an accelerator's, so states move only if the caller asks for offloading.
    stepping = ("step_in_groups", "offload_states") if terms.offloads else ("step_in_groups",)
    return DecisionEngine.of_step(
        step,
        config=config,
        hardware=terms.hardware,
        stepping=stepping if terms.may_step else (),
        streams=False,  # `detach` would have to move streamed parameters and their optimizer states back
    )


def _rule(model: nn.Module, terms: Terms) -> Plan:
    """Returns the plan made without a simulation: for the repeated blocks, and what the caller asks for by name."""
    config = terms.config
    named = {
        "checkpoint": config.enable_checkpointing,
        "tile": config.enable_tiling and "enable_tiling" in config.given,
        "cast": config.use_mixed_precision,
        "offload": terms.offloads,
    }
    rules = shorthands(model, terms.hardware)
    found = planned({name: rules[name] for name, wanted in named.items() if wanted and name in rules})
    if not config.use_8bit_optimizer:
        return found
    return Plan([*((rule.pattern, rule.transform) for rule in found), ("", quantize_states())])


def _nothing_to_do(terms: Terms, trains: bool) -> str | None:
    usable = terms.config.eligible()
    if not terms.offloads and (terms.hardware.device_type == "cpu" or not knows_copies(terms.hardware)):
        usable -= {"offload"}  # the tier below RAM is the disk, which is used only on request
    if not usable:
        return (
            "enable_checkpointing is False and nothing is offloaded: no transform is left; async_offload=True adds one"
        )
    return None if trains else "nothing to train: no parameter requires a gradient"


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Returns the bytes that stay on the device between steps: parameters, buffers, gradients and optimizer states.

    The states of an optimizer that has not stepped yet count as two Adam moments.
    """
    gradient_bytes = trained_bytes(model)
    states = tensors([dict(state) for state in optimizer.state.values()]) if optimizer is not None else []
    state_bytes = sum(tensor.nbytes for tensor in states) or 2 * gradient_bytes
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) + gradient_bytes + state_bytes


def trained_bytes(model: nn.Module) -> int:
    """Returns the bytes of the parameters that require a gradient."""
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
