"""The seconds of a step's distinct parts, measured on this machine: the operators of each part run for real.

NOTE: a part is a run of consecutive operators of one module in one phase. Blocks that repeat are one distinct part,
which runs once for all of them; a recompute is the forward of its part. What an operator makes, the next one reads, and
it lives as long as in the step, so caches, new pages and the allocator act as in the step. The distinct parts take
turns, so that the operands of a part were used a whole round ago, as weights are in a step.

A busy machine stretches an operator by up to a thousand times: a parallel region waits for each thread that another
program has taken off its core. So every call is watched, and the seconds of an interrupted call do not count.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memscale.core import DiskCache, available_host_bytes, format_bytes, interrupts_held
from memscale.simulation.dispatch.tape import PartProgram, Tape, program_of, slots_in
from memscale.simulation.kernels.cpu_scratch import this_machine
from memscale.simulation.trace import OpCall, Phase

try:
    import resource
except ImportError:  # Windows lacks the module
    resource = None  # type: ignore[assignment]

# Errors by which a kernel refuses its operands.
_REFUSALS = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AssertionError, MemoryError)
_BUDGET_SECONDS = 30.0  # after `_ROUNDS`, for calls that were interrupted too often
_ROUNDS = 5  # the least runs of a part, after a first one that loads code
# Runs go on for these seconds, up to so many: what other programs take of memory and caches comes and goes.
_STEADY_SECONDS, _MOST_ROUNDS = 2.0, 20
_CLEAN_CALLS = 3  # the least clean runs of a call
_LEFT_OUT = 0.02  # the share of a step's seconds in calls that may have fewer
# A call is interrupted if a thread of the process waited for a core for this share of the call, or these seconds.
_WAITING_SHARE, _WAITING_SECONDS = 0.05, 20e-6
_FEW_FAULTS = 8  # page faults that the interpreter and the allocator cause in any call
_SPREAD = 1.25  # the most that the clean runs of a step differ by
_AGE_SECONDS = 30 * 24 * 3600.0  # after which a part is measured again: drivers, kernels and clocks change

Clock = Callable[[], float]


class Measured(NamedTuple):
    """Measured seconds by index of the operator in the trace, and notes on what could not be measured."""

    seconds: Mapping[int, float]
    notes: tuple[str, ...]


class PartTimes:
    """The measured seconds of parts, remembered on disk.

    Args:
        budget_seconds: the limit for measuring one step again and again on a busy machine.
    """

    def __init__(self, *, budget_seconds: float = _BUDGET_SECONDS) -> None:
        self._budget_seconds = budget_seconds
        self._disk = DiskCache("parts")
        self._known: dict[str, dict[str, tuple[float, list[float]]]] = {}

    def of_step(
        self,
        tape: Tape,
        ops: Sequence[OpCall],
        deaths: Mapping[int, Sequence[int]],
        parameters: Mapping[int, tuple[int, ...]],
    ) -> Measured:
        """Returns the seconds of the operators on `tape`: nothing, with a note, if the machine is too busy.

        Args:
            tape: the calls of the step.
            ops: the operators of the trace.
            deaths: index of an operator -> the numbers of the storages that die after it.
            parameters: number of a storage -> the shape of the parameter in it.
        """
        parts = parts_of(tape, ops, parameters)
        programs = [
            program_of([(tape.calls[at], deaths.get(at, ())) for at in part], tape.values, parameters) for part in parts
        ]
        name = f"parts-{this_machine()}"
        known = self._read(name)
        new = {program.key: program for program in programs if program.key not in known}
        failed: dict[str, str] = {}
        if new:
            found = _measured(new, failed, self._budget_seconds)
            if found is None:
                return Measured({}, (_TOO_BUSY,))
            now = time.time()
            known |= {key: (now, seconds) for key, seconds in found.items()}
            self._disk.write(name, known)
        seconds = {
            at: taken
            for part, program in zip(parts, programs, strict=True)
            if program.key in known
            for at, taken in zip(part, known[program.key][1], strict=True)
        }
        why = {
            ops[part[0]].path or "the step": failed[program.key]
            for part, program in zip(parts, programs, strict=True)
            if program.key in failed
        }
        return Measured(seconds, tuple(f"{path} could not be measured: {reason}" for path, reason in why.items()))

    def _read(self, name: str) -> dict[str, tuple[float, list[float]]]:
        if name not in self._known:
            now = time.time()
            with contextlib.suppress(AttributeError, TypeError, ValueError):  # of another version of memscale
                self._known[name] = {
                    key: (float(then), list(map(float, seconds)))
                    for key, (then, seconds) in (self._disk.read(name) or {}).items()
                    if 0 <= now - then < _AGE_SECONDS
                }
        return self._known.setdefault(name, {})


_TOO_BUSY = (
    "other programs interrupted too many operators, so nothing was measured; profile again with probe=True when the "
    "machine is quiet, or with fewer threads (torch.set_num_threads) than cores are free"
)

_NUMBERED = re.compile(r"(?:.*\.)?\d+(?=\.|$)")


def parts_of(tape: Tape, ops: Sequence[OpCall], parameters: Mapping[int, Any]) -> list[list[int]]:
    """Returns the parts of a step as lists of indices of operators.

    A part begins where the phase changes, or the numbered module (``layers.3``) around the operator. In the update a
    part begins at each new parameter.
    """
    parts: list[list[int]] = []
    former: tuple[Phase, str] | None = None
    seen: set[int] = set()
    for at, call in sorted(tape.calls.items()):
        op = ops[at]
        numbered = _NUMBERED.match(op.path)
        place = op.phase, op.path if numbered is None else numbered[0]
        touched = {slot.storage for slot in slots_in(call.args) if slot.storage in parameters}
        if place != former or (op.phase is Phase.OPTIMIZER and touched - seen):
            parts.append([])
        former = place
        seen |= touched
        parts[-1].append(at)
    return parts


class _Sample(NamedTuple):
    """One run of a call: its seconds, whether a thread was interrupted, and the page faults."""

    seconds: float
    interrupted: bool
    faults: int


def _measured(
    programs: Mapping[str, PartProgram], failed: dict[str, str], budget_seconds: float
) -> dict[str, list[float]] | None:
    """Returns the seconds of the calls of each program, or None if too many were interrupted.

    Args:
        programs: the programs by key.
        failed: receives the reason for each program that cannot run.
        budget_seconds: the limit of the time for runs beyond the first `_ROUNDS`.
    """
    now: Clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    pools: dict[torch.dtype, torch.Tensor] = {}
    free_bytes = available_host_bytes()
    inputs: dict[str, dict[Any, torch.Tensor]] = {}
    samples: dict[str, list[list[_Sample]]] = {}
    with _disable_current_modes(), torch.no_grad():
        for key, program in programs.items():
            if free_bytes is not None and program.nbytes > free_bytes // 4:
                failed[key] = f"its operands take {format_bytes(program.nbytes)}"
                continue
            try:
                program.run(program.inputs(pools), lambda: None, lambda _: None)
            except _REFUSALS as error:  # a kernel refuses the numbers of `inputs`, or there is no memory for it
                failed[key] = f"{type(error).__name__}: {error}".partition("\n")[0]
                continue
            samples[key] = [[] for _ in program.calls]
        room = None if free_bytes is None else free_bytes // 4
        began = time.perf_counter()
        while True:
            for key, of_calls in samples.items():
                interrupts_held.act()
                program = programs[key]
                own = inputs.get(key)
                if own is None:
                    own = program.inputs(pools)
                    if room is None or program.nbytes <= room:
                        inputs[key] = own
                        room = None if room is None else room - program.nbytes
                with _watching(now) as (before, after):
                    found = program.run(own, before, after)
                for taken, sample in zip(of_calls, found, strict=True):
                    taken.append(sample)
            rounds = len(next(iter(samples.values()), [[()] * _ROUNDS])[0])
            elapsed = time.perf_counter() - began
            if rounds < _ROUNDS or (elapsed < _STEADY_SECONDS and rounds < _MOST_ROUNDS):
                continue
            if _is_clean(samples):
                return {key: [_usual(taken) for taken in of_calls] for key, of_calls in samples.items()}
            if elapsed > budget_seconds:
                return None


def _is_clean(samples: Mapping[str, list[list[_Sample]]]) -> bool:
    """Whether enough runs of enough calls were clean, and these agree."""
    total = left_out = low = high = 0.0
    for taken in (taken for of_calls in samples.values() for taken in of_calls):
        clean = _clean(taken)
        seconds = clean[0] if clean else min(sample.seconds for sample in taken)
        total += seconds
        if len(clean) < _CLEAN_CALLS:
            left_out += seconds
        else:
            low, high = low + clean[0], high + clean[len(clean) // 2]
    return left_out <= _LEFT_OUT * total and high <= _SPREAD * low


def _clean(taken: Sequence[_Sample]) -> list[float]:
    """Returns the seconds of the clean runs of a call, rising: uninterrupted, with no more page faults than usual.

    glibc maps and unmaps a result above 32 MiB in every call, in a step too; a smaller result faults only where it
    happens to lie at the end of the heap.
    """
    kept = [sample for sample in taken if not sample.interrupted]
    usual = sorted(sample.faults for sample in kept)[(len(kept) - 1) // 2] if kept else 0
    return sorted(sample.seconds for sample in kept if sample.faults <= usual + _FEW_FAULTS)


def _usual(taken: Sequence[_Sample]) -> float:
    """Returns the lower quartile of the clean runs of a call: a disturbance only makes a call longer."""
    seconds = _clean(taken) or sorted(sample.seconds for sample in taken)
    return seconds[len(seconds) // 4]


_Begun = tuple[float, int, int, int]


@contextlib.contextmanager
def _watching(now: Clock) -> Iterator[tuple[Callable[[], _Begun], Callable[[_Begun], _Sample]]]:
    """Yields functions to call before and after a call, which return its sample.

    Interruptions of all threads of the process count: `ru_nivcsw` is the number of times that one lost its core, and
    the second number of ``/proc/self/task/*/schedstat`` (Linux) the nanoseconds for which one waited to get a core.
    """
    own = [threading.get_native_id()] if torch.get_num_threads() == 1 else None
    files = list(_opened("/proc/self/task", own))

    def state() -> tuple[int, int, int]:
        usage = None if resource is None else resource.getrusage(resource.RUSAGE_SELF)
        waited = sum(map(_waited, files))
        return (0, 0, waited) if usage is None else (usage.ru_nivcsw, usage.ru_minflt, waited)

    def before() -> _Begun:
        switches, faults, waited = state()
        return now(), switches, faults, waited

    def after(begun: _Begun) -> _Sample:
        seconds = now() - begun[0]
        switches, faults, waited = state()
        waiting = (waited - begun[3]) / 1e9
        interrupted = switches > begun[1] or waiting > max(_WAITING_SECONDS, _WAITING_SHARE * seconds)
        return _Sample(seconds, interrupted, faults - begun[2])

    try:
        yield before, after
    finally:
        for file in files:
            os.close(file)


def _waited(file: int) -> int:
    try:
        return int(os.pread(file, 64, 0).split()[1])
    except OSError:  # the thread has ended
        return 0


def _opened(folder: str, tasks: Iterable[object] | None) -> Iterator[int]:
    with contextlib.suppress(OSError):  # other systems lack the file
        for task in os.listdir(folder) if tasks is None else tasks:
            with contextlib.suppress(OSError):  # a thread may have ended
                yield os.open(f"{folder}/{task}/schedstat", os.O_RDONLY)
