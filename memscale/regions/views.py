"""What one thread sees of a module while it runs a region again: the past, where every other thread sees the present.

A recompute needs the flags, attributes, buffers and hooks that the forward had. Written into the modules they would be
there for everybody: a thread that evaluates the model meanwhile would train it, and two recomputes at once would each
put back what the other had written. So the module keeps what it holds, and what is read *through* it depends on who
reads: a dictionary of the module gives way to a `_Table`, and an attribute to a descriptor on a subclass that the
module is an instance of for that time (as `torch.nn.utils.parametrize` and FSDP make their modules instances of one).
"""

from __future__ import annotations

import copyreg
import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from memscale.core import CorrectnessError
from memscale.regions.by_class import is_importable

ABSENT: Any = object()
_get_ident = threading.get_ident
_lock = threading.Lock()
# The handle of a hook refers weakly to the dictionary that the hook was put into, and that may have been a table.
_hooked_by_others: list[_Table] = []


_PATIENCE_SECONDS = 60.0


class _Turn(AbstractContextManager[None]):
    """Held by one thread; by that one as often as it likes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self.thread = 0  # whose turn it is

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=_PATIENCE_SECONDS):
            raise CorrectnessError(
                "a region that draws random numbers, or has state in closures, globals or lists, waited a minute for "
                "the recompute of another one in another thread, which has put its own state back for that time; run "
                "the two backwards one after the other"
            )
        self.thread = _get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.thread = 0
        self._lock.release()


_turn = _Turn()


def my_turn() -> AbstractContextManager[None]:
    """The only recompute, while the body runs, that may write into what is no module's own: closures, globals, lists,
    and the state of random generators.

    Raises:
        CorrectnessError: another thread's recompute does not come to its end.
    """
    return _turn


def wait_for_recomputes() -> None:
    """Before a region is read in a forward: let the recompute of another thread put back what it wrote."""
    if _turn.thread not in (0, _get_ident()):
        with _turn:
            pass


class _Table(dict[Any, Any]):
    """A dictionary of a module that threads see differently."""

    __slots__ = ("__weakref__", "real", "seen", "users")

    def __init__(self, real: dict[Any, Any]) -> None:
        super().__init__(real)  # for code in C, which asks no method of a dictionary
        self.real = real
        self.seen: dict[int, dict[Any, Any]] = {}  # by thread
        self.users = 0

    def now(self) -> dict[Any, Any]:
        """What the thread that asks is to see."""
        return self.seen.get(_get_ident(), self.real)

    # What modules ask at every look at a buffer is written out; the rest is below.
    def __contains__(self, key: object) -> bool:
        return key in self.seen.get(_get_ident(), self.real)

    def __getitem__(self, key: Any) -> Any:
        return self.seen.get(_get_ident(), self.real)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        now = self.now()
        if now is self.real and isinstance(now, OrderedDict):
            _hooked_by_others.append(self)
        now[key] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.real), (list(self.now().items()),)


def _through(name: str) -> Any:
    def method(self: _Table, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.now(), name)(*args, **kwargs)

    return method


for _name in (
    *("__delitem__", "__eq__", "__iter__", "__len__", "__ne__", "__or__", "__repr__"),
    *("__reversed__", "clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault", "update", "values"),
    "move_to_end",
):
    setattr(_Table, _name, _through(_name))


def real(table: Any) -> Any:
    """The dictionary itself, where `table` stands for one."""
    return table.real if type(table) is _Table else table


def lasting(table: Any) -> Any:
    """The dictionary that this thread sees as `table`, to be remembered: one that stands for it goes away."""
    return table.real if type(table) is _Table and _get_ident() not in table.seen else table


class _Attribute:
    """An attribute that threads see differently; on a subclass of the module's class."""

    def __init__(self, name: str, of_class: Any) -> None:
        self._name = name
        self._of_class = of_class

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self._of_class
        past = _past.get((_get_ident(), id(module)), _NO_PAST)
        value = past[self._name] if self._name in past else module.__dict__.get(self._name, ABSENT)
        if value is ABSENT:
            value = self._of_class
            if type(value) is types.FunctionType:
                return types.MethodType(value, module)
        if value is ABSENT:  # the module's own `__getattr__` is asked next
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {self._name!r}")
        return value

    def __set__(self, module: Any, value: Any) -> None:
        _past.get((_get_ident(), id(module)), module.__dict__)[self._name] = value

    def __delete__(self, module: Any) -> None:
        if (past := _past.get((_get_ident(), id(module)))) is not None:
            past[self._name] = ABSENT
        elif module.__dict__.pop(self._name, ABSENT) is ABSENT:
            raise AttributeError(self._name)


_NO_PAST: dict[str, Any] = {}
_past: dict[tuple[int, int], dict[str, Any]] = {}  # by thread and module: attributes as the thread sees them


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Another thread copies or pickles the module: as what it is otherwise."""
    mine, original = type(self), _original(self)
    how, args, *rest = original.__reduce_ex__(self, protocol)
    if how is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle wants it to make what it is asked to pickle
        how = object.__new__
    return how, tuple(original if arg is mine else arg for arg in args), *rest


def _set(self: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, (nn.Parameter, nn.Buffer, nn.Module)):
        # It goes into a table of the module, which has nothing else of that name then.
        past = _past.get((_get_ident(), id(self)), _NO_PAST)
        if name in past:
            past[name] = ABSENT
    _original(self).__setattr__(self, name, value)


def _class_of_views(original: Any, names: frozenset[str]) -> Any:
    # Which a cache would keep forever, and with a class that `parametrize` made its module.
    return (_kept_class_of_views if is_importable(original) else _made_class_of_views)(original, names)


def _made_class_of_views(original: Any, names: frozenset[str]) -> Any:
    body: dict[str, Any] = {name: _Attribute(name, _static(original, name)) for name in names}
    body |= {"__module__": original.__module__, "__qualname__": original.__qualname__, "__reduce_ex__": _reduce}
    body |= {"__setattr__": _set}
    return type(original)(original.__name__, (original,), body | {"_memscale_views": (original, names)})


_kept_class_of_views = functools.lru_cache(maxsize=256)(_made_class_of_views)


def _static(kind: type, name: str) -> Any:
    """What the class has under `name`, without binding it."""
    return next((base.__dict__[name] for base in kind.__mro__ if name in base.__dict__), ABSENT)


def _original(module: nn.Module) -> Any:
    return getattr(type(module), "_memscale_views", (type(module),))[0]


def can_see(module: nn.Module, name: str) -> bool:
    """Whether threads can see the attribute `name` of `module` differently: not what a property computes."""
    value = _static(_original(module), name)
    return type(value) is types.FunctionType or not hasattr(type(value), "__get__")


_users: dict[int, int] = {}  # how many recomputes have a past of the attributes of a module, by its id


def see_attributes(module: nn.Module, then: Mapping[str, Any]) -> Callable[[], None]:
    """Let this thread see `module` with the attributes `then`, of which some may be `ABSENT`; returns what ends it."""
    key = (_get_ident(), id(module))
    outer = _past.get(key)
    with _lock:
        original = _original(module)
        _, names = getattr(type(module), "_memscale_views", (None, frozenset()))
        if not names.issuperset(then):
            module.__class__ = _class_of_views(original, names.union(then))
        _users[id(module)] = _users.get(id(module), 0) + 1
    _past[key] = {**(outer or {}), **then}

    def end() -> None:
        if outer is None:
            del _past[key]
        else:
            _past[key] = outer
        with _lock:
            _users[id(module)] -= 1
            if not _users[id(module)]:
                del _users[id(module)]
                if hasattr(type(module), "_memscale_views"):  # a lazy module turns into another one as it runs
                    module.__class__ = original

    return end


def rewinding(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """What makes this thread see again what it sees now of `modules`, where that is their past."""
    me = threading.get_ident()
    held = [(past, past.copy()) for module in modules if (past := _past.get((me, id(module)))) is not None]

    def rewind() -> None:
        for past, then in held:
            past.clear()
            past.update(then)

    return rewind


def see_table(module: nn.Module, name: str, then: dict[Any, Any]) -> Callable[[], None]:
    """Let this thread see `then` as the dictionary `name` of `module`; returns what ends it."""
    me = _get_ident()
    with _lock:
        table: Any = module.__dict__[name]
        if type(table) is not _Table:
            table = module.__dict__[name] = _Table(table)
        table.users += 1
    outer = table.seen.get(me)
    table.seen[me] = then

    def end() -> None:
        if outer is None:
            del table.seen[me]
        else:
            table.seen[me] = outer
        with _lock:
            table.users -= 1
            if not table.users and module.__dict__[name] is table:
                module.__dict__[name] = table.real

    return end
