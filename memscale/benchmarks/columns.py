"""The columns of the table: each tries plans from the fastest to the smallest, and shows the first that suffices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from memscale.algebra import Plan, Transform, compose
from memscale.benchmarks.subjects import TableSubject
from memscale.optimizers import offload_states, quantize_states, step_in_backward, step_in_groups
from memscale.planning import repeated_blocks
from memscale.transforms import checkpoint, offload, tile

_CHUNKS = 64  # pieces of the loss head
_PIECES = 4  # pieces of the widest module inside a block


@dataclass(frozen=True)
class Column:
    """A column of the table: a way to train.

    Attributes:
        dtype: the dtype of the parameters.
        share: the share of the published bytes to aim at; `None` to aim at the card's size.
        names: the plans to try, by their names in `plans`, the fastest first.
        numerics: how the numbers of the column relate to plain training in float32.
    """

    dtype: torch.dtype
    share: float | None
    names: tuple[str, ...]
    numerics: str


_STEP = "bit for bit the plain step of the same optimizer on the device where its states are"
_BF16 = "weights, gradients and moments rounded to bfloat16"

_ON_HOST = f"{_BF16}; the step on the host"
_MOVED = Column(torch.bfloat16, None, ("streamed, moved",), _ON_HOST)

#: The columns by their headings.
COLUMNS: Mapping[str, Column] = {
    "exact": Column(
        torch.float32,
        1.0,
        ("recomputed", "recomputed, freed", "recomputed, below, freed", "streamed"),
        f"{_STEP}; the tiled head adds its gradient in pieces",
    ),
    "fastest": Column(
        torch.bfloat16,
        None,
        ("recomputed", "recomputed, freed", "recomputed, freed, 8-bit", "recomputed, below, freed", "streamed"),
        f"{_BF16}, moments to 8 bits where the plan says so",
    ),
    "smallest": _MOVED,
    "host": _MOVED,
    "bf16 + 8-bit": Column(
        torch.bfloat16,
        0.65,
        ("recomputed, 8-bit", "recomputed, freed, 8-bit", "cut, freed, 8-bit", "row by row, freed, 8-bit"),
        f"{_BF16}, moments to 8 bits between steps; blocks that are cut draw other masks of dropout",
    ),
    "everything": Column(torch.bfloat16, 0.25, ("recomputed, below, freed", "streamed", "streamed, moved"), _ON_HOST),
    "disk": Column(torch.bfloat16, None, ("streamed, disk",), f"{_ON_HOST}, states on its disk"),
}


def plans(model: nn.Module, subject: TableSubject) -> dict[str, Plan]:
    """Returns the plans for `model`, by name."""
    blocks = repeated_blocks(model)
    freed, below, small = step_in_backward(), offload_states(), quantize_states()
    streamed = offload(what="params")

    # Cut along rows if there are several: the layers of GPT-2 view their input, so they cannot be cut along positions.
    rows = min(_PIECES, subject.batch)
    cut = tile(chunks=rows) if rows > 1 else tile(chunks=_PIECES, dim=1)
    cut_block, each_row = (cut, tile(chunks=subject.batch)) if rows > 1 else (checkpoint(), checkpoint())

    def plan(how: Transform, *stepping: Transform) -> Plan:
        rules: list[tuple[str, Transform]] = [(path, how) for path in blocks]
        rules += [(f"{path}.{subject.inner}", cut) for path in blocks if subject.inner is not None]
        rules += [(path, checkpoint()) for path in subject.others]
        return Plan([*rules, (subject.head, tile(chunks=_CHUNKS)), ("", compose(*stepping))])

    return {
        "recomputed": plan(checkpoint(), step_in_groups(group_bytes="64MiB")),
        "recomputed, freed": plan(checkpoint(), freed),
        "recomputed, 8-bit": plan(checkpoint(), small),
        "recomputed, freed, 8-bit": plan(checkpoint(), freed, small),
        "cut, freed, 8-bit": plan(cut_block, freed, small),
        "row by row, freed, 8-bit": plan(each_row, freed, small),
        "recomputed, below, freed": plan(checkpoint(), freed, below),
        "streamed": plan(compose(streamed, checkpoint()), freed, below),
        "streamed, moved": plan(compose(streamed, offload(), checkpoint()), freed, below),
        "streamed, disk": plan(compose(streamed, offload(), checkpoint()), freed, offload_states(tier="disk")),
    }
