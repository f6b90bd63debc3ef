"""Transforms and their composition. A transform is a frozen value that maps a function, or an optimizer, to another.

``compose(a, b)(f) == a(b(f))``: the leftmost transform is the outermost, as in stacked decorators. `identity` is the
empty composition, and `compose` flattens, so the monoid laws hold as ``==`` on data.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal, TypeVar, overload

import torch

from memscale.core import ConfigError, TransformError, Value, factory, shown

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)

#: The effect of a transform on the numbers of a step. "exact": equal bit for bit. "rounds": the same sums in another
#: order or with another rounding. "lossy": computed or stored in fewer bits.
Numbers = Literal["exact", "rounds", "lossy"]
_NUMBERS: tuple[Numbers, ...] = ("exact", "rounds", "lossy")


class Transform(Value):
    """A memory technique as a value. Calling a transform maps a function to one that computes the same result.

    Subclasses are frozen dataclasses that implement `apply`. Use the factories (`checkpoint`, ...), which validate.

    >>> import memscale as ms
    >>> how = ms.checkpoint()
    >>> isinstance(how, ms.Transform), how == ms.checkpoint(), how
    (True, True, checkpoint())
    """

    uses_runtime: ClassVar[bool] = False
    of_optimizers: ClassVar[bool] = False
    own_numbers: ClassVar[Numbers] = "exact"

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fn` under this transform. `fn` is any callable; tensors may be anywhere in its arguments."""
        raise NotImplementedError

    def on(self, runtime: Any) -> Transform:
        """Returns this transform bound to `runtime`, if it uses a runtime; `None` is the process's own.

        Raises:
            ConfigError: `runtime` is no runtime.
        """
        if runtime is not None and not hasattr(runtime, "config"):
            raise ConfigError(f"{self!r}.on({shown(runtime)}) takes a Runtime or None; write .on(Runtime())")
        return WithRuntime(self, runtime) if self.uses_runtime and runtime is not None else self

    @property
    def numbers(self) -> Numbers:
        """The effect of the transform on the numbers of a step.

        ``"exact"``: equal, bit for bit. ``"rounds"``: sums in another order or with another rounding. ``"lossy"``:
        some tensors are computed or stored in fewer bits.

        >>> import torch, memscale as ms
        >>> [how.numbers for how in (ms.checkpoint(), ms.tile(chunks=4), ms.cast(compute=torch.bfloat16))]
        ['exact', 'rounds', 'lossy']
        """
        return self.own_numbers

    @property
    def moves(self) -> bool:
        """Whether this transform may move tensors to another memory tier."""
        return False

    def misfit(self, subject: Any) -> str | None:
        """Returns why this transform cannot be applied to `subject`, or `None` if it can."""
        if not callable(subject):
            remedy = "pass a callable, or use memscale.transform(model, plan) for a whole model"
            return f"{self!r} maps a function to a function, got {type(subject).__name__} {subject!r}; {remedy}"
        if isinstance(subject, type) and issubclass(subject, torch.nn.Module):
            return f"{self!r} maps a function to a function, got the class {subject.__name__}; pass a module of it"
        return None

    @overload
    def __call__(self, fn: AnyOptimizer, /) -> AnyOptimizer: ...
    @overload
    def __call__(self, fn: Callable[..., Any], /) -> Callable[..., Any]: ...
    def __call__(self, fn: Any, /) -> Any:
        if (misfit := self.misfit(fn)) is not None:
            raise TransformError(misfit)
        return self.apply(fn)


@dataclasses.dataclass(frozen=True, repr=False)
class WithRuntime(Transform):
    """A transform bound to the runtime that it uses. Made to apply a plan; plans themselves hold no runtime."""

    transform: Transform
    runtime: Any

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        transformed: Any = self.transform.apply(fn)
        transformed.runtime = self.runtime
        return transformed  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"{self.transform!r}.on({self.runtime!r})"


@dataclasses.dataclass(frozen=True, repr=False)
class Compose(Transform):
    """A composition of at least two transforms, or of none (`identity`). Made by `compose`."""

    spelling: ClassVar[str] = "compose"
    positional: ClassVar[str | None] = "transforms"

    transforms: tuple[Transform, ...] = ()

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        for transform in reversed(self.transforms):
            fn = transform(fn)
        return fn

    def misfit(self, subject: Any) -> str | None:
        if self.transforms:
            return self.transforms[-1].misfit(subject)
        return None if isinstance(subject, torch.optim.Optimizer) else super().misfit(subject)

    @property
    def numbers(self) -> Numbers:
        return max((transform.numbers for transform in self.transforms), key=_NUMBERS.index, default="exact")

    @property
    def moves(self) -> bool:
        return any(transform.moves for transform in self.transforms)

    def on(self, runtime: Any) -> Transform:
        return Compose(tuple(transform.on(runtime) for transform in self.transforms))

    def __repr__(self) -> str:
        return super().__repr__() if self.transforms else "identity"


identity = Compose()
"""The transform that changes nothing: ``identity(f) is f``, and the unit of `compose`."""


def compose(*transforms: Transform) -> Transform:
    """Returns one transform that applies `transforms`, the leftmost outermost: ``compose(a, b)(f) == a(b(f))``.

    `compose` flattens nested compositions and drops `identity`, so that equal compositions are equal values:

    >>> import memscale as ms
    >>> a, b = ms.checkpoint(), ms.checkpoint(policy=ms.policies.dots_saveable)
    >>> ms.compose(a, ms.compose(b, ms.identity)) == ms.compose(a, b)
    True
    >>> ms.compose(a) == a, ms.compose()
    (True, identity)

    Args:
        transforms: any number of transforms.

    Raises:
        ConfigError: an argument is not a transform, or the arguments mix transforms of functions and of optimizers.
    """
    flat: list[Transform] = []
    for position, transform in enumerate(transforms):
        if isinstance(transform, Compose):
            flat.extend(transform.transforms)
        elif isinstance(transform, Transform):
            flat.append(transform)
        else:
            raise ConfigError(
                f"compose() takes transforms such as checkpoint(), got {shown(transform)} at position {position}"
                + what_to_write(transform)
            )
    if len({transform.of_optimizers for transform in flat}) > 1:
        raise ConfigError(
            f"compose() takes transforms of functions or of optimizers, got both: {flat!r}; give the model and its "
            "optimizer each their own"
        )
    return flat[0] if len(flat) == 1 else Compose(tuple(flat))


def what_to_write(given: Any) -> str:
    """Returns the end of an error message about `given`, which is no transform: ``"; write ..."``, or ``""``."""
    if isinstance(given, (list, tuple)) and given and all(isinstance(each, Transform) for each in given):
        return f"; write compose({', '.join(map(repr, given))})"
    return "; call the factory" if inspect.isroutine(given) else ""


def chain(transform: Transform) -> tuple[Transform, ...]:
    """Returns the transforms that `transform` composes, outermost first; empty for `identity`."""
    return transform.transforms if isinstance(transform, Compose) else (transform,)


def is_of_optimizers(transform: Transform) -> bool:
    """Whether `transform` maps optimizers rather than functions."""
    return any(each.of_optimizers for each in chain(transform))


factory("compose", compose)
