"""`StepInFloat32`: steps bfloat16 parameters in float32, a few numbers at a time; base of both rounding transforms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch

from memscale.core import TransformError
from memscale.optimizers.step_parts import Group, PartedOptimizer, StepPart, copied, options_of

_AT_ONCE = 2**20  # how many numbers are in float32 at a time, where the optimizer is elementwise


class _Piece(NamedTuple):
    """The numbers of a parameter that step next: the slice `part` of the flat parameter, or all of them.

    Attributes:
        full: names of the states that have one number for each number of the parameter.
        small: the other states, as they are before the step.
    """

    parameter: torch.Tensor
    part: slice | None
    full: list[str]
    small: dict[str, Any]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the same slice of a tensor of the parameter's shape."""
        return tensor.detach() if self.part is None else tensor.detach().view(-1)[self.part]


class StepInFloat32(StepPart):
    """Steps bfloat16 parameters as temporary float32 ones; parameters of other types step as usual."""

    places_states: ClassVar[bool] = True
    works_after: ClassVar[bool] = True
    own_states: ClassVar[frozenset[str]] = frozenset()  # names of states that this transform adds to the optimizer's

    def __init__(self, how: Any, optimizer: PartedOptimizer, inner: StepPart) -> None:
        if isinstance(inner, StepInFloat32):
            raise TransformError(f"{inner.how!r} and {how!r} round the same numbers; choose one")
        super().__init__(how, optimizer, inner)

    # --------------------------------------------------------------------------------------- what a subclass defines

    def begin(self, parameter: torch.Tensor) -> None:
        """Called before `parameter` steps."""

    def widened(self, parameter: torch.Tensor, of: Any) -> torch.Tensor:
        """Returns the numbers of `parameter` that `of` selects, in float32 and in new memory."""
        raise NotImplementedError

    def narrow(self, parameter: torch.Tensor, of: Any, values: torch.Tensor) -> None:
        """Writes the float32 `values` to the numbers of `parameter` that `of` selects."""
        raise NotImplementedError

    def keep(self, parameter: torch.Tensor, of: Any, name: str, values: torch.Tensor) -> None:
        """Writes `values` to the numbers of the state `name` that `of` selects."""
        raise NotImplementedError

    def room(self, parameter: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns the state `name` of `parameter`; a state that is missing or of another type is made anew."""
        states = self.optimizer.state[parameter]
        if not isinstance(states.get(name), torch.Tensor) or states[name].dtype != dtype:
            states[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        found: torch.Tensor = states[name]
        return found

    # ------------------------------------------------------------------------------------------------------ stepping

    def advance(self, group: Group) -> None:
        options = options_of(group)
        narrow = [each for each in group["params"] if each.dtype == torch.bfloat16]
        now: Group = {}
        if wide := [each for each in group["params"] if each.dtype != torch.bfloat16]:
            now = {**options, "params": wide}
            self.inner.advance(now)
        self.optimizer._part_states(narrow)
        for pieces in self._in_pieces(narrow):
            now = {**options, "params": []}
            self._advance_pieces(pieces, now)
        group.update({**now, "params": group["params"]})

    def plain_states(self, parameter: torch.Tensor, states: dict[str, Any]) -> dict[str, Any]:
        if parameter.dtype != torch.bfloat16:
            return states
        return {
            # `load_state_dict` of PyTorch casts every state but `step` to the parameter's type.
            name: value.to(parameter.dtype) if _is_floating(value) and name != "step" else value
            for name, value in states.items()
            if name not in self.own_states
        }

    def loaded(self, state_dict: dict[str, Any]) -> None:
        """Restores the types in which states were saved; PyTorch has cast all of them to the parameter's type."""
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        numbers = dict(zip(self.optimizer._places(), saved, strict=True))  # by the ids of the parameters
        for parameter in (each for each in self.parameters if each.dtype == torch.bfloat16):
            states = self.optimizer.state.get(parameter, {})
            for key, value in (state_dict["state"].get(numbers[id(parameter)]) or {}).items():
                if isinstance(value, torch.Tensor) and value.dtype != states[key].dtype:
                    states[key] = value.detach().to(states[key].device, copy=True)

    def report(self) -> list[str]:
        count = sum(parameter.dtype == torch.bfloat16 for parameter in self.parameters)
        others = len(self.parameters) - count
        return [f"{self.how!r}: {count} parameters" + (f"; {others} are not in bfloat16" if others else "")]

    def _advance_pieces(self, pieces: list[_Piece], group: Group) -> None:
        state: Any = self.optimizer.state
        twins, before = [], []
        for piece in pieces:
            twin = self.widened(piece.parameter, piece.of)
            assert piece.parameter.grad is not None, "it steps"
            twin.grad = piece.of(piece.parameter.grad).float()
            full = {name: piece.of(state[piece.parameter][name]).float() for name in piece.full}
            twins.append(twin)
            before.append({**copied(piece.small), **full})
        after = self.advance_twins(group, twins, before)
        for piece, twin, states in zip(pieces, twins, after, strict=True):
            names = self.optimizer._evidence.full_names(piece.parameter)
            for name, value in states.items():
                if name in names:
                    self.keep(piece.parameter, piece.of, name, value.detach())
                else:
                    state[piece.parameter][name] = value
            self.narrow(piece.parameter, piece.of, twin)

    def _in_pieces(self, parameters: list[torch.Tensor]) -> Iterator[list[_Piece]]:
        """Yields the pieces that are in float32 at the same time."""
        few: list[_Piece] = []
        total = 0
        for parameter in parameters:
            states = self.optimizer.state.get(parameter, {})
            names = self.optimizer._evidence.full_names(parameter)
            full = [name for name in states if name in names]
            apart = names | self.own_states
            small = {name: _widened(copied(value)) for name, value in states.items() if name not in apart}
            self.begin(parameter)
            if parameter.numel() > _AT_ONCE and self._cuts(parameter):
                for start in range(0, parameter.numel(), _AT_ONCE):
                    yield [_Piece(parameter, slice(start, start + _AT_ONCE), full, small)]
                continue
            if few and total + parameter.numel() > _AT_ONCE:
                yield few
                few, total = [], 0
            few.append(_Piece(parameter, None, full, small))
            total += parameter.numel()
        if few:
            yield few

    def _cuts(self, parameter: torch.Tensor) -> bool:
        """Whether the step may go over slices of `parameter`."""
        tensors = [parameter, parameter.grad, *self.optimizer.state.get(parameter, {}).values()]
        is_flat = all(each.is_contiguous() for each in tensors if isinstance(each, torch.Tensor))
        return self.optimizer._evidence.elementwise and is_flat


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _widened(value: Any) -> Any:
    """Returns a state of a plain optimizer in the type that it has for a float32 parameter."""
    return value.float() if _is_floating(value) and value.dtype == torch.bfloat16 else value
