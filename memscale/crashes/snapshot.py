"""Reads a memory snapshot of PyTorch's CUDA allocator without running code from the file.

``torch.cuda.memory._dump_snapshot`` writes a pickle, and loading a pickle can run any function. A snapshot consists of
dictionaries, lists, strings and numbers only, so the reader refuses everything else.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memscale.core import ConfigError

# The part of the error message by which a log is recognized.
FAILURE = "out of memory. Tried to allocate"
_MADE_BY = "torch.cuda.memory._dump_snapshot(path) writes one"
_TAKEN = f"{_MADE_BY}, and a log with '... {FAILURE} ...' is taken as well"


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    name: str


@dataclass(frozen=True)
class Block:
    """A block of a segment that is in use.

    Attributes:
        stack: the stack of the allocation, innermost frame first; empty if not recorded, as for allocations of
            backward in threads of autograd.
        recorded: whether the allocation is in the recorded history.
    """

    address: int
    nbytes: int
    stack: tuple[Frame, ...]
    recorded: bool


@dataclass(frozen=True)
class Moment:
    """The memory of one device when an allocation failed; if none failed, when the snapshot was taken.

    Attributes:
        device: the index of the device.
        requested_bytes: the size of the failed allocation; `None` if none failed.
        device_free_bytes: the bytes that the driver had left.
        stack: the stack of the failed allocation.
        segments: the address and size of each segment of the allocator.
        blocks: the blocks in use.
    """

    device: int
    requested_bytes: int | None
    device_free_bytes: int | None
    stack: tuple[Frame, ...]
    segments: Mapping[int, int]
    blocks: tuple[Block, ...]


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles containers, strings and numbers, and raises at any reference to a class or function."""

    def find_class(self, module: str, name: str) -> Any:
        raise ConfigError(
            f"this file is no memory snapshot: it names {module}.{name}, which could run code, and a snapshot is plain "
            "data; no code of the file was run"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise ConfigError("this file is no memory snapshot: it refers to something outside of itself")


def read_snapshot(path: str | os.PathLike[str]) -> dict[str, Any] | str:
    """Returns the snapshot in a file, or the text of a log with the error.

    Raises:
        ConfigError: the file cannot be read, or is neither a log nor a pickle of plain data.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the snapshot {str(path)!r} cannot be read ({error.strerror}); {_TAKEN}") from error
    if not content.startswith(pickle.PROTO) and FAILURE.encode() in content:
        return content.decode(errors="replace")
    # Classes that this process has unpickled by extension code are cached here, and would bypass `find_class`.
    copyreg.clear_extension_cache()
    try:
        found = _PlainUnpickler(io.BytesIO(content)).load()
    except ConfigError as error:
        raise ConfigError(f"{str(path)!r}: {error}") from None
    except Exception as error:  # a file that is no pickle can raise any error
        raise ConfigError(f"{str(path)!r} is no memory snapshot ({type(error).__name__}: {error}); {_TAKEN}") from error
    return check_snapshot(found)


def check_snapshot(found: Any) -> dict[str, Any]:
    """Returns `found` after checking that it has the form of a snapshot.

    Raises:
        ConfigError: `found` is no snapshot.
    """
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), list) for key in ("segments", "device_traces")
    ):
        raise ConfigError(
            f"a memory snapshot is a dictionary with lists of 'segments' and 'device_traces', got "
            f"{type(found).__name__}; {_MADE_BY}"
        )
    return found


def moment_of(snapshot: Mapping[str, Any], device: int | None = None) -> Moment:
    """Returns the memory of a device at the last failed allocation in `snapshot`.

    Args:
        snapshot: the result of `read_snapshot`.
        device: the index of the device; `None` is the one where an allocation failed, else the one that holds most.

    Raises:
        ConfigError: the snapshot has no such device, or a value of the wrong type.
    """
    traces = [_list(trace, "device_traces") for trace in snapshot["device_traces"]]
    segments = [_dict(segment, "segments") for segment in snapshot["segments"]]
    if device is None:
        failed = [index for index, trace in enumerate(traces) if any(_action(event) == "oom" for event in trace)]
        held = [_int(segment, "device") for segment in segments]
        device = failed[-1] if failed else max(held, key=held.count, default=0)
    if not 0 <= device < max(len(traces), 1):
        raise ConfigError(f"the snapshot has no device {device}; it has {len(traces)}")
    trace = traces[device] if traces else []
    at = max((index for index, event in enumerate(trace) if _action(event) == "oom"), default=None)
    state = _State.of(segment for segment in segments if _int(segment, "device") == device)
    known = {_address(event): event for event in (trace if at is None else trace[:at]) if _action(event) == "alloc"}
    for event in reversed(trace[at + 1 :] if at is not None else []):
        state.undo(event, known)
    blocks = [
        Block(address, nbytes, stack or _stack(known.get(address, {})), address in known)
        for address, (nbytes, stack) in state.blocks.items()
    ]
    failure = None if at is None else trace[at]
    return Moment(
        device,
        None if failure is None else _int(failure, "size"),
        None if failure is None else _int(failure, "device_free"),
        () if failure is None else _stack(failure),
        state.segments,
        tuple(blocks),
    )


class _State:
    """The state of an allocator, from which events can be undone, last one first."""

    def __init__(self) -> None:
        self.segments: dict[int, int] = {}
        self.blocks: dict[int, tuple[int, tuple[Frame, ...]]] = {}

    @classmethod
    def of(cls, segments: Any) -> _State:
        state = cls()
        for segment in segments:
            state.segments[_address(segment)] = _int(segment, "total_size")
            address = _address(segment)
            for block in _list(segment.get("blocks", []), "blocks"):
                nbytes = _int(_dict(block, "blocks"), "size")
                address = _int(block, "address") if "address" in block else address
                if block.get("state") != "inactive":  # a block that waits to be freed is still in use
                    state.blocks[address] = (nbytes, _stack(block))
                address += nbytes
        return state

    def undo(self, event: Any, known: Mapping[int, Any]) -> None:
        action = _action(event)
        if action == "alloc":
            self.blocks.pop(_address(event), None)
        elif action == "free_completed":
            address = _address(event)
            self.blocks[address] = (_int(event, "size"), _stack(known.get(address, {})))
        elif action in ("segment_alloc", "segment_map"):
            self.segments.pop(_address(event), None)
        elif action in ("segment_free", "segment_unmap"):
            self.segments[_address(event)] = _int(event, "size")


def _stack(record: Mapping[str, Any]) -> tuple[Frame, ...]:
    frames = _list(record.get("frames") or [], "frames")
    return tuple(
        Frame(str(frame.get("filename", "")), _int({"line": 0, **frame}, "line"), str(frame.get("name", "")))
        for frame in (_dict(each, "frames") for each in frames)
    )


def _action(event: Any) -> str:
    return str(_dict(event, "device_traces").get("action"))


def _address(record: Mapping[str, Any]) -> int:
    # Segments and events, and older versions of PyTorch, use different keys.
    return _int(record, "addr" if "addr" in record else "address")


def _int(record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"the memory snapshot has {key}={value!r} in place of an integer; {_MADE_BY}")
    return value


def _list(value: Any, key: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"the memory snapshot has {key} of type {type(value).__name__}, not a list; {_MADE_BY}")
    return value


def _dict(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"the memory snapshot has {type(value).__name__} among {key}, not a dictionary; {_MADE_BY}")
    return value
