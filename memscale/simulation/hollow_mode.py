"""The dispatch mode under which a step runs without computing: hollow tensors for answers, and books kept on them.

Every operator of a step passes here, some ten thousand of a large model's: what does not depend on the call is known
from `operators`, what does not depend on values from `call_effects`.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memscale.core import ConfigError
from memscale.hardware import Direction, host_seconds, knows_copies
from memscale.simulation.call_effects import LARGEST_RUN_BYTES, NOTHING, CallEffect, CallEffects
from memscale.simulation.garbage import StepCollections
from memscale.simulation.hollow import HollowStorages
from memscale.simulation.host_time import HostTime
from memscale.simulation.kernels.cuda_programs import in_order
from memscale.simulation.kernels.kernels import Kernels, linear
from memscale.simulation.kernels.programs import PLAIN
from memscale.simulation.kernels.shapes import (
    Kind,
    exchanged,
    result_layout,
    results_of,
    signature,
    written_by,
)
from memscale.simulation.ledger import CHOICE, DRAW, SCALAR, Course, Ledger, OpCall, StorageRecord, Sum
from memscale.simulation.live_storages import LARGEST_KNOWN, LiveStorages, is_small
from memscale.simulation.operators import Operator
from memscale.simulation.parallel.collectives import NAMESPACE, Works, collective, is_of_fsdp, is_wait, is_wrap
from memscale.simulation.schedule.clock import Clock
from memscale.simulation.values import NeedsValues, Values, guess_of, integers_of, stands_in, with_numbers

aten = torch.ops.aten

_CPU = torch.device("cpu")
_LARGEST_GUESS = 1 << 25
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_KNOWN, _IS_META = attrgetter("known"), attrgetter("is_meta")

_FROM_PYTHON = aten.lift_fresh.default
_RESIZES = {aten.resize_.default, aten.resize_as_.default}


class HollowMode(TorchDispatchMode):
    """Answers every operator on plain CPU tensors, and records births and deaths of storages in a `Ledger`.

    Args:
        kernels: those of the device that is simulated.
        residents: the category and the name of storages of before the step, by address of their storage object.
        clock: of that device, which each operator moves on.
        host: times what happens between the operators, where kernels are timed, too; None if nobody asks.
    """

    def __init__(
        self, kernels: Kernels, residents: dict[int, tuple[str, str]], clock: Clock, host: HostTime | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.storages = LiveStorages(
            self.ledger, residents, beside_cpu=kernels.device_type != "cpu", cached=host is not None
        )
        self.values = Values(self.storages)
        self.hollow = HollowStorages()
        self.modules: list[str] = []  # the paths of the modules that are running, innermost last
        self.course = Course()
        self.searching = False  # the optimizer decides by values of the loss
        self.host = host
        self.works = Works(clock)
        self._kernels = kernels
        self._accelerator = kernels.device_type if kernels.device_type != "cpu" else None
        self._clock = clock
        self._used: list[tuple[StorageRecord, int]] = []  # by the operator that is being answered
        # Of a library in a thread, each of which has a handle: the caller's, and autograd's for the device.
        self._workspaces: set[tuple[str, bool]] = set()
        self._effects = CallEffects(kernels, self.hollow)
        self._operators: dict[int, Operator] = {}  # by id: the hash of an OpOverload is a function in Python
        self._sum: Sum | None = None  # the last one
        self._collections = StepCollections()
        self._node_paths: dict[int, str] = {}  # sequence number of an autograd node -> the module that made it
        self._first_node = torch._C._autograd._get_sequence_nr()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled during a simulation, and the guard costs several microseconds at each operator.
        return False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.host is None:
            return self._answered(op, types, args, kwargs or {})
        self.host.stands()
        try:
            return self._answered(op, types, args, kwargs or {})
        finally:
            self.host.goes_on()

    def _answered(self, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not _PLAIN.issuperset(types) and not all(
            cls in _PLAIN or issubclass(cls, torch.nn.Parameter) for cls in types
        ):
            return NotImplemented  # a subclass takes itself apart, and its parts come back here
        operator = self._operators.get(id(op))
        if operator is None:
            if getattr(op, "namespace", "") == NAMESPACE:
                return self._collective(op, args)
            if op.__class__ is not OpOverload:  # operators of higher order
                return op(*args, **kwargs)
            if is_of_fsdp(op):
                with self:  # a function in Python, of operators: one returns views of memory that it has copied to
                    return op._op_dk(DispatchKey.CPU, *args, **kwargs)
            if is_wait(op):
                self.works.awaited(args[0])
                return args[0]
            if is_wrap(op):
                return op(*args, **kwargs)
            operator = self._operators[id(op)] = Operator.of(op, self._kernels)
        device = kwargs.get("device") if kwargs else None
        if device is not None:
            device = torch.device(device)
            if device.type == self._accelerator:
                kwargs = {**kwargs, "device": _CPU}  # which stands for it
                if op is aten._to_copy.default and self._is_there(args[0], kwargs):
                    return aten.alias.default(args[0])
        if operator.kind is Kind.RUN:
            return self._run(operator, args, kwargs)
        tensors: list[torch.Tensor] = []
        key: Any = signature(args, kwargs, tensors, loose=operator.loose)
        if (device is not None and device.type == "meta") or any(map(_IS_META, tensors)):
            return op(*args, **kwargs)  # computes shapes and nothing else, as it is
        records = self.storages.of_arguments(tensors)
        if self.host is not None:
            pairs = zip(records, tensors, strict=True)
            self._used = [(record, min(tensor.nbytes, record.nbytes)) for record, tensor in pairs]
        if op is aten.embedding.default and (records[1].known or tensors[1].is_floating_point()):
            self._check_indices(*tensors[:2])
        known = operator.is_constant or (all(map(_KNOWN, records)) and all(map(is_small, tensors)))
        if operator.reads:
            return self._read(operator, args, kwargs, tensors, records, known)
        if operator.goes_by_lengths:
            return self._from_values(operator, args, kwargs, tensors, records)
        try:
            try:
                effect = operator.effects.get(key)
            except TypeError:  # a generator or another argument without a hash
                effect = key = None
            if effect is None:
                effect = self._effects.find(operator, args, kwargs, tensors, key, self.path())
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._from_values(operator, args, kwargs, tensors, records)
        if effect.draws:
            torch.rand(())  # for a region to see that the generator moved, whose state it then keeps
        if effect.layout.is_view:
            return self._note(operator, op(*args, **kwargs), effect)
        if operator.kind is Kind.IN_PLACE:
            return self._in_place(operator, args, kwargs, tensors, records, known, effect)
        if known and all(nbytes <= LARGEST_KNOWN for nbytes in effect.layout.storage_bytes):
            with contextlib.suppress(NotImplementedError):  # a kernel of the device's that a CPU does not have
                return self._compute(operator, args, kwargs, records, effect)
        if operator.chooses and records and tensors[0].numel() <= _LARGEST_GUESS:
            return self._choose(operator, args, kwargs, tensors, effect)
        result = effect.results(self.hollow, tensors)
        if effect.has_numbers:
            result = with_numbers(operator, result)
        self._note(operator, result, effect)
        if operator.sends:
            self.works.sent(op, args, kwargs, result)
        if not self.values.follow(operator, args, kwargs, tensors, records, result) and effect.has_numbers:
            self.values.trust([tensor for tensor in results_of(result) if stands_in(tensor)], SCALAR)
        if operator.sums:
            self._maybe_in_place(tensors, result)
        elif op is aten._safe_softmax.default:
            self._mask_added_in_place(tensors[0])
        return result

    def _run(self, operator: Operator, args: Any, kwargs: Any) -> Any:
        """Run an operator that touches no data."""
        op = operator.op
        self.storages.away = False  # new ones here came from Python (`torch.tensor`), so their values are real
        if self.host is not None:
            self._used = []
            self.host.views()
        result = op(*args, **kwargs)
        if result.__class__ is torch.Tensor and result.untyped_storage()._cdata in self.storages.live:
            return result  # a view, as most of them are
        self._note(operator, result, NOTHING, known=True)
        if op is _FROM_PYTHON and self.course.optimizing and self.storages.beside_cpu:
            # An optimizer counts its steps on the CPU, unless it is fused or capturable, with zeros of the device.
            self.storages.record(result).nbytes = 0
        return result

    def _is_there(self, tensor: torch.Tensor, wanted: Mapping[str, Any]) -> bool:
        """Whether `tensor` is on the device already, as it is wanted: ``x.to("cuda")`` copies nothing then."""
        return wanted.get("dtype") in (None, tensor.dtype) and not (tensor.is_meta or self.storages.is_away(tensor))

    def _check_indices(self, weight: torch.Tensor, indices: torch.Tensor) -> None:
        """Refuse what the kernel would refuse: no fake kernel looks at values."""
        if indices.is_floating_point():
            where = f" ({path})" if (path := self.path()) else ""
            raise ConfigError(
                f"the batch gives an embedding {str(indices.dtype).removeprefix('torch.')} numbers as rows{where}; "
                "tokens and positions are integers: pass batch.long()"
            )
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < weight.shape[0]:
            raise ConfigError(
                f"the batch asks for rows {int(indices.min())} to {int(indices.max())} of an embedding with "
                f"{weight.shape[0]} rows{f' ({path})' if (path := self.path()) else ''}; check the tokens or positions"
            )

    def _note(
        self,
        operator: Operator,
        result: Any,
        effect: CallEffect,
        known: bool = False,
        *,
        way: Direction | None = None,
    ) -> Any:
        """Record the operator, its scratch memory and the storages of its results that are new.

        A copy between the device and memory of the CPU beside it goes a `way` over the link.
        """
        # What sees a node first made it, whether it is recorded or not (views, recomputes, an autograd.Function), and
        # those before that no operator saw; one that makes no node sees that of an operator before it.
        node = torch._C._autograd._get_sequence_nr() - 1
        while node >= self._first_node and node not in self._node_paths:
            self._node_paths[node] = self.path()
            node -= 1
        results = results_of(result)
        if operator.order and len(results) > 1:
            results = in_order(operator.order, results)
        storages = self.storages
        new = [
            (storage, tensor)
            for tensor in results
            if (storage := tensor.untyped_storage())._cdata not in storages.live and not tensor.is_meta
        ]
        work = effect.work
        if not new and not work.flops and not work.nbytes and effect.program == PLAIN:
            return result
        ledger, path, records = self.ledger, self.path(), torch.is_grad_enabled()
        in_backward = torch._C._current_graph_task_id() != -1
        phase = self.course.phase(ledger.ops, in_backward=in_backward, in_module=bool(self.modules), records=records)
        uncached_share = between = 0.0  # by the rates of a device it does not matter where operands are
        if self.host is not None:
            uncached_share = storages.missing_share(self._used, [storage.nbytes() for storage, _ in new])
            between = self.host.taken(operator.name)
        seconds: float | None
        if way is not None and knows_copies(self._kernels.hardware):
            seconds = self._clock.across(way, work.nbytes // 2)
        elif storages.away:  # the CPU beside an accelerator computes, from tensors of its own
            seconds = host_seconds(work.nbytes, self._kernels.hardware)
            self._clock.host_operator(seconds)
        else:
            seconds = None if effect.seconds is None else between + effect.seconds.at(uncached_share)
            self._clock.operator(seconds)
        # Half the time of calling the class, which is a fiftieth of a simulation.
        call = (operator.name, path, phase, work.flops, work.nbytes, work.dtype, seconds)
        ledger.ops.append(tuple.__new__(OpCall, call))
        at = len(ledger.ops) - 1
        self._collections.after(at)
        scratch: list[int] = []  # what the kernel holds beside its results
        for nbytes in effect.program:
            if nbytes > 0:
                scratch.append(ledger.birth(StorageRecord(nbytes, at, "workspace", path=path)))
            elif nbytes < 0:
                last = next(number for number in reversed(scratch) if ledger.records[number].nbytes == -nbytes)
                scratch.remove(last)
                ledger.death(last)
            else:
                self._take(operator, result, new, at, path, known)
        # Asked for with the handle, when there is room for the result.
        for library, nbytes in effect.workspaces.items():
            if (library, in_backward) not in self._workspaces:
                self._workspaces.add((library, in_backward))
                ledger.birth(StorageRecord(nbytes, at, "workspace", path=library))
        for number in reversed(scratch):
            ledger.death(number)
        return result

    def _take(
        self,
        operator: Operator,
        result: Any,
        new: list[tuple[torch.UntypedStorage, torch.Tensor]],
        at: int,
        path: str,
        known: bool,
    ) -> None:
        """Record the storages that operator `at` returns."""
        storages = self.storages
        before, beside = storages.away, set[int]()
        if operator.on_host:
            results = results_of(result)
            beside = {id(results[number]) for number in operator.on_host if number < len(results)}
        for storage, tensor in new:
            if storage._cdata not in storages.live:
                storages.away = before or id(tensor) in beside
                storages.enter(storage, tensor, at, "", path, known)
        storages.away = before

    def path(self) -> str:
        """Of the module that is running, in backward of the one whose forward made the node."""
        if self.modules:
            return self.modules[-1]
        node = torch._C._current_autograd_node()
        return "" if node is None else self._node_paths.get(node._sequence_nr(), "")

    def _in_place(
        self,
        operator: Operator,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        records: list[StorageRecord],
        known: bool,
        effect: CallEffect,
    ) -> Any:
        op = operator.op
        if op in _RESIZES:
            return self._resize(args[0], args[1] if op is aten.resize_.default else args[1].shape)
        written = written_by(operator.written, args, kwargs)
        if known and not any(record.category == "parameter" for record in records):
            op(*args, **kwargs)
        else:
            self.values.overwrite(operator, args, kwargs, tensors, records, written)
        crosses = self.storages.beside_cpu and op is aten.copy_.default and len(records) == 2
        crosses = crosses and records[0].away != records[1].away
        way: Direction | None = ("out" if records[0].away else "in") if crosses else None
        self._note(operator, None, effect, way=way)
        returned = written[: len(op._schema.returns)]
        return returned[0] if len(returned) == 1 else tuple(returned) or None

    def _resize(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        """Resize `tensor` to hollow contents: the caller's storage stays as it is."""
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        nbytes = (math.prod(shape) + offset) * tensor.itemsize
        grows = nbytes > storage.nbytes()
        stride = torch.empty(tuple(shape), device="meta").stride()
        tensor.set_(self.hollow.storage(nbytes) if grows else storage, offset, tuple(shape), stride)
        if grows:
            self.storages.moved(tensor, storage)
        return tensor

    def _compute(
        self, operator: Operator, args: Any, kwargs: Any, records: list[StorageRecord], effect: CallEffect
    ) -> Any:
        result = operator.op(*args, **kwargs)
        if operator.leaves:  # what was in the memory before is different each time
            with _disable_current_modes():
                result.untyped_storage().fill_(0)  # unlike `zero_`, no new version
        self._note(operator, result, effect)
        self.values.trust(result, DRAW if operator.draws else "" if operator.is_constant else guess_of(records))
        return result

    def _choose(
        self, operator: Operator, args: Any, kwargs: Any, tensors: list[torch.Tensor], effect: CallEffect
    ) -> Any:
        """A choice: among activations of random ones, since the real ones are not computed."""
        source, guess = tensors[0], CHOICE
        if source.is_floating_point():
            values = torch.randn_like(source)
        elif (whole := self.values.of(source)) is not None:
            values, guess = whole, self.storages.record(source).guess
        else:
            values = torch.zeros_like(source)
        chosen = operator.op(*(values if arg is source else arg for arg in args), **kwargs)
        result = integers_of(chosen, effect.layout.build(self.hollow, tensors))
        self._note(operator, result, effect)
        self.values.trust([tensor for tensor in results_of(result) if not tensor.is_floating_point()], guess)
        return result

    def _read(
        self,
        operator: Operator,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        records: list[StorageRecord],
        known: bool,
    ) -> Any:
        values = {id(tensor): tensor if known else self.values.of(tensor) for tensor in tensors}
        if any(value is None for value in values.values()):
            raise NeedsValues(f"{operator.op} reads a value that only a real run computes", self.path())
        self._assume(operator, records)
        return operator.op(*exchanged(args, values), **exchanged(kwargs, values))

    def _from_values(
        self, operator: Operator, args: Any, kwargs: Any, tensors: list[torch.Tensor], records: list[StorageRecord]
    ) -> Any:
        """The result of an operator whose shape depends on values: of known ones, or it cannot be simulated."""
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
            raise NeedsValues(f"the shape of what {op} returns depends on values", self.path())
        self._assume(operator, deciding)
        result = op(*exchanged(args, values), **exchanged(kwargs, values))
        whole = result
        if not all(record.known or record.later for record in records):
            hollow = result_layout(result, tensors).build(self.hollow, tensors)
            result = integers_of(result, hollow) if operator.goes_by_lengths else hollow
        self._note(operator, result, NOTHING)
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
        return self.works.returned(op, args, call)

    def _assume(self, operator: Operator, records: list[StorageRecord]) -> None:
        # A model must not decide on a number that stands for another.
        decides = bool(self.modules or self.searching)
        self.values.assume(operator, records, self.path(), decides=decides)

    def _maybe_in_place(self, operands: list[torch.Tensor], total: torch.Tensor) -> None:
        """Note a sum that PyTorch makes in place where no mode is active: its engine's, its attention's."""
        self._sum = None
        if len(operands) < 2:
            return
        first, number = map(self.storages.number, (operands[0], total))
        born = len(self.ledger.events) - 1
        while self.ledger.events[born] != number + 1:  # scratch memory dies after the result is born
            born -= 1
        self._sum = Sum(born, first, number)
        # By the engine where two gradients of one value meet: not by a backward written in Python, nor by the user.
        caller = sys._getframe(3).f_code
        if caller is linear.__code__:
            self.ledger.sums.append(self._sum)  # of a product that nobody else has and a bias
            return
        by_engine = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        if not by_engine or caller.co_name != "_engine_run_backward":
            return
        # The engine adds into the first only if that is whole and nobody else's; a view keeps its base alive.
        if not operands[0]._is_view() and aten.is_non_overlapping_and_dense(operands[0]):
            self.ledger.sums.append(self._sum)

    def _mask_added_in_place(self, scores: torch.Tensor) -> None:
        """Note that the sum just made was attention's, of scores and mask: only that goes into a safe softmax."""
        if self._sum is not None and self._sum.total == self.storages.number(scores):
            self.ledger.sums.append(self._sum)
