"""Changes of a tensor that its version counter does not show: ``tensor.data = other`` and ``tensor.data.mul_(2)``.

Momentum encoders and layers that limit the norm of their weights update parameters so. A region that is run more than
once, or on stand-ins for its parameters, would repeat such a change, or lose it.

An assignment gives the tensor another storage. Comparing storages takes 0.2 microseconds a tensor, so it can be done in
every call. A change in place shows only in the operators that run. Watching these takes microseconds for each, so it is
for the first call of a region; one that changes a tensor so in later calls only is not noticed.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from memscale.core import TransformError, version
from memscale.regions.uncompiled import OperatorWatch
from memscale.regions.unrecorded import is_unrecorded, unrecorded

# Storages that memscale itself has given to parameters, each with that of before: where they live has changed, not
# their values.
_moved: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def moved(tensor: torch.Tensor, before: weakref.ref[Any]) -> None:
    """Say that `tensor` got its storage from memscale, with the values that it had in that of `before`."""
    _moved[tensor.untyped_storage()] = before


def is_moved(storage: Any, before: weakref.ref[Any]) -> bool:
    """Whether `storage` is what memscale gave to a tensor in place of that of `before`, which may be gone by now."""
    return _moved.get(storage) is before  # Python has one such reference to an object, also when that is gone


def storages(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The storage of each tensor: the same object for the same memory, for as long as somebody holds it."""
    try:
        return [tensor.untyped_storage() for tensor in tensors]
    except (NotImplementedError, RuntimeError):  # one of them is sparse, say: it has none of its own
        return [_storage_or_itself(tensor) for tensor in tensors]


def _storage_or_itself(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return tensor


def memory_of(tensor: torch.Tensor) -> int:
    """Which memory it is over: a sparse tensor has none of its own, and no views."""
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def assigned(now: Sequence[Any], before: Sequence[Any]) -> list[int]:
    """Which tensors were given another storage: they have those of `now`, and had those of `before`, which is held."""
    if all(map(operator.is_, now, before)):
        return []
    return [
        index
        for index, (new, old) in enumerate(zip(now, before, strict=True))
        # Sharding puts an empty storage in place of what it has freed: no values were assigned.
        if new is not old and new not in _moved and _holds_bytes(old)
    ]


def _holds_bytes(storage: Any) -> bool:
    return isinstance(storage, torch.Tensor) or storage.nbytes() > 0


class Writes(OperatorWatch):
    """Calls `before(tensor)` with each tensor that an operator is about to write to.

    Operators that may draw random numbers run in the context that `drawing` makes.
    """

    supports_higher_order_operators = True

    def __init__(
        self, before: Callable[[torch.Tensor], None], drawing: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        super().__init__()
        self._before = before
        self._drawing = drawing

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled inside a region stays compiled; the operators in it are not seen."""
        return True

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = _written(func)
        if not written and takes_batch_statistics(func, args, kwargs):
            # Such a kernel changes them with no word in its schema and no new version. Comparing values is not enough:
            # a first batch of zeros leaves a mean of zero as it is.
            written = _positions(func, _RUNNING)
        if written and not is_unrecorded():
            for position, name in written:
                value = args[position] if position < len(args) else kwargs.get(name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        self._before(tensor)
        with self._drawing() if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) else nullcontext():
            return func(*args, **kwargs)


# How kernels that normalize call their "use the statistics of this batch" argument.
_BATCH_STATISTICS = ("training", "train", "use_input_stats")
_RUNNING = ("running_mean", "running_var")


@functools.lru_cache(maxsize=4096)
def _of_normalizing(func: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments of an operator that has running statistics among them, and its flags; empty of others."""
    schema = getattr(func, "_schema", None)
    names = tuple(argument.name for argument in schema.arguments) if schema is not None else ()
    return (names, tuple(name for name in names if name in _BATCH_STATISTICS)) if _RUNNING[0] in names else ((), ())


def takes_batch_statistics(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call normalizes by statistics of its batch, and moves the running ones if it is given any."""
    names, flags = _of_normalizing(func)
    given = dict(zip(names, args, strict=False)) | kwargs if flags else {}
    return bool(names) and (not flags or any(given.get(flag) is True for flag in flags))


def running_statistics(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """What a call moves that normalizes by statistics of its batch."""
    if not takes_batch_statistics(func, args, kwargs):
        return []
    found = [args[at] if at < len(args) else kwargs.get(name) for at, name in _positions(func, _RUNNING)]
    return [each for each in found if each is not None]


@functools.lru_cache(maxsize=4096)
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The position and name of each argument that an operator writes to."""
    schema = getattr(func, "_schema", None)  # operators of higher order have none
    if schema is None or not schema.is_mutable:
        return ()
    return tuple((index, argument.name) for index, argument in enumerate(schema.arguments) if argument.is_write)


@functools.lru_cache(maxsize=4096)
def _positions(func: Any, names: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((index, argument.name) for index, argument in arguments if argument.name in names)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that `tensor` may lie on, and the one after its last."""
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    last = sum((length - 1) * stride for length, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * size
    return start, start + (last + 1) * size


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage may share a byte."""
    (a_start, a_stop), (b_start, b_stop) = extent(a), extent(b)
    return a_start < b_stop and b_start < a_stop


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How `tensor` lies in its storage, for `laid_out`."""
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def laid_out(storage: Any, lies: tuple[Any, ...]) -> torch.Tensor:
    """The tensor that lies so in `storage`. Unrecorded, without gradients."""
    dtype, *place = lies
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)


def _former(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What gives an alias of `tensor` as it is now, whatever is assigned to it."""
    storage, is_plain = _storage_or_itself(tensor), type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if storage is tensor or not is_plain or tensor.is_conj() or tensor.is_neg():
        with unrecorded(), torch.no_grad():
            alias = tensor.detach()
        return lambda: alias
    # No alias before it is wanted: what has one does not leave for another tier, which a region inside may want.
    return functools.partial(laid_out, storage, layout(tensor))


@contextmanager
def refused(
    tensors: Sequence[torch.Tensor], title: Callable[[int], str], how: object, why: str, *, watch: bool
) -> Iterator[None]:
    """Run the body, part of a region of the transform `how`, and refuse hidden changes of `tensors`.

    >>> weight = torch.ones(2)
    >>> with refused([weight], lambda index: "the weight", "a transform", "is not to be", watch=True):
    ...     weight.data.mul_(2)
    Traceback (most recent call last):
    ...
    memscale.core.errors.TransformError: the region of a transform changes the weight through .data, ...
    >>> weight
    tensor([1., 1.])

    Args:
        tensors: plain tensors, as the body finds them.
        title: what an error calls the tensor at an index.
        how: the transform.
        why: what would become of the change, in words that follow "which" and end with what to do instead.
        watch: look for changes in place too, which is slow. For the first call of a region.

    Raises:
        TransformError: the body changed one of them. All of them are as they were by then.
    """
    before = [_former(tensor) for tensor in tensors]
    held, versions = storages(tensors), [version(tensor) for tensor in tensors]
    copies: dict[int, torch.Tensor] = {}
    by_storage: dict[int, list[int]] = {}
    for index, storage in enumerate(held if watch else ()):
        by_storage.setdefault(getattr(storage, "_cdata", 0), []).append(index)

    def copy(written: torch.Tensor) -> None:
        for index in by_storage.get(getattr(_storage_or_itself(written), "_cdata", -1), ()):
            with unrecorded(), torch.no_grad():
                if index not in copies and overlap(written, former := before[index]()):
                    copies[index] = former.clone()

    with Writes(copy) if watch else nullcontext():
        yield
    replaced = assigned(storages(tensors), held)
    changed = [index for index in copies if version(tensors[index]) == versions[index]]
    if not replaced and not changed:
        return
    with unrecorded(), torch.no_grad():
        for index in replaced:
            tensors[index].data = before[index]()
        for index in changed:
            before[index]().copy_(copies[index])
    raise TransformError(f"the region of {how} changes {title((replaced + changed)[0])} through .data, which {why}")
