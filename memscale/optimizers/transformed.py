"""`TransformedOptimizer`: an optimizer under transforms, which is an instance of its original class as well."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from memscale.algebra import Transform, chain
from memscale.core import TransformError
from memscale.optimizers.assigned import Assigned, assigned_by_rules
from memscale.optimizers.separability import Separability, check_separable, made_of
from memscale.optimizers.spent import SpentGradient
from memscale.optimizers.step_parts import (
    Group,
    OwnStep,
    PartedOptimizer,
    StepPart,
    copied,
    marks,
    options_of,
    parameters_of,
)
from memscale.regions import uncompiled


class OptimizerTransform(Transform):
    """A memory technique for an optimizer, as data; calling it maps an optimizer to a new optimizer.

    >>> import torch, memscale as ms
    >>> optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    >>> isinstance(ms.step_in_backward()(optimizer), torch.optim.AdamW)
    True
    """

    of_optimizers: ClassVar[bool] = True
    innermost: ClassVar[bool] = False  # whether it must be the innermost, next to the class's own step

    def misfit(self, subject: Any) -> str | None:
        if isinstance(subject, torch.optim.Optimizer):
            return None
        return f"{self!r} maps an optimizer to an optimizer, got {type(subject).__name__}; pass a torch.optim.Optimizer"

    def apply(self, fn: Any) -> Any:
        """Returns the optimizer `fn` under this transform."""
        return transformed(fn, self)

    @staticmethod
    def by_rules(
        optimizer: torch.optim.Optimizer, rules: Sequence[tuple[str, torch.Tensor, Sequence[Transform]]]
    ) -> torch.optim.Optimizer:
        """Returns `optimizer` under a plan's rules: (path, parameter, transforms from the innermost outwards) each."""
        assigned = assigned_by_rules(rules)
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return transformed(optimizer, assigned) if any(map(assigned.number, own)) else optimizer

    def part(self, optimizer: PartedOptimizer, inner: StepPart) -> StepPart:
        """Returns the part that does this transform's work in `optimizer`, around `inner`."""
        raise NotImplementedError


class TransformedOptimizer(PartedOptimizer):
    """The base of every transformed optimizer, besides the optimizer's original class."""

    # ---------------------------------------------------------------------------------------------------- construction

    def _begin(self, assigned: Assigned, evidence: Separability) -> None:
        self._assigned, self._evidence = assigned, evidence
        self._options, self._changes, self._due, self._twins = {}, {}, deque(), {}
        self.parts, self._tops = [], []
        for how in assigned.hows:
            part: StepPart = OwnStep(how, self, None)
            self.parts.append(part)
            inside_out = list(reversed(chain(how)))
            inside_out.sort(key=lambda each: not getattr(each, "innermost", False))
            for each in inside_out:
                assert isinstance(each, OptimizerTransform)
                part = each.part(self, part)
                self.parts.append(part)
            self._tops.append(part)
        self._is_stepping = False
        self._attend()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _revived, (self._own_class, self._hows_in_order(), self._evidence, self.__getstate__())

    def _hows_in_order(self) -> tuple[Transform, list[Transform]]:
        """Returns the transform of parameters that are added later, and the transforms of the present parameters."""
        return self._assigned.hows[0], [self._assigned.how(each) for each in parameters_of(self.param_groups)]

    def __getstate__(self) -> dict[str, Any]:
        with self._gathered():
            found: dict[str, Any] = super().__getstate__()
            return {**found, "state": defaultdict(dict, self.state)}

    def __repr__(self) -> str:
        return f"{self._assigned.shown(parameters_of(self.param_groups))}({super().__repr__()})"

    @property
    def only_rounds(self) -> bool:
        """Whether every transform only changes how numbers are rounded, so that any other one may be put around it."""
        return all(getattr(each, "innermost", False) for how in self._assigned.hows for each in chain(how))

    def _marks(self) -> Any:
        """Returns a value that changes when a state is written to or replaced."""
        return {parameter: marks(states) for parameter, states in self.state.items()}

    def _attend(self) -> None:
        present = parameters_of(self.param_groups)
        if not self._evidence.covers(present):  # parameters were added, or cast
            self._evidence = check_separable(as_plain(self), self._assigned.shown(present))
        super()._attend()

    # --------------------------------------------------------------------------- the interface of torch.optim.Optimizer

    def step(self, closure: Any = None) -> Any:
        """Makes one optimization step, with the numbers of the class's own step."""
        self._catch_up()
        self._follow()
        for part in self.parts:
            part.before_step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for number, group in enumerate(self.param_groups):
                if ready := [parameter for parameter in group["params"] if has_gradient(parameter)]:
                    self._advance(number, ready)
                elif number not in self._options:
                    self._pass_over(number)
            for number, changed in self._changes.items():
                self.param_groups[number].update(changed)
        finally:
            self._options, self._changes = {}, {}
        self._catch_up()
        for part in self.parts:
            part.after_step()
        return loss

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        try:
            self._attend()
        except BaseException:
            self.param_groups.pop()
            self._attend()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.steps_in_backward:
            uncompiled(TransformedOptimizer._drop_gradients, _LITTLE_LEFT, self, set_to_none)
        else:
            self._drop_gradients(set_to_none)

    def _drop_gradients(self, set_to_none: bool) -> None:
        self._catch_up()
        spent = [each for each in parameters_of(self.param_groups) if isinstance(each.grad, SpentGradient)]
        for parameter in spent:
            parameter.grad = None
        super().zero_grad(set_to_none)
        for part in self.parts:
            part.after_zero_grad([] if set_to_none else spent)

    def state_dict(self) -> dict[str, Any]:
        with self._gathered():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads states as `torch.optim.Optimizer.load_state_dict` does.

        Raises:
            TransformError: a state has another shape than its parameter; the optimizer is unchanged then.
        """
        loaded = state_dict

        def check(_: Any, changed: dict[str, Any]) -> None:
            nonlocal loaded
            self._check_shapes(changed)
            loaded = changed

        self._catch_up()
        if self._own_class.load_state_dict is not torch.optim.Optimizer.load_state_dict:  # it may call no hooks
            check(self, state_dict)
        with self.register_load_state_dict_pre_hook(check):  # last: the caller's hooks may return another one
            super().load_state_dict(state_dict)
        self._shared.clear()
        for part in self.parts:
            part.loaded(loaded)
        self._attend()

    def _check_shapes(self, state_dict: dict[str, Any]) -> None:
        """Raises `TransformError` for states of other shapes, which PyTorch would load, then broadcast or reject."""
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = parameters_of(self.param_groups)
        titles = (title for _, title in self._places().values())
        wrong = [
            f"{key!r} of {title} has shape {list(value.shape)}"
            for number, parameter, title in zip(saved, parameters, titles, strict=False)
            for key, value in (state_dict["state"].get(number) or {}).items()
            if key in self._evidence.full_names(parameter) and value.shape != parameter.shape
        ]
        if wrong:
            raise TransformError(
                f"this state_dict is of an optimizer over parameters of other shapes: {'; '.join(wrong)}; load the "
                "state_dict of the same model, with the same groups in the same order"
            )


def transformed(optimizer: torch.optim.Optimizer, how: Transform | Assigned) -> TransformedOptimizer:
    """Returns a new optimizer over the parameters, options and states of `optimizer` that steps as `how` says.

    Raises:
        TransformError: the optimizer cannot be stepped one parameter at a time, or is already under the same transform
            with other options.
    """
    origins: tuple[Any, ...] = (weakref.ref(optimizer),)
    assigned = how if isinstance(how, Assigned) else Assigned(how)
    if isinstance(optimizer, TransformedOptimizer):
        own_class, evidence = optimizer._own_class, optimizer._evidence
        assigned = assigned.around(optimizer._assigned)
        origins += optimizer._origins
    else:
        own_class = type(optimizer)
        evidence = check_separable(optimizer, assigned.shown(parameters_of(optimizer.param_groups)))
    taken = _shareable(optimizer)
    hooks = {key: OrderedDict(value) for key, value in taken.items() if isinstance(value, OrderedDict)}
    known: dict[int, Any] = {}  # by the id of an option: groups share a learning rate that is a tensor, with each other

    def own_options(options: dict[str, Any]) -> dict[str, Any]:
        return {key: known.setdefault(id(value), copied(value)) for key, value in options.items()}

    groups = [{**own_options(options_of(group)), "params": list(group["params"])} for group in optimizer.param_groups]
    state = {key: dict(value) for key, value in optimizer.__getstate__()["state"].items()}
    own = {"defaults": own_options(optimizer.defaults), "param_groups": groups, "state": defaultdict(dict, state)}
    made = made_of(
        class_for(own_class),
        taken,
        **hooks,
        **own,
        _origins=origins,
        _shared={id(key): marks(each) for key, each in state.items()},
    )
    made._begin(assigned, evidence)
    return made  # type: ignore[no-any-return]


def as_plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns `optimizer`, or for a transformed one a plain optimizer over the same parameters, without states."""
    if not isinstance(optimizer, TransformedOptimizer):
        return optimizer
    own = {"param_groups": optimizer.param_groups, "state": defaultdict(dict)}
    return made_of(optimizer._own_class, _shareable(optimizer), **own)  # type: ignore[no-any-return]


def without_states(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer like `optimizer`, over the same parameters, in the state before its first step."""
    taken = {key: value for key, value in optimizer.__dict__.items() if key != "step"}
    return made_of(type(optimizer), taken, state=defaultdict(dict))  # type: ignore[no-any-return]


def _shareable(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the attributes of `optimizer` that an optimizer made of it shares."""
    return {key: value for key, value in optimizer.__dict__.items() if key not in _OF_ONE_OPTIMIZER}


def _revived(
    own_class: type[torch.optim.Optimizer], hows: tuple[Transform, list[Transform]], evidence: Separability, state: Any
) -> Any:
    made = made_of(class_for(own_class), {}, _origins=(), _shared={})
    made.__setstate__(state)
    made._begin(Assigned(hows[0], zip(parameters_of(made.param_groups), hows[1], strict=True)), evidence)
    return made


_LITTLE_LEFT = "step_in_backward() has stepped in backward, so step() has next to nothing to compile"
_hooked_step: Any = torch.optim.Optimizer.profile_hook_step(TransformedOptimizer.step)


@functools.wraps(TransformedOptimizer.step)
def _step(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(self, TransformedOptimizer):  # the caller has kept `step` from before `InPlace.undo`
        return type(self).step(self, *args, **kwargs)
    if self.steps_in_backward:
        return uncompiled(_known_step, _LITTLE_LEFT, self, *args, **kwargs)
    return _known_step(self, *args, **kwargs)


def _known_step(self: TransformedOptimizer, *args: Any, **kwargs: Any) -> Any:
    """Runs the step with `_is_stepping` set."""
    self._is_stepping = True
    try:
        return _hooked_step(self, *args, **kwargs)
    finally:
        self._is_stepping = False


_step.hooked = True  # type: ignore[attr-defined]  # stops PyTorch from wrapping it in its hooks a second time


def _with_all_states(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a public method of an optimizer's class, except `step`: it then sees all states as the class has them.

    The method would otherwise miss states on disk, and take 8-bit codes for numbers. Its changes to states are kept.
    """

    @functools.wraps(method)
    def called(self: TransformedOptimizer, *args: Any, **kwargs: Any) -> Any:
        self._part_states(parameters_of(self.param_groups))
        with self._gathered():
            before = self._marks()
            result = method(self, *args, **kwargs)
            after = {key: dict(value) for key, value in self.state.items()} if self._marks() != before else None
        if after is not None:
            self.state.update(after)
            self._attend()
        return result

    return called


_classes: dict[int, type[TransformedOptimizer]] = {}  # by the id of the original class, which the subclass keeps alive


def class_for(own_class: type[torch.optim.Optimizer]) -> type[TransformedOptimizer]:
    """Returns the subclass of `own_class` for transformed optimizers; it has the same name, and `isinstance` holds."""
    if (known := _classes.get(id(own_class))) is not None:
        return known
    own = {name: inspect.getattr_static(own_class, name) for name in dir(own_class) if not name.startswith("_")}
    methods = {
        name: _with_all_states(each)
        for name, each in own.items()
        if inspect.isfunction(each) and not hasattr(TransformedOptimizer, name)
    }
    body = {
        **methods,
        "__module__": own_class.__module__,
        "__qualname__": own_class.__qualname__,
        "__doc__": own_class.__doc__,
        "_own_class": own_class,
        "step": _step,
    }
    made = _classes[id(own_class)] = type(own_class.__name__, (TransformedOptimizer, own_class), body)
    return made


# Attributes that belong to one optimizer alone: an LR scheduler's wrapper of `step`, and what `_begin` sets.
_OF_ONE_OPTIMIZER = {"step", "param_groups", "state", *PartedOptimizer.__annotations__}


def has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and not isinstance(parameter.grad, SpentGradient)
