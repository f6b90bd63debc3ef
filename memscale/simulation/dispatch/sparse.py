"""Operators on sparse tensors of the batch: they run, on zeros, since indices say how large each result is."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from memscale.simulation.dispatch.fake_storages import FakeStorages
from memscale.simulation.kernels.cpu_scratch import ScratchProbe, watched
from memscale.simulation.kernels.shapes import exchanged, is_sparse, results_of, strided_parts
from memscale.simulation.rules.layouts import result_layout


def ran(
    op: OpOverload,
    args: Any,
    kwargs: Any,
    tensors: list[torch.Tensor],
    written: list[torch.Tensor],
    fakes: FakeStorages,
) -> tuple[Any, ScratchProbe]:
    """What `op` returns, and what its kernel allocated.

    Args:
        tensors: those among its arguments; the dense ones may be fake, which a kernel reads as zeros.
        written: those that it writes to, and returns as they are.
        fakes: makes the dense results.
    """
    parts = strided_parts(tensors)
    own = {id(tensor): torch.zeros_like(tensor) for tensor in written if not is_sparse(tensor)}
    args, kwargs = exchanged(tuple(args), own), exchanged(kwargs, own)
    result, probe = watched(lambda: op(*args, **kwargs), parts)
    if written:
        returned = written[: len(op._schema.returns)]
        return (returned[0] if len(returned) == 1 else tuple(returned) or None), probe
    results, known = results_of(result), {part.untyped_storage()._cdata for part in parts}
    if any(map(is_sparse, results)) or all(each.untyped_storage()._cdata in known for each in results):
        return result, probe  # of indices that are known, or these and the values themselves
    dense = [tensor for tensor in tensors if not is_sparse(tensor)]
    return result_layout(result, dense).build(fakes, dense), probe
