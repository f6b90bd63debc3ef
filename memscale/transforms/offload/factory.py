"""`offload`: keeps the residuals or the parameters of a region on another memory tier between uses."""

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
            return self.fn(*args, **kwargs)  # the graph includes its derivative, so there are no residuals to move
        why = "offload() decides tensor by tensor, while the region runs, what to move"
        return uncompiled(_eager, why, self, args, kwargs)


@by_name
def offload(*, what: str = "activations", tier: str = "auto", min_bytes: int | None = None) -> Transform:
    """A transform that keeps what a function saves for backward on another memory tier, and brings it back.

    ``offload()(f)`` computes what ``f`` computes, bit for bit, and so do its gradients of any order. It frees:

    >>> import torch, memscale as ms
    >>> def f(x):
    ...     return torch.exp(torch.sin(x * 2))
    >>> x = torch.ones(1024, requires_grad=True)
    >>> sum(r.nbytes for r in ms.saved_residuals(f, x) if r.source == "intermediate")
    8192
    >>> moved = ms.offload(min_bytes=4096)(f)
    >>> sum(r.nbytes for r in ms.saved_residuals(moved, x) if r.source == "intermediate")
    0

    A tensor moves when only backward still needs it. A tensor that stays on the device anyway (a parameter, a tensor
    that the caller holds, a view of either) is not copied, because that would free nothing, and views of one storage
    move together. Outside a `checkpoint`, ``compose(offload(), checkpoint())`` moves the checkpoint's inputs. Inside
    one, ``compose(checkpoint(), offload())``, there is nothing to move.

    With ``offload(what="params")`` the region's parameters live on the other tier, where an optimizer finds them and
    their gradients, and are copied to the device for forward and again for backward:

    >>> layer = torch.nn.Linear(1024, 1024)
    >>> fit = ms.transform(layer, {"": ms.offload(what="params")})
    >>> fit(torch.ones(8, 1024)).sum().backward()
    >>> fit.weight is layer.weight, fit.weight.grad.shape
    (True, torch.Size([1024, 1024]))

    Under `torch.compile` the region runs uncompiled, with a graph break.

    Args:
        what: ``"activations"``, what autograd saves between forward and backward, or ``"params"``.
        tier: ``"pinned"``, ``"pageable"``, ``"disk"``, or ``"auto"`` for the nearest tier that the device has. If a
            tier is full, the next one is used; if all are full, the tensor stays where it is, with a warning. On a
            machine without an accelerator the device is RAM, and ``"disk"`` is its only tier.
        min_bytes: smaller tensors stay on the device; None is the runtime's value, 1 MiB by default.

    Raises:
        ConfigError: an argument has another value.
        CorrectnessError: in backward, if a moved tensor was changed in place after it was saved.
        RuntimeUnavailable: in forward, if no backend moves tensors of this device.
        TransformError: inside a transform of `torch.func`, in a CUDA graph capture, in a forked process, or for sparse
            tensors.

    Cost: saves the region's residuals on the device; pays the part of the copies that compute does not hide.

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
    # A surrounding checkpoint recomputes the region as a whole, under `torch.func` too, so there is nothing to keep.
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
