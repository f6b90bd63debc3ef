"""Whether an optimizer treats each parameter alone, so that one may step before another has its gradient.

Not a list of classes: the step is tried on small parameters, all at once and one after the other. What shares anything
between them differs: a norm over all gradients (Prodigy, LAMB), a count of its own, a random stream, a line search.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from memscale.core import TransformError, pytrees

_SIDES = (2, 3, 5, 7, 11)
_STEPS = 2
_MOST_TRIED = 8  # parameters of a group


@dataclasses.dataclass(frozen=True)
class Separability:
    """What trying an optimizer has shown.

    Attributes:
        full: the states that have the shape of their parameter: its number of dimensions, and the state's name.
    """

    full: frozenset[tuple[int, str]]


def own_step(own_class: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The step of a class without the hooks that PyTorch calls around it."""
    step: Any = own_class.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def check_separable(optimizer: torch.optim.Optimizer, how: object) -> Separability:
    """What is known of `optimizer`, none of whose parameters and states are touched.

    Raises:
        TransformError: it cannot be stepped one parameter at a time, and why.
    """
    name = type(optimizer).__name__
    if not {"param_groups", "state"} <= optimizer.__dict__.keys():
        raise TransformError(f"{how!r}: this {name} has the parameters of another optimizer; transform that one")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise TransformError(f"{how!r}: this {name} is differentiable, and what a graph needs cannot be freed")
    indices = {p.device.index for group in optimizer.param_groups for p in group["params"] if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(indices)):
        try:
            at_once, one_by_one = _Trial(optimizer), _Trial(optimizer)
            for number in range(_STEPS):
                at_once.step(number, at_once.groups)
                one_by_one.step_backwards(number)
        except Exception as error:
            raise TransformError(
                f"{how!r}: {name} cannot be stepped one parameter at a time, which this transform needs; a trial on "
                f"small parameters ended with {type(error).__name__}: {error}"
            ) from error
    if one_by_one.results() != at_once.results() or not at_once.moved():
        raise TransformError(
            f"{how!r}: {name} does not treat each parameter alone: stepping them one after the other gives other "
            "numbers than all at once; use another optimizer, or leave this transform out"
        )
    return Separability(frozenset(at_once.full_states()))


class _Trial:
    """An optimizer of the same class and options over a few small parameters of the same kinds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._class = type(optimizer)
        self._attributes = optimizer.__dict__
        self._own: dict[str, Any] = {}  # what the step left in attributes
        self.state: Any = defaultdict(dict)
        self.groups = []
        random = torch.Generator().manual_seed(0)
        for group in optimizer.param_groups:
            kinds = {(p.dim(), p.dtype, p.device): p for p in group["params"]}
            tried = [p for p in kinds.values() for _ in range(2)][:_MOST_TRIED]
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            self.groups.append({**options, "params": [_small(p, random) for p in tried]})
        self.before = [p.detach().clone() for p in self._parameters()]

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.groups for parameter in group["params"]]

    def step(self, number: int, groups: list[dict[str, Any]]) -> None:
        random = torch.Generator().manual_seed(number + 1)
        for position, parameter in enumerate(self._parameters()):
            # Of very different sizes, for a norm over all of them to matter.
            gradient = torch.randn(parameter.shape, generator=random) * 10.0 ** (position % 3)
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
        self._run(groups)

    def step_backwards(self, number: int) -> None:
        """The same step, one parameter after the other, the last one first."""
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
        twin: Any = object.__new__(self._class)
        twin.__dict__.update(self._attributes)
        twin.__dict__.update({key: OrderedDict() for key, v in self._attributes.items() if isinstance(v, OrderedDict)})
        twin.__dict__.update(self._own, param_groups=groups, state=self.state)
        known = {key: value for key, value in twin.__dict__.items() if key not in ("param_groups", "state")}
        with torch.no_grad():
            own_step(self._class)(twin)
        self._own = {
            key: value
            for key, value in twin.__dict__.items()
            if isinstance(value, (int, float, str, torch.Tensor)) and value is not known.get(key)
        }

    def results(self) -> Any:
        """Everything that a step changes, by its bytes."""
        options = [{key: value for key, value in group.items() if key != "params"} for group in self.groups]
        states = [self.state.get(parameter) for parameter in self._parameters()]
        leaves, spec = pytrees.flatten((self._parameters(), states, options, self._own))
        return [_bytes(leaf) for leaf in leaves], str(spec)

    def moved(self) -> bool:
        """Whether it steps the parameters that it was given; one that has a rate of zero does not show it."""
        rates = [group.get("lr") for group in self.groups]
        still = [torch.equal(a, b) for a, b in zip(self.before, self._parameters(), strict=True)]
        return not all(still) or any(rate is not None and not rate for rate in rates)

    def full_states(self) -> set[tuple[int, str]]:
        found: dict[tuple[int, str], bool] = {}
        for parameter, states in self.state.items():
            for key, value in states.items() if isinstance(states, dict) and parameter.dim() else ():
                if isinstance(value, torch.Tensor):
                    full = value.shape == parameter.shape
                    found[parameter.dim(), key] = found.get((parameter.dim(), key), True) and full
        return {key for key, full in found.items() if full}


def _small(parameter: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    shape = tuple(_SIDES[at % len(_SIDES)] for at in range(parameter.dim()))
    values = torch.randn(shape, generator=random)
    device = "cpu" if parameter.is_meta else parameter.device
    return values.to(device, parameter.dtype).requires_grad_(parameter.requires_grad)


def _bytes(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    whole = leaf.detach().cpu().contiguous().reshape(-1)
    return str(leaf.dtype), tuple(leaf.shape), whole.view(torch.uint8).numpy().tobytes()
