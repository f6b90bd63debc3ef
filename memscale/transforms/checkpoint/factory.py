"""`checkpoint`: keep a region's inputs instead of its intermediate values, and recompute these values in backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.utils import checkpoint as torch_checkpoint

from memscale.algebra import Transform, Transformed
from memscale.core import TransformError, by_name, factory, internals
from memscale.policies import (
    EverythingSaveable,
    Move,
    NothingSaveable,
    Policy,
    Save,
    Site,
    batch_dims,
    check_policy,
    nothing_saveable,
)
from memscale.regions import (
    functorch_state,
    name_refused_hooks,
    without_dynamo,
)
from memscale.transforms.checkpoint import functorch, recompute
from memscale.transforms.checkpoint.compiled import checked
from memscale.transforms.checkpoint.cuts import Cut, check_cuts, check_row, segments
from memscale.transforms.checkpoint.learned_effects import LearnedEffects
from memscale.transforms.checkpoint.selective import Recorder


@dataclasses.dataclass(frozen=True, repr=False)
class Checkpoint(Transform):
    """Made by `checkpoint`."""

    spelling: ClassVar[str] = "checkpoint"
    uses_runtime: ClassVar[bool] = True

    policy: Policy = nothing_saveable
    cuts: tuple[Cut, ...] = ()

    @property
    def moves(self) -> bool:
        return self.policy.moves

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if self.cuts:
            check_row(fn, self.cuts)
        return Checkpointed(fn, self)


class Checkpointed(Transformed):
    """A checkpointed function.

    Attributes:
        learned: the effects that earlier runs found, for each segment between cuts.
    """

    how: Checkpoint

    def __init__(self, fn: Callable[..., Any], how: Checkpoint) -> None:
        super().__init__(fn, how)
        self.learned = [LearnedEffects() for _ in how.cuts or (0,)]  # of each segment

    @property
    def keeps_inputs_only(self) -> bool:  # type: ignore[override]
        """Whether backward recomputes the function from its inputs."""
        return not isinstance(self.how.policy, EverythingSaveable)

    @property
    def not_around_sharded(self) -> str:  # type: ignore[override]
        """Returns why the region cannot contain sharded modules; empty if it can. Policies count calls of operators."""
        if isinstance(self.how.policy, (NothingSaveable, EverythingSaveable)):
            return ""
        return "gathering parameters runs other operators in the recompute, among which a policy does not find its own"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        # The `try` makes Dynamo leave the whole frame to Python, where `is_compiling` is false, if Dynamo cannot trace
        # the region (due to a side effect on a Python object) or `checked` refuses the region. Without the `try` Dynamo
        # would resume at the call of `torch.utils.checkpoint`, whose eager form repeats side effects.
        try:
            if compiling:
                # Under `torch.func` the compiler traces the transform, and decides what backward keeps.
                if functorch_state.active() or not torch.is_grad_enabled() or not self.keeps_inputs_only:
                    return self.fn(*args, **kwargs)
                *regions, rest = segments(self.fn, self.how.cuts) if self.how.cuts else (self.fn, None)
                for fn in regions:
                    args, kwargs = (_traced(fn, self.how.policy, args, kwargs),), {}
                return args[0] if rest is None else rest(*args)
        finally:
            pass
        # No part of a region that runs here may be compiled: its recompute runs uncompiled, and would save other
        # tensors than compiled parts.
        return without_dynamo(_eager)(self, args, kwargs)


@by_name
def checkpoint(*, policy: Policy | None = None, cuts: tuple[Cut, ...] = ()) -> Transform:
    """A transform that keeps a function's inputs for backward and recomputes the rest.

    ``checkpoint()(f)`` computes what ``f`` computes, bit for bit, as do its gradients of any order:

    >>> import torch, memscale as ms
    >>> def f(x, w):
    ...     return torch.tanh(x @ w).exp()
    >>> x, w = torch.ones(4, 8), torch.ones(8, 100, requires_grad=True)
    >>> sum(r.nbytes for r in ms.saved_residuals(f, x, w) if r.source == "intermediate")
    3200
    >>> sum(r.nbytes for r in ms.saved_residuals(ms.checkpoint()(f), x, w) if r.source == "intermediate")
    0

    The recompute sees the parameters, buffers, train/eval flags, Python attributes (also those of objects among the
    arguments), random state and autocast of the forward. BatchNorm statistics and counters therefore move once, dropout
    repeats its mask, and `eval()` before backward changes nothing. `checkpoint` works in plain autograd, under
    `torch.func` and under `torch.compile`.

    Args:
        policy: decides which intermediate values to keep, one of `memscale.policies`; `None` means
            `policies.nothing_saveable`. Under `torch.func` every policy but `everything_saveable` keeps inputs only,
            and so do policies by name under `torch.compile`, which does not see labels.
        cuts: for an `nn.Sequential`, the children (counted from 0) before which another region begins; ``(2, 1)`` is
            before child 1 of child 2, which must be an `nn.Sequential` too. Each segment up to a cut keeps its input
            and is recomputed by itself; the segment behind the last cut runs without checkpoint.

    Cuts behind layers with weights keep the outputs of these layers, and recompute the cheap ones:

    >>> row = torch.nn.Sequential(*(m() for _ in range(4) for m in (lambda: torch.nn.Linear(8, 8), torch.nn.Tanh)))
    >>> x = torch.ones(4, 8)
    >>> sum(r.nbytes for r in ms.saved_residuals(row, x) if r.source == "intermediate")
    512
    >>> fit = ms.transform(row, {"": ms.checkpoint(cuts=(3, 7))})
    >>> sum(r.nbytes for r in ms.saved_residuals(fit, x) if r.source == "intermediate")
    256

    Raises:
        ConfigError: `policy` is not a policy, or `cuts` are not increasing.
        CorrectnessError: in backward, a tensor that the region depends on was changed in place, or the recompute
            differs from the run; in forward, the region changes state that a recompute cannot restore.
        RuntimeUnavailable: in forward, the policy moves a value from a device that no runtime here supports.
        TransformError: the function with `cuts` is not an `nn.Sequential`, is too short, or a child that a cut goes
            through has hooks; the policy moves a value under `torch.compile`; a region under `torch.func` changes an
            argument in place; or an argument leads to more than 4,096 objects.

    Cost: saves the bytes of the region's residuals; pays its forward again, up to the last value that backward needs.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4; the policies are those of
    ``jax.checkpoint``.
    """
    internals.needs("checkpoint")
    if policy is None:
        policy = nothing_saveable
    check_policy("checkpoint(policy=...)", policy)
    return Checkpoint(policy, check_cuts(cuts))


def _eager(self: Checkpointed, args: Any, kwargs: Any) -> Any:
    policy = self.how.policy
    if not torch.is_grad_enabled() or isinstance(policy, EverythingSaveable):
        for learned in self.learned:
            learned.release()
        return self.fn(*args, **kwargs)
    run: Callable[..., Any] = _region
    if not functorch_state.is_absent():
        if functorch_state.inside_region() or not functorch_state.active():
            # Also in a dual level of forward-mode differentiation: after its end a recompute would miss the tangents.
            return self.fn(*args, **kwargs)
        run = _region_under_functorch
    if not self.how.cuts:
        return run(self, self.fn, self.learned[0], args, kwargs)
    *regions, rest = segments(self.fn, self.how.cuts)
    for fn, learned in zip(regions, self.learned, strict=True):
        args, kwargs = (run(self, fn, learned, args, kwargs),), {}
    return rest(*args)


def _region(self: Checkpointed, fn: Callable[..., Any], learned: LearnedEffects, args: Any, kwargs: Any) -> Any:
    policy = self.how.policy
    record = None if isinstance(policy, NothingSaveable) else functools.partial(Recorder, policy, self.runtime)
    try:
        return recompute.run(fn, record, learned, args, kwargs)
    except RuntimeError as error:
        name_refused_hooks(error, self.how, "recomputing")
        raise


def _region_under_functorch(_: Checkpointed, fn: Callable[..., Any], __: LearnedEffects, args: Any, kwargs: Any) -> Any:
    if functorch_state.has_rules():
        return functorch.run(fn, args, kwargs)
    with functorch_state.region():
        return fn(*args, **kwargs)


def _traced(fn: Callable[..., Any], policy: Policy, args: Any, kwargs: Any) -> Any:
    """Runs the region under `torch.compile`, where the compiler decides what to recompute from the graph's tags."""
    fn = functools.partial(checked, fn)
    if isinstance(policy, NothingSaveable):
        return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, **kwargs)

    # A partial of module-level functions, since Dynamo refuses a closure here.
    contexts = functools.partial(
        torch_checkpoint.create_selective_checkpoint_contexts, functools.partial(_decide, policy)
    )
    return torch_checkpoint.checkpoint(fn, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _decide(policy: Policy, context: Any, op: Any, *_: Any, **__: Any) -> torch_checkpoint.CheckpointPolicy:
    match policy.verdict(Site(op, None, batch_dims(op))):
        case Save():
            return torch_checkpoint.CheckpointPolicy.MUST_SAVE
        case Move(tier):
            raise TransformError(
                f"{policy!r} moves {op} to tier {tier!r}, which the graphs of torch.compile cannot; use a policy that "
                "saves or recomputes there, or leave this region uncompiled"
            )
        case _:
            return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


factory("checkpoint", checkpoint)
