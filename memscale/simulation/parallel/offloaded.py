"""What FSDP2 keeps in the memory of the host beside a card, under `CPUOffloadPolicy`: where it lies, and its copies."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memscale.hardware import Direction, knows_copies
from memscale.simulation.dispatch.live_storages import LiveStorages
from memscale.simulation.dispatch.trace_builder import StorageRecord, TraceBuilder
from memscale.simulation.sandbox.process_state import patched
from memscale.simulation.schedule.clock import Clock

_FSDP2 = "torch.distributed.fsdp._fully_shard"


@contextmanager
def offloaded_shards(
    storages: LiveStorages, clock: Clock, like: Callable[..., torch.Tensor], *, pins: bool
) -> Iterator[None]:
    """Let FSDP2's own code find shards on the host in the body, in pinned memory if it `pins` them.

    It copies a shard to the card in the stream that gathers it, and the gradient back in the stream that reduced that,
    by ``Tensor.to``, which does nothing where tensors are on the CPU wherever they lie.

    Args:
        storages, clock: of the step; shards are offloaded.
        like: makes a tensor with the layout of another one, ``offloaded=True`` or on the card.
        pins: whether copies of shards go on by themselves.
    """
    to, is_pinned = torch.Tensor.to, torch.Tensor.is_pinned

    def copied(tensor: torch.Tensor, direction: Direction, tier: str) -> torch.Tensor:
        clock.calls(clock.host.plain)
        result = like(tensor, offloaded=direction == "out")
        if knows_copies(clock.hardware):
            clock.copy_in_stream(direction, tier, tensor.nbytes)
        return result

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], torch.device) and _is_of_fsdp(sys._getframe(2)):
            if storages.is_offloaded(tensor):
                return copied(tensor, "in", "pinned" if pins else "pageable")
            return copied(tensor, "out", "pinned" if kwargs.get("non_blocking") else "pageable")
        return to(tensor, *args, **kwargs)

    def in_pinned(tensor: torch.Tensor, *args: Any) -> bool:
        return pins if _is_of_fsdp(sys._getframe(2)) else is_pinned(tensor, *args)

    with patched(torch.Tensor, "to", moved), patched(torch.Tensor, "is_pinned", in_pinned):
        yield


def host_bytes(builder: TraceBuilder, *, pins: bool) -> dict[str, int]:
    """The most that the last step has on the host, by tier: shards and gradients, and beside them what is pageable.

    PyTorch rounds what is pinned up to a power of two, each tensor by itself.
    """
    most: dict[str, int] = {}
    now = {"pinned": 0, "pageable": 0}
    begin = builder.steps[-1][0]
    for at, event in enumerate(builder.events):
        record = builder.records[abs(event) - 1]
        if record.offloaded:
            tier, nbytes = _taken(record, pins=pins)
            now[tier] += nbytes if event > 0 else -nbytes
        if at >= begin - 1:
            most = {tier: max(nbytes, most.get(tier, 0)) for tier, nbytes in now.items()}
    return {tier: nbytes for tier, nbytes in most.items() if nbytes}


def _taken(record: StorageRecord, *, pins: bool) -> tuple[str, int]:
    nbytes = math.prod(record.shape) * getattr(torch, record.dtype).itemsize
    if pins and record.category in ("parameter", "gradient"):
        return "pinned", 1 << (nbytes - 1).bit_length() if nbytes else 0
    return "pageable", nbytes


def _is_of_fsdp(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_FSDP2)
