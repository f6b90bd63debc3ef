"""Batches and losses: the arguments of a model call, and the scalar from which its backward begins.

Every verb accepts the same three kinds of batch and the same kind of loss, with the same error messages.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memscale.core import pytrees
from memscale.core.errors import Argument, ConfigError

Loss = Callable[[Any, Any], torch.Tensor]
_LOSS = Argument("", "loss")


@dataclass(frozen=True)
class Arguments:
    """The batch of a call that has arguments by position and by name; its tensors are in this order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def check_batch(batch: Any) -> None:
    """Checks that `batch` is a tensor, a tuple or list, a mapping, or `Arguments`.

    Raises:
        ConfigError: `batch` is none of these.
    """
    if not isinstance(batch, (torch.Tensor, tuple, list, Mapping, Arguments)):
        raise ConfigError(
            "a batch is a tensor, a tuple of arguments or a mapping of keyword arguments, "
            f"got {type(batch).__name__}; pass what the model is called with"
        )


def check_call(model: Callable[..., Any], batch: Any) -> None:
    """Checks that the forward of `model` accepts `batch`. A frequent mistake is a batch with labels.

    Raises:
        ConfigError: `batch` is none of the three kinds, or does not fit the signature of the forward.
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
            "mapping its keyword arguments. Labels that the forward does not take belong to the loss: leave them out "
            "of the batch, and write loss=lambda output, _: F.cross_entropy(output, y)"
        ) from None


def has_forward(module: Any) -> bool:
    """Whether `module` has a forward besides the inherited one of `nn.Module`, which only raises."""
    return "forward" in getattr(module, "__dict__", ()) or (
        getattr(type(module), "forward", None) is not torch.nn.Module.forward
    )


def call(model: Callable[..., Any], batch: Any) -> Any:
    """Calls `model` with `batch`: a tensor is one argument, a tuple or list the arguments, a mapping the keywords.

    >>> call(max, (3, 4)), call(dict, {"a": 1}), call(torch.numel, torch.ones(5))
    (4, {'a': 1}, 5)
    """
    try:
        if isinstance(batch, torch.Tensor):
            return model(batch)
        if isinstance(batch, Arguments):
            return model(*batch.args, **batch.kwargs)
        return model(**batch) if isinstance(batch, Mapping) else model(*batch)
    except NotImplementedError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        # The forward of LightningModule calls that of `nn.Module`, which only raises.
        if frames[-1].f_code is torch.nn.Module.forward.__code__:
            raise _no_forward(frames[-1].f_locals["self"]) from None
        raise


def _no_forward(module: Any) -> ConfigError:
    return ConfigError(
        f"this {type(module).__name__} has no forward of its own, so there is no step; pass the module that calls its "
        "children, or give it a forward: a training_step does not count"
    )


def flatten(batch: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of a batch in order, and the spec for `pytrees.unflatten`."""
    # A tokeniser's BatchEncoding is a mapping that pytree libraries treat as a leaf.
    return pytrees.flatten(dict(batch) if isinstance(batch, Mapping) else batch)


def tensors(batch: Any) -> list[torch.Tensor]:
    """Returns the tensors of a batch, in order."""
    return [leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor)]


def check_loss(loss: Any) -> None:
    """Checks that `loss` is a function ``loss(output, batch)``, or `None` for the loss of the output.

    Raises:
        ConfigError: `loss` is neither, or does not take two arguments.
    """
    if isinstance(loss, type):
        name = loss.__name__
        raise ConfigError(
            f"loss={name} is a class, and calling it makes a {name} instead of a loss; write loss=lambda output, _: "
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
    except (TypeError, ValueError):  # a function in C may have no signature
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
    """Returns the loss in a model's output (outputs of transformers have one), or `None`."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def given_loss(output: Any, batch: Any, loss: Loss) -> torch.Tensor:
    """Returns the result of the caller's ``loss(output, batch)``.

    Raises:
        ConfigError: the result is not a tensor with one element, or the loss is one of PyTorch's, which take targets
            instead of a batch.
    """
    if getattr(loss, "__module__", "") not in ("torch.nn.modules.loss", "torch.nn.functional"):
        return _one_element(loss(output, batch), "loss(output, batch)")
    name = getattr(loss, "__name__", type(loss).__name__)
    call = f"{name}(output, y)" if hasattr(loss, "__name__") else f"nn.{name}()(output, y)"
    fault = ConfigError(
        f"loss={name} compares an output with targets, and a loss is called as loss(output, batch), here with the "
        f"whole {type(batch).__name__}; write loss=lambda output, _: {call}, with your labels for y"
    )
    if not isinstance(batch, torch.Tensor):  # a tensor may be the target, as in an autoencoder
        raise fault
    try:
        return _one_element(loss(output, batch), "loss(output, batch)")
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise fault from error


def scalar_loss(output: Any, batch: Any, loss: Loss | None) -> torch.Tensor:
    """Returns the loss of a training step: the caller's, else the output's own, else the output itself.

    Raises:
        ConfigError: there is no loss, or the loss is not a scalar that depends on a parameter.
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
                f"the model's output, a {type(output).__name__}, has no loss; pass {_LOSS}, a function "
                "loss(output, batch) that returns a scalar tensor, or put labels into the batch"
            ).naming(_LOSS)
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
    remedy = f"pass {_LOSS} and take its mean"
    if isinstance(value, Mapping):
        got, remedy = (
            f"{got} with {', '.join(map(repr, value)) or 'nothing'}",
            "return the one that backward begins from",
        )
    elif isinstance(value, (tuple, list)):
        got, remedy = f"{got} of {len(value)}", "return the one that backward begins from"
    raise ConfigError(f"{source} must be a tensor with one element, got {got}; {remedy}").naming(_LOSS)
