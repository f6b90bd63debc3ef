"""The dispatch mode under which a step runs without computing: returns fake tensors, and records.

Every operator of a step passes here, about ten thousand for a large model. Facts that are independent of values come
from `operators`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memscale.core import ConfigError, OpOverload, interrupts_held
from memscale.hardware import Direction
from memscale.simulation.dispatch.lazy_values import NeedsValues, stands_in
from memscale.simulation.dispatch.live_storages import LARGEST_KNOWN, InPlaceSums, LiveStorages, is_small
from memscale.simulation.dispatch.operators import (
    LARGEST_RUN_BYTES,
    NOTHING,
    Call,
    CallEffect,
    CallEffects,
    Operator,
    composition,
    run_sparse,
)
from memscale.simulation.dispatch.step_recorder import StepRecorder
from memscale.simulation.dispatch.step_values import Choices, Values, guess_of, integers_of, with_numbers
from memscale.simulation.dispatch.trace_builder import CHOICE, DRAW, GIVEN, SCALAR, StorageRecord, TraceBuilder
from memscale.simulation.kernels.kernels import Kernels
from memscale.simulation.kernels.shapes import (
    Kind,
    exchanged,
    is_sparse,
    results_of,
    signature,
    strided_parts,
    tensors_in,
    written_by,
)
from memscale.simulation.parallel.collectives import NAMESPACE, WAITS, WRAP, Works, collective, scratch_bytes
from memscale.simulation.process.draws import Draws, StepRandomness, settle
from memscale.simulation.process.fake_storages import FakeStorages
from memscale.simulation.rules.layouts import result_layout
from memscale.simulation.schedule.clock import Clock

aten = torch.ops.aten

_CPU, _CARD = torch.device("cpu"), torch.device("cuda", 0)
_LARGEST_GUESS = 1 << 25
_LARGEST_STATE = 1 << 16  # bytes: numbers that optimizers compute, and tables of codes, are smaller
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_KNOWN, _IS_META = attrgetter("known"), attrgetter("is_meta")

_FROM_PYTHON = aten.lift_fresh.default
_SPARSE_ON_A_CARD = "has sparse tensors: the scratch memory of their kernels on a card is unknown and not counted"


class FakeMode(TorchDispatchMode):
    """Returns fake results for every operator on plain CPU tensors, and records births and deaths of storages.

    Args:
        kernels: the kernels of the simulated device.
        residents: the category and the name of storages from before the step, by address of their storage object.
        clock: the clock of the device, which each operator advances.
        draws: the random numbers that the step draws.
    """

    supports_higher_order_operators = True  # so that the error names the operator and its module

    def __init__(
        self,
        kernels: Kernels,
        residents: dict[int, tuple[str, str]],
        clock: Clock,
        draws: Draws = Draws.SEEDED,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.builder = TraceBuilder()
        self.storages = LiveStorages(
            self.builder,
            residents,
            has_own_memory=kernels.device_type != "cpu",
            stream=lambda: clock.stream,
        )
        self.values = Values(self.storages, alike=draws is not Draws.SEEDED)
        self.draws = draws
        self.fakes = FakeStorages()
        self.recorder = StepRecorder(self.storages, clock)
        self.searching = False  # whether the optimizer decides by values of the loss
        self.meets_sparse = False  # whether the batch has sparse tensors
        self.works = Works(clock)
        self.choices = Choices()
        self.randomness = StepRandomness(draws)
        self._one_thread = threading.RLock()  # serialises the operators of the step's threads
        self._accelerator = kernels.device_type if kernels.device_type != "cpu" else None
        self._effects = CallEffects(kernels, self.fakes)
        self._operators = self._effects.operators
        self._sums = InPlaceSums(self.storages)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled during a simulation, and the guard costs several microseconds per operator.
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        interrupts_held.act()
        with self._one_thread:
            try:
                return self._answered(op, types, args, kwargs or {})
            except Exception as error:
                self.recorder.place(error, op.name())
                raise

    def _answered(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not _PLAIN.issuperset(types) and not all(
            cls in _PLAIN or issubclass(cls, torch.nn.Parameter) for cls in types
        ):
            return NotImplemented  # the subclass runs this operator on its inner tensors, which come back here
        operator = self._operators.get(id(op))
        if operator is None:
            if (answer := self._of_another_kind(op, args, kwargs)) is not NotImplemented:
                return answer
            operator = self._effects.operator(op)
        if self.meets_sparse and any(map(is_sparse, given := tensors_in(args, kwargs))):
            return self._of_sparse(operator, args, kwargs, given)
        if operator.composed is not None:
            with self:
                return op._op_dk(operator.composed, *args, **kwargs)
        device = kwargs.get("device") if kwargs else None
        if device is not None:
            device = torch.device(device)
            if device.type == self._accelerator:
                kwargs = {**kwargs, "device": _CPU}  # the CPU stands for the device
                if op.name() == "aten::_to_copy" and self._is_on_device(args[0], kwargs):
                    return aten.alias.default(args[0])
                device = _CARD
        if operator.kind is Kind.RUN:
            return self._run(operator, args, kwargs)
        tensors: list[torch.Tensor] = []
        key: Any = signature(args[: operator.rule.deciding], kwargs, tensors, loose=operator.loose)
        if (device is not None and device.type == "meta") or any(map(_IS_META, tensors)):
            return op(*args, **kwargs)  # computes shapes only
        call = self._call(operator, args, kwargs, tensors)
        if device is _CARD:
            self.storages.offloaded = False
        elif device == _CPU and not tensors:
            self.storages.offloaded = self._is_host_count(args[0])  # a number in `where` is not a count
        if operator.rule.values == "reads":
            return self._read(call)
        if operator.rule.values == "lengths":
            return self._from_values(call)
        try:
            effect = self._effect(call, key)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._from_values(call)
        if effect.draws:
            torch.rand((), generator=self.randomness.torch)  # advances the generator, so that a region saves its state
        if effect.layout.is_view:
            return self.recorder.enter(operator, op(*args, **kwargs), effect)
        if operator.kind is Kind.IN_PLACE:
            return self._in_place(call, effect)
        # Zeros of an optimizer's states are as large as the parameters, and hardly any optimizer reads them.
        most = _LARGEST_STATE if self.recorder.course.optimizing else LARGEST_KNOWN
        if call.known and all(nbytes <= most for nbytes in effect.layout.storage_bytes):
            with contextlib.suppress(NotImplementedError):  # the CPU lacks a kernel of the device
                return self._compute(call, effect)
        if operator.chooses and tensors and tensors[0].numel() <= _LARGEST_GUESS:
            return self._choose(call, effect)
        return self._stand_in(call, effect)

    def _of_another_kind(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operator outside ATen and libraries; NotImplemented for any other operator."""
        if (namespace := getattr(op, "namespace", "")) == NAMESPACE:
            return self._collective(op, args)
        if namespace == "higher_order":
            raise NotImplementedError(f"a simulation does not follow {op.name()}, an operator of higher order")
        if op.__class__ is not OpOverload:  # of an object in C++, such as the one of `record_function`
            return op(*args, **kwargs)
        if op.namespace == "fsdp":  # the copies into a buffer before a collective, and out after it
            with self:  # a composite function: one of them returns views of memory that it has copied to
                return op._op_dk(composition(op, DispatchKey.CPU), *args, **kwargs)
        if op.name() in WAITS:
            self.works.awaited(args[0])
            return args[0]
        return op(*args, **kwargs) if op.name() == WRAP else NotImplemented

    def _of_sparse(self, operator: Operator, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Returns the results of an operator on sparse tensors, whose indices decide sizes: dense results are fake."""
        parts = strided_parts(tensors)
        self.storages.of_arguments(parts)
        if self._accelerator is not None:
            self.values.assumptions[_SPARSE_ON_A_CARD] = None
        written = written_by(operator.written, args, kwargs)
        result, probe = run_sparse(operator.op, args, kwargs, tensors, written, self.fakes)
        self.recorder.enter(operator, strided_parts(results_of(result)), self._effects.by_probe(parts, probe))
        return result

    def _call(self, operator: Operator, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Call:
        """Returns the call with its records; raises the error that the kernel would raise for indices."""
        records = self.storages.of_arguments(tensors)
        if (tape := self.recorder.tape) is not None:
            tape.begins(operator.op, args, kwargs, [record.known for record in records])
        if operator.op is aten.embedding.default and (records[1].known or tensors[1].is_floating_point()):
            self._check_indices(*tensors[:2])
        known = operator.rule.values == "constant" or (all(map(_KNOWN, records)) and all(map(is_small, tensors)))
        # tuple.__new__ takes half the time of calling the class.
        return tuple.__new__(Call, (operator, args, kwargs, tensors, records, known))

    def _effect(self, call: Call, key: Any) -> CallEffect:
        """Returns the effect of the call, which is looked up once for all calls with the same `key`."""
        operator, args, kwargs, tensors, *_ = call
        try:
            effect = operator.effects.get(key)
        except TypeError:  # a generator or another argument is unhashable
            effect = key = None
        return effect or self._effects.find(operator, args, kwargs, tensors, key, self.recorder.path())

    def _stand_in(self, call: Call, effect: CallEffect) -> Any:
        """Returns results with the layouts of the kernel's, without memory."""
        operator, args, kwargs, tensors, *_ = call
        result = effect.results(self.fakes, tensors)
        if effect.has_numbers:
            result = with_numbers(operator, result)
        self.recorder.enter(operator, result, effect, is_new=effect.alone is not None)
        if operator.sends:
            self.works.sent(operator.op, args, kwargs, result)
        if not self.values.follow(call, result) and effect.has_numbers:
            self.values.trust([tensor for tensor in results_of(result) if stands_in(tensor)], SCALAR)
        if operator.rule.in_place:
            self._sums.maybe_in_place(operator.op, tensors, result, self.recorder.first_of_node)
        elif operator.op is aten._safe_softmax.default:
            self._sums.mask_added_in_place(tensors[0])
        return result

    def _run(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Runs an operator that touches no data."""
        op = operator.op
        # New tensors here come from Python (`torch.tensor`), so their values are real.
        self.storages.offloaded = self.storages.counts = op is _FROM_PYTHON and self._is_host_count(list(args[0].shape))
        view = operator.rule.method if args and args[0].__class__ in _PLAIN else None
        result = op(*args, **kwargs) if view is None else view(*args, **kwargs)
        if result.__class__ is torch.Tensor and result.untyped_storage()._cdata in self.storages.live:
            self.recorder.calls("view")
            return result  # a view, the usual case
        self.recorder.enter(operator, result, NOTHING, known=True)
        return result

    def _is_host_count(self, shape: Any) -> bool:
        """Whether a scalar is made on the CPU while the step is on a device, as optimizers do for step counts."""
        return shape == [] and self.storages.has_own_memory and self.recorder.course.optimizing

    def _is_on_device(self, tensor: torch.Tensor, wanted: Mapping[str, Any]) -> bool:
        """Whether `tensor` already has the wanted device and dtype, so that ``x.to("cuda")`` copies nothing."""
        return wanted.get("dtype") in (None, tensor.dtype) and not (
            tensor.is_meta or self.storages.is_offloaded(tensor)
        )

    def _check_indices(self, weight: torch.Tensor, indices: torch.Tensor) -> None:
        """Raises an error for indices that the kernel would refuse, since fake kernels ignore values."""
        where = f" ({path})" if (path := self.recorder.path()) else ""
        if indices.is_floating_point():
            raise ConfigError(
                f"the batch gives an embedding {str(indices.dtype).removeprefix('torch.')} numbers as rows{where}; "
                "tokens and positions are integers: pass batch.long()"
            )
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < weight.shape[0]:
            raise ConfigError(
                f"the batch asks for rows {int(indices.min())} to {int(indices.max())} of an embedding with "
                f"{weight.shape[0]} rows{where}; check the tokens or positions"
            )

    def _in_place(self, call: Call, effect: CallEffect) -> Any:
        operator, args, kwargs, _, records, known = call
        op = operator.op
        if operator.rule.resizes:
            return self._resize(args[0], args[1] if op is aten.resize_.default else args[1].shape)
        written = written_by(operator.written, args, kwargs)
        if known and not any(record.category == "parameter" for record in records):
            self._call_real(operator, args, kwargs)
            if operator.draws:
                self._settle(written[0], call)
                self.values.trust(written, DRAW)
            elif guess_of(records) or any(record.op < 0 for record in records):
                for record in map(self.storages.record, written):
                    record.guess = record.guess or GIVEN
        else:
            self.values.overwrite(call, written)
        crosses = self.storages.has_own_memory and op is aten.copy_.default and len(records) == 2
        crosses = crosses and records[0].offloaded != records[1].offloaded
        way: Direction | None = ("out" if records[0].offloaded else "in") if crosses else None
        self.recorder.enter(operator, None, effect, way=way)
        returned = written[: len(op._schema.returns)]
        return returned[0] if len(returned) == 1 else tuple(returned) or None

    def _resize(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        """Resizes `tensor` to fake contents: the caller's storage stays unchanged."""
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        nbytes = (math.prod(shape) + offset) * tensor.itemsize
        grows = nbytes > storage.nbytes()
        stride = torch.empty(tuple(shape), device="meta").stride()
        tensor.set_(self.fakes.storage(nbytes) if grows else storage, offset, tuple(shape), stride)
        if grows:
            self.storages.moved(tensor, storage)
        return tensor

    def _compute(self, call: Call, effect: CallEffect) -> Any:
        operator = call.operator
        result = self._call_real(operator, call.args, call.kwargs)
        if operator.rule.empty:  # uninitialised memory differs each time
            with _disable_current_modes():
                result.untyped_storage().fill_(0)  # in contrast to `zero_`, leaves the version counter
        if operator.draws:
            self._settle(result, call)
        self.recorder.enter(operator, result, effect)
        self.values.trust(
            result, DRAW if operator.draws else "" if operator.rule.values == "constant" else guess_of(call.records)
        )
        return result

    def _call_real(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Returns the real results of the operator, drawn from the step's own generator if it is random."""
        if operator.drawing is not None:
            return operator.drawing(self.randomness.torch, *args, **kwargs)
        compute: Callable[..., Any] = operator.rule.computed or operator.op
        return compute(*args, **kwargs)

    def _settle(self, drawn: Any, call: Call) -> None:
        with _disable_current_modes():
            settle(drawn, call.operator.op, call.args, self.draws)

    def _choose(self, call: Call, effect: CallEffect) -> Any:
        """Returns chosen indices; for activations, which are not computed, by random values."""
        operator, args, kwargs, tensors, *_ = call
        source, guess = tensors[0], CHOICE
        if source.is_floating_point():
            # `multinomial` requires probabilities of at least 0.
            values = self.choices.numbers(source, positive=operator.draws)
        elif (whole := self.values.of(source)) is not None:
            values, guess = whole, self.storages.record(source).guess
        else:
            values = torch.zeros_like(source)
        chosen = self._call_real(operator, [values if arg is source else arg for arg in args], kwargs)
        result = integers_of(chosen, effect.layout.build(self.fakes, tensors))
        self.recorder.enter(operator, result, effect)
        self.values.trust([tensor for tensor in results_of(result) if not tensor.is_floating_point()], guess)
        return result

    def _read(self, call: Call) -> Any:
        operator, args, kwargs, tensors, records, known = call
        values = {id(tensor): tensor if known else self.values.of(tensor) for tensor in tensors}
        if any(value is None for value in values.values()):
            raise NeedsValues(f"{operator.op} reads a value that only a real run computes", self.recorder.path())
        self._assume(operator, records, reads=True)
        return operator.op(*exchanged(args, values), **exchanged(kwargs, values))

    def _from_values(self, call: Call) -> Any:
        """Returns the result of an operator whose shape depends on values; raises NeedsValues for unknown values."""
        operator, args, kwargs, tensors, records, _ = call
        op = operator.op
        deciding = [
            record
            for tensor, record in zip(tensors, records, strict=True)
            if len(tensors) == 1 or not tensor.is_floating_point()
        ]
        values = {
            id(tensor): self.values.of(tensor) for tensor, record in zip(tensors, records, strict=True) if record.later
        }
        if (
            not all(record.known or record.later for record in deciding)
            or sum(tensor.nbytes for tensor in tensors) > LARGEST_RUN_BYTES
            or any(value is None for value in values.values())
        ):
            raise NeedsValues(f"the shape of what {op} returns depends on values", self.recorder.path())
        self._assume(operator, deciding)
        args, kwargs = exchanged(args, values), exchanged(kwargs, values)
        result = op(*args, **kwargs)
        whole = result
        if not all(record.known or record.later for record in records):
            fake = result_layout(result, tensors).build(self.fakes, tensors)
            result = integers_of(result, fake) if operator.rule.values == "lengths" else fake
        self.recorder.enter(operator, result, self._effects.by_values(op, args, kwargs, result))
        trusted = {id(tensor) for tensor in results_of(whole)}
        self.values.trust([tensor for tensor in results_of(result) if id(tensor) in trusted], guess_of(deciding))
        return result

    def _collective(self, op: Any, args: Any) -> Any:
        call = collective(op, args)
        given, written = self.storages.of_arguments(call.given), self.storages.of_arguments(call.written)
        small = all(map(is_small, (*call.given, *call.written)))
        if small and all(map(_KNOWN, (*given, *written))):
            call.compute()
        else:
            self.values.forget(call.written)
        if self._accelerator is None and (scratch := scratch_bytes(op, args, call)):
            builder = self.builder
            builder.death(builder.birth(StorageRecord(scratch, len(builder.ops) - 1, "workspace", path="gloo")))
        return self.works.returned(op, args, call)

    def _assume(self, operator: Operator, records: list[StorageRecord], *, reads: bool = False) -> None:
        # A model must not decide by a stand-in value.
        decides = bool(self.recorder.modules or self.searching)
        self.values.assume(operator, records, self.recorder.path(), decides=decides, reads=reads)
