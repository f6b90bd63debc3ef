"""Reads and restores the states of random generators, and detects draws."""

from __future__ import annotations

import ctypes
import functools
import operator
import pickle
import random
import struct
import sys
import types
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from memscale.regions.class_cache import cached_by_class


def generators(devices: Collection[torch.device], here: Any) -> list[Any]:
    """Returns the generators of the CPU and of `devices`, PyTorch's generator for the CPU first.

    Here and below, `here` is the simulation of this thread, from `simulated()`; it has generators of its own.
    """
    found: list[Any] = [torch.default_generator if here is None else here.randomness.torch]
    for device in sorted(devices, key=str) if len(devices) > 1 else devices:
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            found.append(torch.cuda.default_generators[index])
        elif device.type == "mps":
            found.append(_ON_A_MAC)
        elif device.type == "xpu":
            index = torch.xpu.current_device() if device.index is None else device.index
            found.append(torch.xpu.default_generators[index])
    if here is not None and here.choices is not None:
        found.append(here.choices)
    return found


_ON_A_MAC = types.SimpleNamespace(
    device=torch.device("mps"), get_state=torch.mps.get_rng_state, set_state=torch.mps.set_rng_state
)


@cached_by_class
def is_host_generator(kind: Any) -> bool:
    """Whether `kind` is a random generator class of Python or NumPy whose state can be restored."""
    if issubclass(kind, random.Random):
        return not issubclass(kind, random.SystemRandom)
    return kind.__module__.startswith("numpy.random.") and kind.__name__ in ("Generator", "RandomState")


class HostGenerator:
    """Wraps a user's generator of Python or NumPy in the interface of `torch.Generator`."""

    __slots__ = ("_own",)

    def __init__(self, own: Any) -> None:
        self._own = own

    def get_state(self) -> Any:
        """Returns the state, in the generator's own format."""
        own = self._own
        if isinstance(own, random.Random):
            return own.getstate()
        return own.bit_generator.state if hasattr(own, "bit_generator") else own.get_state(legacy=False)

    def set_state(self, state: Any) -> None:
        """Restores a state that `get_state` returned."""
        own = self._own
        if isinstance(own, random.Random):
            own.setstate(state)
        elif hasattr(own, "bit_generator"):
            own.bit_generator.state = state
        else:
            own.set_state(state)


def state_of(generator: Any) -> Any:
    """Returns the present state of `generator`, for `restore_state` and `differ`.

    The state of a CPU generator of PyTorch is read from its memory. Its own `get_state` allocates a tensor and takes
    ten times as long, which every region without dropout would pay twice.
    """
    if type(generator) is torch.Generator and (row := _row_of(generator)) is not None:
        return row.raw
    return generator.get_state()


def restore_state(generator: Any, state: Any) -> None:
    """Puts `generator` back into a state that `state_of` returned."""
    if isinstance(state, bytes) and (row := _row_of(generator)) is not None:
        row.raw = state
    else:
        generator.set_state(state)


def differ(a: Any, b: Any) -> bool:
    """Whether two states of a generator, from `state_of`, differ."""
    if isinstance(a, bytes):
        return bool(a != b)
    if isinstance(a, torch.Tensor):
        return _bytes(a) != _bytes(b)
    return pickle.dumps(a) != pickle.dumps(b)


def are_apart(a: Any, b: Any) -> bool:
    """Whether two states of a generator are at different places of its sequence of random words.

    Bytes that may have any content are left out: padding, and the normal numbers of a pair where none is left.
    """
    return _place(a) != _place(b) if isinstance(a, bytes) else differ(a, b)


def _place(row: bytes) -> tuple[bytes, bytes]:
    return row[:12], row[16:_AT_NORMALS]


def _bytes(state: torch.Tensor) -> bytes:
    # Read as raw bytes (generator states live in host memory): the caller's dispatch modes would see any tensor
    # operator here, `numpy()` included, and a fake mode refuses real tensors.
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _row_of(generator: torch.Generator) -> Any:
    """Returns the memory of a CPU generator that changes with its state; `None` for other generators and layouts."""
    return _default_row(generator) if generator is torch.default_generator else _new_row(generator)


def _new_row(generator: Any) -> Any:
    start = _start_of_state() if generator.device.type == "cpu" else None
    return None if start is None else _Row.from_address(generator._cdata + start)


# By the generator, since `torch.default_generator` is the step's own during a simulation.
_default_row = functools.lru_cache(maxsize=1)(_new_row)


@functools.cache
def _start_of_state() -> int | None:
    """Returns where the state begins in the memory of a CPU generator, or `None` if the layout is not as expected.

    The place is found in a new generator, and used only if the bytes there are those of the state, and if writing them
    back restores the state, the normal numbers included that are left of a pair.
    """
    probe: Any = torch.Generator("cpu")
    probe.manual_seed(_SEED)
    state = _bytes(probe.get_state())
    seed, left, _, following, *words = _HEAD.unpack_from(state)
    memory = ctypes.string_at(probe._cdata, _SEARCHED)
    start = memory.find(struct.pack("=Qi", seed, left))
    if start < 0:
        return None
    row = _Row.from_address(probe._cdata + start)
    if row.raw[16:_AT_NORMALS] != struct.pack("=I624I", following, *words):
        return None
    for normals in _NORMALS:
        before, then = row.raw, _bytes(probe.get_state())
        changed = probe.get_state()
        ctypes.memmove(changed.data_ptr() + _HEAD.size, normals, len(normals))
        probe.set_state(changed)
        is_seen = row.raw != before
        row.raw = before
        if not is_seen or _bytes(probe.get_state()) != then:
            return None
    return start


_SEED = 0x6D656D7363616C65
_SEARCHED = 256  # bytes
# The beginning of a state: the seed, how many words are left, whether it is seeded, the next word, and the words.
_HEAD = struct.Struct("=QiiQ624Q")
_AT_WORDS = 20  # bytes from the seed to the words of the twister, of 4 bytes each in memory
_AT_NORMALS = _AT_WORDS + 624 * 4
_Row = ctypes.c_char * (_AT_NORMALS + 24)  # with the normal numbers of both precisions that are left of a pair
# The end of a state with one left normal number, of double precision and of single precision.
_NORMALS = [struct.pack("=3di4xfi", *numbers) for numbers in ((0.0, 0.5, 0.5, 1, 0.0, 0), (0.0, 0.0, 0.0, 0, 0.5, 1))]


def draw_marks(generators: list[Any]) -> list[Any]:
    """Returns a value for each of `generators` that changes when the generator is drawn from."""
    states = [state_of(each) for each in generators]
    return [_bytes(state) if isinstance(state, torch.Tensor) else state for state in states]


def _position_of_python(own: random.Random) -> Any:
    """Returns (view, owner) of a Python generator, or `None` if its memory has another layout.

    The view shows, as one number, the generator's position among its 624 words, and the word beside it in memory.
    """
    try:
        view = ctypes.c_uint64.from_address(id(own) + object.__basicsize__)
        state: Any = own.getstate()[1]
        # The generator is returned too, since its memory must outlive the view.
        return (view, own) if bytes(view) == _in_memory(state[-1], state[0]) else None
    except (AttributeError, ValueError):
        return None


def _position_of_numpy(own: Any) -> Any:
    """Returns (view, owner) of NumPy's legacy generator, by the address that NumPy publishes for C code."""
    try:
        bits = own._bit_generator
        view = ctypes.c_uint64.from_address(bits.ctypes.state_address + 623 * 4)
        state: Any = own.get_state(legacy=True)
        # The bit generator is returned too, since `numpy.random.set_bit_generator` may drop the last reference to it.
        return (view, bits) if bytes(view) == _in_memory(int(state[1][623]), state[2]) else None
    except (AttributeError, ValueError):
        return None


def _in_memory(*words: int) -> bytes:
    return b"".join(word.to_bytes(4, sys.byteorder) for word in words)


# Reading a position takes 0.1 microseconds, a whole state 10 to 40; the position is enough to detect a draw.
@functools.cache  # on first use, for importing numpy.random takes 10 ms
def _views_of_process() -> tuple[list[Any], list[Any]]:
    return _views_of(random._inst, np.random.mtrand._rand)


@functools.lru_cache(maxsize=1)
def _views_of(python: random.Random, numpy: Any) -> tuple[list[Any], list[Any]]:
    found = [each for each in (_position_of_python(python), _position_of_numpy(numpy)) if each is not None]
    # The owners are returned too, since the views refer to their memory.
    return [view for view, _ in found], found


def host_positions(here: Any) -> list[int]:
    """Returns the positions of Python's and NumPy's generators, each in one number with one word of the state.

    The word detects a number of draws after which the position is the same again. Generators with another memory layout
    (of another interpreter) are left out; callers read the whole states of such generators.
    """
    own = here and here.randomness
    views, _ = _views_of_process() if own is None else _views_of(own.python, own.numpy)
    return list(map(_value, views))


_value = operator.attrgetter("value")


def host_state() -> tuple[Any, Any]:
    """Returns the states of Python's and NumPy's global generators."""
    return random.getstate(), np.random.get_state()


def set_host_state(state: tuple[Any, Any]) -> None:
    """Restores the states that `host_state` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])


def differs(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    """Whether two results of `host_state` differ."""
    return a[0] != b[0] or any(not np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True))
