"""The operators of a simulated step: the facts that hold for all calls of one, and the effect of a call.

An effect is found without running the kernel: result layout, scratch memory and cost. The effect follows from the
signature of the call, the device and PyTorch's switches, so the process looks up each signature once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from memscale.core import OpOverload
from memscale.hardware import Work
from memscale.simulation.dispatch.lazy_values import NeedsValues, stands_in
from memscale.simulation.dispatch.trace_builder import StorageRecord
from memscale.simulation.kernels.cpu_scratch import ScratchProbe, watched
from memscale.simulation.kernels.kernels import BLAS_VARIABLES, Kernels
from memscale.simulation.kernels.shapes import (
    FakeKernels,
    Kind,
    exchanged,
    is_sparse,
    kind_of,
    results_of,
    strided_parts,
    written_arguments,
)
from memscale.simulation.process.draws import drawing_from
from memscale.simulation.process.fake_storages import FakeStorages
from memscale.simulation.rules.layouts import NewTensor, ResultLayout, result_layout
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.rule import PLAIN, RESULTS, OpRule, Program, is_deterministic, taken
from memscale.simulation.rules.work import tfloat32, work_of

aten = torch.ops.aten

# The namespaces of collectives that return new tensors, as DTensors call them.
_FUNCTIONAL = frozenset({"_c10d_functional", "c10d_functional"})


@dataclass(frozen=True, eq=False, slots=True)
class Operator:
    """An operator on the simulated device.

    Attributes:
        op: the operator.
        name: ``"aten::mm"``.
        kind: how the operator is simulated.
        rule: the facts beyond its schema.
        loose: whether the layout of its results does not depend on the values of floats.
        chooses: whether its integer results decide the model's next operations.
        draws: whether it advances a random generator.
        sends: whether it is a collective between processes, without work on the device.
        composed: the dispatch key of the kernel that composes it of other operators; None for a single kernel.
        written: the arguments that the operator writes to.
        order: the order in which its kernel allocates results, if it differs from the order of return.
        on_host: the results that are on the CPU of the host.
        effects: the effects of its calls, by signature.
    """

    op: OpOverload
    name: str
    kind: Kind
    rule: OpRule
    loose: bool
    chooses: bool
    draws: bool
    sends: bool
    composed: DispatchKey | None
    written: tuple[tuple[int, str], ...]
    order: tuple[int, ...]
    on_host: tuple[int, ...]
    drawing: Callable[..., Any] | None
    effects: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, op: OpOverload, kernels: Kernels) -> Operator:
        """Returns the facts about `op` on the device of `kernels`."""
        schema, rule = op._schema, rule_of(op)
        kind = kind_of(op)
        reads_nothing = not any("Tensor" in str(value.type) for value in schema.returns) and rule.values != "reads"
        if reads_nothing and kind is Kind.MAKE and not schema.is_mutable:
            kind = Kind.RUN  # asks about tensors (sizes, devices, assertions), and reads no values
        return cls(
            op=op,
            name=op.name(),
            kind=kind,
            rule=rule,
            loose=kind is Kind.IN_PLACE or torch.Tag.pointwise in op.tags,
            chooses=rule.values == "choice" and not schema.is_mutable,
            draws=torch.Tag.nondeterministic_seeded in op.tags,
            sends=op.namespace in _FUNCTIONAL and any(each.name == "group_name" for each in schema.arguments),
            composed=composition(op) if kernels.device_type in rule.composed_on else None,
            written=written_arguments(op),
            order=() if kernels.card is None else rule.order,
            on_host=() if kernels.card is None else rule.on_host,
            drawing=drawing_from(op) if torch.Tag.nondeterministic_seeded in op.tags else None,
        )


def composition(op: OpOverload, *before: DispatchKey) -> DispatchKey:
    """Returns the key of the kernel that composes `op` of others, the first in `before`; None if it has none."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = *before, DispatchKey.CompositeExplicitAutograd, DispatchKey.CompositeExplicitAutogradNonFunctional
    return next(key for key in keys if has_kernel(op.name(), key.name))


class Call(NamedTuple):
    """A call of an operator: its arguments, the tensors among them, and the records of these tensors' storages.

    ``known`` says whether the results follow from few values, all of which are known now.
    """

    operator: Operator
    args: Any
    kwargs: Any
    tensors: list[torch.Tensor]
    records: list[StorageRecord]
    known: bool


LARGEST_RUN_BYTES = 1 << 30
_MOST_EFFECTS = 1 << 15
# By the device and PyTorch's switches: the facts about PyTorch's own operators, by the id of the operator.
_known: dict[Any, dict[int, Operator]] = {}


@dataclass(frozen=True, eq=False, slots=True)
class CallEffect:
    """The effect of every call with one signature.

    Attributes:
        layout: the layout of the results.
        alone: the only result, if it is a new tensor at the beginning of its own storage; else None.
        program: the allocations of the kernel.
        work: the FLOPs and the memory traffic of the kernel.
        cost: the work that takes the device as long as the kernel.
        workspaces: library -> bytes of a workspace that stays allocated.
        draws: whether the call advances the step's random generator.
        has_numbers: whether a result is a single number, which a stand-in value can replace.
        listed: the number of tensors in a list argument, as of an optimizer's operators.
    """

    layout: ResultLayout
    alone: NewTensor | None
    program: Program
    work: Work
    cost: Work
    workspaces: Mapping[str, int]
    draws: bool = False
    has_numbers: bool = False
    listed: int = 0

    def results(self, fakes: FakeStorages, tensors: list[torch.Tensor]) -> Any:
        """Returns the results of a call with `tensors`, as fake tensors."""
        new = self.alone
        if new is not None:
            return fakes.alone(self.layout.storage_bytes[0], new.dtype, new.shape, new.stride)
        return self.layout.build(fakes, tensors)


#: The effect of an operator that touches no data.
_NO_WORK = Work(0, 0, "")
NOTHING = CallEffect(ResultLayout(None, ()), None, PLAIN, _NO_WORK, _NO_WORK, {})


class CallEffects:
    """Finds the effects of calls on a device.

    Args:
        kernels: the kernels of the device.
        fakes: makes fake tensors.

    Attributes:
        operators: the known operators, by id: hashing an OpOverload calls a Python function.
    """

    def __init__(self, kernels: Kernels, fakes: FakeStorages) -> None:
        self._kernels = kernels
        self._fakes = fakes
        if sum(len(each.effects) for known in _known.values() for each in known.values()) > _MOST_EFFECTS:
            _known.clear()
        self._shared = _known.setdefault((kernels.key, *_switches()), {})
        self.operators = self._shared.copy()

    @functools.cached_property
    def _fake(self) -> FakeKernels:
        return FakeKernels(self._kernels.card)

    def operator(self, op: OpOverload) -> Operator:
        """Returns the facts about `op`, which is new to this simulation, and caches them."""
        found = self.operators[id(op)] = Operator.of(op, self._kernels)
        if op.namespace == "aten":  # a custom operator may be registered again with other behaviour
            self._shared[id(op)] = found
        return found

    def find(
        self, operator: Operator, args: Any, kwargs: Any, tensors: list[torch.Tensor], key: Any, path: str
    ) -> CallEffect:
        """Returns the effect of a call in the module at `path`, for a new signature `key`; None means: not cacheable.

        Raises:
            DynamicOutputShapeException, DataDependentOutputException: the layout depends on values.
            NeedsValues: neither a fake kernel nor a rule gives the layout.
            Exception: the error that the real kernel would raise.
        """
        op = operator.op
        layout = self._layout(op, args, kwargs, tensors, path)
        shown = layout.build(self._fakes, tensors) if not layout.is_view else tensors[0]
        work = work_of(op, args, kwargs, shown)
        new = layout.outputs
        is_alone = isinstance(new, NewTensor) and not new.offset and len(layout.storage_bytes) == 1
        effect = CallEffect(
            layout=layout,
            alone=new if is_alone else None,
            program=PLAIN if layout.is_view else self._kernels.program(op, args, kwargs, shown, work.flops),
            work=work,
            cost=_NO_WORK if operator.sends else self._kernels.cost(op, args, work),
            workspaces=self._kernels.workspaces(op, args),
            # A card's generator keeps its state on the host.
            draws=self._kernels.device_type == "cpu" and operator.draws and not _drops_nothing(op, args, kwargs),
            has_numbers=any(map(stands_in, results_of(shown))),
            listed=len(args[0]) if args and isinstance(args[0], (list, tuple)) else 0,
        )
        if key is not None:
            operator.effects[key] = effect
        return effect

    def by_values(self, op: OpOverload, args: Any, kwargs: Any, result: Any) -> CallEffect:
        """Returns the effect of a call whose result shapes follow from the values in `args`, without its cost."""
        return dataclasses.replace(NOTHING, program=self._kernels.program(op, args, kwargs, result, 0, by_values=True))

    def by_probe(self, tensors: list[torch.Tensor], probe: ScratchProbe) -> CallEffect:
        """Returns the effect of a call on `tensors` that was probed on the CPU: scratch bytes, and the cost of traffic.

        For a card the scratch bytes are 0, since the CPU's kernel says nothing about the card's.
        """
        scratch = 0 if self._kernels.is_cuda else probe.scratch_bytes
        dtype = str(tensors[-1].dtype).removeprefix("torch.")
        work = Work(0, probe.returned_bytes + sum(tensor.nbytes for tensor in tensors), dtype)
        return dataclasses.replace(NOTHING, program=(*taken(scratch), RESULTS), work=work, cost=work)

    def _layout(self, op: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor], path: str) -> ResultLayout:
        if not op._schema.returns:
            # All operands are changed in place: an optimizer's loop over lists, an update by a custom operator.
            return ResultLayout(None, ())
        # Fake products accept operands of two dtypes, which the real kernels refuse.
        if rule_of(op).runs or (rule_of(op).rows is not None and len({tensor.dtype for tensor in tensors}) > 1):
            return self._on_zeros(op, args, kwargs, tensors, path)
        try:
            return self._fake.layout(op, args, kwargs, tensors)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise
        except Exception:
            # The operator has no fake kernel, or one that refuses valid arguments. The real kernel, on zeros, also
            # raises the error that the user would have seen.
            return self._on_zeros(op, args, kwargs, tensors, path)

    def _on_zeros(self, op: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor], path: str) -> ResultLayout:
        if op._schema.is_mutable or sum(tensor.nbytes for tensor in tensors) > LARGEST_RUN_BYTES:
            raise NeedsValues(f"{op} has no usable fake kernel and is too large to try on zeros", path)
        fakes = {id(tensor): self._fakes.like(tensor) for tensor in tensors if tensor.is_floating_point()}
        result = op(*exchanged(args, fakes), **exchanged(kwargs, fakes))  # the caller's tensors stay unchanged
        return result_layout(result, [fakes.get(id(tensor), tensor) for tensor in tensors])


def _switches() -> tuple[Any, ...]:
    """Returns the settings of the process that layouts, scratch memory and times depend on."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        is_deterministic(),
        torch.get_default_dtype(),
        torch.backends.mkldnn.enabled,
        torch.backends.cudnn.enabled,
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        *tfloat32(),
        *map(os.environ.get, BLAS_VARIABLES),
    )


def _drops_nothing(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether the call is attention with a dropout of 0, which draws no numbers."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            return not (args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value))
    return False


def run_sparse(
    op: OpOverload,
    args: Any,
    kwargs: Any,
    tensors: list[torch.Tensor],
    written: list[torch.Tensor],
    fakes: FakeStorages,
) -> tuple[Any, ScratchProbe]:
    """Runs `op` on sparse tensors, and returns its results and the allocations of its kernel.

    Args:
        tensors: the tensors among the arguments; dense ones may be fake, and a kernel reads zeros from these.
        written: the tensors that `op` writes to, which are returned unchanged.
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
        return result, probe  # of known indices, or of the indices and the values themselves
    dense = [tensor for tensor in tensors if not is_sparse(tensor)]
    return result_layout(result, dense).build(fakes, dense), probe
