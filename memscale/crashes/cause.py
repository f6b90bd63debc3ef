"""`explain`: finds in an out-of-memory error or a memory snapshot what held the memory, and a plan that fits."""

from __future__ import annotations

import dataclasses
import os
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from traceback import FrameSummary, extract_tb
from typing import Any

import torch
from torch import nn

from memscale.core import ConfigError, Loss, format_bytes
from memscale.crashes.dump import FAILURE, MemoryState, UsedBlock, check_snapshot, moment_of, read_snapshot
from memscale.crashes.explanation import Explanation, Holder
from memscale.hardware import Hardware
from memscale.planning import Budget, OOMPrediction, OOMPredictor

_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# Parts of the paths of files that the report skips as library code.
_LIBRARY = ("/torch/", "\\torch\\", "<frozen", "<string>")
_PACKAGES = ("site-packages", "dist-packages")
# Files that make or move parameters, functions that make or load optimizer states, and files that start backward.
_PLACES = ("nn/modules/module.py", "nn/init.py")
_STATES = ("_init_group", "__setstate__", "load_state_dict")
_BACKWARD = ("torch/_tensor.py", "autograd/__init__.py", "autograd/graph.py")
# A run that needed more than this multiple of the simulated peak ran another step, since predictions are within 3 %.
_CONTRADICTION_RATIO = 1.05


def explain(
    subject: Any,
    *,
    model: nn.Module | None = None,
    batch: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Loss | None = None,
    hardware: Hardware | str | None = None,
    budget: Budget | None = None,
) -> Explanation:
    """Returns what held the memory when an allocation failed, by category and line of code, and the fragmentation.

    Of a snapshot with several devices, the report is about the one where an allocation failed, else about the one that
    holds most.

    A snapshot has the line that allocated each tensor if the history was recorded: call
    ``torch.cuda.memory._record_memory_history()`` first, and ``torch.cuda.memory._dump_snapshot(path)`` where the error
    is caught. Memory that was freed after the failure counts as in use. Files are read as plain data: a pickle that
    refers to any class or function is refused.

    >>> import torch, memscale as ms
    >>> print(ms.explain(torch.OutOfMemoryError(
    ...     "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which 1.00 GiB "
    ...     "is free. Of the allocated memory 4.00 GiB is allocated by PyTorch, and 2.50 GiB is reserved by PyTorch "
    ...     "but unallocated.")).message)
    cuda:0: an allocation of 2.00 GiB failed; tensors held 4.00 GiB, the allocator had 2.50 GiB free and the device \
had 1.00 GiB left, enough together but in pieces: the largest free block is smaller (fragmentation)

    Args:
        subject: the path of a snapshot, a snapshot, a ``torch.OutOfMemoryError``, its text, or the path of a log that
            has it. For an error, the present state of this process's allocator is read too; the error keeps the tensors
            in its frames alive.
        model, batch, optimizer, loss: the step, to find a plan that would have fitted; as in `OOMPredictor`.
        hardware: the card; `None` is the model's device, which must then be a card.
        budget: the memory that the step may take, if the process has a limit below the card's memory.

    Raises:
        ConfigError: `subject` is none of these, or a snapshot with more than plain data; or an argument of the step is
            wrong.
        RuntimeUnavailable: the step can be neither simulated nor run on this machine.
    """
    if isinstance(subject, os.PathLike) or (isinstance(subject, str) and FAILURE not in subject):
        subject = read_snapshot(subject)
    if isinstance(subject, dict):
        found = _of_snapshot(check_snapshot(subject))
    elif isinstance(subject, str):
        found = _of_log(subject)
    elif isinstance(subject, torch.OutOfMemoryError):
        found = _of_error(subject)
    else:
        raise ConfigError(
            f"explain() takes a torch.OutOfMemoryError, its text, the path of a log with it, a memory snapshot or the "
            f"path of one, got {type(subject).__name__}; torch.cuda.memory._dump_snapshot(path) writes one"
        )
    if model is None:
        return found
    predictor = OOMPredictor(model, optimizer, loss=loss, hardware=hardware)
    if hardware is None and predictor.hardware.device_type != "cuda":
        raise ConfigError(
            f"the run was on a CUDA card, and the plan would be for {predictor.hardware.name}: name"
            " the card, as hardware='t4', or with --gpu"
        )
    given = found.available_bytes if budget is None else budget
    prediction = predictor.predict(batch, budget=given, recommend=True)
    notes = (*_contradictions(found, prediction, model), *found.notes)
    return dataclasses.replace(found, prediction=prediction, notes=notes)


def _contradictions(found: Explanation, prediction: OOMPrediction, model: nn.Module) -> list[str]:
    """Returns a line that the failed run cannot be the simulated step, and the likely difference; ``[]`` if it can."""
    needed = found.allocated_bytes + (found.requested_bytes or 0)
    simulated = prediction.profile.peak_bytes
    if found.requested_bytes is None or needed <= _CONTRADICTION_RATIO * simulated:
        return []
    half = any(each.dtype in (torch.float16, torch.bfloat16) for each in model.parameters())
    weights = "float32 weights under autocast (--amp) where this model has 16 bits (--dtype), "
    return [
        f"contradiction: the run had {format_bytes(found.allocated_bytes)} in tensors and asked for "
        f"{format_bytes(needed - found.allocated_bytes)} more, and this step takes {format_bytes(simulated)} at most: "
        f"it was another step. Most likely it had {weights if half else ''}more or longer rows than this batch, or "
        "kept outputs, losses or a second model alive"
    ]


def _of_snapshot(snapshot: dict[str, Any], device: int | None = None) -> Explanation:
    moment = moment_of(snapshot, device)
    held = sum(moment.segments.values())
    notes = []
    if moment.requested_bytes is None:
        notes.append("no allocation failed in the recorded history: this is the moment of the snapshot")
    if not any(block.stack for block in moment.blocks):
        notes.append("no stacks: call torch.cuda.memory._record_memory_history() before the code to explain")
    elif any(not block.recorded and not block.stack for block in moment.blocks):
        notes.append("'other' was allocated before the recorded history begins")
    holders = _holders(moment)
    by_category: dict[str, int] = defaultdict(int)
    for holder in holders:
        by_category[holder.category] += holder.nbytes
    return Explanation(
        f"cuda:{moment.device}",
        moment.requested_bytes,
        sum(block.nbytes for block in moment.blocks),
        held,
        None if moment.device_free_bytes is None else held + moment.device_free_bytes,
        max(_gaps(moment), default=0),
        _where(moment.stack),
        dict(by_category),
        holders,
        notes=tuple(notes),
    )


def _of_log(text: str) -> Explanation:
    """Explains the last error in `text`, with the traceback before it."""
    before, _, message = text.rpartition(FAILURE)
    lines = re.findall(r'File "(.+)", line (\d+), in (.+)', before.rpartition("Traceback")[2])
    stack = [FrameSummary(file, int(line), name, lookup_line=False) for file, line, name in lines]
    return _of_message(FAILURE + message, stack)


def _of_error(error: torch.OutOfMemoryError) -> Explanation:
    found = _of_message(str(error), extract_tb(error.__traceback__))
    if not torch.cuda.is_initialized():
        return found
    now = _of_snapshot(check_snapshot(torch.cuda.memory._snapshot()), int(found.device.removeprefix("cuda:")))
    return dataclasses.replace(
        found,
        failed_at=found.failed_at or now.failed_at,
        by_category=now.by_category,
        holders=now.holders,
        notes=(*found.notes, "the lines show the memory held now, which may be less than at the failure", *now.notes),
    )


def _of_message(text: str, lines: Sequence[FrameSummary]) -> Explanation:
    def size(pattern: str) -> int | None:
        match = re.search(pattern.format(size=_SIZE), text)
        return None if match is None else int(Fraction(match[1]) * _UNITS[match[2]])

    requested = size("Tried to allocate {size}")
    allocated = size("Of the allocated memory {size} is allocated by PyTorch")
    free = size("and {size} is reserved by PyTorch but unallocated")
    left = size("of which {size} is free")
    if requested is None or allocated is None or free is None or left is None:
        raise ConfigError(f"pass explain() the whole error of PyTorch's CUDA allocator; this one says: {text[:200]}")
    limit = size("{size} allowed")
    where = re.search(r"GPU (\d+)", text)
    return Explanation(
        f"cuda:{0 if where is None else int(where[1])}",
        requested,
        allocated,
        allocated + free,
        allocated + free + left if limit is None else limit,
        failed_at=_where(lines[::-1]),
        notes=("the numbers are from the error's message, which rounds them",),
    )


def _holders(moment: MemoryState) -> tuple[Holder, ...]:
    found: dict[tuple[str, str], list[UsedBlock]] = defaultdict(list)
    for block in moment.blocks:
        found[_category(block), _where(block.stack)].append(block)
    holders = [
        Holder(sum(block.nbytes for block in blocks), len(blocks), *key, tuple(map(_line, blocks[0].stack)))
        for key, blocks in found.items()
    ]
    return tuple(sorted(holders, key=lambda holder: (-holder.nbytes, holder.where)))


def _category(block: UsedBlock) -> str:
    """Returns the category of memory, by the innermost function of PyTorch in its stack that decides it."""
    for frame in block.stack:
        file = frame.filename.replace("\\", "/")
        if "/optim/" in file:
            return "optimizer state" if frame.name in _STATES else "temporary"
        if "backward" in frame.name and file.endswith(_BACKWARD):
            return "backward"
        if frame.name in ("forward", "_call_impl", "_wrapped_call_impl"):
            return "activation"
        if file.endswith(_PLACES):
            return "parameter"
    # Memory without Python in its stack although history was recorded: autograd's threads run no Python.
    return "input" if block.stack else "backward" if block.recorded else "other"


def _where(stack: Iterable[FrameSummary]) -> str:
    """Returns the innermost line outside PyTorch; if that is in a package, also the script's line that called it."""
    outside = [frame for frame in stack if not any(part in frame.filename for part in _LIBRARY)]
    if not outside:
        return ""
    own = next((frame for frame in outside if not any(part in frame.filename for part in _PACKAGES)), outside[0])
    return _line(outside[0]) + ("" if own is outside[0] else f", called from {_line(own)}")


def _line(frame: FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _gaps(moment: MemoryState) -> Iterable[int]:
    """Yields the sizes of the free gaps in the segments, in bytes."""
    blocks = sorted((block.address, block.nbytes) for block in moment.blocks)
    for begin, nbytes in moment.segments.items():
        at, end = begin, begin + nbytes
        for address, size in blocks[bisect_left(blocks, (begin, 0)) : bisect_left(blocks, (end, 0))]:
            yield max(0, address - at)
            at = max(at, address + size)
        yield end - at
