"""Recurrent layers: where their rows are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memscale.core import TransformError, modules_in
from memscale.transforms.tile.cutting import Cut, Cutting, broadcast


def refuse_time(how: Cutting, fn: Any, cut: Cut) -> None:
    """Raise `TransformError` if `fn` is a recurrent layer and `how` cuts it anywhere else than over the batch.

    Sizes do not tell: the state of one layer is as long in front as a piece of one step.
    """
    module = next(modules_in(fn), None)
    if not isinstance(module, nn.RNNBase):
        return
    given = [index for index, leaf in enumerate(cut.leaves) if isinstance(leaf, torch.Tensor)]
    if cut.leaves[given[0]].dim() != 3:
        raise TransformError(
            f"{how!r} around {type(module).__name__}: its input has no batch, and steps depend on one another; use "
            "checkpoint() for this region"
        )
    rows, states = 0 if module.batch_first else 1, (1, 1) if isinstance(module, nn.LSTM) else 1
    out: list[Any] = [how.dim] * (3 if states != 1 else 2)
    if how.out_dims is not ...:
        out.clear()
        broadcast(how.out_dims, (0, (0, 0) if states != 1 else 0), out)
    right = [rows, *[1] * (len(given) - 1)], [rows, *[1] * (len(out) - 1)]
    if ([cut.dims.get(index) for index in given], [None if dim is None else dim % 3 for dim in out]) != right:
        raise TransformError(
            f"{how!r} around {type(module).__name__}(batch_first={module.batch_first}) does not cut the batch alone; "
            f"say in_dims={(rows, states)[: 1 + (len(given) > 1)]}, out_dims={(rows, states)}, for states have their "
            "layers in front"
        )
