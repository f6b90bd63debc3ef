"""Reads a memory snapshot of PyTorch's CUDA allocator without running code from the file.

``torch.cuda.memory._dump_snapshot`` writes a pickle, and loading a pickle can run any function. A snapshot consists of
dictionaries, lists, strings and numbers only, so the reader refuses everything else.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any

from memscale.core import ConfigError, Document

# The part of the error message by which a log is recognized.
FAILURE = "out of memory. Tried to allocate"
_MADE_BY = "torch.cuda.memory._dump_snapshot(path) writes a snapshot"
_DOCUMENT = Document("memory snapshot", version=0, writer="torch.cuda.memory._dump_snapshot(path)", error=ConfigError)
_TAKEN = f"{_MADE_BY}, and a log must have the line '... {FAILURE} ...' of the error"


@dataclass(frozen=True)
class UsedBlock:
    """A block of a segment that is in use.

    Attributes:
        stack: the lines of Python of the allocation, innermost first; empty if not recorded, as for allocations of
            backward in threads of autograd.
        recorded: whether the allocation is in the recorded history.
    """

    address: int
    nbytes: int
    stack: tuple[FrameSummary, ...]
    recorded: bool


@dataclass(frozen=True)
class MemoryState:
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
    stack: tuple[FrameSummary, ...]
    segments: Mapping[int, int]
    blocks: tuple[UsedBlock, ...]


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles containers, strings and numbers, and raises at any reference to a class or function."""

    def find_class(self, module: str, name: str) -> Any:
        raise ConfigError(
            f"this file is no memory snapshot: it names {module}.{name}, which could run code, and a snapshot is plain "
            "data; no code of the file was run"
        )


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
        raise ConfigError(f"{str(path)!r} is neither a memory snapshot nor a log with the error; {_TAKEN}") from error
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


@_DOCUMENT.parts()
def moment_of(snapshot: Mapping[str, Any], device: int | None = None) -> MemoryState:
    """Returns the memory of a device at the last failed allocation in `snapshot`.

    Args:
        snapshot: the result of `read_snapshot`.
        device: the index of the device; `None` is the one where an allocation failed, else the one that holds most.

    Raises:
        ConfigError: the snapshot has no such device, or a value of the wrong type.
    """
    traces, of_device = snapshot["device_traces"], [int(segment["device"]) for segment in snapshot["segments"]]
    if device is None:
        failed = [index for index, trace in enumerate(traces) if any(event["action"] == "oom" for event in trace)]
        device = failed[-1] if failed else max(of_device, key=of_device.count, default=0)
    if not 0 <= device < max(len(traces), 1):
        raise ConfigError(f"the snapshot has no device {device}; it has {len(traces)}")
    trace = list(traces[device]) if traces else []
    at = max((index for index, event in enumerate(trace) if event["action"] == "oom"), default=None)
    failure = None if at is None else trace[at]
    known = {_address(event): event for event in trace[:at] if event["action"] == "alloc"}
    segments: dict[int, int] = {}
    blocks: dict[int, UsedBlock] = {}

    def use(address: int, nbytes: int, record: Mapping[str, Any]) -> None:
        seen = known.get(address, {})
        is_recorded = address in known or bool(record.get("frames"))
        blocks[address] = UsedBlock(address, nbytes, _stack(record) or _stack(seen), is_recorded)

    for segment, owner in zip(snapshot["segments"], of_device, strict=True):
        if owner == device:
            address = _address(segment)
            segments[address] = int(segment["total_size"])
            for block in segment.get("blocks", ()):
                address, nbytes = int(block.get("address", address)), int(block["size"])
                if block.get("state") != "inactive":  # a block that waits to be freed is in use
                    use(address, nbytes, block)
                address += nbytes
    # Undo what happened after the failure, last event first.
    for event in reversed([] if at is None else trace[at:]):
        if event["action"] == "alloc":
            blocks.pop(_address(event), None)
        elif event["action"] == "free_completed":
            use(_address(event), int(event["size"]), {})
        elif event["action"] in ("segment_alloc", "segment_map"):
            segments.pop(_address(event), None)
        elif event["action"] in ("segment_free", "segment_unmap"):
            segments[_address(event)] = int(event["size"])
    return MemoryState(
        device,
        None if failure is None else int(failure["size"]),
        None if failure is None else int(failure["device_free"]),
        () if failure is None else _stack(failure),
        segments,
        tuple(blocks.values()),
    )


def _stack(record: Mapping[str, Any]) -> tuple[FrameSummary, ...]:
    """Returns the lines of Python of a stack."""
    frames = [
        FrameSummary(
            str(frame.get("filename", "")), int(frame.get("line", 0)), str(frame.get("name", "")), lookup_line=False
        )
        for frame in record.get("frames") or ()
    ]
    return tuple(frame for frame in frames if frame.filename.endswith(".py"))


def _address(record: Mapping[str, Any]) -> int:
    # Segments and events, and older versions of PyTorch, use different keys.
    return int(record["addr" if "addr" in record else "address"])
