"""Host memory and host-device copies of FSDP2 under `CPUOffloadPolicy`, on a simulated card."""

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
from memscale.simulation.process.process_state import patched
from memscale.simulation.schedule.clock import Clock

_FSDP2 = "torch.distributed.fsdp._fully_shard"


@contextmanager
def offloaded_shards(
    storages: LiveStorages, clock: Clock, like: Callable[..., torch.Tensor], *, pins: bool
) -> Iterator[None]:
    """Makes ``Tensor.to`` and ``Tensor.is_pinned`` act for FSDP2's code as if shards were on the host of a real card.

    FSDP2 copies a shard to the card in the all-gather stream, and the gradient back in the reduce-scatter stream, by
    ``Tensor.to``. In a simulation all tensors are on the CPU, where the original ``Tensor.to`` would copy nothing.

    Args:
        storages: the live storages of the step, which know what is offloaded.
        clock: the clock of the step.
        like: makes a tensor with the layout of another one, on the host with ``offloaded=True``, else on the card.
        pins: whether the shards are in pinned memory, from which copies are asynchronous.
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
    """Returns the most host bytes that offloaded storages of the last step hold at once, by tier.

    With `pins`, shards and gradients are ``pinned``, where PyTorch rounds each tensor up to a power of two bytes; all
    other offloaded storages are ``pageable``.
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
