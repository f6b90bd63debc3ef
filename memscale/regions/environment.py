"""Process-wide state that a region's values depend on: random generators, autocast, attention backends.

Taken before a region runs and put back while it is recomputed, so that the recompute draws the same dropout mask at
the same precision, and leaves no trace in any generator.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from memscale.core.errors import CorrectnessError


class Environment:
    """The environment at one moment. `settle` after the region drops what the region did not use."""

    __slots__ = ("_attention", "_autocast", "_devices", "_host", "_host_positions", "_random", "uses_host_random")

    def __init__(
        self, devices: set[torch.device], *, host_random: bool, generators: Iterable[torch.Generator] = ()
    ) -> None:
        self._devices = sorted(devices, key=str)
        self._random: list[tuple[torch.Generator, torch.Tensor]] | None = [
            (generator, generator.get_state()) for generator in (*_generators(self._devices), *generators)
        ]
        self._host_positions = _host_positions()
        self._host: tuple[Any, Any] | None = _host_state() if host_random or not _can_notice() else None
        self._autocast = _autocast(self._devices)
        self._attention = _attention()
        self.uses_host_random = False

    def settle(self) -> None:
        """Forget the generators that the region did not advance: a recompute need not touch them.

        Raises:
            CorrectnessError: the region drew from Python's or NumPy's generator, whose state was not taken.
        """
        if self._random is not None:
            used = [(gen, state) for gen, state in self._random if not _same(gen.get_state(), state)]
            self._random = used or None
        if self._host is not None:
            self.uses_host_random = _differs(self._host, _host_state())
            if not self.uses_host_random:
                self._host = None
        elif _host_positions() != self._host_positions:
            raise CorrectnessError(
                "the region drew random numbers from Python's random or from NumPy, which it had not done on its first "
                "call, so a recompute could not repeat them; draw them outside the region, or use torch's generator"
            )

    @contextmanager
    def reinstate(self) -> Iterator[None]:
        """Run the body in this environment, then restore the present one."""
        undo: list[Callable[[], Any]] = []
        try:
            self.enter(undo)
            yield
        finally:
            for step in reversed(undo):
                step()

    def enter(self, undo: list[Callable[[], Any]]) -> None:
        """Go back to this environment; `undo` receives the steps that return to the present, in order."""
        for generator, state in self._random or ():
            undo.append(partial(generator.set_state, generator.get_state()))
            generator.set_state(state)
        if self._host is not None:
            undo.append(partial(_set_host_state, _host_state()))
            _set_host_state(self._host)
        autocast = _autocast(self._devices)
        if autocast != self._autocast:
            for kind, enabled, dtype, cache in self._autocast:
                context = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
                context.__enter__()
                undo.append(partial(context.__exit__, None, None, None))
        attention = _attention()
        if attention != self._attention:
            undo.append(partial(_set_attention, attention))
            _set_attention(self._attention)


def _generators(devices: list[torch.device]) -> list[torch.Generator]:
    generators = [torch.default_generator]
    for device in devices:
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            generators.append(torch.cuda.default_generators[index])
        elif device.type == "mps":
            generators.append(torch.mps._get_default_mps_generator())
        elif device.type == "xpu":
            index = torch.xpu.current_device() if device.index is None else device.index
            generators.append(torch.xpu.default_generators[index])
    return generators


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Read as raw bytes (generator states live in host memory): any tensor operator here, `numpy()` included, would
    # be seen by the caller's dispatch modes, and a fake mode refuses real tensors.
    return ctypes.string_at(a.data_ptr(), a.nbytes) == ctypes.string_at(b.data_ptr(), b.nbytes)


def _position_of_python() -> Any:
    """Where Python's generator keeps its position among the 624 numbers it draws at a time (CPython's layout)."""
    try:
        position: Any = ctypes.c_int.from_address(id(random._inst) + object.__basicsize__)
        position.owner = random._inst  # its memory must outlive the pointer
        return position if position.value == random.getstate()[1][-1] else None
    except (AttributeError, ValueError):
        return None


def _position_of_numpy() -> Any:
    """The same for NumPy's legacy generator, by the address it publishes for C callers."""
    try:
        bits = np.random.mtrand._rand._bit_generator
        position: Any = ctypes.c_int.from_address(bits.ctypes.state_address + 624 * 4)
        position.owner = bits  # `numpy.random.set_bit_generator` may drop it
        state: Any = np.random.get_state(legacy=True)
        return position if position.value == state[2] else None
    except (AttributeError, ValueError):
        return None


# Reading a whole state takes 10 to 40 microseconds, a position 0.1: enough to notice that numbers were drawn.
@functools.cache  # found when a region first runs, for numpy.random takes 10 ms to import
def _positions() -> list[Any]:
    return [position for position in (_position_of_python(), _position_of_numpy()) if position is not None]


def _can_notice() -> bool:
    return len(_positions()) == 2  # otherwise (another interpreter, another layout) whole states are always taken


def _host_positions() -> list[int]:
    return [position.value for position in _positions()]


def _host_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_host_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])


def _differs(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return a[0] != b[0] or any(not np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def _autocast(devices: list[torch.device]) -> tuple[tuple[str, bool, torch.dtype, bool], ...]:
    cache = torch.is_autocast_cache_enabled()
    kinds = {"cpu", *(device.type for device in devices if device.type != "meta")}
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache) for kind in sorted(kinds)
    )


def _attention() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def _set_attention(flags: tuple[bool, ...]) -> None:
    cuda = torch.backends.cuda
    setters = (
        cuda.enable_flash_sdp,
        cuda.enable_mem_efficient_sdp,
        cuda.enable_math_sdp,
        cuda.enable_cudnn_sdp,
    )
    for set_enabled, flag in zip(setters, flags, strict=True):
        set_enabled(flag)
