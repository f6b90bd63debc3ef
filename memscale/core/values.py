"""Frozen values whose `repr` is the Python that makes them, and which convert to and from JSON.

Transforms, policies and tiers are all `Value` s. A value has a *spelling*, the public name of the factory that
makes it (``"checkpoint"``, ``"policies.save_only_these_names"``), and its dataclass fields are that factory's
arguments. `repr`, equality, hashing, pickling and both directions of JSON follow from the spelling and the fields, so
subclasses implement none of them.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from memscale.core.errors import PlanError

_FACTORIES: dict[str, Callable[..., Any]] = {}


class Value:
    """Base of every frozen value. Subclasses are frozen dataclasses with a `spelling`.

    `positional` names a field that the factory takes as ``*args``; `constant` says that the public name *is* the
    value, so that it prints without a call.
    """

    spelling: ClassVar[str]
    positional: ClassVar[str | None] = None
    constant: ClassVar[bool] = False

    @property
    def _spelled(self) -> str:
        # A user's own policy may have no spelling.
        return getattr(type(self), "spelling", type(self).__name__)

    def _shown_fields(self) -> list[dataclasses.Field[Any]]:
        """Returns the fields that differ from their defaults, which `repr` shows."""
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        return [f for f in fields if f.name != self.positional and getattr(self, f.name) != f.default]

    def __repr__(self) -> str:
        if self.constant:
            return self._spelled
        shown = [repr(item) for item in getattr(self, self.positional)] if self.positional else []
        shown += [f"{f.name}={getattr(self, f.name)!r}" for f in self._shown_fields()]
        return f"{self._spelled}({', '.join(shown)})"

    def to_data(self) -> dict[str, Any]:
        """Returns the value as plain JSON types.

        Raises:
            PlanError: a field has no JSON form, such as a policy that is a bare function.
        """
        if self._spelled not in _FACTORIES:
            raise PlanError(f"{self!r} is of a kind of your own, which has no JSON form; keep such a plan as Python")
        data: dict[str, Any] = {"type": self._spelled}
        if self.positional:
            data["args"] = [_encode(item, self) for item in getattr(self, self.positional)]
        data.update({f.name: _encode(getattr(self, f.name), self) for f in self._shown_fields()})
        return data


def factory(spelling: str, make: Callable[..., Any]) -> None:
    """Registers the function that `from_data` calls for `spelling`: the public factory, or a getter of a constant."""
    _FACTORIES[spelling] = make


def spellings() -> list[str]:
    """Every registered spelling."""
    return sorted(_FACTORIES)


def first_line(spelling: str) -> str:
    """Returns the first line of a factory's docstring.

    >>> import memscale as ms
    >>> first_line(ms.checkpoint.__name__)
    "A transform that keeps a function's inputs for backward and recomputes the rest."
    """
    return (inspect.getdoc(_FACTORIES[spelling]) or "").partition("\n")[0]


def from_data(data: Any) -> Any:
    """Returns the value that `Value.to_data` wrote, made and validated by its public factory.

    Raises:
        PlanError: the spelling is unknown, or the factory does not take the arguments.
    """
    if isinstance(data, list):
        return tuple(from_data(item) for item in data)
    if not isinstance(data, Mapping):
        return data
    spelling = data.get("type")
    if isinstance(spelling, str) and spelling not in _FACTORIES:
        # The module that registers the factory may not be imported yet.
        for home in ("transforms", "policies", "optimizers"):
            importlib.import_module(f"memscale.{home}")
    if not isinstance(spelling, str) or spelling not in _FACTORIES:
        raise PlanError(
            f"unknown transform or policy {spelling!r}; this version of memscale knows {spellings()}. "
            "A plan from a newer version needs that version"
        )
    args = [from_data(item) for item in data.get("args", ())]
    kwargs = {key: from_data(item) for key, item in data.items() if key not in ("type", "args")}
    make = _FACTORIES[spelling]
    try:
        inspect.signature(make).bind(*args, **kwargs)
        return make(*args, **kwargs)
    except TypeError as error:
        raise PlanError(f"{spelling} cannot be made from {dict(data)!r}: {error}") from error


def _encode(item: Any, owner: Value) -> Any:
    if isinstance(item, Value):
        return item.to_data()
    if isinstance(item, (tuple, list, frozenset)):
        return [_encode(part, owner) for part in (sorted(item) if isinstance(item, frozenset) else item)]
    if item is None or isinstance(item, (bool, int, float, str)):
        return item
    if isinstance(item, torch.dtype):
        return str(item).removeprefix("torch.")  # factories take the name as well as the dtype
    raise PlanError(
        f"{owner!r} holds {item!r}, which has no JSON form; use values of memscale, or keep the plan as Python"
    )
