"""An optimizer under transforms: a real `torch.optim.Optimizer`, of the class of the one that it was made of.

All transforms of optimizers come down to one function, *advance*: the step of the class as it is, for some of the
parameters. `step_in_backward` calls it for one parameter as soon as its gradient is complete, `bound_temporaries` for a
few at a time. Each is a `StepPart` around the parts inside of it; the innermost is the class's own step.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from memscale.algebra import Transform, chain
from memscale.core import TransformError, pytrees
from memscale.optimizers.assigned import Assigned, assigned_by_rules
from memscale.optimizers.separability import Separability, check_separable, own_step
from memscale.optimizers.spent import SpentGradient

Group = dict[str, Any]


class OptimizerTransform(Transform):
    """A memory technique for an optimizer, as data. Calling it maps an optimizer to another one.

    >>> import torch, memscale as ms
    >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    >>> isinstance(ms.step_in_backward()(optimizer), torch.optim.AdamW)
    True
    """

    of_optimizers: ClassVar[bool] = True

    def misfit(self, subject: Any) -> str | None:
        """See `Transform.misfit`."""
        if isinstance(subject, torch.optim.Optimizer):
            return None
        return f"{self!r} maps an optimizer to an optimizer, got {type(subject).__name__}; pass a torch.optim.Optimizer"

    def apply(self, fn: Any) -> Any:
        """`fn`, an optimizer, under this transform."""
        return transformed(fn, self)

    @staticmethod
    def by_rules(
        optimizer: torch.optim.Optimizer, rules: Sequence[tuple[str, torch.Tensor, Sequence[Transform]]]
    ) -> torch.optim.Optimizer:
        """`optimizer` under a plan's rules: each parameter's path, itself, and its transforms, innermost first."""
        assigned = assigned_by_rules(rules)
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return transformed(optimizer, assigned) if any(map(assigned.number, own)) else optimizer

    def part(self, optimizer: TransformedOptimizer, inner: StepPart) -> StepPart:
        """What this transform does to `optimizer`, around `inner`."""
        raise NotImplementedError


class StepPart:
    """One of the transforms of an optimizer at work. It holds the optimizer weakly: whoever drops that ends all."""

    writes_away: ClassVar[bool] = False
    places_states: ClassVar[bool] = False  # somewhere of their own, by the parameter
    in_backward: ClassVar[bool] = False

    def __init__(self, optimizer: TransformedOptimizer, inner: StepPart | None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._inner = inner

    @property
    def optimizer(self) -> TransformedOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "it holds this part"
        return optimizer

    @property
    def inner(self) -> StepPart:
        assert self._inner is not None, "only the innermost has none"
        return self._inner

    @property
    def places(self) -> bool:
        """Whether this part or one inside of it places states by their parameter, which is to be the same each time."""
        return self.places_states or (self._inner is not None and self._inner.places)

    def advance(self, groups: list[Group]) -> None:
        """Step the parameters in `groups`, whose options it may change as the step of the class does."""
        self.inner.advance(groups)

    def attend(self, parameters: list[torch.Tensor]) -> None:
        """The optimizer's parameters are these from here on."""

    def below(self) -> list[torch.Tensor]:
        """The tensors that live on a tier below the device."""
        return []

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """For the body, let the optimizer's `state` have all of it."""
        yield

    def before_step(self, closure: Any) -> None:
        """`step` is called. Raises `TransformError` where it cannot be, before anything happens."""

    def after_step(self) -> None:
        """`step` is over."""

    def report(self) -> list[str]:
        """What it does to which parameters, in lines; none where that is the same for all."""
        return []


class _OwnStep(StepPart):
    """The step of the class, on a twin of the optimizer that has nothing but these groups: no hooks run twice."""

    def advance(self, groups: list[Group]) -> None:
        optimizer = self.optimizer
        optimizer._part_states(groups)
        twin: Any = object.__new__(optimizer._own_class)
        twin.__dict__.update(optimizer.__dict__, param_groups=groups, **_NO_HOOKS)
        with torch.no_grad():
            own_step(optimizer._own_class)(twin)
        # Not every optimizer changes its parameters in a way that autograd sees, and a graph may still need one.
        torch.autograd.graph.increment_version(_parameters(groups))


class TransformedOptimizer(torch.optim.Optimizer):
    """What every transformed optimizer is, next to its own class."""

    _own_class: ClassVar[type[torch.optim.Optimizer]]
    _assigned: Assigned
    _evidence: Separability
    _origins: tuple[weakref.ref[torch.optim.Optimizer], ...]
    _shared: set[int]  # parameters whose states the optimizers have too that this one was made of
    parts: list[StepPart]  # of one transform after the other, innermost first
    _tops: list[StepPart]  # the outermost of each
    _options: dict[int, Group]  # by the number of a group, those that its parameters are stepped with in this step
    _changes: dict[int, Group]  # and what the class's step made of them

    # ------------------------------------------------------------------------------------------------------- making

    def _begin(self, assigned: Assigned, evidence: Separability) -> None:
        self._assigned, self._evidence = assigned, evidence
        self._options, self._changes = {}, {}
        self.parts, self._tops = [], []
        for how in assigned.hows:
            part: StepPart = _OwnStep(self, None)
            self.parts.append(part)
            for each in reversed(chain(how)):
                assert isinstance(each, OptimizerTransform)
                part = each.part(self, part)
                self.parts.append(part)
            self._tops.append(part)
        self._patch_step_function()  # PyTorch's hooks around the step of this class
        self._attend()

    def _attend(self) -> None:
        own = self._assigned.split(_parameters(self.param_groups))
        for number, part in enumerate(self._tops):
            within: StepPart | None = part
            while within is not None:
                within.attend(own.get(number, []))
                within = within._inner

    def _part_states(self, groups: list[Group]) -> None:
        """Give parameters that are about to change states of their own, if anybody else may look at those they have.

        Only now: whoever writes ``optimizer = transform(optimizer)`` has dropped the other by now, and pays for none.
        """
        if not self._shared:
            return
        others = any(origin() is not None for origin in self._origins)
        for parameter in _parameters(groups):
            if id(parameter) in self._shared:
                self._shared.discard(id(parameter))
                if others:
                    self.state[parameter] = copied(self.state[parameter])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revived, (self._own_class, self._hows_in_order(), self._evidence, self.__getstate__())

    def _hows_in_order(self) -> tuple[Transform, list[Transform]]:
        """The transform of parameters that come later, and those of the parameters that are there."""
        return self._assigned.hows[0], [self._assigned.how(each) for each in _parameters(self.param_groups)]

    def __getstate__(self) -> dict[str, Any]:
        with self._gathered():
            found: dict[str, Any] = super().__getstate__()
            return {**found, "state": defaultdict(dict, self.state)}

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in reversed(self.parts):  # what an outer one brings an inner one may have to read
                stack.enter_context(part.gathered())
            yield

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._attend()

    def __repr__(self) -> str:
        return f"{self._assigned.shown(_parameters(self.param_groups))}({super().__repr__()})"

    # ------------------------------------------------------------------------------------- what an optimizer can do

    def step(self, closure: Any = None) -> Any:
        """One optimization step, to the numbers of the step that the class has."""
        for part in self.parts:
            part.before_step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for number, group in enumerate(self.param_groups):
                if ready := [parameter for parameter in group["params"] if _has_gradient(parameter)]:
                    self._advance(number, ready)
            for number, changed in self._changes.items():
                self.param_groups[number].update(changed)
        finally:
            self._options, self._changes = {}, {}
        for part in self.parts:
            part.after_step()
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """See `torch.optim.Optimizer.add_param_group`."""
        super().add_param_group(param_group)
        try:
            self._attend()
        except BaseException:
            self.param_groups.pop()
            self._attend()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.optim.Optimizer.zero_grad`."""
        for parameter in _parameters(self.param_groups):
            if isinstance(parameter.grad, SpentGradient):
                parameter.grad = None
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer.state_dict`."""
        with self._gathered():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer.load_state_dict`.

        Raises:
            TransformError: a state has another shape than its parameter; nothing is changed then.
        """
        self._check_shapes(state_dict)
        super().load_state_dict(state_dict)
        self._shared.clear()

    def _check_shapes(self, state_dict: dict[str, Any]) -> None:
        """PyTorch loads any shapes, and the next step raises about tensors, or goes on with what it has broadcast."""
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = _parameters(self.param_groups)
        titles = (title for _, title in self._places().values())
        wrong = [
            f"{key!r} of {title} has shape {list(value.shape)}"
            for number, parameter, title in zip(saved, parameters, titles, strict=False)
            for key, value in (state_dict["state"].get(number) or {}).items()
            if (parameter.dim(), key) in self._evidence.full and value.shape != parameter.shape
        ]
        if wrong:
            raise TransformError(
                f"this state_dict is of an optimizer over parameters of other shapes: {'; '.join(wrong)}; load that of "
                "the same model, with the same groups in the same order"
            )

    @property
    def writes_away(self) -> bool:
        """Whether a step changes states that are not in `state`, where nobody could put them back."""
        return any(part.writes_away for part in self.parts)

    @property
    def steps_in_backward(self) -> bool:
        """Whether parameters step before `step` is called."""
        return any(part.in_backward for part in self.parts)

    def below(self) -> list[torch.Tensor]:
        """The states that live on a tier below the device."""
        return [tensor for part in self.parts for tensor in part.below()]

    def report(self) -> str:
        """Which parameters are under which transforms, and what those have to say about them."""
        own = self._assigned.split(_parameters(self.param_groups))
        under = [f"{self._assigned.hows[number]!r}: {len(some)} parameters" for number, some in own.items()]
        return "\n".join([*under, *(line for part in self.parts for line in part.report())])

    def let_go(self) -> None:
        """Leave the parameters alone from here on: no hooks on them, nothing of theirs on a tier."""
        for part in self.parts:
            part.attend([])

    # ------------------------------------------------------------------------------------------------------- inside

    def _advance(self, number: int, parameters: list[torch.Tensor]) -> None:
        """Step these parameters of a group, with the options that the group has in this step."""
        group = self.param_groups[number]
        if number not in self._options:
            self._options[number] = {key: copied(value) for key, value in _options(group).items()}
        options = self._options[number]
        for which, some in self._assigned.split(parameters).items():
            now = {**options, "params": some}
            self._tops[which].advance([now])
            changed = [key for key, value in now.items() if value is not options.get(key, some)]
            if changed:
                self._changes.setdefault(number, {}).update({key: now[key] for key in changed})

    def _changed_options(self) -> str:
        """Which options are not those any more that parameters were stepped with in this step; empty if none."""
        return ", ".join(
            f"{key!r} of group {number} was changed from {was!r} to {now!r}"
            for number, options in self._options.items()
            for key, now in _options(self.param_groups[number]).items()
            if not _same(now, was := options.get(key))
        )

    def _places(self) -> dict[int, tuple[int, str]]:
        """By the id of a parameter, in their order: the number of its group, and what messages call it."""
        return {
            id(parameter): (
                number,
                f"parameter {(names or {position: f'{position} of group {number}'})[position]} {list(parameter.shape)}",
            )
            for number, group in enumerate(self.param_groups)
            for names in [group.get("param_names")]
            for position, parameter in enumerate(group["params"])
        }


def transformed(optimizer: torch.optim.Optimizer, how: Transform | Assigned) -> TransformedOptimizer:
    """A new optimizer that steps the parameters of `optimizer`, with its options and states, as `how` says.

    Raises:
        TransformError: its class cannot be stepped one parameter at a time; or it is under the same transform with
            other options.
    """
    origins: tuple[Any, ...] = (weakref.ref(optimizer),)
    assigned = how if isinstance(how, Assigned) else Assigned(how)
    if isinstance(optimizer, TransformedOptimizer):
        own_class, evidence = optimizer._own_class, optimizer._evidence
        assigned = assigned.around(optimizer._assigned)
        origins += optimizer._origins
    else:
        own_class, evidence = type(optimizer), check_separable(optimizer, how)
    made = object.__new__(_class_for(own_class))
    taken = {key: value for key, value in optimizer.__dict__.items() if key not in _OF_ONE_OPTIMIZER}
    hooks = {key: OrderedDict(value) for key, value in _hooks_in(taken).items()}
    made.__dict__.update(taken, **hooks, defaults=dict(optimizer.defaults))
    made.param_groups = [
        {**{key: copied(value) for key, value in _options(group).items()}, "params": list(group["params"])}
        for group in optimizer.param_groups
    ]
    state = optimizer.__getstate__()["state"]
    made.state = defaultdict(dict, {key: dict(value) for key, value in state.items()})
    made._origins = origins
    made._shared = {id(parameter) for parameter in made.state}
    made._begin(assigned, evidence)
    return made


def without_states(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer like `optimizer`, over the same parameters, that has not stepped yet."""
    made = object.__new__(type(optimizer))
    made.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    made.state = defaultdict(dict)
    return made


def _revived(
    own_class: type[torch.optim.Optimizer],
    hows: tuple[Transform, list[Transform]],
    evidence: Separability,
    state: Any,
) -> Any:
    made = object.__new__(_class_for(own_class))
    made._origins, made._shared, made.parts, made._tops = (), set(), [], []
    made._assigned = Assigned(hows[0])
    made.__setstate__(state)
    made._begin(Assigned(hows[0], zip(_parameters(made.param_groups), hows[1], strict=True)), evidence)
    return made


_classes: dict[int, type[TransformedOptimizer]] = {}  # by the id of the class, which its subclass keeps


def _class_for(own_class: type[torch.optim.Optimizer]) -> type[TransformedOptimizer]:
    """The class of `own_class`'s optimizers under transforms; it has the name, and `isinstance` holds."""
    if (known := _classes.get(id(own_class))) is not None:
        return known
    body = {
        "__module__": own_class.__module__,
        "__qualname__": own_class.__qualname__,
        "__doc__": own_class.__doc__,
        "_own_class": own_class,
    }
    made = _classes[id(own_class)] = type(own_class.__name__, (TransformedOptimizer, own_class), body)
    return made


_NO_HOOKS: dict[str, Any] = {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}

# What an optimizer has for itself: an LR scheduler's `step` around its own, and what `_begin` makes.
_OF_ONE_OPTIMIZER = {"step", "param_groups", "state", *TransformedOptimizer.__annotations__}


def _hooks_in(attributes: dict[str, Any]) -> dict[str, OrderedDict[int, Any]]:
    return {key: value for key, value in attributes.items() if isinstance(value, OrderedDict)}


def _parameters(groups: list[Group]) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _options(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != "params"}


def _has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and not isinstance(parameter.grad, SpentGradient)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def copied(tree: Any, device: str | None = None) -> Any:
    """`tree` with tensors of its own, on `device` if one is given."""
    if not pytrees.tensors(tree):
        return tree
    leaves, spec = pytrees.flatten(tree)
    return pytrees.unflatten(
        spec, [leaf.detach().to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    )
