"""`transform` and `install`: the one interpreter of a plan.

A region is a module whose `forward` is replaced, as an instance attribute, by a transformed function. Nothing else
about the module changes: not its class, its hooks, its parameters or its place in the tree.
"""

from __future__ import annotations

import difflib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
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
    """What to write where `transform` was given what `plan` takes: a plan is made once, and may be applied often."""
    budget = shown(given["budget"]) if "budget" in given else "..."
    others = "".join(f", {name}=..." for name in given if name not in ("batch", "budget"))
    return f"transform(model, plan(model, batch, budget={budget}{others}))"


@overload
def transform(
    model: nn.Module, plan: PlanLike, *, optimizer: None = None, runtime: Runtime | None = None
) -> nn.Module: ...
@overload
def transform(
    model: nn.Module, plan: PlanLike, *, optimizer: AnyOptimizer, runtime: Runtime | None = None
) -> tuple[nn.Module, AnyOptimizer]: ...
@takes_no(("batch", "budget", "loss", "config", "hardware", "accumulate", "stepping"), _planned_first)
@counted("transform")
def transform(
    model: nn.Module,
    plan: PlanLike,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    runtime: Runtime | None = None,
) -> Any:
    """A new module tree in which each region that `plan` names runs under its transform.

    The argument is left exactly as it is. The new tree has the same classes, the same names, the same parameter
    objects and shares the buffers, so an optimizer or a `state_dict` of either works for both:

    >>> import torch, memscale as ms
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    >>> fit = ms.transform(model, {"*": ms.checkpoint()})
    >>> type(fit) is type(model), fit[0].weight is model[0].weight, fit is model
    (True, True, False)
    >>> x = torch.ones(3, 4)
    >>> torch.equal(fit(x), model(x))
    True

    What the trees share and what not: parameters and buffers are shared (`.to()`, `load_state_dict`, in-place changes
    are seen by both). Training mode, hooks, attributes and children belong to each tree from here on. Replacing a
    parameter *object* (``load_state_dict(assign=True)``, assigning a new `nn.Parameter`) parts the trees: if it was
    replaced in `model`, the next call of the new tree raises `TransformError` and names the parameter; in the new
    tree it is taken as meant, as a new child is.

    Rules for optimizers, such as `step_in_backward`, take the optimizer too, and a new one comes back beside the module
    (the given one if the plan has no such rule). They are for all parameters at and below the modules that they name,
    or for parameters that they name, whose states go on where they are:

    >>> plan = ms.Plan({"*": ms.checkpoint(), "**.weight": ms.step_in_backward()})
    >>> fit, optimizer = ms.transform(model, plan, optimizer=torch.optim.AdamW(model.parameters()))
    >>> fit(x).sum().backward()
    >>> model[0].weight.grad, model[0].bias.grad.shape  # one has stepped already
    (SpentGradient(parameter 0 of group 0 [4, 4]), torch.Size([4]))
    >>> optimizer.step()

    Args:
        model: any module.
        plan: a `Plan`, or what `Plan` takes.
        optimizer: of the parameters of `model`; it is left as it is.
        runtime: where `offload` and `offload_states` move tensors to; `None` is the process's own, for the device of
            each tensor.

    Returns:
        A module of the same class as `model`; with `optimizer` a pair of it and an optimizer of that one's class. A
        model that ``fully_shard`` took, of which no copy would be one, comes back itself: a plan for it has rules for
        its optimizer alone.

    Raises:
        TransformError: `model` is not a module, a region cannot be one (a container without a forward, a scripted
            module), `model` was sharded by ``fully_shard``, or the optimizer has parameters that the model lacks, or
            is none that the rules can change.
        PlanError: patterns that match no module, nor a parameter where the rule is for an optimizer; all at once, with
            the nearest paths. Rules for an optimizer without one.

    Cost: one Python object for each module; no tensor is copied.
    """
    modules = _modules_of("transform", model)
    if runtime is not None and not isinstance(runtime, Runtime):
        raise TransformError(
            f"transform(runtime={runtime!r}) must be a memscale.runtime.Runtime, or None for the process's own"
        )
    plan = as_plan(plan)
    regions = find_regions(model, plan.of_functions(), modules)
    # Before anything is made: what is wrong with the rules for the optimizer is said first.
    stepping = under_rules(model, plan.of_optimizers(), optimizer, runtime)
    if (sharded := _sharded_in(modules)) is not None:
        if regions:
            raise TransformError(
                f"{sharded or 'the model'} was sharded by fully_shard, which gathers its parameters in that very "
                "module and would not in the new one; call transform() before fully_shard(), or wrap(), which works in "
                "place"
            )
        return model if optimizer is None else (model, stepping)
    memo = copy_tree(modules)
    copy, copies = memo[id(model)], [(path, memo[id(module)]) for path, module in modules]
    for module, how in regions:
        attach(memo[id(module)], how.on(runtime))
    name_regions(copies)
    _keep_shared_parameters(copies)
    _tell_of_its_own_checkpointing(copies)
    # A process whose plan is empty answers the others, too.
    if regions or plan.parallel is not None or _is_one_of_several():
        links = _links(modules) if regions else []
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
    """Apply `plan` to `model` itself, and return what `uninstall` takes it off with.

    Args:
        model, plan, runtime: as in `transform`.
        over: makes of each region's path and its transformed forward what runs in its place.
        around_root: makes of the root's forward, a region or not, what runs in its place.
        wrapped: patches of an earlier plan, over whose forward somebody has put another: regions go inside of that.
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
    """Take off what `install` put on: every attribute is the object that it was.

    Returns:
        The forwards that somebody else has put over a region since then, which stay.
    """
    return [(patch, on_top) for patch in patches if (on_top := patch.put_back()) is not None]


def find_regions(model: nn.Module, plan: Plan, modules: Modules | None = None) -> list[tuple[nn.Module, Transform]]:
    """The modules that `plan` names, each with the composition of its rules.

    A module reachable by several paths is one region, under the rules of all of them.

    Args:
        model, plan: as in `transform`.
        modules: what `walk` gives for `model`, if that is known.
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
    """The modules of what `verb` was given, which must be a module whose parameters have shapes."""
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
            f"{verb}(model, plan): parameter {lazy[0]!r} has no shape yet, for its module is a lazy one; run a batch "
            "through the model first, and transform it then"
        )
    return modules


def _sharded_in(modules: Modules) -> str | None:
    """The path of the first module that ``fully_shard`` has taken."""
    taken = (path for path, each in modules if any(c.__name__ == "FSDPModule" for c in type(each).__mro__))
    return next(taken, None)


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
    """Make regions that place their parameters leave those alone which modules outside of all of them use too."""
    distinct = {id(module): module for _, module in modules}.values()
    regions = [(module, placing) for module in distinct if (placing := placing_in(module))]
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
    told: list[str | None] = []
    for module, placing in regions:
        resident = tuple([parameter for parameter in module.parameters() if id(parameter) in outside])
        for region in placing:
            region.resident = resident
            told.append(region.why_none_leaves(list(module.parameters())))
        module.__dict__["_apply"] = Relocation(module, placing[0])  # where several do, the outermost has the word
    if told and None not in told:
        warnings.warn(f"{max(map(str, told), key=len)}; this is said once", RuntimeWarning, stacklevel=3)


def _tell_of_its_own_checkpointing(modules: Modules) -> None:
    """Warn of a Hugging Face model that recomputes layers itself, in or around which regions are to be recomputed."""
    own = {id(module): path for path, module in reversed(modules) if module.__dict__.get("gradient_checkpointing")}
    for path, region in modules if own else ():
        made_of = assembled_in(region.__dict__.get("forward"))
        if not any(isinstance(part, Transformed) and part.keeps_inputs_only for part in made_of):
            continue
        beside = [own[id(module)] for module in region.modules() if id(module) in own]
        beside += [each for each in own.values() if not each or f"{path}.".startswith(f"{each}.")]
        if beside:
            warnings.warn(
                f"the model's own activation checkpointing is on (at {beside[0]!r}), in or around the region {path!r}: "
                "one of the two keeps nothing, and what memscale checks is not checked; call "
                "model.gradient_checkpointing_disable() before transform()",
                RuntimeWarning,
                stacklevel=3,
            )
            return


_Link = tuple["weakref.ref[nn.Module]", str, dict[str, nn.Parameter | None]]


class Shared(Assembled):
    """`fn`, the root's forward, after a look whether the model still holds the parameters that it shared.

    And, the first time, whether other processes have the same plan.
    """

    def __init__(self, fn: Callable[..., Any], links: list[_Link], agreement: Agreement) -> None:
        self.fn = fn
        self.links = links
        self.agreement = agreement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In a `try`, so that between two graphs this frame is Python's, which looks before it calls.
        try:
            if torch.compiler.is_compiling():
                # Dynamo makes a guard of each comparison. Afterwards, for it takes a parameter that it first meets
                # outside of a module for an input like any other, of a size that may change.
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
        # Only the original is looked at: in this tree, functional_call replaces entries for the time of a call.
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
        # A deep copy or a pickle is independent of the model it was made from: nothing is shared any more.
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
            # With the model its parameters go: FSDP2 puts shards in their place, and nobody else would hold them.
            links.append((weakref.ref(module, partial(_let_go, shared)), f"{path}." if path else "", shared))
    return links


def _let_go(shared: dict[str, nn.Parameter | None], _: object) -> None:
    shared.clear()
