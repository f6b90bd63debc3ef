"""Changes of a tensor that its version counter does not show: ``tensor.data = other`` and ``tensor.data.mul_(2)``.

Momentum encoders and layers that limit the norm of their weights update parameters in this way. A region that runs
twice would repeat such a change, and a region that runs on stand-ins for its parameters would lose it.

An assignment gives the tensor another storage. Comparing storages takes 0.2 microseconds a tensor, so every call does
it. A change in place through `.data` is seen only by watching the operators that run, which takes microseconds for each
operator, so only the first call of a region is watched. A change that first occurs in a later call is not detected.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from memscale.core import TransformError, version
from memscale.regions.uncompiled import OperatorWatch
from memscale.regions.unrecorded import is_unrecorded, unrecorded

# Maps each storage that memscale gave to a parameter to the parameter's storage before: the values are the same.
_moved: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def moved(tensor: torch.Tensor, before: weakref.ref[Any]) -> None:
    """Registers that memscale moved `tensor`, with unchanged values, from the storage `before` to its present one."""
    _moved[tensor.untyped_storage()] = before


def is_moved(storage: Any, before: weakref.ref[Any]) -> bool:
    """Whether memscale moved a tensor from the storage `before` to `storage`. The storage `before` may be freed."""
    return _moved.get(storage) is before  # Python has one plain weak reference per object, also once it is freed


def storages(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Returns the storage of each tensor. Tensors of one memory give the same object while it is referenced."""
    try:
        return list(map(_storage, tensors))
    except (NotImplementedError, RuntimeError):  # a sparse tensor has no storage of its own
        return [_storage_or_itself(tensor) for tensor in tensors]


_storage: Any = torch.Tensor.untyped_storage


def _storage_or_itself(tensor: torch.Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return tensor


def memory_of(tensor: torch.Tensor) -> int:
    """Returns a key of the memory of `tensor`. A sparse tensor has no storage and no views; its own id is the key."""
    storage = _storage_or_itself(tensor)
    return id(tensor) if storage is tensor else storage._cdata


def assigned(now: Sequence[Any], before: Sequence[Any]) -> list[int]:
    """Returns the indices at which the storage in `now` differs from the one in `before`. The caller holds `before`."""
    if all(map(operator.is_, now, before)):
        return []
    return [
        index
        for index, (new, old) in enumerate(zip(now, before, strict=True))
        # FSDP replaces a freed storage by an empty one, which assigns no values.
        if new is not old and new not in _moved and _holds_bytes(old)
    ]


def _holds_bytes(storage: Any) -> bool:
    return isinstance(storage, torch.Tensor) or storage.nbytes() > 0


def _called(call: Callable[[], Any]) -> Any:
    return call()


class Writes(OperatorWatch):
    """A dispatch mode that calls `before(tensor)` with each tensor that an operator is about to write to.

    Operators that may draw random numbers are called by `drawing(call)`, which returns the result of ``call()``.
    """

    keeps_compiled = True

    def __init__(
        self, before: Callable[[torch.Tensor], None], drawing: Callable[[Callable[[], Any]], Any] = _called
    ) -> None:
        super().__init__()
        self._before = before
        self._drawing = drawing

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        written = _written_arguments(func)
        if not written and takes_batch_statistics(func, args, kwargs):
            # These kernels write the running statistics without declaring it in the schema and without a new version.
            # Comparing values would miss a first batch of zeros, which leaves a running mean of zero unchanged.
            written = _positions(func, _RUNNING)
        if written and not is_unrecorded():
            for position, name in written:
                value = args[position] if position < len(args) else kwargs.get(name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        self._before(tensor)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            return self._drawing(functools.partial(func, *args, **kwargs))
        return func(*args, **kwargs)


# The argument names by which normalization kernels are told to use the statistics of the batch.
_BATCH_STATISTICS = ("training", "train", "use_input_stats")
_RUNNING = ("running_mean", "running_var")


@functools.lru_cache(maxsize=4096)
def _of_normalizing(func: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the argument names of an operator with running statistics, and its batch flags; else empty tuples."""
    schema = getattr(func, "_schema", None)
    names = tuple(argument.name for argument in schema.arguments) if schema is not None else ()
    return (names, tuple(name for name in names if name in _BATCH_STATISTICS)) if _RUNNING[0] in names else ((), ())


def takes_batch_statistics(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call normalizes by the statistics of its batch, and so updates running statistics if it has any."""
    names, flags = _of_normalizing(func)
    given = dict(zip(names, args, strict=False)) | kwargs if flags else {}
    return bool(names) and (not flags or any(given.get(flag) is True for flag in flags))


def running_statistics(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the running statistics that a call updates; empty if it does not use the statistics of its batch."""
    if not takes_batch_statistics(func, args, kwargs):
        return []
    found = [args[at] if at < len(args) else kwargs.get(name) for at, name in _positions(func, _RUNNING)]
    return [each for each in found if each is not None]


@functools.lru_cache(maxsize=4096)
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Returns the position and name of each argument that an operator writes to."""
    schema = getattr(func, "_schema", None)  # higher-order operators have no schema
    if schema is None or not schema.is_mutable:
        return ()
    return tuple((index, argument.name) for index, argument in enumerate(schema.arguments) if argument.is_write)


@functools.lru_cache(maxsize=4096)
def _positions(func: Any, names: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((index, argument.name) for index, argument in arguments if argument.name in names)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the half-open range of bytes [start, stop) that `tensor` may cover in its storage."""
    if tensor.is_nested:  # the lengths of a jagged tensor are no numbers
        return 0, sys.maxsize
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
    """Returns dtype, storage offset, size and stride of `tensor`, for `laid_out`."""
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()


def laid_out(storage: Any, lies: tuple[Any, ...]) -> torch.Tensor:
    """Returns the tensor with the layout `lies` (from `layout`) in `storage`. Callers hide it from recorders."""
    dtype, *place = lies
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)


def _former(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns a function that makes an alias of the present memory of `tensor`, even after `tensor.data = other`."""
    storage, is_plain = _storage_or_itself(tensor), type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if storage is tensor or not is_plain or tensor.is_conj() or tensor.is_neg():
        with unrecorded(), torch.no_grad():
            alias = tensor.detach()
        return lambda: alias
    # The alias is made late: a tensor with an alias cannot be offloaded, which a region inside may want to do.
    return functools.partial(laid_out, storage, layout(tensor))


@contextmanager
def refused(
    tensors: Sequence[torch.Tensor], title: Callable[[int], str], how: object, why: str, *, watch: bool
) -> Iterator[None]:
    """Runs the body, part of a region of the transform `how`, and refuses hidden changes of `tensors`.

    >>> weight = torch.ones(2)
    >>> with refused([weight], lambda index: "the weight", "a transform", "is not to be", watch=True):
    ...     weight.data.mul_(2)
    Traceback (most recent call last):
    ...
    memscale.core.errors.TransformError: the region of a transform changes the weight through .data, ...
    >>> weight
    tensor([1., 1.])

    Args:
        tensors: plain tensors, in the state before the body.
        title: maps an index into `tensors` to the words for it in an error.
        how: the transform.
        why: the end of the error after "which": the reason, and what to write instead.
        watch: also detect changes in place through `.data`, which is slow. Meant for the first call of a region.

    Raises:
        TransformError: the body changed one of the tensors. All of them have their old values back by then.
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
