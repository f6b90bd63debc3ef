"""Errors about frequent misuse of the API, which say what to write instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from memscale.core.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")


def by_name(make: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a factory of transforms: positional and unknown arguments raise an error that says what to write.

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
    """Decorates a function: arguments `names`, which users pass by mistake, raise an error that shows `write(given)`.

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
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if given := {name: value for name, value in kwargs.items() if name in lacks}:
                raise ConfigError(f"{function.__name__}() takes no {', '.join(given)}; write {write(given)}")
            return function(*args, **kwargs)

        return checked

    return around


def shown(value: Any) -> str:
    """Returns the text for `value` in a message: its `repr`, or its class if the `repr` has several lines.

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
