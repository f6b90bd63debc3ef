"""`LateGradient`: the gradient of a tied head's weight, computed when backward has the embedding's gradient.

Backward completes the gradient of a tied embedding last. The head's share of that gradient, often the largest tensor of
a step, would stay in memory during the whole backward. The share follows from the hidden states and one number per row,
so only these are kept, and the share is added block by block of classes to the embedding's gradient at the end.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from memscale.core import changed_error, described, in_process_group, pytrees, version
from memscale.runtime import host_parameter_of, is_alone

_ADD, _ADD_IN_PLACE = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor
_SMALLER = 2  # the hidden states must be this many times smaller than the gradient


class Fill(Protocol):
    """Computes a gradient."""

    def __call__(self, target: torch.Tensor, *, add: bool) -> None:
        """Writes the gradient to `target`, or adds it."""


def pays(weight: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Whether `hidden` was computed from `weight` and is much smaller, so that a late gradient saves memory."""
    if not weight.is_leaf or not weight.requires_grad or weight.nbytes < _SMALLER * hidden.nbytes:
        return False
    # Host parameters, and parameters that FSDP gathers, may have been freed by then.
    if host_parameter_of(weight) is not None or in_process_group():
        return False
    return _leads_to(hidden, weight)


def late_gradient(weight: torch.Tensor, hidden: torch.Tensor, fill: Fill) -> torch.Tensor:
    """Returns a gradient of `weight` for the head's backward, which `fill` computes after the other gradients."""
    made = LateGradient(weight, (_Unchanged(fill, weight, hidden),), None)
    # Computed at once if user hooks on the weight would run before ours, if the weight was frozen since and has no
    # hooks, or if anomaly mode reads the gradient here.
    if weight._backward_hooks or not weight.requires_grad or torch.is_anomaly_enabled():
        return made.settled()
    _Settled(weight)
    return made


class LateGradient(torch.Tensor):
    """A sum of gradients of which some are still to be computed. Any use except autograd's sums computes them."""

    fills: tuple[Fill, ...]
    made: torch.Tensor | None

    @staticmethod
    def __new__(cls, like: torch.Tensor, fills: tuple[Fill, ...], made: torch.Tensor | None) -> LateGradient:
        late = torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        late.fills, late.made = fills, made
        return late

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is _ADD and not kwargs and all(isinstance(each, torch.Tensor) for each in args):
            one, other = args if isinstance(args[0], LateGradient) else args[::-1]
            return one.plus(other)
        if func is _ADD_IN_PLACE and not kwargs and not isinstance(args[0], LateGradient):
            return args[1].added_to(args[0])
        args, kwargs = pytrees.map_only(LateGradient, LateGradient.settled, (args, kwargs or {}))
        return func(*args, **kwargs)

    def plus(self, other: torch.Tensor) -> LateGradient:
        """Returns the sum with another gradient, still uncomputed."""
        if isinstance(other, LateGradient):
            mine = self if other.made is None else self.plus(other.made)
            return LateGradient(self, mine.fills + other.fills, mine.made)
        return LateGradient(self, self.fills, other if self.made is None else self.made + other)

    def added_to(self, target: torch.Tensor) -> torch.Tensor:
        """Adds the whole sum to `target` and returns it."""
        if self.made is not None:
            target.add_(self.made)
        for fill in self.fills:
            fill(target, add=True)
        return target

    def settled(self) -> torch.Tensor:
        """Computes and returns the sum."""
        made, self.made = self.made, None
        if made is None:
            made = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.fills[0](made, add=False)
            self.fills = self.fills[1:]
        elif self.fills and not is_alone(made):  # the same gradient may have gone to several tensors
            made = made.clone()
        for fill in self.fills:
            fill(made, add=True)
        self.made, self.fills = made, ()
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LateGradient({list(self.shape)}, {self.dtype})"


class _Unchanged:
    """A `Fill` that raises `CorrectnessError` if its inputs were changed in place since."""

    def __init__(self, fill: Fill, *of: torch.Tensor) -> None:
        self._fill, self._of, self._versions = fill, of, [version(tensor) for tensor in of]

    def __call__(self, target: torch.Tensor, *, add: bool) -> None:
        for tensor, expected, what in zip(self._of, self._versions, ("the weight", "the hidden states"), strict=True):
            if (now := version(tensor)) != expected:
                raise changed_error(
                    described(f"{what} of a tiled output projection", tensor.dtype, tensor.shape),
                    now,
                    expected,
                    "Backward, of which its gradient is the last part, has to end before",
                )
        self._fill(target, add=add)


class _Settled:
    """A hook on a leaf that computes the next gradient before any other code receives it."""

    def __init__(self, leaf: torch.Tensor) -> None:
        self._handle = leaf.register_hook(self)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self._handle.remove()
        return gradient.settled() if isinstance(gradient, LateGradient) else None


def _leads_to(hidden: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether the autograd graph of `hidden` contains `leaf`."""
    wanted = torch.autograd.graph.get_gradient_edge(leaf).node
    left = [hidden.grad_fn]
    seen = set(left)
    while left:
        node = left.pop()
        if node is wanted:
            return True
        for following, _ in () if node is None else node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return False
