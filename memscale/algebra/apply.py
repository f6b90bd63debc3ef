"""`transform` and `install`: the two functions that apply a plan to a model.

A region is a module whose `forward` is replaced, as an instance attribute, by a transformed function. The class, hooks
and parameters of the module, and its path in the model, stay the same.
"""

from __future__ import annotations

import difflib
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, overload

import torch
from torch import nn

from memscale.algebra.agreement import Agreement
from memscale.algebra.composition import AnyOptimizer, Transform, compose
from memscale.algebra.functions import Modules, copy_tree, walk
from memscale.algebra.of_optimizers import under_rules
from memscale.algebra.plan import Plan, as_plan
from memscale.algebra.region import ForwardPatch, Relocation, Transformed, attach, name_regions, placing_in
from memscale.core import Assembled, PlanError, TransformError, assembled_in, batches, shown, takes_no
from memscale.runtime import Runtime
from memscale.telemetry import counted

PlanLike = Plan | Mapping[str, Transform] | Iterable[tuple[str, Transform]]


def _planned_first(given: Mapping[str, Any]) -> str:
    """Returns the call to write instead, for a call of `transform` with arguments of `plan` such as `budget`."""
    budget = shown(given["budget"]) if "budget" in given else "..."
    others = "".join(f", {name}=..." for name in given if name not in ("batch", "budget"))
    return f"transform(model, plan(model, batch, budget={budget}{others}))"


@contextmanager
def _uncollected() -> Iterator[None]:
    """Runs the body without Python's garbage collector, which would walk the process for every 700 new containers."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@overload
def transform(
    model: nn.Module, plan: PlanLike, *, optimizer: None = None, runtime: Runtime | None = None
) -> nn.Module: ...
@overload
def transform(
    model: nn.Module, plan: PlanLike, *, optimizer: AnyOptimizer, runtime: Runtime | None = None
) -> tuple[nn.Module, AnyOptimizer]: ...
@counted("transform")
@takes_no(("batch", "budget", "loss", "config", "hardware", "accumulate", "stepping"), _planned_first)
def transform(
    model: nn.Module,
    plan: PlanLike,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    runtime: Runtime | None = None,
) -> Any:
    """Returns a copy of `model` in which each module that `plan` names runs under its transform.

    `model` itself does not change. The copy has the same classes and names, and shares the parameter objects and the
    buffers, so an optimizer or a `state_dict` of either works for both:

    >>> import torch, memscale as ms
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    >>> fit = ms.transform(model, {"*": ms.checkpoint()})
    >>> type(fit) is type(model), fit[0].weight is model[0].weight, fit is model
    (True, True, False)
    >>> x = torch.ones(3, 4)
    >>> torch.equal(fit(x), model(x))
    True

    Parameters and buffers are shared: `.to()`, `load_state_dict` and in-place changes take effect in both. Training
    mode, hooks, attributes and children are separate from then on. Replacing a parameter *object* in `model`
    (``load_state_dict(assign=True)``, assigning a new `nn.Parameter`) ends the sharing: the next call of the copy
    raises `TransformError` and names the parameter. Replacing a parameter of the copy is allowed and affects only the
    copy.

    Rules for optimizers, such as `step_in_backward`, need the optimizer. `transform` then returns a pair of the model
    and a new optimizer (the given one if the plan has no such rule). The path of such a rule names parameters, or
    modules, which stand for all parameters in them. The states of the optimizer carry over:

    >>> plan = ms.Plan({"*": ms.checkpoint(), "**.weight": ms.step_in_backward()})
    >>> fit, optimizer = ms.transform(model, plan, optimizer=torch.optim.AdamW(model.parameters()))
    >>> fit(x).sum().backward()
    >>> model[0].weight.grad, model[0].bias.grad.shape  # the weight has stepped already, in backward
    (SpentGradient(parameter 0 of group 0 [4, 4]), torch.Size([4]))
    >>> optimizer.step()

    Args:
        model: any module.
        plan: a `Plan`, or any argument of `Plan`.
        optimizer: an optimizer of the parameters of `model`; the optimizer itself does not change.
        runtime: the runtime by which `offload` and `offload_states` move tensors; `None` is the process's own, for the
            device of each tensor.

    Returns:
        A module of the same class as `model`; with `optimizer`, a pair of the module and an optimizer of the class of
        `optimizer`. A model that ``fully_shard`` took cannot be copied and is returned itself; its plan may have rules
        for the optimizer only.

    Raises:
        TransformError: `model` is not a module; a path names a module that cannot be transformed (a container without
            a forward, a scripted module); ``fully_shard`` took `model` before; the optimizer has parameters that
            the model lacks, or is of a class that the rules cannot change.
        PlanError: patterns match no module (or, for an optimizer, no parameter); the error lists all of them with the
            nearest paths. Or the plan has rules for an optimizer and none is given.

    Cost: one Python object for each module; no tensor is copied.
    """
    modules = _modules_of("transform", model)
    if runtime is not None and not isinstance(runtime, Runtime):
        raise TransformError(
            f"transform(runtime={runtime!r}) must be a memscale.runtime.Runtime, or None for the process's own"
        )
    plan = as_plan(plan)
    regions = find_regions(model, plan.of_functions(), modules)
    # First, so that an error in the rules for the optimizer is raised before any module is copied.
    stepping = under_rules(model, plan.of_optimizers(), optimizer, runtime)
    if (sharded := _sharded_in(modules)) is not None:
        if regions:
            raise TransformError(
                f"{sharded or 'the model'} was sharded by fully_shard, whose hooks work for this module only and not "
                "for a copy; call transform() before fully_shard(), or use wrap(), which works in place"
            )
        return model if optimizer is None else (model, stepping)
    with _uncollected():
        memo = copy_tree(modules)
        copy, copies = memo[id(model)], [(path, memo[id(module)]) for path, module in modules]
        for module, how in regions:
            attach(memo[id(module)], how.on(runtime))
        name_regions(copies)
        links = _links(modules) if regions else []
    _keep_shared_parameters(copies)
    _warn_of_own_checkpointing(copies)
    # A process with an empty plan takes part in the comparison of plans, too.
    if regions or plan.parallel is not None or _is_one_of_several():
        agreement = Agreement(copy, plan)
        attach(copy, lambda fn: Shared(fn, links, agreement))
    return copy if optimizer is None else (copy, stepping)


def install(
    model: nn.Module,
    plan: PlanLike,
    *,
    runtime: Runtime | None = None,
    over: Callable[[str, Callable[..., Any]], Callable[..., Any]] = lambda _, fn: fn,
    around_root: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    wrapped: Iterable[ForwardPatch] = (),
) -> list[ForwardPatch]:
    """Applies `plan` to `model` itself, in place, and returns the patches that `uninstall` takes.

    Args:
        model, plan, runtime: as in `transform`.
        over: wraps the transformed forward of each region: ``over(path, forward)`` returns the function to run.
        around_root: wraps the forward of the root, which may be a region or not.
        wrapped: patches of an earlier plan whose forward other code has wrapped since. Regions go inside the wrapper.
    """
    modules = _modules_of("install", model)
    regions = dict(find_regions(model, as_plan(plan), modules))
    former = {patch.module: patch for patch in wrapped}
    patches = []
    for path, module in model.named_modules():
        layers: list[Callable[..., Any]] = []
        if (how := regions.get(module)) is not None:
            layers += [how.on(runtime), partial(over, path)]
        if module is model and around_root is not None:
            layers.append(around_root)
        if layers:
            patches.append(former.get(module) or ForwardPatch(module))
            patches[-1].apply(partial(_layered, layers))
    name_regions(modules, patches)
    _keep_shared_parameters(modules)
    return patches


def _layered(layers: list[Callable[..., Any]], fn: Callable[..., Any]) -> Callable[..., Any]:
    for layer in layers:
        fn = layer(fn)
    return fn


def uninstall(patches: Iterable[ForwardPatch]) -> list[tuple[ForwardPatch, Callable[..., Any]]]:
    """Undoes `install`: every attribute of the modules is the same object as before.

    Returns:
        The patches whose region other code has wrapped since, each with the wrapping forward, which stays.
    """
    return [(patch, on_top) for patch in patches if (on_top := patch.put_back()) is not None]


def find_regions(model: nn.Module, plan: Plan, modules: Modules | None = None) -> list[tuple[nn.Module, Transform]]:
    """Returns the modules that `plan` names, each with the composition of its rules.

    A module with several paths is one region, under the rules of all its paths.

    Args:
        model, plan: as in `transform`.
        modules: the result of `walk(model)`, if the caller has it.
    """
    under_rules(model, plan.of_optimizers(), None, None)
    paths = walk(model) if modules is None else modules
    found: dict[int, tuple[nn.Module, str, list[Transform]]] = {}
    unmatched = []
    for rule in plan:
        hits = [(path, module) for path, module in paths if rule.matches(path)]
        if not hits:
            unmatched.append(rule.pattern)
        for path, module in {id(module): (path, module) for path, module in reversed(hits)}.values():
            found.setdefault(id(module), (module, path, []))[2].append(rule.transform)
    if unmatched:
        known = [path for path, _ in paths if path]
        raise PlanError("; ".join(_no_match(pattern, known, model) for pattern in unmatched))
    regions = [(module, path, compose(*reversed(rules))) for module, path, rules in found.values()]
    regions = [(module, path, how) for module, path, how in regions if how != compose()]
    if misfits := [message for module, path, _ in regions if (message := _misfit(module, path))]:
        raise TransformError("; ".join(misfits))
    return [(module, how) for module, _, how in regions]


def _modules_of(verb: str, model: Any) -> Modules:
    """Returns the modules of `model`. Raises `TransformError` if it is no module or has lazy parameters."""
    if not isinstance(model, nn.Module):
        raise TransformError(
            f"{verb}(model, plan) takes a torch.nn.Module, got {type(model).__name__}; "
            "apply a transform to a plain function by calling it: checkpoint()(fn)"
        )
    modules = walk(model)
    lazy = [
        f"{path}.{name}" if path else name
        for path, module in modules
        for name, parameter in module._parameters.items()
        if parameter is not None and type(parameter) is not nn.Parameter and nn.parameter.is_lazy(parameter)
    ]
    if lazy:
        raise TransformError(
            f"{verb}(model, plan): parameter {lazy[0]!r} has no shape yet, since its module is lazy; "
            "run a batch through the model first, then transform it"
        )
    return modules


def _sharded_in(modules: Modules) -> str | None:
    """Returns the path of the first module that ``fully_shard`` took, or `None`."""
    kinds = {type(module) for _, module in modules}
    taken = {kind for kind in kinds if any(base.__name__ == "FSDPModule" for base in kind.__mro__)}
    return next((path for path, module in modules if type(module) in taken), None)


def _is_one_of_several() -> bool:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size() > 1)


def _no_match(pattern: str, known: list[str], model: nn.Module) -> str:
    if not known:
        return (
            f"the plan's path {pattern!r} matches nothing: {type(model).__name__} has no submodules; use '' for itself"
        )
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.3) or known[:3]
    return (
        f"the plan's path {pattern!r} matches no module of {type(model).__name__}; the nearest are "
        f"{', '.join(map(repr, near))} ('*' is one segment, '**' any number)"
    )


def _misfit(module: nn.Module, path: str) -> str | None:
    where = f"the module at {path!r}" if path else "the model"
    if isinstance(module, torch.jit.ScriptModule):
        return f"{where} is a torch.jit.ScriptModule, whose forward runs in C++; transform the Python module"
    if not batches.has_forward(module):
        return (
            f"{where} is a {type(module).__name__}, which has no forward to transform; "
            f"name its children with {f'{path}.*' if path else '*'!r}"
        )
    return None


def _keep_shared_parameters(modules: Modules) -> None:
    """Tells the regions that move parameters which ones to keep in place: those also used outside of all regions."""
    distinct = {id(module): module for _, module in modules}.values()
    patched = [module for module in distinct if "forward" in module.__dict__]
    regions = [(module, placing) for module in patched if (placing := placing_in(module))]
    if not regions:
        return
    inside = {id(part) for module, _ in regions for part in module.modules()}
    outside = {
        id(parameter)
        for module in distinct
        if id(module) not in inside
        for parameter in module._parameters.values()
        if parameter is not None
    }
    reasons: list[str | None] = []
    for module, placing in regions:
        resident = tuple([parameter for parameter in module.parameters() if id(parameter) in outside])
        for region in placing:
            region.resident = resident
            reasons.append(region.why_none_leaves(list(module.parameters())))
        module.__dict__["_apply"] = Relocation(module, placing[0])  # of several such transforms, the outermost decides
    if reasons and None not in reasons:
        warnings.warn(f"{max(map(str, reasons), key=len)}; this is said once", RuntimeWarning, stacklevel=3)


def _warn_of_own_checkpointing(modules: Modules) -> None:
    """Warns if a Hugging Face model's own checkpointing is on inside or around a region that recomputes."""
    own = {id(module): path for path, module in reversed(modules) if module.__dict__.get("gradient_checkpointing")}
    for path, region in modules if own else ():
        made_of = assembled_in(region.__dict__.get("forward"))
        if not any(isinstance(part, Transformed) and part.keeps_inputs_only for part in made_of):
            continue
        owners = [own[id(module)] for module in region.modules() if id(module) in own]
        owners += [each for each in own.values() if not each or f"{path}.".startswith(f"{each}.")]
        if owners:
            warnings.warn(
                f"the model's own activation checkpointing is on (at {owners[0]!r}), in or around the region {path!r}: "
                "one of the two has no effect, and memscale's checks of recomputes do not cover the model's own; call "
                "model.gradient_checkpointing_disable() before transform()",
                RuntimeWarning,
                stacklevel=3,
            )
            return


_Link = tuple["weakref.ref[nn.Module]", str, dict[str, nn.Parameter | None]]


class Shared(Assembled):
    """The forward of the root: checks that the original model still holds the shared parameters, then calls `fn`.

    The first call also compares the plan with the other processes.
    """

    def __init__(self, fn: Callable[..., Any], links: list[_Link], agreement: Agreement) -> None:
        self.fn = fn
        self.links = links
        self.agreement = agreement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In a `try`, so that Dynamo leaves this frame to Python, which checks before each call.
        try:
            if torch.compiler.is_compiling():
                # Dynamo makes a guard of each comparison. The check comes after the call, because Dynamo treats a
                # parameter that it first meets outside of a module as an input of dynamic size.
                result = self.fn(*args, **kwargs)
                self._check()
                return result
        finally:
            pass
        self._check()
        if self.agreement.is_open:
            self.agreement.settle()
        return self.fn(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def _check(self) -> None:
        # Checks only the original model: in the copy, functional_call replaces entries for the time of a call.
        for reference, path, shared in self.links:
            original = reference()
            if original is None:
                continue
            for name, parameter in original._parameters.items():
                if name in shared and parameter is not shared[name]:
                    raise TransformError(
                        f"parameter '{path}{name}' of the model was replaced by another object after transform(), so "
                        "the transformed module trains one that the model no longer has; "
                        "call transform(model, plan) again"
                    )

    def parts(self) -> tuple[Any, ...]:
        return (self.fn,)

    def reassembled(self, remap: Callable[[Any], Any]) -> Shared:
        return Shared(remap(self.fn), self.links, self.agreement)

    def __reduce__(self) -> Any:
        # A deep copy or a pickle shares no parameters with the original model, so it needs no check.
        return (_alone, (self.fn,))


def _alone(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _links(modules: Modules) -> list[_Link]:
    links: list[_Link] = []
    seen: set[int] = set()
    for path, module in modules:
        if module._parameters and id(module) not in seen:
            seen.add(id(module))
            shared = dict(module._parameters)
            # The link is emptied when the model is freed, or it would keep parameters alive that FSDP2 has replaced.
            links.append((weakref.ref(module, partial(_let_go, shared)), f"{path}." if path else "", shared))
    return links


def _let_go(shared: dict[str, nn.Parameter | None], _: object) -> None:
    shared.clear()
