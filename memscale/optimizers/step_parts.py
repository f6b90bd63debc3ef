"""The parts of a transformed optimizer: each steps some of its parameters, through the part inside of it.

All optimizer transforms reduce to one function, *advance*: the unchanged step of the optimizer's class, for some of the
parameters. `step_in_backward` calls it for one parameter as soon as its gradient is complete, `step_in_groups` for a
few at a time. Each is a `StepPart` around an inner `StepPart`; the innermost, `OwnStep`, is the class's own step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from memscale.core import CorrectnessError, TransformError, pytrees, version
from memscale.optimizers.assigned import Assigned
from memscale.optimizers.separability import Separability, made_of, own_step

Group = dict[str, Any]

# How many bytes of parameters may wait for their copies at once: 1/_SHARE of all, at most _MOST_BYTES.
_SHARE, _MOST_BYTES = 16, 2**28
_NO_HOOKS: dict[str, Any] = {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}


class StepPart:
    """A transform of an optimizer at work. A part holds the optimizer weakly, so dropping the optimizer frees both.

    Attributes:
        how: the transform.
        parameters: the optimizer's parameters under this transform.
    """

    writes_offloaded: ClassVar[bool] = False  # whether a step writes states that are outside the optimizer's `state`
    places_states: ClassVar[bool] = False  # whether states live in this part's own memory, in one place per parameter
    in_backward: ClassVar[bool] = False  # whether parameters step before `step` is called
    works_after: ClassVar[bool] = False  # whether `advance` does work after that of the inner part

    def __init__(self, how: Any, optimizer: PartedOptimizer, inner: StepPart | None) -> None:
        self.how = how
        self._optimizer = weakref.ref(optimizer)
        self._inner = inner
        self.parameters: list[torch.Tensor] = []

    @property
    def optimizer(self) -> PartedOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "the optimizer holds this part"
        return optimizer

    @property
    def inner(self) -> StepPart:
        assert self._inner is not None, "only the innermost part has none"
        return self._inner

    def with_inner(self) -> Iterator[StepPart]:
        """Yields this part and the parts inside of it, from the outermost to the innermost."""
        part: StepPart | None = self
        while part is not None:
            yield part
            part = part._inner

    def advance(self, group: Group) -> None:
        """Steps the parameters of `group`; may change the group's options as the class's step does."""
        self.inner.advance(group)

    def advance_twins(
        self, group: Group, twins: list[torch.Tensor], before: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Steps `twins`, with the states `before`, in place of the parameters of `group`; returns their new states."""
        state: Any = self.optimizer.state
        state.update({twin: states for twin, states in zip(twins, before, strict=True) if states})
        now = {**group, "params": twins}
        try:
            self.inner.advance(now)
        finally:
            after = [state.pop(twin, {}) for twin in twins]
        group.update({**now, "params": group["params"]})
        return after

    def ask(self, parameters: list[torch.Tensor]) -> bool:
        """Begins the copies that `advance` will need for `parameters`; returns whether a copy is in flight.

        The copies are of the gradients of now, and `advance` is called later. So a part that `works_after` begins none.
        """
        return self._inner is not None and not self.works_after and self._inner.ask(parameters)

    def settle(self) -> None:
        """Waits for all copies to the parameters, and drops copies that were begun and not used."""

    def states_like(self, parameter: torch.Tensor) -> torch.dtype:
        """Returns the dtype of the parameters whose states those of `parameter` have the type of."""
        return parameter.dtype if self._inner is None else self._inner.states_like(parameter)

    def plain_states(self, parameter: torch.Tensor, states: dict[str, Any]) -> dict[str, Any]:
        """Returns those of `states` that the optimizer has without this transform, in the form that it has them."""
        return states

    def attend(self, parameters: list[torch.Tensor]) -> None:
        """Called when the parameters under this transform become `parameters`."""
        self.parameters = parameters

    def loaded(self, state_dict: dict[str, Any]) -> None:
        """Called after `load_state_dict`, with states in the types to which PyTorch has cast them."""

    def below(self) -> list[torch.Tensor]:
        """Returns the tensors that live on a tier below the device."""
        return []

    @property
    def backward_passes(self) -> int:
        """The number of backward passes over one graph in a step."""
        return 1

    def after_zero_grad(self, zeroed: list[torch.Tensor]) -> None:
        """Called after gradients were dropped; those of `zeroed` were freed before and count as zeros from now on."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which the optimizer's `state` holds all states, as numbers."""
        yield

    def before_step(self, closure: Any) -> None:
        """Called first in `step`. Raises `TransformError`, before anything changes, if the step is not possible."""

    def after_step(self) -> None:
        """Called last in `step`."""

    def report(self) -> list[str]:
        """Returns lines that say what this part does to which parameters; empty if it is the same for all."""
        return []


class OwnStep(StepPart):
    """Runs the step of the class on a copy of the optimizer that has only this group and no hooks."""

    def advance(self, group: Group) -> None:
        optimizer = self.optimizer
        optimizer._part_states(group["params"])
        optimizer._own_step(group)
        # Some optimizers write through `.data`, which autograd does not see, while a graph may still need the old
        # value.
        torch.autograd.graph.increment_version(group["params"])


class PartedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps by parts: knows which part steps which parameter, and with which options."""

    _own_class: ClassVar[type[torch.optim.Optimizer]]
    _assigned: Assigned
    _evidence: Separability
    _origins: tuple[weakref.ref[torch.optim.Optimizer], ...]
    _shared: dict[int, Any]  # by the id of a parameter whose states the optimizers in `_origins` have too: `marks`
    parts: list[StepPart]  # all parts, for each transform from the innermost to the outermost
    _tops: list[StepPart]  # the outermost part of each transform
    _options: dict[int, Group]  # by the index of a group, the options that its parameters step with in this step
    _changes: dict[int, Group]  # by the index of a group, the options that the class's step has changed
    _due: deque[tuple[int, torch.Tensor]]  # group index and parameter, for those that step when their copies arrive
    _most_due: int  # the most bytes of parameters in `_due`
    _is_stepping: bool  # whether `step` runs
    _twins: dict[int, torch.Tensor]  # by the id of a tensor that steps in place of a parameter, the parameter
    _attended: list[tuple[int, int, torch.dtype]]  # of each parameter that the parts know: its group, id and dtype
    _following: int  # the autograd task at whose end every parameter in `_due` has stepped

    def _follow(self) -> None:
        """Attends to parameters that the caller has put into a group, moved, taken out or cast since."""
        if self._attended != self._present():
            self._attend()

    def _present(self) -> list[tuple[int, int, torch.dtype]]:
        groups = enumerate(self.param_groups)
        return [(number, id(each), each.dtype) for number, group in groups for each in group["params"]]

    def _attend(self) -> None:
        self._catch_up()
        self._most_due = _most_due([parameter.nbytes for parameter in parameters_of(self.param_groups)])
        own = self._assigned.split(parameters_of(self.param_groups))
        for number, top in enumerate(self._tops):
            for part in reversed(list(top.with_inner())):  # outer first: states are quantized before they are offloaded
                part.attend(own.get(number, []))
        self._attended = self._present()  # last: the parts hold the parameters, so no other tensor gets such an id

    def _part_states(self, parameters: list[torch.Tensor]) -> None:
        """Copies the states of parameters that are about to change, if another live optimizer has the same tensors.

        The copy is made this late because ``optimizer = transform(optimizer)`` has usually dropped the other one by
        now.

        Raises:
            CorrectnessError: the other optimizer has changed these tensors since.
        """
        if not self._shared:
            return
        others = any(origin() is not None for origin in self._origins)
        for parameter in parameters:
            if id(parameter) in self._shared:
                then, now = self._shared[id(parameter)], marks(self.state[parameter])
                if any(now.get(name, mark) != mark and now[name][0] == mark[0] for name, mark in then.items()):
                    raise CorrectnessError(
                        f"the states of {self._places()[id(parameter)][1]} were changed in place by the optimizer to "
                        f"which {self._assigned.how(parameter)!r} was applied; step only the optimizer that the "
                        "transform has returned, or apply the transform again"
                    )
                del self._shared[id(parameter)]
                if others:
                    self.state[parameter] = copied(self.state[parameter])

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        self._catch_up()
        with ExitStack() as stack:
            for part in reversed(self.parts):  # outer first: an inner part may have to read what an outer one restores
                stack.enter_context(part.gathered())
            yield

    def _plain_states(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Returns the states of `parameter` as its class has them."""
        states: dict[str, Any] = self.state[parameter]
        for part in self._tops[self._assigned.number(parameter)].with_inner():
            states = part.plain_states(parameter, states)
        return states

    @property
    def writes_offloaded(self) -> bool:
        """Whether a step writes states that are outside `state`, where a caller cannot restore them."""
        return any(part.writes_offloaded for part in self.parts)

    @property
    def steps_in_backward(self) -> bool:
        """Whether parameters step before `step` is called."""
        return any(part.in_backward for part in self.parts)

    @property
    def backward_passes(self) -> int:
        """The number of backward passes over one graph in a step."""
        return max((part.backward_passes for part in self.parts), default=1)

    def below(self) -> list[torch.Tensor]:
        """Returns the states that live on a tier below the device."""
        return [tensor for part in self.parts for tensor in part.below()]

    def report(self) -> str:
        """Returns, as text, which parameters are under which transforms, and the lines of each part."""
        own = self._assigned.split(parameters_of(self.param_groups))
        under = [f"{self._assigned.hows[number]!r}: {len(some)} parameters" for number, some in own.items()]
        return "\n".join([*under, *(line for part in self.parts for line in part.report())])

    def let_go(self) -> None:
        """Removes all hooks from the parameters, and their states from all tiers."""
        for part in self.parts:
            part.attend([])

    def _advance_in_backward(self, number: int, parameter: torch.Tensor) -> None:
        """Steps a parameter whose gradient is complete: now, or later in this backward if copies have to arrive first.

        The last few parameters wait, so that neither the device waits for the host's step nor the host for copies. From
        here on autograd regards the parameter as changed, and its gradient may be dropped.
        """
        if not self._tops[self._assigned.number(parameter)].ask([parameter]):
            self._advance(number, [parameter])
            return
        torch.autograd.graph.increment_version(parameter)
        self._options_of(number)
        self._due.append((number, parameter))
        if self._following != (task := torch._C._current_graph_task_id()):
            self._following = task
            torch.autograd.Variable._execution_engine.queue_callback(self._catch_up)
        if parameter.nbytes > self._most_due:
            self._catch_up()
        while sum(each.nbytes for _, each in self._due) > self._most_due:
            self._advance_first()

    def _catch_up(self) -> None:
        """Steps all parameters in `_due`, and waits for all copies."""
        while self._due:
            self._advance_first()
        self._following = -1
        for top in self._tops:
            for part in top.with_inner():
                part.settle()

    def _advance_first(self) -> None:
        number, parameter = self._due[0]
        self._advance(number, [parameter])
        self._due.popleft()  # last, so that an exception leaves the parameter in the queue

    def _options_of(self, number: int) -> Group:
        """Returns the options of a group in this step: those from when its first parameter stepped."""
        if number not in self._options:
            options = options_of(self.param_groups[number])
            self._options[number] = {key: copied(value) for key, value in options.items()}
        return self._options[number]

    def _advance(self, number: int, parameters: list[torch.Tensor]) -> None:
        """Steps these parameters of a group with the options that the group has in this step."""
        options = self._options_of(number)
        for which, some in self._assigned.split(parameters).items():
            now = {**options, "params": some}
            self._tops[which].advance(now)
            self._note_changes(number, now)

    def _pass_over(self, number: int) -> None:
        """Steps a group in which no parameter has a gradient: the class may still count the step."""
        now = {**self._options_of(number), "params": self.param_groups[number]["params"]}
        self._own_step(now)
        self._note_changes(number, now)

    def _own_step(self, group: Group) -> None:
        twin = made_of(self._own_class, self.__dict__, param_groups=[group], **_NO_HOOKS)
        with torch.no_grad():
            own_step(self._own_class)(twin)

    def _note_changes(self, number: int, now: Group) -> None:
        """Records the options of a group that the class's step has changed."""
        before = self._options[number]
        changed = {key: value for key, value in options_of(now).items() if value is not before.get(key)}
        if changed:
            self._changes.setdefault(number, {}).update(changed)

    def _changed_options(self) -> str:
        """Describes the options that were changed since parameters stepped with them; empty if none was."""
        return ", ".join(
            f"{key!r} of group {number} was changed from {was!r} to {now!r}"
            for number, options in self._options.items()
            for key, now in options_of(self.param_groups[number]).items()
            if not _same(now, was := options.get(key))
        )

    def _places(self) -> dict[int, tuple[int, str]]:
        """Returns, by the id of each parameter, the index of its group and its name in messages."""
        return {
            id(parameter): (
                number,
                f"parameter {(names or {position: f'{position} of group {number}'})[position]} {list(parameter.shape)}",
            )
            for number, group in enumerate(self.param_groups)
            for names in [group.get("param_names")]
            for position, parameter in enumerate(group["params"])
        }


def _most_due(sizes: list[int]) -> int:
    """Returns how many bytes of parameters may wait for copies: enough to hide copies, yet less than an embedding.

    At least the weighted median of `sizes`: half of all bytes are in parameters of that size or smaller.
    """
    total, passed, middle = sum(sizes), 0, 0
    for middle in sorted(sizes):
        passed += middle
        if 2 * passed >= total:
            break
    return max(middle, min(total // _SHARE, _MOST_BYTES))


def parameters_of(groups: list[Group]) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def options_of(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != "params"}


def marks(states: Any) -> dict[str, tuple[int, Any]]:
    """Returns, by the name of a state, a pair that changes when the state is replaced or written to."""
    return {
        name: (id(value), version(value) if isinstance(value, torch.Tensor) else value)
        for name, value in states.items()
    }


def in_turn(group: Group, few: Iterable[list[torch.Tensor]]) -> Iterator[Group]:
    """Yields `group` with each of the lists `few` as its parameters in turn, always with the options from before.

    Options that the step changes, such as a count, so change once and not once per list.
    """
    options = dict(group)
    for some in few:
        now = {**options, "params": some}
        yield now
        group.update({**now, "params": options["params"]})


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def copied(tree: Any, device: str | None = None) -> Any:
    """Returns `tree` with copies of its tensors, on `device` if one is given."""
    if not pytrees.tensors(tree):
        return tree
    leaves, spec = pytrees.flatten(tree)
    return pytrees.unflatten(
        spec, [leaf.detach().to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    )


def check_whole(title: str, parameters: Sequence[torch.Tensor]) -> None:
    """Raises `TransformError` for DTensors: a step over slices would see one process's shard only."""
    for parameter in parameters:
        if hasattr(parameter, "device_mesh"):
            raise TransformError(
                f"{title}: a parameter of shape {list(parameter.shape)} is a DTensor, whose numbers it cannot work on; "
                "leave it out for what fully_shard() took, where step_in_groups(), step_in_backward() and "
                "compensate_rounding() do apply"
            )
