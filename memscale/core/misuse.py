"""What is easily written and means something else: how messages show it, and what they say to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from memscale.core.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")


def by_name(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """The factory `make` of transforms, which refuses whatever is given to it without a name or by a wrong one.

    >>> @by_name
    ... def shrink(*, size=1):
    ...     return size
    >>> shrink(size=2)
    2
    >>> shrink(3)
    Traceback (most recent call last):
    memscale.core.errors.ConfigError: shrink() takes its options by name; write shrink(size=3)
    >>> shrink(by=3)
    Traceback (most recent call last):
    memscale.core.errors.ConfigError: shrink() has no option by; it takes size
    """
    name, options = make.__name__, list(inspect.signature(make).parameters)

    @functools.wraps(make)
    def factory(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if args:
            raise ConfigError(_instead(name, options, args[0]))
        if unknown := [each for each in kwargs if each not in options]:
            takes = f"it takes {', '.join(options)}" if options else "it takes none"
            raise ConfigError(f"{name}() has no option {', '.join(unknown)}; {takes}")
        return make(*args, **kwargs)

    return factory


def takes_no(
    names: Iterable[str], write: Callable[[Mapping[str, Any]], str]
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Of a function that lacks arguments that are easily guessed: `write` says where those that it was given belong.

    >>> @takes_no(["size"], lambda given: f"paint(shrink(size={given['size']}))")
    ... def paint(picture):
    ...     return picture
    >>> paint("a"), paint(picture="b")
    ('a', 'b')
    >>> paint("a", size=3)
    Traceback (most recent call last):
    memscale.core.errors.ConfigError: paint() takes no size; write paint(shrink(size=3))
    """
    known = frozenset(names)

    def around(function: Callable[_P, _T]) -> Callable[_P, _T]:
        lacks = known - inspect.signature(function).parameters.keys()

        @functools.wraps(function)
        def told(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if given := {name: value for name, value in kwargs.items() if name in lacks}:
                raise ConfigError(f"{function.__name__}() takes no {', '.join(given)}; write {write(given)}")
            return function(*args, **kwargs)

        return told

    return around


def shown(value: Any) -> str:
    """How a message shows `value`: by its class where its `repr` has lines, as of modules and optimizers.

    >>> shown(3), shown(__import__("torch").nn.Linear(1, 1))
    ('3', 'a Linear')
    """
    text = "\n" if _is_module(value) else repr(value)
    return f"a {type(value).__name__}" if "\n" in text else text


def _is_module(value: Any) -> bool:
    return callable(getattr(value, "named_modules", None)) and not isinstance(value, type)


def _instead(name: str, options: Sequence[str], given: Any) -> str:
    if hasattr(given, "param_groups"):
        return f"{name}() makes a transform, and takes no {type(given).__name__}; write {name}()(optimizer)"
    if _is_module(given) or inspect.isroutine(given):
        return (
            f"{name}() makes a transform, and takes no {type(given).__name__}; write {name}()(function), or "
            f"transform(model, {{'layers.*': {name}()}}) for the layers of a model"
        )
    if not options:
        return f"{name}() takes no options; write {name}()"
    return f"{name}() takes its options by name; write {name}({options[0]}={given!r})"
