"""Reads and restores the states of random generators, and detects draws without reading a whole state again."""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from memscale.core import simulated_choices, simulated_device_type, simulated_randomness
from memscale.regions.class_cache import cached_by_class
from memscale.regions.unrecorded import unrecorded


def generators(devices: Iterable[torch.device]) -> list[Any]:
    """Returns the generators of the CPU and of `devices`, PyTorch's generator for the CPU first."""
    simulated = simulated_randomness()
    found: list[Any] = [torch.default_generator if simulated is None else simulated.torch]
    for device in sorted(devices, key=str):
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            found.append(torch.cuda.default_generators[index])
        elif device.type == "mps":
            found.append(torch.mps._get_default_mps_generator())
        elif device.type == "xpu":
            index = torch.xpu.current_device() if device.index is None else device.index
            found.append(torch.xpu.default_generators[index])
    if (choices := simulated_choices()) is not None:
        found.append(choices)
    return found


def counted_states(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns, in a simulation of a CPU, empty tensors of the sizes of `states`, so that their bytes are counted.

    A simulation counts the outputs of operators, and a state is the output of no operator.
    """
    if simulated_device_type() != "cpu":  # with an accelerator, the states are in host memory
        return []
    with unrecorded():  # not an operator of a region that happens to be recording
        return [torch.empty(state.shape, dtype=state.dtype) for state in states if isinstance(state, torch.Tensor)]


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


def same(a: Any, b: Any) -> bool:
    """Whether two states of a generator are equal."""
    return _bytes(a) == _bytes(b) if isinstance(a, torch.Tensor) else pickle.dumps(a) == pickle.dumps(b)


def _bytes(state: torch.Tensor) -> bytes:
    # Read as raw bytes (generator states live in host memory): the caller's dispatch modes would see any tensor
    # operator here, `numpy()` included, and a fake mode refuses real tensors.
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def position() -> tuple[bytes, bytes] | None:
    """Returns bytes that change with each draw from PyTorch's CPU generator, or `None` if its layout is unknown."""
    simulated = simulated_randomness()
    if simulated is None:
        found = _position_of_torch()
    else:
        found = None if (at := _place_of_seed()) is None else _views(simulated.torch, at)
    return found and (found[0].raw, found[1].raw)


def draw_marks(generators: list[Any]) -> list[Any]:
    """Returns a value for each of `generators`, the CPU's first, that changes when the generator is drawn from."""
    first = position()
    states = [each.get_state() for each in (generators if first is None else generators[1:])]
    return [first, *(_bytes(state) if isinstance(state, torch.Tensor) else state for state in states)]


# Reading and comparing a whole state (5,056 bytes) would be a tenth of the cost of a small region.
@functools.cache
def _position_of_torch() -> tuple[Any, Any] | None:
    """Returns views of two fields of the CPU generator: position and first words, and the cached normal numbers."""
    at = _place_of_seed()
    return None if at is None else _views(torch.default_generator, at)


@functools.cache
def _place_of_seed() -> int | None:
    """Returns the byte offset of the seed in PyTorch's CPU generator, or `None` if the layout is not as expected.

    The offset is found in a new generator, and used only if the bytes there change together with the state.
    """
    probe = torch.Generator("cpu")
    probe.manual_seed(_SEED)
    state = probe.get_state()
    at = ctypes.string_at(_implementation(probe), _SEARCHED).find(struct.pack("=Q", _SEED))
    layout = struct.Struct("=QiiQ624Q3di4xfi")  # seed, left, whether seeded, next, words; normal numbers
    if at < 0 or layout.size != state.nbytes:
        return None
    seed, left, seeded, following, *rest = layout.unpack(_bytes(state))
    words = struct.pack("=624I", *rest[:624])
    start = ctypes.string_at(_implementation(probe) + at, _WORDS)
    if start[:12] + start[16:] != struct.pack("=QiI", seed, left, following):
        return None
    if ctypes.string_at(_implementation(probe) + at + _WORDS, len(words)) != words:
        return None
    for normals in ((0.0, 0.5, 0.5, 1, 0.0, 0), (0.0, 0.0, 0.0, 0, 0.5, 1)):
        _, before = _views(probe, at)
        packed = layout.pack(seed, left, seeded, following, *rest[:624], *normals)
        ctypes.memmove(state.data_ptr(), packed, len(packed))
        then = before.raw
        probe.set_state(state)
        if before.raw == then:
            return None
    return at


_SEED = 0x6D656D7363616C65
_SEARCHED, _WORDS = 256, 20  # bytes searched for the seed; bytes from the seed to the words of the twister


def _implementation(generator: torch.Generator) -> int:
    address = ctypes.c_void_p.from_address(id(generator) + object.__basicsize__).value
    assert address is not None
    return address


def _views(generator: torch.Generator, at: int) -> tuple[Any, Any]:
    start = _implementation(generator) + at
    return (ctypes.c_char * 52).from_address(start), (ctypes.c_char * 32).from_address(start + _WORDS + 624 * 4)


def _position_of_python(own: random.Random) -> Any:
    """Returns views of a Python generator's position among its 624 words and of its first word (CPython's layout).

    Returns `None` where the layout differs.
    """
    try:
        at = id(own) + object.__basicsize__
        position, word = ctypes.c_int.from_address(at), ctypes.c_uint32.from_address(at + 4)
        state: Any = own.getstate()[1]
        # The generator is returned too, since its memory must outlive the pointers.
        return (position, word, own) if (word.value, position.value) == (state[0], state[-1]) else None
    except (AttributeError, ValueError):
        return None


def _position_of_numpy(own: Any) -> Any:
    """Returns the same views for NumPy's legacy generator, at the address that NumPy publishes for C callers."""
    try:
        bits = own._bit_generator
        at = bits.ctypes.state_address
        position, word = ctypes.c_int.from_address(at + 624 * 4), ctypes.c_uint32.from_address(at)
        state: Any = own.get_state(legacy=True)
        # The bit generator is returned too, since `numpy.random.set_bit_generator` may drop the last reference to it.
        return (position, word, bits) if (word.value, position.value) == (state[1][0], state[2]) else None
    except (AttributeError, ValueError):
        return None


# Reading a position takes 0.1 microseconds, a whole state 10 to 40; the position is enough to detect a draw.
@functools.cache  # on first use, for importing numpy.random takes 10 ms
def _positions_of_process() -> list[Any]:
    return _positions_of(random._inst, np.random.mtrand._rand)


@functools.lru_cache(maxsize=1)
def _positions_of(python: random.Random, numpy: Any) -> list[Any]:
    return [each for each in (_position_of_python(python), _position_of_numpy(numpy)) if each is not None]


def _positions() -> list[Any]:
    simulated = simulated_randomness()
    return _positions_of_process() if simulated is None else _positions_of(simulated.python, simulated.numpy)


def can_notice() -> bool:
    """Whether `host_positions` detects draws from both Python's and NumPy's generator."""
    return len(_positions()) == 2  # else (another interpreter, another layout) callers read whole states


def host_positions() -> list[tuple[int, int]]:
    """Returns (position, first word) of Python's and NumPy's generators.

    The first word detects a number of draws after which the position is the same again.
    """
    return [(position.value, word.value) for position, word, _ in _positions()]


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
