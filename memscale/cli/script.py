"""``--python``: writes a script that trains the model under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from memscale.cli.step_options import RankOptions, Step
from memscale.cli.subject import DTYPES

if TYPE_CHECKING:
    from memscale.algebra import Plan

_CPU_OR_CARD = 'device = "cuda" if torch.cuda.is_available() else "cpu"'


def as_script(step: Step, options: RankOptions, plan: Plan, batch: Any) -> str:
    """Returns Python that builds the model with its weights, applies the plan, and trains.

    For a step of several processes the script ends with the planned model; starting and sharding are left to the user.

    Args:
        step: the model and its training loop.
        options: the options as typed.
        plan: the plan to train under.
        batch: the batch of the plan; the script makes random data of its shapes.
    """
    subject, optimizer = step.subject, step.optimizer
    code = subject.code if "import torch\n" in subject.code else f"import torch\n{subject.code}"
    making = f"optimizer = torch.optim.{type(optimizer).__name__}({{}}.parameters(){_loop_of(optimizer)})"
    steps = bool(plan.of_optimizers())
    if optimizer is not None and steps:
        code += "\n" + making.format("model")
    parts = [code, plan.to_python()]
    if options.parallel is None:
        placed = [_CPU_OR_CARD, "fit = fit.to(device)  # what the plan streams stays on the host"]
        if optimizer is not None and not steps:
            placed.append(making.format("fit"))
        parts += ["\n".join(placed), _data(batch), _loop(step, options, batch)]
    else:
        parts.append("# Shard `fit` as you shard the model now, make its optimizer, and train.")
    return "\n\n".join(parts) + "\n"


def _loop_of(optimizer: Any) -> str:
    group = {} if optimizer is None else optimizer.param_groups[0]
    return next((f", {name}=True" for name in ("fused", "foreach") if group.get(name)), "")


def _data(batch: Any) -> str:
    return (
        "\ndef batches():\n"
        '    """Yields the arguments of the model: put your data in place of the random numbers."""\n'
        f"    for _ in range(10):\n        yield {_random_data(batch)}\n"
    )


def _random_data(value: Any) -> str:
    """Returns Python that makes random data of the shapes of `value`."""
    if isinstance(value, torch.Tensor):
        size = ", ".join(map(str, value.shape))
        if value.is_floating_point():
            return f"torch.randn({size or '()'}, dtype={value.dtype}, device=device)"
        size = f"({size},)" if value.dim() == 1 else f"({size})"
        make = "ones" if value.dtype is torch.bool else "zeros"
        return f"torch.{make}({size}, dtype={value.dtype}, device=device)"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_random_data(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_random_data, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
    return repr(value)


def _loop(step: Step, options: RankOptions, batch: Any) -> str:
    given = "**batch" if isinstance(batch, Mapping) else "*batch" if isinstance(batch, (tuple, list)) else "batch"
    call = f"fit({given})"
    lines = [] if step.subject.loss is None else ["loss_fn = made[2]"]
    half = None if (name := options.amp or options.dtype) is None else DTYPES[name]
    scaled = half is torch.float16 and step.optimizer is not None
    if scaled:
        lines += ["from memscale import LossScale", "", "scale = LossScale()  # small gradients are zeros in float16"]
    of = "{}.loss" if step.subject.loss is None else "loss_fn({}, batch)"
    inside = [f"output = {call}"] if options.keeps_output else []
    inside.append(f"loss = {of.format('output' if options.keeps_output else call)}")
    if options.amp is not None:
        inside = [f"with torch.autocast(device, {half}):", *(f"    {line}" for line in inside)]
    share = "" if options.accumulate == 1 else f" / {options.accumulate}"
    whole = f"(loss{share})" if share else "loss"
    inside.append(f"scale.scale(loss{share}).backward()" if scaled else f"{whole}.backward()")
    update = [] if step.optimizer is None else ["scale = scale.step(optimizer)" if scaled else "optimizer.step()"]
    update.append("fit.zero_grad()" if step.optimizer is None else "optimizer.zero_grad()")
    if share:
        update = [f"if number % {options.accumulate} == 0:", *(f"    {line}" for line in update)]
    inside += [*update, 'print(f"loss {loss.item():.4f}")']
    head = "for number, batch in enumerate(batches(), 1):" if share else "for batch in batches():"
    return "\n".join([*lines, *([""] if lines else []), head, *(f"    {line}" for line in inside)])
