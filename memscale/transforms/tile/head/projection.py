"""A projection that was called but not computed: all that its result depends on, as it was at the call."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from memscale.core import changed_error, described, device_type, version
from memscale.regions import Captures, Environment, accelerators, as_it_was
from memscale.transforms.tile.head.linear import plain_linear


class Tiling(Protocol):
    """How rows are cut: what the deferred logits need of `tile`."""

    @property
    def late_gradient(self) -> bool:
        """Whether the gradient of a tied weight is made last of all, at the price of a product."""

    def ranges(self, total: int) -> list[tuple[int, int]]:
        """The (start, length) of each piece of `total` rows."""

    def rows(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` run on pieces of its arguments' rows, recomputing."""


class Projection:
    """A linear map of the last dimension, as the model ran it: its function, input, environment and captures.

    Attributes:
        hidden: its input, of shape ``[..., in_features]``.
        captured: the tensors that it captures, the weight among them.
        dtype: the type of the logits.
        width: how many classes they have.
        linear: weight and bias, where it is exactly `F.linear` of the two.
        tiling: how its rows are to be cut.
    """

    def __init__(self, fn: Callable[..., Any], hidden: torch.Tensor, tiling: Tiling) -> None:
        self.hidden = hidden
        self.tiling = tiling
        self._fn = fn
        # Held as read now: under functional_call the module has other weights again when the loss is computed.
        self._captures = Captures(fn, follows=True)
        self.captured = list({id(tensor): tensor for _, _, tensor in self._captures.tensors}.values())
        self.linear = None if torch.is_autocast_enabled(device_type(hidden)) else plain_linear(fn, self._captures)
        with torch.no_grad():
            sample = fn(hidden.reshape(-1, hidden.shape[-1])[:0])  # no rows: only type and width are wanted
        self.dtype, self.width = sample.dtype, sample.shape[-1]
        self._grad_enabled = torch.is_grad_enabled()
        self._environment = Environment(accelerators([hidden]), host_random=False)
        self._versions = [version(tensor) for tensor in (hidden, *self.captured)]
        self._value: torch.Tensor | None = None
        self._inference = torch.is_inference_mode_enabled()
        self.deferred: list[weakref.ref[torch.Tensor]] = []  # all that follow from it

    @property
    def requires_grad(self) -> bool:
        """Whether the logits would require a gradient."""
        return self._grad_enabled and any(tensor.requires_grad for tensor in (self.hidden, *self.captured))

    @property
    def computed(self) -> bool:
        """Whether the logits exist: from then on they, not the projection, are the truth."""
        return self._value is not None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of `hidden`, in the environment of the original call."""
        with as_it_was(self._captures), self._environment.reinstate():
            return self._fn(hidden)  # type: ignore[no-any-return]

    def of_views(self) -> Projection:
        """The same of views of the captured tensors, in whose graph nothing is behind the input too."""
        views = {id(tensor): tensor.view_as(tensor) for tensor in self.captured if tensor.requires_grad}
        found = copy.copy(self)
        found._captures = self._captures.exchanged(views)
        found.captured = [views.get(id(tensor), tensor) for tensor in self.captured]
        return found

    def product(self, hidden: torch.Tensor, classes: slice = slice(None)) -> torch.Tensor:
        """The logits of `hidden` for some classes, where the projection is `F.linear`; no autocast was on then."""
        assert self.linear is not None
        weight, bias = self.linear
        with torch.autocast(device_type(hidden), enabled=False):
            return F.linear(hidden, weight[classes], None if bias is None else bias[classes])

    def check(self) -> None:
        """Raise `CorrectnessError` if the projection would no longer give what it would have given when called."""
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
        """The logits themselves."""
        if self._value is None:
            self.check()
            with self.as_when_called(grad=self._grad_enabled):
                self._value = self(self.hidden)
        return self._value

    @contextmanager
    def as_when_called(self, *, grad: bool) -> Iterator[None]:
        """Compute what is kept for later: with a graph if `grad`, even if the present use of it is under no_grad."""
        with torch.inference_mode(self._inference), torch.set_grad_enabled(grad and not self._inference):
            yield
