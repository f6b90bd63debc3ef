"""The parts of a transformed optimizer: each steps some of its parameters, through the part inside of it.

All transforms of optimizers come down to one function, *advance*: the step of the class as it is, for some of the
parameters. `step_in_backward` calls it for one parameter as soon as its gradient is complete, `step_in_groups` for a
few at a time. Each is a `StepPart` around the parts inside of it; the innermost is the class's own step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from memscale.core import TransformError, pytrees
from memscale.optimizers.assigned import Assigned
from memscale.optimizers.separability import Separability, made_of, own_step

Group = dict[str, Any]

# Of all parameters, this share may be due to step at once, up to so many bytes.
_SHARE, _MOST_BYTES = 16, 2**28
_NO_HOOKS: dict[str, Any] = {"_optimizer_step_pre_hooks": {}, "_optimizer_step_post_hooks": {}}


class StepPart:
    """One of the transforms of an optimizer at work. It holds the optimizer weakly: whoever drops that ends all."""

    writes_offloaded: ClassVar[bool] = False
    places_states: ClassVar[bool] = False  # somewhere of their own, by the parameter, the same one at each step
    in_backward: ClassVar[bool] = False

    def __init__(self, optimizer: PartedOptimizer, inner: StepPart | None) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._inner = inner

    @property
    def optimizer(self) -> PartedOptimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "it holds this part"
        return optimizer

    @property
    def inner(self) -> StepPart:
        assert self._inner is not None, "only the innermost has none"
        return self._inner

    def with_inner(self) -> Iterator[StepPart]:
        """This part and those inside of it, from the outside in."""
        part: StepPart | None = self
        while part is not None:
            yield part
            part = part._inner

    def advance(self, group: Group) -> None:
        """Step the parameters of `group`, whose options it may change as the step of the class does."""
        self.inner.advance(group)

    def advance_twins(
        self, group: Group, twins: list[torch.Tensor], before: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Step `twins`, with these states, in the place of the parameters of `group`; returns the states they have."""
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
        """Begin to bring what `advance` will take for these; whether anything is on its way.

        Only parts that do nothing after the `advance` of the part inside may pass this on: that may come later, and
        then with the gradients of now.
        """
        return False

    def settle(self) -> None:
        """Let all that is on its way to the parameters arrive, and forget what was asked for and not used."""

    def states_like(self, parameter: torch.Tensor) -> torch.dtype:
        """The type of the parameters whose states those of `parameter` are like."""
        return parameter.dtype if self._inner is None else self._inner.states_like(parameter)

    def plain_states(self, parameter: torch.Tensor, states: dict[str, Any]) -> dict[str, Any]:
        """Of these `states` of `parameter`, those that the optimizer has without this transform, as it has them."""
        return states

    def attend(self, parameters: list[torch.Tensor]) -> None:
        """The optimizer's parameters are these from here on."""

    def loaded(self, state_dict: dict[str, Any]) -> None:
        """States were loaded from this, in the types that PyTorch loads them in."""

    def below(self) -> list[torch.Tensor]:
        """The tensors that live on a tier below the device."""
        return []

    @property
    def backward_passes(self) -> int:
        """How many passes of backward over one graph make a step."""
        return 1

    def after_zero_grad(self) -> None:
        """Gradients are dropped."""

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


class OwnStep(StepPart):
    """The step of the class, on a twin of the optimizer that has nothing but this group: no hooks run twice."""

    def advance(self, group: Group) -> None:
        optimizer = self.optimizer
        optimizer._part_states(group["params"])
        optimizer._own_step(group)
        # Not every optimizer changes its parameters in a way that autograd sees, and a graph may still need one.
        torch.autograd.graph.increment_version(group["params"])


class PartedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps by parts: which of them steps which parameter, and with which options."""

    _own_class: ClassVar[type[torch.optim.Optimizer]]
    _assigned: Assigned
    _evidence: Separability
    _origins: tuple[weakref.ref[torch.optim.Optimizer], ...]
    _shared: set[int]  # parameters whose states the optimizers have too that this one was made of
    parts: list[StepPart]  # of one transform after the other, innermost first
    _tops: list[StepPart]  # the outermost of each
    _options: dict[int, Group]  # by the number of a group, those that its parameters are stepped with in this step
    _changes: dict[int, Group]  # and what the class's step made of them
    _due: deque[tuple[int, torch.Tensor]]  # parameters that step once what was asked for is there, and their groups
    _most_due: int  # bytes of them
    _is_stepping: bool  # whether `step` runs
    _twins: dict[int, torch.Tensor]  # by the id of what steps in the place of a parameter, the parameter
    _following: int  # the backward at whose end they step at the latest

    def _attend(self) -> None:
        self._catch_up()
        self._most_due = _most_due([parameter.nbytes for parameter in parameters_of(self.param_groups)])
        own = self._assigned.split(parameters_of(self.param_groups))
        for number, top in enumerate(self._tops):
            for part in reversed(list(top.with_inner())):  # states are quantised before they leave
                part.attend(own.get(number, []))

    def _part_states(self, parameters: list[torch.Tensor]) -> None:
        """Give parameters that are about to change states of their own, if anybody else may look at those they have.

        Only now: whoever writes ``optimizer = transform(optimizer)`` has dropped the other by now, and pays for none.
        """
        if not self._shared:
            return
        others = any(origin() is not None for origin in self._origins)
        for parameter in parameters:
            if id(parameter) in self._shared:
                self._shared.discard(id(parameter))
                if others:
                    self.state[parameter] = copied(self.state[parameter])

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        self._catch_up()
        with ExitStack() as stack:
            for part in reversed(self.parts):  # what an outer one brings an inner one may have to read
                stack.enter_context(part.gathered())
            yield

    def _plain_states(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The states of `parameter` as its class has them."""
        states: dict[str, Any] = self.state[parameter]
        for part in self._tops[self._assigned.number(parameter)].with_inner():
            states = part.plain_states(parameter, states)
        return states

    @property
    def writes_offloaded(self) -> bool:
        """Whether a step changes states that are not in `state`, where nobody could put them back."""
        return any(part.writes_offloaded for part in self.parts)

    @property
    def steps_in_backward(self) -> bool:
        """Whether parameters step before `step` is called."""
        return any(part.in_backward for part in self.parts)

    @property
    def backward_passes(self) -> int:
        """How many passes of backward over one graph make a step."""
        return max((part.backward_passes for part in self.parts), default=1)

    def below(self) -> list[torch.Tensor]:
        """The states that live on a tier below the device."""
        return [tensor for part in self.parts for tensor in part.below()]

    def report(self) -> str:
        """Which parameters are under which transforms, and what those have to say about them."""
        own = self._assigned.split(parameters_of(self.param_groups))
        under = [f"{self._assigned.hows[number]!r}: {len(some)} parameters" for number, some in own.items()]
        return "\n".join([*under, *(line for part in self.parts for line in part.report())])

    def let_go(self) -> None:
        """Leave the parameters alone from here on: no hooks on them, nothing of theirs on a tier."""
        for part in self.parts:
            part.attend([])

    def _advance_in_backward(self, number: int, parameter: torch.Tensor) -> None:
        """Step a parameter whose gradient is complete: now, or while backward goes on and its gradient is on its way.

        The last few wait, so that neither the device waits for the host's step nor that for the link. From here on
        autograd takes the parameter for changed, and its gradient may be dropped.
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
        """Step what is due, and let all that is on its way to parameters arrive."""
        while self._due:
            self._advance_first()
        self._following = -1
        for top in self._tops:
            for part in top.with_inner():
                part.settle()

    def _advance_first(self) -> None:
        number, parameter = self._due[0]
        self._advance(number, [parameter])
        self._due.popleft()  # only now: what an exception stops is taken up again

    def _options_of(self, number: int) -> Group:
        """The options that a group has in this step: those of when its first parameter steps."""
        if number not in self._options:
            options = options_of(self.param_groups[number])
            self._options[number] = {key: copied(value) for key, value in options.items()}
        return self._options[number]

    def _advance(self, number: int, parameters: list[torch.Tensor]) -> None:
        """Step these parameters of a group, with the options that the group has in this step."""
        options = self._options_of(number)
        for which, some in self._assigned.split(parameters).items():
            now = {**options, "params": some}
            self._tops[which].advance(now)
            self._note_changes(number, now)

    def _pass_over(self, number: int) -> None:
        """What a step does with a group none of whose parameters has a gradient: the class may count its steps."""
        now = {**self._options_of(number), "params": self.param_groups[number]["params"]}
        self._own_step(now)
        self._note_changes(number, now)

    def _own_step(self, group: Group) -> None:
        twin = made_of(self._own_class, self.__dict__, param_groups=[group], **_NO_HOOKS)
        with torch.no_grad():
            own_step(self._own_class)(twin)

    def _note_changes(self, number: int, now: Group) -> None:
        """What the class's step made of the options of a group."""
        before = self._options[number]
        changed = {key: value for key, value in options_of(now).items() if value is not before.get(key)}
        if changed:
            self._changes.setdefault(number, {}).update(changed)

    def _changed_options(self) -> str:
        """Which options are not those any more that parameters were stepped with in this step; empty if none."""
        return ", ".join(
            f"{key!r} of group {number} was changed from {was!r} to {now!r}"
            for number, options in self._options.items()
            for key, now in options_of(self.param_groups[number]).items()
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


def _most_due(sizes: list[int]) -> int:
    """How many bytes of parameters may be due: what hides copies, and less than an embedding, which steps at once.

    At least one of those sizes that half of all bytes are in parameters of, or less.
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


def in_turn(group: Group, few: Iterable[list[torch.Tensor]]) -> Iterator[Group]:
    """`group` with some of its parameters after others, each time with its options of now; then it gets those it left.

    What a step counts in its options so goes up once, and not with each of them.
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
    """`tree` with tensors of its own, on `device` if one is given."""
    if not pytrees.tensors(tree):
        return tree
    leaves, spec = pytrees.flatten(tree)
    return pytrees.unflatten(
        spec, [leaf.detach().to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    )


def check_whole(title: str, parameters: Sequence[torch.Tensor]) -> None:
    """Raise `TransformError` for parameters that are one process's part, which a step over numbers does not see."""
    for parameter in parameters:
        if hasattr(parameter, "device_mesh"):
            raise TransformError(
                f"{title}: a parameter of shape {list(parameter.shape)} is a DTensor, whose numbers it cannot work on; "
                "leave it out for what fully_shard() took, where step_in_groups(), step_in_backward() and "
                "compensate_rounding() do apply"
            )
