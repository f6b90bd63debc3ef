"""`cast`: mixed precision as a pure function of the state.

The region runs on copies of its parameters, buffers and arguments in another dtype, each in the place of its original.
The copies are made by the differentiable `Tensor.to`, so gradients reach the originals in the originals' dtype, and
only the tensors that autograd saves outlive the call. A compiler traces the same steps (`_run`), on what it can see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from memscale.algebra import Numbers, Transform, Transformed
from memscale.core import (
    ConfigError,
    TransformError,
    assembled_in,
    by_name,
    factory,
    internals,
    matches,
    misfit,
    modules_in,
    pytrees,
)
from memscale.regions import Captures, copying_ahead, functorch_state, hidden_changes, without_dynamo
from memscale.transforms.cast.between import adapted
from memscale.transforms.cast.clashes import RecomputeWatch, explained
from memscale.transforms.cast.containers import Containers
from memscale.transforms.cast.converted import Converted, substituted, substituted_in_trace
from memscale.transforms.cast.precision import (
    NORMS,
    Survey,
    cast_floating,
    is_castable,
    is_kept,
    own_dtype,
    own_kernels,
    promoted,
)


@dataclasses.dataclass(frozen=True, repr=False)
class Cast(Transform):
    """Made by `cast`."""

    spelling: ClassVar[str] = "cast"
    own_numbers: ClassVar[Numbers] = "lossy"

    compute: torch.dtype = torch.bfloat16
    output: torch.dtype | None = None
    params: torch.dtype | None = None
    keep: tuple[str, ...] = (NORMS,)

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        region = Casted(fn, self)
        if not torch.compiler.is_compiling():
            region.find_captured()
        return region


class Casted(Transformed):
    """A function in mixed precision.

    Attributes:
        traceable: whether a compiler can trace the region: the forward of a module whose tree has all captured modules
            and, as parameters, buffers and attributes, all tensors; or a function of its arguments alone.
        watched_in_training: whether a call in training mode has shown that the region changes no cast buffer.
        watched: the train/eval flags, and the grad mode, with which a call has been watched for what a cast loses.
    """

    def __init__(self, fn: Callable[..., Any], how: Cast) -> None:
        super().__init__(fn, how)
        self.traceable = False
        self.watched_in_training = False
        self.watched: set[tuple[bool, ...]] = set()

    def find_captured(self) -> None:
        """Finds out what `fn` depends on; raises `TransformError` if a pattern of `keep` matches none of it."""
        captures = _CastCaptures(self)
        inside = [module for root in modules_in(self.fn) for module in root.modules()]
        tables = {id(table) for each in inside for table in (each._parameters, each._buffers, each.__dict__)}
        slots = [captures.slots[position] for position, _, tensor in captures.tensors if is_castable(tensor)]
        self.traceable = set(captures.modules).issubset(inside) and all(
            id(getattr(slot, "mapping", slot)) in tables for slot in slots
        )
        self._refuse_sparse(captures)
        paths = [path for root in captures.roots for path, _ in root.named_modules(remove_duplicate=False)]
        patterns = [pattern for pattern in self.how.keep if pattern != NORMS]
        if unmatched := [pattern for pattern in patterns if not any(matches(pattern, path) for path in paths)]:
            known = [repr(path) for path in paths if path]
            raise TransformError(
                f"{self.how!r}: {', '.join(map(repr, unmatched))} in keep matches no submodule of the region; paths "
                f"are relative to the region, which has {', '.join(known[:8]) or 'no submodules'}"
            )

    def _refuse_sparse(self, captures: _CastCaptures) -> None:
        """Raises `TransformError` for sparse gradients, which PyTorch cannot cast in backward."""
        of = {module: path for root in captures.roots for path, module in root.named_modules()}
        for module in captures.survey.cast:
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or not module.sparse:
                continue
            if module.weight.requires_grad and module.weight.dtype != (self.how.params or self.how.compute):
                kept = (*self.how.keep, of.get(module, ""))
                raise TransformError(
                    f"{self.how!r}: the {type(module).__name__} at {kept[-1]!r} has sparse gradients, which do not go "
                    f"back through a cast; write keep={kept!r}, or sparse=False"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The `try` makes Dynamo run the region in Python as a whole where it cannot trace; see `Checkpointed`.
        try:
            if torch.compiler.is_compiling():
                return _run(self, args, kwargs)
        finally:
            pass
        return without_dynamo(_run)(self, args, kwargs)

    def reassembled(self, remap: Callable[[Any], Any]) -> Casted:
        region = super().reassembled(remap)
        region.traceable, region.watched_in_training = self.traceable, self.watched_in_training
        return region


@by_name
def cast(
    *,
    compute: torch.dtype | str = torch.bfloat16,
    output: torch.dtype | str | None = None,
    params: torch.dtype | str | None = None,
    keep: Iterable[str] = (NORMS,),
) -> Transform:
    """A transform that computes a function in another floating dtype: mixed precision without a global switch.

    ``cast(compute=d)(f)(x)`` is ``f(x.to(d))`` with each parameter ``p`` replaced by ``p.to(d)``, and the result cast
    back. The parameters keep their dtype, and so do their gradients:

    >>> import torch, memscale as ms
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
    >>> def show(layer, args, output):
    ...     print(layer.weight.dtype, output.dtype)
    >>> hooks = [layer.register_forward_hook(show) for layer in model]
    >>> y = ms.cast()(model)(torch.ones(3, 4))
    torch.bfloat16 torch.bfloat16
    torch.float32 torch.bfloat16
    torch.bfloat16 torch.bfloat16
    >>> y.sum().backward()
    >>> y.dtype, model[0].weight.dtype, model[0].weight.grad.dtype
    (torch.float32, torch.float32, torch.float32)

    Floating tensors of at least 16 bits are cast: arguments and results at any depth, parameters, buffers, and tensors
    that the function captures. Each distinct tensor is cast once per call. Integer tensors stay. A `cast` inside a
    `cast` determines the dtypes of its own region, and casts the original parameters.

    Args:
        compute: the dtype of floating arguments and activations, as a `torch.dtype` or its name (``"bf16"``).
        output: the dtype of floating results. None is the dtype that the plain region would return: the promoted dtype
            of its floating arguments, or of its state if it has none.
        params: the dtype of the floating state; None is `compute`.
        keep: path patterns, as in a `Plan` but relative to the region, of submodules that keep their own precision.
            Their floating inputs are cast to the dtype of their own state, and their outputs to `compute`. The default
            pattern ``"<norms>"`` selects by structure: leaf modules whose parameters are all vectors, leaf modules with
            an epsilon and no parameters, and modules with floating buffers and no parameters, such as rotary tables and
            codebooks. ``()`` keeps none of these; the statistics of a BatchNorm keep their dtype in any case.

    Raises:
        ConfigError: a dtype is not a floating dtype of at least 16 bits, or `keep` is not an iterable of patterns.
        TransformError: on application, if a pattern of `keep` matches no submodule of the region. In a call, if the
            region changes a cast tensor, because the change would be lost. Under `torch.compile` also if the region is
            a function that captures modules or tensors, or if no earlier call has shown that it leaves its buffers
            unchanged.

    Cost: saves the difference in size of the tensors saved for backward; pays one copy of each parameter per call.
    Copies that backward needs live until then; ``compose(checkpoint(), cast())`` recomputes them instead.

    Source: Micikevicius et al., "Mixed Precision Training" (2018), section 3.1; the three dtypes are those of
    DeepMind's ``jmp.Policy``.
    """
    internals.needs("cast")
    computed = _dtype("compute", compute)
    state = None if params is None else _dtype("params", params)
    if isinstance(keep, str) or not isinstance(keep, Iterable):
        raise ConfigError(f"cast(keep=...) takes a tuple of path patterns, got {keep!r}; write keep=({keep!r},)")
    patterns = tuple(keep)
    if wrong := [message for pattern in patterns if (message := misfit(pattern))]:
        raise ConfigError(f"cast(keep=...): {'; '.join(wrong)}")
    return Cast(
        compute=computed,
        output=None if output is None else _dtype("output", output),
        params=None if state == computed else state,
        keep=patterns,
    )


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def _dtype(argument: str, value: Any) -> torch.dtype:
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    dtype = getattr(torch, _SHORT.get(name, name), None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise ConfigError(
            f"cast({argument}=...) takes a floating dtype of at least 16 bits, such as torch.bfloat16 or 'bfloat16', "
            f"got {value!r}" + ("; 8-bit floats compute only with their scales" if "float8" in str(value) else "")
        )
    return dtype


def _casts_in(part: Any) -> list[Casted]:
    """Returns the casts among the functions that `part` is made of, without those of modules that they call."""
    return [part for part in assembled_in(part) if isinstance(part, Casted)]


def _survey(region: Casted) -> Survey:
    def is_inner(module: nn.Module) -> bool:
        casts = _casts_in(module.__dict__.get("forward"))
        return len(casts) > 0 and region not in casts

    return Survey(region.how.keep, is_inner)


def _is_own(region: Casted, root: nn.Module) -> bool:
    """Whether `region` is the forward of `root` itself."""
    return region in _casts_in(root.__dict__.get("forward"))


def _leaves_alone(region: Casted, root: nn.Module) -> bool:
    """Whether `root`, whose forward is `region`, keeps its own precision or has another cast inside."""
    return is_kept(root, "", region.how.keep) or len(_casts_in(region.fn)) > 0


class _CastCaptures(Captures):
    """The captures of a region, without modules that keep their own precision.

    Attributes:
        roots: the topmost modules, including the region's own.
        survey: the modules below them, sorted by what the cast does with them.
    """

    def __init__(self, region: Casted) -> None:
        self._region = region
        self.roots: list[nn.Module] = []
        self.survey = _survey(region)
        super().__init__(region.fn)

    def _visit(self, thing: Any, home: dict[str, Any] | None) -> None:
        if not isinstance(thing, Casted):  # an inner cast casts its own state, from the originals
            super()._visit(thing, home)

    def _visit_module(self, root: nn.Module) -> None:
        if root in self.survey.seen:
            return
        self.roots.append(root)
        if _is_own(self._region, root) and _leaves_alone(self._region, root):
            self.survey.seen.update(root.modules())
            return
        added = self.survey.add(root)
        # Each cast module is visited by itself; modules that keep their precision are not visited at all.
        self._seen.update(map(id, self.survey.seen))
        for module in added:
            self._seen.discard(id(module))
            super()._visit_module(module)


class _TracedCaptures:
    """The captures of a region while a compiler traces it: the tensors in the tables of its modules.

    A compiler cannot follow the code of a function to the tensors that the code uses. It sees no version counters
    either, so a region with floating buffers must have run before.
    """

    def __init__(self, region: Casted) -> None:
        how = region.how
        torch._dynamo.comptime.comptime(_refuse_what_cannot_trace)
        if not region.traceable:
            raise TransformError(
                f"{how!r} under torch.compile: the region is a function that captures modules or tensors, or was made "
                "by code that is being compiled; transform a module, pass tensors as arguments, and apply the "
                "transform before torch.compile"
            )
        self.roots = list(dict.fromkeys(modules_in(region.fn)))
        self.survey = _survey(region)
        for root in self.roots:
            if not (_is_own(region, root) and _leaves_alone(region, root)):
                self.survey.add(root)
        self.modules = self.survey.cast
        tables = [table for each in self.modules for table in (each._parameters, each._buffers, each.__dict__)]
        self.tensors = [(table, key, value) for table in tables for key, value in table.items() if is_castable(value)]
        if not region.watched_in_training and any(
            module.training and any(is_castable(buffer) for buffer in module._buffers.values())
            for module in self.modules
        ):
            raise TransformError(
                f"{how!r} under torch.compile: the region has floating buffers, and only a call outside of "
                "torch.compile can show that it does not change them; call it once in training mode before, or name "
                "them in keep"
            )


_SIDE_EFFECTS = ("ignore_mutations_on", "stop_ignoring_mutations_on", "store_attr_mutations")


def _refuse_what_cannot_trace(context: Any) -> None:
    """Runs inside the compiler: before torch 2.12 it makes the region run in Python, or raise under `fullgraph`."""
    side_effects = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.side_effects
    if (
        internals.TORCH_VERSION < (2, 12)
        or not internals.has("torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer")
        or not all(hasattr(side_effects, name) for name in _SIDE_EFFECTS)
    ):
        raise torch._dynamo.exc.Unsupported(
            f"cast() under torch.compile: torch {torch.__version__} cannot trace how the tables of a module change, as "
            "it can from torch 2.12 on; without fullgraph=True the region runs as it does outside of torch.compile"
        )


def _run(self: Casted, args: Any, kwargs: Any) -> Any:
    how, copies, compiling = self.how, Converted(), torch.compiler.is_compiling()
    captures: Any = _TracedCaptures(self) if compiling else _CastCaptures(self)
    leaves, _ = pytrees.flatten((args, kwargs))
    natural = promoted(leaves) or promoted(tensor for _, _, tensor in captures.tensors)
    inside = how.compute
    for root in captures.roots:
        if _is_own(self, root) and is_kept(root, "", how.keep):
            inside = own_dtype(root) or natural or inside
    containers = Containers(lambda tensor: copies.of(tensor, inside))
    lost: list[torch.Tensor] = []
    try:
        with nullcontext() if compiling else copying_ahead():  # also for tensors inside objects among the arguments
            args, kwargs = containers.lend(args), {key: containers.lend(value) for key, value in kwargs.items()}
        with (
            own_kernels(captures.survey),
            adapted(captures.survey, how.compute, natural),
            (substituted_in_trace if compiling else substituted)(captures, how.params or how.compute, copies, lost),
        ):
            result = self.fn(*args, **kwargs) if compiling else _watched(self, captures, copies, leaves, args, kwargs)
    finally:
        containers.take_back(copies.original, how.output or natural)
    containers.refuse_changed_copies()
    _refuse_lost(self, captures, copies, lost, leaves)
    if not compiling:
        _remember(self, captures)
    outside = how.output or natural
    return result if outside is None else cast_floating(result, lambda tensor: tensor.to(outside))


def _remember(self: Casted, captures: _CastCaptures) -> None:
    if not functorch_state.active():
        self.watched.add((*captures.flags, torch.is_grad_enabled()))
    self.watched_in_training = self.watched_in_training or any(module.training for module in captures.modules)


def _watched(
    self: Casted, captures: _CastCaptures, copies: Converted, leaves: list[Any], args: Any, kwargs: Any
) -> Any:
    """Runs the function outside of a compiler, where changes through ``.data`` and clashes of dtypes can be named."""
    how, made, flags = self.how, copies.made(), (*captures.flags, torch.is_grad_enabled())
    watch = flags not in self.watched and not functorch_state.active()
    weights = {id(tensor) for _, _, tensor in captures.tensors}
    cast_weights = [copy for copy in made if id(copies.original(copy)) in weights]
    with (
        explained(how, captures.roots, how.keep),
        hidden_changes.refused(
            made,
            lambda index: _describe(copies.original(made[index]), copies, captures, leaves),
            how,
            f"goes to a copy in another dtype. {_remedy(how)}",
            watch=watch,
        ),
        RecomputeWatch(how, captures.roots, cast_weights) if watch and flags[-1] else nullcontext(),
    ):
        return self.fn(*args, **kwargs)


def _refuse_lost(self: Casted, captures: Any, copies: Converted, lost: list[torch.Tensor], leaves: list[Any]) -> None:
    """Raises `TransformError` if the region changed a copy, or replaced a cast buffer."""
    how = self.how
    if torch.compiler.is_compiling():
        why = (
            f"{how!r} under torch.compile: the region changes a parameter, buffer or argument in place, and the change "
            f"goes to a copy in another dtype; a call outside of torch.compile names the tensor. {_remedy(how)}"
        )
        if lost:
            raise TransformError(why)
        copies.refuse_traced_changes(why)
    elif lost := [*lost, *copies.changed()]:
        raise TransformError(
            f"{how!r}: the region changed {_describe(lost[0], copies, captures, leaves)}, and the change went to a "
            f"copy in another dtype. {_remedy(how)}"
        )


def _remedy(how: Cast) -> str:
    kept = ", ".join(map(repr, how.keep))
    return (
        f"Add the path of its module to keep=({kept}{',' * (len(how.keep) == 1)}) so that it stays in its own "
        "precision, or do not change it inside the region"
    )


def _describe(tensor: torch.Tensor, copies: Converted, captures: _CastCaptures, leaves: list[Any]) -> str:
    what = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    for root in captures.roots:
        for path, candidate in [*root.named_parameters(), *root.named_buffers()]:
            if copies.original(candidate) is tensor:
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                return f"{kind} {path!r} of {type(root).__name__} ({what})"
    kind = "argument" if any(leaf is tensor for leaf in leaves) else "captured tensor"
    return f"its {kind} {what}"


factory("cast", cast)
