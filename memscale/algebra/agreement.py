"""Checks once, at the first step, that all processes that train a model use the same plan."""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
import warnings
import weakref
from collections import defaultdict
from datetime import timedelta
from typing import Any

from torch import nn

from memscale.algebra.plan import Plan
from memscale.algebra.region import Transformed, placing_in
from memscale.core import PlanError, TransformError, assembled_in, fsdp_groups_of, internals, simulating

# Generous: the processes synchronized just before, in the collectives of FSDP2's root or of DDP's buffers.
_PATIENCE = timedelta(seconds=120)
_LONGEST_PLAN = 200

# How many models each group of ranks has compared, which makes the keys in the store unique.
_numbers: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)


class Agreement:
    """Compares the plan of a transformed model with the plans of the other processes.

    Args:
        model: the root of the transformed tree.
        plan: the plan that `model` was transformed by.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self._model = weakref.ref(model)
        self._text = f"{_hash(plan)} {Plan([(rule.pattern, rule.transform) for rule in plan])!r}"
        self._made_for = plan.parallel
        self.is_open = True

    def settle(self) -> None:
        """Compares the plans, when the first real step begins.

        By then the processes that train the model are known: the ranks of its FSDP2 mesh, or of DDP's group. Each
        writes its plan to the store of the process group and reads the others' from there. A collective would hang if
        one process did not take part; the store has a timeout.

        Raises:
            TransformError: the plans differ (raised in every process), a process has written none in time, or FSDP2
                has sharded parameters that a region would move.
        """
        model = self._model()
        if model is None:
            return
        distributed = sys.modules.get("torch.distributed")
        is_several = distributed is not None and distributed.is_available() and distributed.is_initialized()
        mesh = _mesh_of(model) if is_several else None
        if mesh is not None and (placing := [path for path, each in model.named_modules() if placing_in(each)]):
            raise TransformError(
                f"offload(what='params') keeps the parameters of {placing[0] or 'the model'!r} on another tier, and "
                "fully_shard() took the same parameters; only one of the two can place them. Leave what='params' out "
                "of the plan, and shard with CPUOffloadPolicy() for parameters in host memory"
            )
        if mesh is not None:
            _refuse_around_sharded(model)
        if simulating():
            return
        parallel, ranks = _ranks_of(mesh) if is_several else ("", ())
        if is_several and not ranks:
            return  # one process calls `ddp.module` by itself, before the training step
        self.is_open = False
        self._say_for_whom(parallel, len(ranks))
        if distributed is not None and len(ranks) > 1 and distributed.get_backend() != "fake":
            _compare(distributed, ranks, self._text)

    def _say_for_whom(self, parallel: str, count: int) -> None:
        asked = self._made_for
        if asked is None or (asked.kind, asked.world) == (parallel, count):
            return
        here = f"{parallel} over {count} process{'es' * (count > 1)}" if parallel else "one process"
        warnings.warn(
            f"this plan was made for {asked}, and this is {here}, so its memory and time differ from the plan's; "
            "plan again with the parallel= and world= of this run",
            RuntimeWarning,
            stacklevel=2,
        )


def _refuse_around_sharded(model: nn.Module) -> None:
    for path, module in model.named_modules():
        regions = [part for part in assembled_in(module.__dict__.get("forward")) if isinstance(part, Transformed)]
        if not (why := next((region.not_around_sharded for region in regions if region.not_around_sharded), "")):
            continue
        for name, each in module.named_modules(prefix=path):
            if each is not module and fsdp_groups_of(each):
                raise TransformError(
                    f"{regions[0].how!r} of {path or 'the model'!r} is around {name!r}, which fully_shard() took: "
                    f"{why}. In the plan, name the modules that fully_shard() takes, or modules inside them"
                )


def _mesh_of(model: nn.Module) -> Any:
    """Returns the largest mesh over which FSDP2 has sharded the model, tensor parallelism included, or `None`."""
    found: list[Any] = []
    for module in model.modules():
        for group in fsdp_groups_of(module):
            found += [group.mesh_info.mesh, *(each.sharded_param.device_mesh for each in group.fsdp_params)]
    return max(found, key=lambda mesh: mesh.size(), default=None)


def _ranks_of(mesh: Any) -> tuple[str, tuple[int, ...]]:
    """Returns the parallelism of the model ("fsdp2" or "ddp") and its ranks; ``("", ())`` if there is neither."""
    if mesh is not None:
        return "fsdp2", tuple(mesh.mesh.flatten().tolist())
    replica = None
    if "torch.nn.parallel.distributed" in sys.modules:
        replica = internals.named("torch.nn.parallel.distributed.DistributedDataParallel._active_ddp_module")
    if replica is not None:
        return "ddp", tuple(sys.modules["torch.distributed"].get_process_group_ranks(replica.process_group))
    return "", ()


def _compare(distributed: Any, ranks: tuple[int, ...], text: str) -> None:
    store = internals.named("torch.distributed.distributed_c10d._get_default_store")()
    group = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
    number = next(_numbers[ranks])
    keys = {rank: f"memscale plan {group} {number} {rank}" for rank in ranks}
    store.set(keys[distributed.get_rank()], text)
    try:
        store.wait(list(keys.values()), _PATIENCE)
    except RuntimeError as error:  # the store timed out, or its host is gone
        late = [rank for rank, key in keys.items() if not store.check([key])]
        raise TransformError(
            f"processes {late} have not begun a step of a transformed model {_PATIENCE.seconds} s after this one; "
            "transform the model in every process with the same plan, even with a plan without rules"
        ) from error
    texts = store.multi_get(list(keys.values())) if store.has_extended_api() else map(store.get, keys.values())
    plans: dict[str, str] = {}
    having: dict[str, list[int]] = {}
    for rank, found in zip(ranks, texts, strict=True):
        digest, _, plan = found.decode().partition(" ")
        plans.setdefault(digest, plan)
        having.setdefault(digest, []).append(rank)
    if len(plans) > 1:
        differing = "; ".join(f"{_numbered(having[each])} {each[:8]} {_shown(plan)}" for each, plan in plans.items())
        raise TransformError(
            f"the processes of this model have different plans, and would wait for each other: {differing}. "
            "Make the plan in one of them and send it to the others (torch.distributed.broadcast_object_list), or plan "
            "in each with the same arguments"
        )


def _numbered(ranks: list[int]) -> str:
    few = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {few}:"


def _shown(plan: str) -> str:
    return plan if len(plan) <= _LONGEST_PLAN else f"{plan[:_LONGEST_PLAN]}..."


def _hash(plan: Plan) -> str:
    try:
        return plan.hash
    except PlanError:  # a rule without a JSON form; the addresses in its repr differ between processes
        return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", repr(plan)).encode()).hexdigest()
