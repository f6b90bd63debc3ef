"""Checks before a simulation: errors for models and optimizers that cannot be simulated, and notes about models."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memscale.core import ConfigError, batches, format_bytes, shown
from memscale.simulation.kernels.shapes import is_sparse
from memscale.simulation.sandbox.compiled_modules import CompiledModules, compiled_of


def check_followed(model: Any) -> None:
    """Raises ConfigError for a model with scripted modules, whose forward runs in C++, or with lazy parameters."""
    if isinstance(model, nn.Module) and any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise ConfigError(
            f"this is a {type(model).__name__}, which holds scripted modules: their forward runs in "
            "C++ and cannot be followed; pass the Python module that was scripted or traced"
        )
    lazy = [name for name, each in model.named_parameters() if is_lazy(each)] if isinstance(model, nn.Module) else []
    if lazy:
        raise ConfigError(
            f"the model's parameter {lazy[0]!r} has no shape yet, for its module is a lazy one; run a batch "
            "through the model first"
        )


def about_compiled(modules: Iterable[nn.Module], graphs: CompiledModules | None) -> tuple[str, ...]:
    """Returns notes on compiled modules: how many are simulated as graphs, and how many as written, and why."""
    compiled, followed = len(compiled_of(modules)), 0 if graphs is None else len(graphs.followed)

    def those(count: int) -> str:
        return f"{count} module{'s are' if count > 1 else ' is'} compiled, and simulated as "

    found = []
    if followed:
        found.append(
            f"{those(followed)}the graphs that AOTAutograd hands to a compiler, in fused kernels: its peak is within "
            "3 % of inductor's, with convolutions up to 7 % above; a graph break or max-autotune takes other memory"
        )
    if compiled > followed:
        why = "" if graphs is None or not graphs.reasons else f" ({next(iter(graphs.reasons))})"
        found.append(
            f"{those(compiled - followed)}written{why}: a graph frees a tensor after its last use and chooses what it "
            "keeps for backward, so a real step may take less, or more"
        )
    return tuple(found)


def check_call(model: Any, batch: Any) -> None:
    """Raises ConfigError for a batch that does not fit the model, a layout without fixed sizes, or nothing to train."""
    if not isinstance(model, nn.Module):
        if batch is not None:
            raise ConfigError("profile(step, batch) takes a batch for a module only; a function holds its own")
        return
    batches.check_call(model, batch)
    for tensor in (*batches.tensors(batch), *model.buffers()):
        if tensor.layout is not torch.strided and not is_sparse(tensor):
            raise ConfigError(
                f"the step has a tensor of layout {tensor.layout} and shape {list(tensor.shape)}, which is several "
                "in one, of sizes that its values decide: its memory is neither simulated nor measured; profile "
                "and plan with a dense or a sparse one (COO, CSR) in its place"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        none_at_all = not any(True for _ in model.parameters())
        lacks, remedy = (
            ("parameters", "pass what trains")
            if none_at_all
            else ("parameter that requires a gradient", "call requires_grad_() on what should train")
        )
        raise ConfigError(f"this {type(model).__name__} has no {lacks}, so there is no training step; {remedy}")


def check_optimizer(model: Any, optimizer: Any) -> None:
    """Raises ConfigError for an `optimizer` of another type or model, or whose ``step`` requires arguments."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={shown(optimizer)} must be a torch.optim.Optimizer or None; pass the optimizer itself, "
            "made of the model's parameters"
        )
    if not isinstance(model, nn.Module):
        return
    own = {id(parameter) for parameter in model.parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if updated and not any(id(parameter) in own for parameter in updated):
        raise ConfigError(
            f"the optimizer updates {len(updated)} parameters and none of them is the model's, which has {len(own)}; "
            "build it on this model's parameters"
        )
    # The signature of the class: a scheduler wraps `step` of the instance, and the wrapper's signature has `self`.
    _, *given = inspect.signature(type(optimizer).step).parameters.items()
    needed = ", ".join(name for name, parameter in given if _is_required(parameter))
    if needed:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs {needed}, which the usual step of profile(model, batch) does not "
            f"give; profile a function that does one step of your loop, as in profile(lambda: optimizer.step({needed}))"
        )


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def about_key_values(outputs: Iterable[Any]) -> tuple[str, ...]:
    """Returns a note on the bytes of key-value caches in `outputs`, which models of transformers return by default.

    >>> keys = torch.ones(2, 512)
    >>> about_key_values([{"logits": keys}]), about_key_values([{"past_key_values": ((keys, keys),)}])[0][:48]
    ((), 'the output keeps 4.00 KiB of keys and values, wh')
    """
    nbytes = sum(_cached_bytes(output["past_key_values"]) for output in outputs if _has_cache(output))
    if not nbytes:
        return ()
    return (
        f"the output keeps {format_bytes(nbytes)} of keys and values, which training does not read: "
        "model.config.use_cache = False frees them",
    )


def _has_cache(output: Any) -> bool:
    return isinstance(output, dict) and output.get("past_key_values") is not None


def _cached_bytes(cache: Any) -> int:
    """Returns the bytes of the tensors in a key-value cache of any version of transformers."""
    found: dict[int, int] = {}
    to_see: list[Any] = [cache]
    while to_see:
        each = to_see.pop()
        if isinstance(each, torch.Tensor):
            found[id(each)] = each.nbytes
        elif isinstance(each, (list, tuple)):
            to_see.extend(each)
        elif "cache" in type(each).__module__:
            to_see.extend(vars(each).values())
    return sum(found.values())
