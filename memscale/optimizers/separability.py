"""Tries whether an optimizer treats each parameter alone, so that one may step before another has its gradient.

The trial steps small parameters of the same kinds, once all together and once one after the other, and compares the
results. Anything shared between parameters makes them differ: a norm over all gradients (Prodigy, LAMB), a common
count, a random stream, a line search. So there is no list of known classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from memscale.core import TransformError, pytrees

# Errors by which an optimizer refuses a dtype, a shape or a number of elements.
_REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError, ArithmeticError, LookupError)
_SIDES = (5, 3, 2, 7, 11)
_LARGE_SIDES = (64, 128)
_STEPS = 2
_RATE = 2.0**-5  # the learning rate of every trial; the user's (a warm-up's 0) may be too small to move a number
_HALVES = (torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class MomentState:
    """A state that sums up gradients: it has its parameter's shape, and stays zero while gradients are zero.

    Attributes:
        dims: the parameter's number of dimensions.
        of: the parameter's dtype.
        name: the state's name.
        dtype: the state's dtype.
        signed: whether the state may be negative.
    """

    dims: int
    of: torch.dtype
    name: str
    dtype: torch.dtype
    signed: bool


@dataclasses.dataclass(frozen=True)
class Separability:
    """The result of the trial of an optimizer.

    Attributes:
        full: the states that have their parameter's shape, as pairs of the parameter's number of dimensions and the
            state's name. States that have another type for large parameters (8-bit optimizers) are left out.
        moments: the states in `full` that are moments.
        elementwise: whether each number steps independently of the others and of its position.
        composed: the names of states that are tensor subclasses, such as quantized numbers with their scales.
        kinds: the number of dimensions and the dtype of each kind of parameter in the trial.
    """

    full: frozenset[tuple[int, str]]
    moments: frozenset[MomentState]
    elementwise: bool
    composed: frozenset[str]
    kinds: frozenset[tuple[int, torch.dtype]] = frozenset()

    def covers(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether the trial had a parameter of the kind of each of `parameters`."""
        return all((parameter.dim(), parameter.dtype) in self.kinds for parameter in parameters)

    def full_names(self, parameter: torch.Tensor) -> set[str]:
        """Returns the names of the states of `parameter` that have one number for each of its numbers."""
        return {name for dims, name in self.full if dims == parameter.dim()}

    def moments_of(self, parameter: torch.Tensor, dtype: torch.dtype) -> dict[str, MomentState]:
        """Returns the moments of `parameter` by name, in order of names, as they would be if it were of `dtype`."""
        found = {each.name: each for each in self.moments if (each.dims, each.of) == (parameter.dim(), dtype)}
        # The order of a set differs from process to process, and decides the order of allocations.
        return {name: found[name] for name in sorted(found)}


def own_step(own_class: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Returns the step of a class without the wrapper by which PyTorch calls hooks."""
    step: Any = own_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def made_of(own_class: type[torch.optim.Optimizer], attributes: Mapping[str, Any], **own: Any) -> Any:
    """Makes an optimizer of `own_class` with these attributes, overridden by `own`, without calling its constructor.

    Every copy of an optimizer in this package is made here.
    """
    made: Any = object.__new__(own_class)
    made.__dict__.update(attributes, **own)
    return made


def check_separable(optimizer: torch.optim.Optimizer, how: str) -> Separability:
    """Tries `optimizer` on small parameters; leaves its own parameters and states untouched.

    Args:
        optimizer: the optimizer.
        how: the transforms for which it is tried, as an error shows them.

    Raises:
        TransformError: the optimizer cannot be stepped one parameter at a time; the message says why.
    """
    name = type(optimizer).__name__
    if not {"param_groups", "state"} <= optimizer.__dict__.keys():
        raise TransformError(f"{how}: this {name} has the parameters of another optimizer; transform that one")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise TransformError(f"{how}: this {name} is differentiable, and what a graph needs cannot be freed")
    cards = {p.device.index for group in optimizer.param_groups for p in group["params"] if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(cards)):
        random = _random_states(cards)
        try:
            own = _Trials(optimizer)
        except Exception as error:  # the optimizer's own step may raise any error
            raise TransformError(
                f"{how}: {name} cannot be stepped one parameter at a time, which this transform needs; a trial on "
                f"small parameters ended with {type(error).__name__}: {error}. Leave this transform out, or "
                "use another optimizer"
            ) from error
        tried = [own, *_in_float32(optimizer)]
        draws = not all(map(torch.equal, random, _random_states(cards)))
        large = _large(optimizer)
        elementwise = large.has_plain_states() and _is_elementwise(optimizer, own.at_once)
    if (why := _why_not(tried, draws)) is not None:
        raise TransformError(f"{how}: {name} {why}, or leave this transform out")
    moments = {
        (each.dims, each.of, each.name): each
        for trials in reversed(tried)  # the first entry, the parameters in their own type, overrides the others
        for each in trials.at_once.moments(trials.still)
    }
    full, known, kinds = own.at_once.full_states(), own.at_once.kinds(), large.kinds()
    other = {state for state, kind in kinds.items() if known.get(state, kind) != kind}
    return Separability(
        full=frozenset(full - other),
        moments=frozenset(each for each in moments.values() if (each.dims, each.name) not in other),
        elementwise=elementwise,
        composed=frozenset(name for (_, name), each in kinds.items() if any(of is not torch.Tensor for of, *_ in each)),
        kinds=frozenset((p.dim(), p.dtype) for group in optimizer.param_groups for p in group["params"]),
    )


class _Trials:
    """Three trials of an optimizer: all parameters at once, one after the other, and all with gradients of zero."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, widens: bool = False) -> None:
        self.at_once, self.one_by_one = _Trial(optimizer, widens=widens), _Trial(optimizer, widens=widens)
        self.still = _Trial(optimizer, widens=widens, decays=False)
        for number in range(_STEPS):
            self.at_once.step(number, self.at_once.groups)
            self.one_by_one.step_backwards(number)
            self.still.step(number, self.still.groups, size=0.0)


def _in_float32(optimizer: torch.optim.Optimizer) -> list[_Trials]:
    """Returns a trial with half-precision parameters as float32, where rounding hides no step; empty if it raises."""
    if not any(p.dtype in _HALVES for group in optimizer.param_groups for p in group["params"]):
        return []
    try:
        return [_Trials(optimizer, widens=True)]
    except _REFUSALS:  # some optimizers accept half precision only
        return []


def _why_not(tried: list[_Trials], draws: bool) -> str | None:
    """Returns what prevents stepping one parameter at a time and what to use instead, or None."""
    if common := [repr(key) for key in tried[0].at_once.state if not isinstance(key, torch.Tensor)]:
        return (
            f"keeps states that belong to no parameter ({', '.join(common)}), which parameters that step alone would "
            "change several times; use another optimizer"
        )
    if any(each.one_by_one.results() != each.at_once.results() for each in tried):
        return (
            "does not treat each parameter alone: stepping them one after the other gives other numbers than all at "
            "once; use another optimizer"
        )
    if not any(each.at_once.moved() for each in tried):
        return (
            f"moved none of the small parameters of a trial at lr={_RATE}, so the trial does not show that each "
            "parameter is treated alone; use another optimizer"
        )
    if draws:  # checked separately: drawn numbers may make no difference to parameters as small as these
        return (
            "draws random numbers, which would differ where a parameter steps before the others; use another optimizer"
        )
    if any(each.at_once.moves_without_gradients() for each in tried):
        return (
            "steps parameters that have no gradient, such as frozen ones, which this transform would leave alone; give "
            "the optimizer only those that get one"
        )
    return None


def _large(optimizer: torch.optim.Optimizer) -> _Trial:
    """Runs a trial with larger parameters, for which an optimizer may keep states in fewer bits."""
    large = _Trial(optimizer, large=True)
    try:
        large.step(0, large.groups)
    except _REFUSALS:  # some optimizers accept small parameters only
        large.state.clear()
    return large


def _random_states(cards: set[Any]) -> list[torch.Tensor]:
    """Returns the states of all generators from which a step on the CPU and these cards may draw."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(card) for card in sorted(cards))]


def _is_elementwise(optimizer: torch.optim.Optimizer, at_once: _Trial) -> bool:
    """Whether the halves of a parameter step to the same numbers as the whole parameter."""
    try:
        halves = _Trial(optimizer, halved=True)
        for number in range(_STEPS):
            halves.step(number, halves.groups)
    except _REFUSALS:  # some optimizers accept matrices only
        return False
    return all(map(torch.equal, at_once.values(), halves.values()))


class _Trial:
    """An optimizer of the same class and options, over a few small parameters of the same kinds.

    Args:
        optimizer: the optimizer to imitate.
        decays: keep weight decay; False sets it to zero.
        halved: split each parameter into two halves.
        widens: make half-precision parameters float32.
        large: use one parameter of 8192 numbers for each kind.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        decays: bool = True,
        halved: bool = False,
        widens: bool = False,
        large: bool = False,
    ) -> None:
        self._class = type(optimizer)
        self._attributes = optimizer.__dict__
        self._own: dict[str, Any] = {}  # attributes that the step has set
        self.state: Any = defaultdict(dict)
        self.groups = []
        self._wholes: list[list[torch.Tensor]] = []
        random = torch.Generator().manual_seed(0)
        for group in optimizer.param_groups:
            kinds = {(p.dim(), p.dtype, p.device): p for p in group["params"]}
            tried = [p for p in kinds.values() for _ in range(1 if large else 2)]
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            if not decays and "weight_decay" in options:
                options["weight_decay"] = 0.0
            if "lr" in options:
                options["lr"] = _rate_like(options["lr"])
            small = [_small(p, random, large) for p in tried]
            small = [each.float() if widens and each.dtype in _HALVES else each for each in small]
            wholes = [_parts(each, halved) for each in small]
            for part, p in ((part, p) for parts, p in zip(wholes, tried, strict=True) for part in parts):
                part.requires_grad_(p.requires_grad)
            self._wholes += wholes
            self.groups.append({**options, "params": [part for parts in wholes for part in parts]})
        self._halved = halved
        self.before = [p.detach().clone() for p in self._parameters()]

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.groups for parameter in group["params"]]

    def values(self) -> list[torch.Tensor]:
        """Returns the parameters, flat; halves are joined."""
        return [torch.cat([part.detach().flatten() for part in parts]) for parts in self._wholes]

    def step(self, number: int, groups: list[dict[str, Any]], size: float = 1.0) -> None:
        random = torch.Generator().manual_seed(number + 1)
        for position, parts in enumerate(self._wholes):
            shape = (sum(part.numel() for part in parts),) if self._halved else parts[0].shape
            # Magnitudes that differ by factors of 10 and 100, so that a norm over all gradients changes the result.
            whole = torch.randn(shape, generator=random) * size * 10.0 ** (position % 3)
            for part, gradient in zip(parts, _parts(whole, self._halved), strict=True):
                part.grad = gradient.to(part.device, part.dtype)
        self._run(groups)

    def step_backwards(self, number: int) -> None:
        """Runs the same step one parameter at a time, the last parameter first."""
        self.step(number, [])
        before = [dict(group) for group in self.groups]
        for group, options in reversed(list(zip(self.groups, before, strict=True))):
            for parameter in reversed(options["params"]):
                alone = {**options, "params": [parameter]}
                self._run([alone])
                group.update({**alone, "params": options["params"]})

    def _run(self, groups: list[dict[str, Any]]) -> None:
        if not groups:
            return
        empty: dict[str, Any] = {
            key: OrderedDict() for key, v in self._attributes.items() if isinstance(v, OrderedDict)
        }
        own = {**empty, **self._own, "param_groups": groups, "state": self.state}
        twin = made_of(self._class, self._attributes, **own)
        known = {key: value for key, value in twin.__dict__.items() if key not in ("param_groups", "state")}
        with torch.no_grad():
            own_step(self._class)(twin)
        self._own = {
            key: value
            for key, value in twin.__dict__.items()
            if isinstance(value, (int, float, str, torch.Tensor)) and value is not known.get(key)
        }

    def results(self) -> Any:
        """Returns everything that a step changes, as bytes."""
        options = [{key: value for key, value in group.items() if key != "params"} for group in self.groups]
        states = [self.state.get(parameter) for parameter in self._parameters()]
        leaves, spec = pytrees.flatten((self._parameters(), states, options, self._own))
        return [_bytes(leaf) for leaf in leaves], str(spec)

    def moved(self) -> bool:
        """Whether the step has changed any parameter."""
        return not all(torch.equal(a, b) for a, b in zip(self.before, self._parameters(), strict=True))

    def moves_without_gradients(self) -> bool:
        """Whether a step changes parameters without a gradient. A step that raises does so in plain PyTorch too."""
        parameters = self._parameters()
        before = list(map(_bytes, parameters))
        for parameter in parameters:
            parameter.grad = None
        with contextlib.suppress(AttributeError, *_REFUSALS):  # the optimizer's own error about gradients that are None
            self._run(self.groups)
        return list(map(_bytes, parameters)) != before

    def moments(self, still: _Trial) -> frozenset[MomentState]:
        """Returns the states that are zero in `still`, the same trial with gradients of zero."""
        found: dict[tuple[int, torch.dtype, str], list[tuple[torch.dtype, bool, bool]]] = {}
        for parameter, other in zip(self._parameters(), still._parameters(), strict=True):
            states, zeros = self.state.get(parameter), still.state.get(other)
            for key, value in states.items() if isinstance(states, dict) and isinstance(zeros, dict) else ():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape == parameter.shape:
                    stays = isinstance(zeros.get(key), torch.Tensor) and not zeros[key].count_nonzero()
                    kind = parameter.dim(), parameter.dtype, key
                    found.setdefault(kind, []).append((value.dtype, bool((value < 0).any()), stays))
        return frozenset(
            MomentState(dims, of, name, each[0][0], any(negative for _, negative, _ in each))
            for (dims, of, name), each in found.items()
            if dims and all(stays and dtype == each[0][0] for dtype, _, stays in each)
        )

    def kinds(self) -> dict[tuple[int, str], set[tuple[Any, ...]]]:
        """Returns, by dimensions and state name, the types of each state and whether it has the parameter's shape."""
        found: dict[tuple[int, str], set[tuple[Any, ...]]] = {}
        for parameter, states in self.state.items():
            for key, value in states.items() if isinstance(states, dict) and parameter.dim() else ():
                if isinstance(value, torch.Tensor):
                    kind = type(value), value.dtype, value.shape == parameter.shape
                    found.setdefault((parameter.dim(), key), set()).add(kind)
        return found

    def has_plain_states(self) -> bool:
        """Whether each state is a single number, or has its parameter's shape."""
        return all(
            value.numel() <= 1 or value.shape == parameter.shape
            for parameter, states in self.state.items()
            for value in pytrees.tensors(states)
        )

    def full_states(self) -> set[tuple[int, str]]:
        return {state for state, kinds in self.kinds().items() if all(full for _, _, full in kinds)}


def _small(parameter: torch.Tensor, random: torch.Generator, large: bool) -> torch.Tensor:
    shape = tuple(_SIDES[at % len(_SIDES)] for at in range(parameter.dim()))
    if large and shape:
        shape = _LARGE_SIDES if len(shape) > 1 else (math.prod(_LARGE_SIDES),)
        shape += (1,) * (parameter.dim() - len(shape))
    values = torch.randn(shape, generator=random)
    if shape:
        values[::2] = 0.0  # on a zero a step of any size is visible
    device = "cpu" if parameter.is_meta else parameter.device
    return values.to(device, parameter.dtype)


def _rate_like(rate: Any) -> Any:
    """Returns the learning rate of a trial as a number or tensor like `rate`; other kinds are returned unchanged."""
    if isinstance(rate, torch.Tensor):
        return torch.full_like(rate, _RATE)
    return _RATE if isinstance(rate, (int, float)) and not isinstance(rate, bool) else rate


def _parts(whole: torch.Tensor, halved: bool) -> list[torch.Tensor]:
    """Returns `[whole]`, or copies of its two halves."""
    return [part.clone() for part in whole.flatten().split((whole.numel() + 1) // 2)] if halved else [whole]


def _bytes(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    whole = leaf.detach().cpu().contiguous().reshape(-1)
    return str(leaf.dtype), tuple(leaf.shape), whole.view(torch.uint8).numpy().tobytes()
