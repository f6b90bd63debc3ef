"""Batches and losses: what a model is called with, and the one number that its backward begins from.

The same three kinds of batch and the same loss everywhere, and for each mistake the same words.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memscale.core import pytrees
from memscale.core.errors import ConfigError

Loss = Callable[[Any, Any], torch.Tensor]


def check_batch(batch: Any) -> None:
    """Do nothing for what a model can be called with.

    Raises:
        ConfigError: `batch` is none of the three kinds.
    """
    if not isinstance(batch, (torch.Tensor, tuple, list, Mapping)):
        raise ConfigError(
            "a batch is a tensor, a tuple of arguments or a mapping of keyword arguments, "
            f"got {type(batch).__name__}; pass what the model is called with"
        )


def check_call(model: Callable[..., Any], batch: Any) -> None:
    """Do nothing for a batch that `model` has arguments for: labels are often not among them.

    Raises:
        ConfigError: it is none of the three kinds, or not what a module's forward takes.
    """
    check_batch(batch)
    if not has_forward(model):
        raise _no_forward(model)
    try:
        signature = inspect.signature(getattr(model, "forward", model))
    except (TypeError, ValueError):
        return
    try:
        call(signature.bind, batch)
    except TypeError as error:
        raise ConfigError(
            f"the batch does not fit {type(model).__name__}.forward: {error}. A tuple is its positional arguments, a "
            "mapping its keyword arguments; labels that the model does not take belong to the loss: leave them out, "
            "and write loss=lambda output, _: F.cross_entropy(output, y) where a loss is asked for"
        ) from None


def has_forward(module: Any) -> bool:
    """False of a module that has the forward which `nn.ModuleList` and `nn.ModuleDict` inherit: it only raises."""
    return "forward" in getattr(module, "__dict__", ()) or (
        getattr(type(module), "forward", None) is not torch.nn.Module.forward
    )


def call(model: Callable[..., Any], batch: Any) -> Any:
    """``model`` of ``batch``: a tensor is one argument, a tuple or list the arguments, a mapping keywords.

    >>> call(max, (3, 4)), call(dict, {"a": 1}), call(torch.numel, torch.ones(5))
    (4, {'a': 1}, 5)
    """
    try:
        if isinstance(batch, torch.Tensor):
            return model(batch)
        return model(**batch) if isinstance(batch, Mapping) else model(*batch)
    except NotImplementedError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        # A LightningModule's own forward calls the one that only raises.
        if frames[-1].f_code is torch.nn.Module.forward.__code__:
            raise _no_forward(frames[-1].f_locals["self"]) from None
        raise


def _no_forward(module: Any) -> ConfigError:
    return ConfigError(
        f"this {type(module).__name__} has no forward of its own, so there is no step; pass the module that calls its "
        "children, or give it a forward: a training_step is none"
    )


def flatten(batch: Any) -> tuple[list[Any], Any]:
    """The leaves of a batch in order, and what puts them back: `pytrees.flatten` of it."""
    # A tokeniser's BatchEncoding is a mapping that no pytree library knows.
    return pytrees.flatten(dict(batch) if isinstance(batch, Mapping) else batch)


def tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in order."""
    return [leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor)]


def check_loss(loss: Any) -> None:
    """Do nothing for a function, and for None, which leaves the loss to the output.

    Raises:
        ConfigError: `loss` is neither, or does not take the two of ``loss(output, batch)``.
    """
    if isinstance(loss, type):
        name = loss.__name__
        raise ConfigError(
            f"loss={name} is a class, whose call makes a {name} and no number; write loss=lambda output, _: "
            f"{name}()(output, y), with your labels for y"
        )
    if loss is not None and not callable(loss):
        raise ConfigError(
            f"a loss is a function loss(output, batch) that returns a scalar tensor, or None, got "
            f"{type(loss).__name__} {loss!r}; wrap it in a function, or leave it out if the output has a loss"
        )
    if loss is None:
        return
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # one in C says nothing about what it takes
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise ConfigError(
            f"a loss is called as loss(output, batch), and this one takes ({takes}): {error}; write "
            "lambda output, batch: ..."
        ) from None


def own_loss(output: Any) -> Any:
    """The loss that an output brings along, as those of transformers do; None without one."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def given_loss(output: Any, batch: Any, loss: Loss) -> torch.Tensor:
    """What the caller's ``loss(output, batch)`` returns.

    Raises:
        ConfigError: not a tensor with one element, or a loss of PyTorch's, which takes targets and not a batch.
    """
    if getattr(loss, "__module__", "") not in ("torch.nn.modules.loss", "torch.nn.functional"):
        return _one_element(loss(output, batch), "loss(output, batch)")
    name = getattr(loss, "__name__", type(loss).__name__)
    call = f"{name}(output, y)" if hasattr(loss, "__name__") else f"nn.{name}()(output, y)"
    fault = ConfigError(
        f"loss={name} compares an output with targets, and a loss is called as loss(output, batch), here with the "
        f"whole {type(batch).__name__}; write loss=lambda output, _: {call}, with your labels for y"
    )
    if not isinstance(batch, torch.Tensor):  # of an autoencoder the batch is the target
        raise fault
    try:
        return _one_element(loss(output, batch), "loss(output, batch)")
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise fault from error


def scalar_loss(output: Any, batch: Any, loss: Loss | None) -> torch.Tensor:
    """The loss of a training step: the caller's, else the output's own, else the output.

    Raises:
        ConfigError: there is none, or it is not a scalar that depends on a parameter.
    """
    if loss is not None:
        value, source = given_loss(output, batch, loss), "loss(output, batch)"
    elif isinstance(output, torch.Tensor):
        source = "the model's output, which stands for the loss when none is given,"
        value = _one_element(output, source)
    else:
        own, source = own_loss(output), "output.loss"
        if own is None:
            raise ConfigError(
                f"the model's output, a {type(output).__name__}, has no loss; pass loss=..., a function "
                "loss(output, batch) that returns a scalar tensor, or put labels into the batch"
            )
        value = _one_element(own, source)
    if not value.requires_grad:
        raise ConfigError(
            f"{source} does not depend on any parameter that requires a gradient, so there is no backward pass; "
            "call the model with gradients enabled and train at least one parameter"
        )
    return value


def _one_element(value: Any, source: str) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value
    got = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    remedy = "pass loss=... and take its mean"
    if isinstance(value, Mapping):
        got, remedy = (
            f"{got} with {', '.join(map(repr, value)) or 'nothing'}",
            "return the one that backward begins from",
        )
    elif isinstance(value, (tuple, list)):
        got, remedy = f"{got} of {len(value)}", "return the one that backward begins from"
    raise ConfigError(f"{source} must be a tensor with one element, got {got}; {remedy}")
