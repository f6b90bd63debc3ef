"""A Ctrl-C at a chosen one of the places where Python lets one through: behind calls, and where functions begin.

A signal at a random moment nearly always meets the same few slow lines. `strike` reaches every place, one at a time.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    before, found = "", set()
    for instruction in dis.get_instructions(code):
        if instruction.opname == "CACHE":
            continue
        if before.startswith(("CALL", "RESUME")):
            found.add(instruction.offset)
        before = instruction.opname
    return frozenset(found)


def _is_finalizer(frame: FrameType | None) -> bool:
    """Whether a finalizer runs: Python only prints what it raises."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


def strike(run: Callable[[], Any], at: int, files: tuple[str, ...]) -> bool:
    """Run, and raise `KeyboardInterrupt` at place `at` in these files; whether there is such a place.

    The collector stands still meanwhile: what it ends at a random place would make another place of each number.
    """
    left = at

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in _places(frame.f_code) and not _is_finalizer(frame):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
        gc.enable()
    return left < 0


def everywhere(run: Callable[[int], Callable[[], Any]], files: tuple[str, ...], step: int = 1) -> Iterator[int]:
    """Strike what ``run(n)`` returns at each place ``n`` in turn, or at every so manyth; yields ``n`` after each."""
    at = 0
    while strike(run(at), at, files):
        yield at
        at += step
    assert at > 0, "nothing in these files runs"
