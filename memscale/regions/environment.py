"""The environment of a region: random generators, autocast, modes and backend flags, which all affect its values.

A snapshot takes the environment before the region runs. A recompute restores it, so that it draws the same dropout mask
at the same precision with the same kernels, and afterwards every generator is back in its present state.
"""

from __future__ import annotations

import contextvars
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.utils import parametrize

from memscale.core import CorrectnessError, found_once, internals, is_alone, pytrees, simulated
from memscale.regions import randomness
from memscale.regions.modes import modes


class Environment:
    """The environment at one moment. After the region, `conclude` drops the generators that the region did not use.

    Attributes:
        context: the context variables of Python; a rerun must run in a copy of it.
        devices: the devices of the region's tensors, the CPU excluded.
        uses_host_random: whether the region drew from Python's or NumPy's generator.
        drew: the ids of the PyTorch generators that operators of the region are known to draw from. The generator's
            state alone does not show a draw where the region restores the state itself, as `fork_rng` does.
        marked: the number of the saved tensor at which `mark` was called last; -1 before.
    """

    def __init__(
        self,
        devices: set[torch.device],
        *,
        host_random: bool,
        generators: Iterable[Any] = (),
        drew: frozenset[int] = frozenset(),
    ) -> None:
        here = simulated()
        self.devices = devices
        self.drew = drew
        self.marked = -1
        self._marks: list[tuple[Any, Any]] = []
        self.context = contextvars.copy_context()  # constant time, whatever the number of variables
        self._here = here
        shared = randomness.generators(devices, here) if devices or here is not None else [torch.default_generator]
        self._shared = len(shared)
        self._random = [(each, randomness.state_of(each)) for each in (*shared, *generators)]
        self._host_positions = randomness.host_positions(here)
        takes_host = host_random or len(self._host_positions) < 2  # a generator's memory has an unknown layout
        self._host: tuple[Any, Any] | None = randomness.host_state() if takes_host else None
        self._kinds = (
            _kinds(frozenset(devices), None if here is None else here.device_type) if devices or here else _CPU
        )
        if here is None and devices and "cuda" in self._kinds:
            _settle_attention()
        self._flags, self._read = _flags(self._kinds)
        self._settings = self._read()
        self._modes = modes()
        self._parametrizations = dict(parametrize._cache) if parametrize._cache_enabled else None
        self._global_hooks = global_hooks()
        self._shares = True
        self.uses_host_random = False

    def leave_shared(self) -> None:
        """Drops the state that threads share: the generators, and with other threads also flags and global hooks."""
        self._random, self._host = self._random[self._shared :], None
        if not is_alone():
            self._shares = False
            self._settings[: len(self._flags)] = [None] * len(self._flags)

    def conclude(self) -> None:
        """Drops the states of the generators that the region did not advance, since a recompute does not need them.

        Raises:
            CorrectnessError: the region drew from Python's or NumPy's generator, whose state was not taken.
        """
        here, self._here = self._here, None
        if not self.drew:
            shared = self._shared  # generators of the user's own are few, and always restored
            self._random = [
                (generator, state)
                for at, (generator, state) in enumerate(self._random)
                if at >= shared or randomness.differ(randomness.state_of(generator), state)
            ]
        if self._host is not None:
            self.uses_host_random = randomness.differs(self._host, randomness.host_state())
            if not self.uses_host_random:
                self._host = None
        elif randomness.host_positions(here) != self._host_positions:
            raise CorrectnessError(
                "the region drew random numbers from Python's random or from NumPy, which it had not done on its first "
                "call, so a recompute cannot repeat them; draw them outside the region, or use torch's generator"
            )

    def has_drawn(self) -> bool:
        """Whether a generator whose state was taken has advanced."""
        moved = [randomness.differ(randomness.state_of(generator), state) for generator, state in self._random]
        return any(moved) or (self._host is not None and randomness.differs(self._host, randomness.host_state()))

    def watch_draws(self, call: Callable[[], Any]) -> Any:
        """Returns the result of `call`, an operator that may draw random numbers, and adds to `drew` if it did.

        An operator draws from the generator of its results' device. Meanwhile another thread may draw from others.
        """
        shared = [generator for generator, _ in self._random[: self._shared]]
        before = randomness.draw_marks(shared)
        result = call()
        after = randomness.draw_marks(shared)
        moved = [each for each, old, new in zip(shared, before, after, strict=True) if old != new]
        if moved and self._here is None:
            types = {tensor.device.type for tensor in pytrees.tensors(result)}
            moved = [each for each in moved if each.device.type in types]
        self.drew |= set(map(id, moved))
        return result

    def mark(self, number: int) -> None:
        """Reads the generators that the region draws from, at the saved tensor `number`, for `check_draws`."""
        self.marked = number
        self._marks = [(each, randomness.state_of(each)) for each, _ in self._random if id(each) in self.drew]

    def check_draws(self) -> None:
        """Checks, where `mark` was called in the run, that a rerun has drawn the same numbers.

        Raises:
            CorrectnessError: it has not, since another thread drew from the generator during one of the two.
        """
        for generator, state in self._marks:
            if randomness.are_apart(randomness.state_of(generator), state):
                raise CorrectnessError(
                    "the recompute of a checkpointed region drew other random numbers than its run: another thread "
                    f"drew from PyTorch's generator of the {generator.device.type} device meanwhile. Let "
                    "threads that draw take turns: hold one lock around forward and backward, and around other draws"
                )

    @contextmanager
    def reinstate(self) -> Iterator[None]:
        """Runs the body in this environment, then restores the present one."""
        undo: list[Callable[[], Any]] = []
        try:
            self.enter(undo)
            yield
        finally:
            for step in reversed(undo):
                step()

    def enter(self, undo: list[Callable[[], Any]]) -> bool:
        """Switches to this environment. Returns whether a dispatch mode is active now, and none was in the region.

        Appends to `undo` the calls that restore the present, to be run in reverse.
        """
        if self._random:
            _leave_vmap(undo)
        for generator, state in self._random:
            undo.append(partial(randomness.restore_state, generator, randomness.state_of(generator)))
            randomness.restore_state(generator, state)
        if self._host is not None:
            undo.append(partial(randomness.set_host_state, randomness.host_state()))
            randomness.set_host_state(self._host)
        settings = self._read()
        undo.append(partial(self._leave_settings, settings))
        if settings != self._settings:
            self._enter_settings(settings, undo)
        # Inside `parametrize.cached()`, now or when the region ran.
        if self._shares and (parametrize._cache_enabled or self._parametrizations is not None):
            undo.append(partial(_set_parametrizations, parametrize._cache_enabled, parametrize._cache))
            _set_parametrizations(self._parametrizations is not None, dict(self._parametrizations or {}))
        if self._shares and (hooks := global_hooks()) != self._global_hooks:
            undo.append(partial(_set_global_hooks, hooks))
            _set_global_hooks(self._global_hooks)
        if (now := modes()) is self._modes:
            return False
        self._modes.enter(undo, now)
        return not self._modes.dispatched and modes().dispatched

    def _enter_settings(self, present: list[Any], undo: list[Callable[[], Any]]) -> None:
        count = len(self._flags)
        if (autocast := self._settings[count:]) != present[count:]:
            cache, *of_kinds = autocast
            for kind, enabled, dtype in zip(self._kinds, of_kinds[::2], of_kinds[1::2], strict=True):
                context = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
                context.__enter__()
                undo.append(partial(context.__exit__, None, None, None))
        flags, then = present[:count], self._settings[:count]
        if flags != then:
            _set_flags(self._flags, then, flags)

    def _leave_settings(self, before: list[Any]) -> None:
        """Restores the settings `before`, also those that the body changed: a rerun may stop before the body's end."""
        if (now := self._read()) == before:
            return
        count = len(self._flags)
        _set_flags(self._flags, before[:count], now[:count])
        cache, *of_kinds = before[count:]
        torch.set_autocast_cache_enabled(cache)
        for kind, enabled, dtype in zip(self._kinds, of_kinds[::2], of_kinds[1::2], strict=True):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)

    @property
    def moved(self) -> list[Any]:
        """Returns, after `conclude`, the PyTorch generators that the region drew from and the user's own generators."""
        return [generator for generator, _ in self._random]


def _leave_vmap(undo: list[Callable[[], Any]]) -> None:
    """Lets a rerun draw random numbers inside of ``autograd.grad(..., is_grads_batched=True)``.

    PyTorch refuses random operators there, since a batch has no single mask. A rerun has no batch: only the gradients
    of that backward are batched, and the rerun reads none of them.
    """
    c: Any = torch._C
    key, include = c._dispatch_key_parse("VmapMode"), c._dispatch_tls_local_include_set()
    if include.has(key):
        without = include - c.DispatchKeySet(key)
        guard = c._ForceDispatchKeyGuard(without, c._dispatch_tls_local_exclude_set())
        guard.__enter__()
        undo.append(partial(guard.__exit__, None, None, None))


def _pair(name: str) -> tuple[str, Callable[[], Any], Callable[[Any], Any]] | None:
    get, set_to = getattr(torch._C, f"_get_{name}", None), getattr(torch._C, f"_set_{name}", None)
    return (name, get, set_to) if get and set_to else None


def _precision(backend: str, op: str) -> tuple[str, Callable[[], Any], Callable[[Any], Any]] | None:
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    put = getattr(torch._C, "_set_fp32_precision_setter", None)
    if get is None or put is None:
        return None
    set_to = partial(put, backend, op)
    return f"fp32_precision of {backend} {op}", partial(get, backend, op), set_to


_SDP = {"flash_sdp": "flash", "mem_efficient_sdp": "mem_efficient", "math_sdp": "math", "cudnn_sdp": "cudnn"}
_mha = torch.backends.mha
_FLAGS = [
    flag
    for flag in (
        # Before `fp32_precision`, since setting one of these older flags sets `fp32_precision` too.
        *map(_pair, ("float32_matmul_precision", "cudnn_allow_tf32", "onednn_allow_tf32")),
        *(_precision(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv", "rnn")),
        *map(_pair, ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cublas_allow_fp16_accumulation")),
        *map(_pair, ("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled", "sdp_priority_order")),
        *map(_pair, ("math_sdp_allow_fp16_bf16_reduction", "deterministic_fill_uninitialized_memory")),
        *(
            (
                f"{name} enabled",
                internals.named(f"torch._C._get_{name}_enabled"),
                internals.named(f"torch._C._set_sdp_use_{short}"),
            )
            for name, short in _SDP.items()
        ),
        ("deterministic", torch.are_deterministic_algorithms_enabled, None),
        ("warn_only", torch.is_deterministic_algorithms_warn_only_enabled, None),
        ("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        ("fast path of attention", _mha.get_fastpath_enabled, _mha.set_fastpath_enabled),
    )
    if flag is not None
]
# All flags except three that take longest to read and affect no kernel on the CPU.
_FLAGS_ON_CPU = [flag for flag in _FLAGS if not flag[0].startswith("fp32_precision of cuda")]
_CPU = ("cpu",)


@functools.lru_cache(maxsize=64)
def _kinds(devices: frozenset[torch.device], of_simulation: str | None) -> tuple[str, ...]:
    """Returns the types of devices whose autocast settings a region on `devices` depends on."""
    kinds = {"cpu", *(device.type for device in devices if device.type != "meta")}
    return tuple(sorted(kinds if of_simulation is None else {*kinds, of_simulation}))


@found_once
def _settle_attention() -> None:
    """Makes PyTorch fix the priority order of its attention kernels, once per process.

    On Hopper and Blackwell the first attention call of a process moves cuDNN to the front of that order. Were that call
    inside a region, the snapshot would hold the order before it, and the recompute would run another kernel.
    """
    query = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="cuda")
    torch._fused_sdp_choice(query, query, query)


@functools.cache
def _flags(kinds: tuple[str, ...]) -> tuple[list[Any], Callable[[], list[Any]]]:
    """Returns the flags that a region depends on, and a function that reads the flags, then the autocast settings.

    Every call of a region reads them three times, so the function is compiled: one expression with all the calls takes
    half of the time of a loop over the readers.
    """
    flags = _FLAGS_ON_CPU if kinds == _CPU else _FLAGS
    autocast = [partial(read, kind) for kind in kinds for read in (torch.is_autocast_enabled, torch.get_autocast_dtype)]
    readers = [*(read for _, read, _ in flags), torch.is_autocast_cache_enabled, *autocast]
    functions = {f"read_{at}": read for at, read in enumerate(readers)}
    read_all = eval(f"lambda: [{', '.join([f'{name}()' for name in functions])}]", functions)

    def settings() -> list[Any]:
        try:
            return read_all()  # type: ignore[no-any-return]
        except RuntimeError:  # PyTorch refuses to read some flags after TF32 was set by its old and its new names
            return [_read(read) for read in readers]

    return flags, settings


def accelerators(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Returns the devices of `tensors` that have random generators of their own, the CPU excluded."""
    found = list(map(_device, tensors))
    if not found or found.count(_ON_CPU) == len(found):  # to compare devices takes a quarter of the time of a hash
        return set()
    return {found[0]} if found.count(found[0]) == len(found) else set(found) - {_ON_CPU}


_device = operator.attrgetter("device")
_ON_CPU = torch.device("cpu")


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def _set_flags(flags: list[Any], values: list[Any], now: list[Any]) -> None:
    for (_, _, set_to), value, present in zip(flags, values, now, strict=True):
        if value != present and value is not None:
            if set_to is None:
                by_name = {name: value for (name, *_), value in zip(flags, values, strict=True)}
                torch.use_deterministic_algorithms(by_name["deterministic"], warn_only=by_name["warn_only"])
            else:
                set_to(value)


def _set_parametrizations(enabled: int, cache: dict[Any, Any]) -> None:
    parametrize._cache_enabled, parametrize._cache = enabled, cache


_GLOBAL_HOOKS: Any = (
    internals.named("torch.nn.modules.module._global_forward_hooks"),
    internals.named("torch.nn.modules.module._global_forward_pre_hooks"),
    internals.named("torch.nn.modules.module._global_forward_hooks_with_kwargs"),
)


def global_hooks() -> tuple[dict[int, Any], ...]:
    """Returns the hooks that apply to all modules, except those of PyTorch's own tools such as profilers."""
    if not any(_GLOBAL_HOOKS):
        return _NO_HOOKS
    return tuple([{key: hook for key, hook in table.items() if not _is_tool(hook)} for table in _GLOBAL_HOOKS])


_NO_HOOKS: tuple[dict[int, Any], ...] = ({}, {}, {})


def _set_global_hooks(hooks: tuple[dict[int, Any], ...]) -> None:
    for table, those in zip(_GLOBAL_HOOKS, hooks, strict=True):
        kept = {key: hook for key, hook in table.items() if _is_tool(hook)}
        table.clear()
        table.update({**kept, **those})


def _is_tool(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(("torch.", "memscale."))
