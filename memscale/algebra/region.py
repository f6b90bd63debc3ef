"""What every transform makes of a function: another function, which knows what it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from memscale.algebra.composition import Transform
from memscale.runtime import Runtime

Same = TypeVar("Same", bound="Transformed")


class Transformed:
    """A function under a transform. Copies and pickles with the function it holds.

    Attributes:
        fn: the function underneath.
        how: the transform.
        runtime: the one that it uses, where it uses one; `None` is the process's own.
    """

    how: Any  # each transform's own class

    def __init__(self, fn: Callable[..., Any], how: Transform) -> None:
        self.fn = fn
        self.how = how
        self.runtime: Runtime | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `fn` returns, computed another way."""
        raise NotImplementedError

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn  # `inspect.signature` and friends see the function underneath

    def __memscale_parts__(self) -> tuple[Any, ...]:
        """What is called in the end: whoever looks for what a region depends on goes on there."""
        return (self.fn,)

    def __memscale_remap__(self: Same, remap: Callable[[Any], Any]) -> Same:
        """The same over other parts, as a copy of a module needs it."""
        other = type(self)(remap(self.fn), self.how)
        other.runtime = self.runtime
        return other

    def __repr__(self) -> str:
        return f"{self.how!r}({self.fn!r})"
