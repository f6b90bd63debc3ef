"""Sharding propagation of DTensors in a simulated step: with fake tensors, and once for each kind of tensor."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from memscale.simulation.process.process_state import patched

_DTENSOR = "torch.distributed.tensor._sharding_prop"


@contextmanager
def propagating() -> Iterator[None]:
    """Makes DTensors propagate shapes outside the simulation's dispatch mode, and shardings once for each kind.

    An optimizer passes lists with all parameters, and PyTorch's propagation loops over the whole list for each of its
    tensors: without the grouping by kind, propagation is quadratic in the number of parameters.
    """
    if _DTENSOR not in sys.modules:
        yield
        return
    propagator = sys.modules[_DTENSOR].ShardingPropagator
    find_shapes, find_sharding = "_propagate_tensor_meta_non_cached", "propagate_op_sharding_non_cached"
    shapes, sharding = getattr(propagator, find_shapes), getattr(propagator, find_sharding)

    def apart(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return shapes(self, schema)

    def by_kind(self: Any, schema: Any) -> Any:
        found = _of_kinds(schema)
        if found is not None:
            one_of_each, kinds = found
            answer = sharding(self, one_of_each)
            specs = answer.output_spec
            if not answer.needs_redistribute and (specs is None or isinstance(specs, (list, tuple))):
                many = None if specs is None else type(specs)(specs[kind] for kind in kinds)
                return dataclasses.replace(answer, output_spec=many)
        return sharding(self, schema)

    with patched(propagator, find_shapes, apart), patched(propagator, find_sharding, by_kind):
        yield


def _of_kinds(schema: Any) -> tuple[Any, list[int]] | None:
    """Return `schema` over lists with one tensor of each kind, and each tensor's kind; None if no list becomes shorter.

    A kind is the layout and the sharding of the tensors at one index of the lists.
    """
    lists = [arg for arg in schema.args_schema if isinstance(arg, (list, tuple))]
    if not lists or len({len(each) for each in lists}) != 1 or schema.kwargs_schema:
        return None
    if not all(hasattr(each, "placements") for each in lists[0]):
        return None  # the list is a shape, as an argument of `view`
    numbers: dict[Any, int] = {}
    kinds: list[int] = []
    first: list[int] = []
    for at, items in enumerate(zip(*lists, strict=True)):
        kind = tuple(each if hasattr(each, "placements") else type(each) for each in items)
        kinds.append(numbers.setdefault(kind, len(numbers)))
        if len(numbers) > len(first):
            first.append(at)
    if len(first) == len(kinds):
        return None
    args = tuple(
        type(arg)(arg[at] for at in first) if isinstance(arg, (list, tuple)) else arg for arg in schema.args_schema
    )
    return type(schema)(schema.op, args, schema.kwargs_schema, schema_info=schema.schema_info), kinds
