"""`offload`: keep a region's residuals on another memory tier between forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from memscale.algebra import Transform, Transformed
from memscale.core import ConfigError, TransformError, by_name, check_tier, factory, internals
from memscale.regions import functorch_state, uncompiled
from memscale.runtime import hooks_here
from memscale.transforms.offload.saving import saving_by
from memscale.transforms.offload.streamed import Streamed


@dataclasses.dataclass(frozen=True, repr=False)
class Offload(Transform):
    """Made by `offload`."""

    spelling: ClassVar[str] = "offload"
    uses_runtime: ClassVar[bool] = True

    what: str = "activations"
    tier: str = "auto"
    min_bytes: int | None = None

    @property
    def moves(self) -> bool:
        return True

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return Streamed(fn, self) if self.what == "params" else Offloaded(fn, self)


class Offloaded(Transformed):
    """A function whose residuals are kept on another tier."""

    how: Offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and functorch_state.active():
            return self.fn(*args, **kwargs)  # one graph with its derivative: nothing is kept that could move
        why = "offload() decides tensor by tensor, while the region runs, what to move"
        return uncompiled(_eager, why, self, args, kwargs)


@by_name
def offload(*, what: str = "activations", tier: str = "auto", min_bytes: int | None = None) -> Transform:
    """A transform that keeps what a function saves for backward on another memory tier, and brings it back.

    ``offload()(f)`` computes what ``f`` computes, bit for bit, as do its gradients of any order. What it frees:

    >>> import torch, memscale as ms
    >>> def f(x):
    ...     return torch.exp(torch.sin(x * 2))
    >>> x = torch.ones(1024, requires_grad=True)
    >>> sum(r.nbytes for r in ms.saved_residuals(f, x) if r.source == "intermediate")
    8192
    >>> moved = ms.offload(min_bytes=4096)(f)
    >>> sum(r.nbytes for r in ms.saved_residuals(moved, x) if r.source == "intermediate")
    0

    A tensor moves once nothing but backward needs it. One that is kept on the device anyway (a parameter, what the
    caller holds, another view of either) is not copied, since that would free nothing, and views of one storage move
    once. Around `checkpoint` it moves what that keeps: ``compose(offload(), checkpoint())`` moves the region's input.
    Inside one, ``compose(checkpoint(), offload())``, nothing is left to move.

    ``offload(what="params")`` is about the region's parameters instead: they live on the other tier, where an
    optimizer finds them and their gradients, and come to the device for forward and again for backward.

    >>> layer = torch.nn.Linear(1024, 1024)
    >>> fit = ms.transform(layer, {"": ms.offload(what="params")})
    >>> fit(torch.ones(8, 1024)).sum().backward()
    >>> fit.weight is layer.weight, fit.weight.grad.shape
    (True, torch.Size([1024, 1024]))

    Under `torch.compile` the region runs uncompiled, at the price of a graph break.

    Args:
        what: ``"activations"``, what autograd saves between forward and backward, or ``"params"``.
        tier: where to, ``"pinned"``, ``"pageable"`` or ``"disk"``; ``"auto"`` is the nearest that the device has. When
            a tier is full the next one is taken, and at the end of the row the tensor stays where it is, with a
            warning. On a machine without an accelerator the device is RAM, and ``"disk"`` is its only tier.
        min_bytes: smaller ones stay on the device; `None` is the runtime's, 1 MiB unless configured.

    Raises:
        ConfigError: an argument is none of these.
        CorrectnessError: in backward, when a moved tensor was changed in place after it was saved.
        RuntimeUnavailable: in forward, on a device whose tensors nothing here can move.
        TransformError: inside a transform of `torch.func`, in a CUDA graph capture, in a forked process, for sparse
            tensors.

    Cost: saves the region's residuals on the device; pays their way out and back, as far as compute does not hide it.

    Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks" (2016), section III.
    """
    internals.needs("offload")
    if what not in ("activations", "params"):
        raise ConfigError(
            f"offload(what={what!r}) must be 'activations', what autograd saves, or 'params', the region's parameters"
        )
    check_tier("offload(tier=...)", tier)
    if min_bytes is not None and (isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0):
        raise ConfigError(f"offload(min_bytes={min_bytes!r}) must be an int of at least 0, or None for the runtime's")
    return Offload(what, tier, min_bytes)


def _eager(self: Offloaded, args: Any, kwargs: Any) -> Any:
    # A checkpoint around the region runs it again as a whole: there is nothing to keep, under `torch.func` too.
    if not torch.is_grad_enabled() or functorch_state.inside_region():
        return self.fn(*args, **kwargs)
    hooks = hooks_here(self.runtime, self.how.tier, self.how.min_bytes, region=self.title)
    if hooks is not None and functorch_state.active():
        raise TransformError(
            f"{self.how!r} inside a transform of torch.func, such as grad, vjp, vmap or jvp, which know nothing of the "
            "saved-tensor hooks that offloading needs; use checkpoint() there, or loss.backward() in place of the "
            "transform"
        )
    with saving_by(hooks, self.how):
        return self.fn(*args, **kwargs)


factory("offload", offload)
