"""`Assigned`: which parameter of an optimizer is under which transform."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

from memscale.algebra import Transform, chain, compose, identity
from memscale.core import TransformError


class Assigned:
    """Maps each parameter of an optimizer to its transform.

    Args:
        rest: the transform of every parameter that `by_parameter` does not list, including parameters of a group that
            is added later.
        by_parameter: pairs of a parameter and its transform.

    Attributes:
        hows: the distinct transforms; the first one is `rest`.
    """

    def __init__(self, rest: Transform, by_parameter: Iterable[tuple[torch.Tensor, Transform]] = ()) -> None:
        self.hows = [rest]
        # Weak references: the optimizer may drop a parameter, and another tensor may get the same `id` afterwards.
        self._numbers: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        for parameter, how in by_parameter:
            if how not in self.hows:
                self.hows.append(how)
            self._numbers[id(parameter)] = weakref.ref(parameter), self.hows.index(how)

    def number(self, parameter: torch.Tensor) -> int:
        """Returns the index in `hows` of the transform of `parameter`."""
        found, number = self._numbers.get(id(parameter), (None, 0))
        return number if found is not None and found() is parameter else 0

    def how(self, parameter: torch.Tensor) -> Transform:
        """Returns the transform of `parameter`."""
        return self.hows[self.number(parameter)]

    def split(self, parameters: Iterable[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """Groups `parameters`, in their order, by the index in `hows` of their transform."""
        found: dict[int, list[torch.Tensor]] = {}
        for parameter in parameters:
            found.setdefault(self.number(parameter), []).append(parameter)
        return found

    def around(self, inner: Assigned) -> Assigned:
        """Returns the assignment in which each parameter has its transform here around its transform in `inner`.

        Raises:
            TransformError: a parameter would be under the same transform twice, with different options.
        """
        found = [parameter() for each in (self, inner) for parameter, _ in each._numbers.values()]
        known = [parameter for parameter in found if parameter is not None]
        pairs = [(parameter, one_of_each(self.how(parameter), inner.how(parameter))) for parameter in known]
        return Assigned(one_of_each(self.hows[0], inner.hows[0]), pairs)

    def shown(self, parameters: Sequence[torch.Tensor]) -> str:
        """Returns the transforms of `parameters` as text, with a count for each where they differ."""
        counts = {self.hows[number]: len(some) for number, some in self.split(parameters).items()}
        if len(counts) == 1:
            return repr(next(iter(counts)))
        return f"[{', '.join(f'{how!r} on {count}' for how, count in counts.items())} parameters]"


def one_of_each(outer: Transform, inner: Transform) -> Transform:
    """Composes `outer` outside `inner`; a transform that `inner` already contains is not added a second time.

    Raises:
        TransformError: both contain the same kind of transform, with different options.
    """
    by_type = {type(each): each for each in chain(inner)}
    for each in chain(outer):
        if (other := by_type.get(type(each), each)) != each:
            raise TransformError(f"an optimizer under {other!r} cannot be put under {each!r} too; choose one")
    return compose(*(each for each in chain(outer) if type(each) not in by_type), inner)


def assigned_by_rules(rules: Sequence[tuple[str, torch.Tensor, Sequence[Transform]]]) -> Assigned:
    """Builds the assignment that a plan's rules make.

    Args:
        rules: for each parameter its path, the parameter, and its transforms from the innermost to the outermost.

    Raises:
        TransformError: rules contradict each other; the message lists every such path.
    """
    pairs, wrong = [], []
    for path, parameter, hows in rules:
        try:
            how: Transform = identity
            for each in hows:
                how = one_of_each(each, how)
            pairs.append((parameter, how))
        except TransformError as error:
            wrong.append(f"{path!r}: {error}")
    if wrong:
        raise TransformError("; ".join(wrong))
    return Assigned(identity, pairs)
