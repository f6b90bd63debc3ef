"""`Projection`: an output projection that was called and not computed, with everything its result depends on."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from memscale.core import changed_error, described, device_type, version
from memscale.regions import Captures, Environment, accelerators
from memscale.transforms.tile.head.linear import plain_linear


class Tiling(Protocol):
    """The part of `tile` that lazy logits need: how rows are cut."""

    @property
    def late_gradient(self) -> bool:
        """Whether the gradient of a tied weight is computed last, for the price of one product."""

    def ranges(self, total: int) -> list[tuple[int, int]]:
        """Returns the (start, length) of each piece of `total` rows."""

    def rows(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fn` run on pieces of its arguments' rows, recomputing."""


class Projection:
    """A linear map of the last dimension as the model called it: function, input, environment and captures.

    Attributes:
        hidden: the input, shape ``[..., in_features]``.
        captured: the tensors that the function captures, including the weight.
        dtype: the dtype of the logits.
        width: the number of classes.
        linear: weight and bias, if the function is exactly `F.linear` of the two.
        tiling: how the rows are cut.
    """

    def __init__(self, fn: Callable[..., Any], hidden: torch.Tensor, tiling: Tiling) -> None:
        self.hidden = hidden
        self.tiling = tiling
        self._fn = fn
        # Read now: after a `functional_call` the module has its other weights again when the loss is computed.
        self._captures = Captures(fn, follows=True)
        self.captured = list({id(tensor): tensor for _, _, tensor in self._captures.tensors}.values())
        self.linear = None if torch.is_autocast_enabled(device_type(hidden)) else plain_linear(fn, self._captures)
        with torch.no_grad():
            sample = fn(hidden.reshape(-1, hidden.shape[-1])[:0])  # zero rows give the dtype and the width
        self.dtype, self.width = sample.dtype, sample.shape[-1]
        self._grad_enabled = torch.is_grad_enabled()
        self._environment = Environment(accelerators([hidden]), host_random=False)
        self._versions = [version(tensor) for tensor in (hidden, *self.captured)]
        self._value: torch.Tensor | None = None
        self._inference = torch.is_inference_mode_enabled()
        self.lazy: list[weakref.ref[torch.Tensor]] = []  # all lazy logits of this projection

    @property
    def requires_grad(self) -> bool:
        """Whether the logits require a gradient."""
        return self._grad_enabled and any(tensor.requires_grad for tensor in (self.hidden, *self.captured))

    @property
    def computed(self) -> bool:
        """Whether the logits were computed; from then on changes to them count, not the projection."""
        return self._value is not None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits of `hidden`, computed in the environment of the original call."""
        with self._captures.restored(), self._environment.reinstate():
            return self._fn(hidden)  # type: ignore[no-any-return]

    def of_views(self) -> Projection:
        """Returns the same projection over views of the captured tensors, in a graph without the input's history."""
        views = {id(tensor): tensor.view_as(tensor) for tensor in self.captured if tensor.requires_grad}
        found = copy.copy(self)
        found._captures = self._captures.exchanged(views)
        found.captured = [views.get(id(tensor), tensor) for tensor in self.captured]
        return found

    def product(self, hidden: torch.Tensor, classes: slice = slice(None)) -> torch.Tensor:
        """Returns the logits of `hidden` for some classes by `F.linear`, without autocast as in the original call."""
        assert self.linear is not None
        weight, bias = self.linear
        with torch.autocast(device_type(hidden), enabled=False):
            return F.linear(hidden, weight[classes], None if bias is None else bias[classes])

    def check(self) -> None:
        """Raises `CorrectnessError` if an input was changed in place since the original call."""
        for tensor, expected in zip((self.hidden, *self.captured), self._versions, strict=True):
            if (now := version(tensor)) != expected:
                what = "the hidden states" if tensor is self.hidden else "the weight or bias"
                raise changed_error(
                    described(f"{what} of a tiled output projection", tensor.dtype, tensor.shape),
                    now,
                    expected,
                    "Compute the loss before changing it, or change a clone",
                )

    def value(self) -> torch.Tensor:
        """Returns the logits of the original input, computed on first use."""
        if self._value is None:
            self.check()
            with self.as_when_called(grad=self._grad_enabled):
                self._value = self(self.hidden)
        return self._value

    @contextmanager
    def as_when_called(self, *, grad: bool) -> Iterator[None]:
        """Within the body, gradients and inference mode are as in the original call, with a graph only if `grad`."""
        with torch.inference_mode(self._inference), torch.set_grad_enabled(grad and not self._inference):
            yield
