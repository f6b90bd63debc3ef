"""The dispatch mode under which a step runs without computing: hollow tensors for answers, and books kept on them.

Small integer and boolean tensors are the exception. What a model's control flow reads (lengths, masks, expert numbers)
is computed for real where it is known, so that `.item()`, `nonzero` and a mixture's routing take a real path.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.core import ConfigError, MemscaleError
from memscale.hardware import Seconds, Work, host_seconds, work_of
from memscale.simulation.hollow import HollowStorages
from memscale.simulation.host_time import HostTime
from memscale.simulation.kernels.kernels import Kernels, linear
from memscale.simulation.kernels.programs import PLAIN, Program
from memscale.simulation.kernels.shapes import (
    FakeKernels,
    Kind,
    ResultLayout,
    exchanged,
    kind_of,
    result_layout,
    signature,
    tensors_in,
    written_by,
)
from memscale.simulation.ledger import CHOICE, DRAW, SCALAR, Course, Ledger, OpCall, Phase, StorageRecord, Sum
from memscale.simulation.live_storages import LARGEST_KNOWN, LiveStorages, is_small
from memscale.simulation.postponed import TooLarge, overwritten, postponed, value_of
from memscale.simulation.schedule.clock import Clock

aten = torch.ops.aten

_CPU = torch.device("cpu")
_MOST_READS = 512  # an optimizer reads one for each parameter, in torch's own code, which is not counted here
_TORCH = os.path.dirname(torch.__file__)
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}  # the fake ones take operands of two dtypes, the real ones refuse
# What stands for values that are not computed, the one that says least about them first.
_ASSUMED = {
    SCALAR: "reads a number computed by the step: one without overflow was assumed",
    CHOICE: "chooses by activations: random ones were assumed",
    DRAW: "decides by a random number: one draw was taken",
}
# Out of place under a mode, in place without one: in the formulas of a selection's backward (`scatter`), too.
_IN_PLACE_WITHOUT_MODE = {
    aten.add.Tensor,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.put.default,
}
_LARGEST_GUESS = 1 << 25
_LARGEST_RUN_BYTES = 1 << 30

_FROM_PYTHON = aten.lift_fresh.default
_RESIZES = {aten.resize_.default, aten.resize_as_.default}
_READS = {aten._local_scalar_dense.default, aten.equal.default}
# Only the kernel knows the size of its workspace, which it keeps for backward; the fake one returns an empty tensor.
_KERNEL_DECIDES = {aten.mkldnn_rnn_layer.default}
# What they return depends on the shape of their argument only.
_CONSTANTS = {"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"}
# Shapes, and integer results, follow from the lengths among the arguments.
_BY_LENGTHS = {aten._pack_padded_sequence.default}
# Their integer results decide what a model does next: which expert, which beam, which token.
_CHOICES = {"topk", "sort", "argsort", "argmax", "argmin", "multinomial", "max", "min"}


@dataclass(frozen=True)
class _Answer:
    """What is known of every call with one signature."""

    layout: ResultLayout
    program: Program
    work: Work
    seconds: Seconds | None
    workspaces: Mapping[str, int]
    draws: bool = False


_NOTHING = _Answer(ResultLayout(None, ()), PLAIN, Work(0, 0, ""), Seconds(0.0, 0.0), {})


class NeedsValues(MemscaleError):
    """The step reads values that a simulation does not compute; `path` names the module that does."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(f"{reason}{f' (in {path})' if path else ''}")
        self.reason = reason
        self.path = path


_BETWEEN_PROCESSES = ("c10d", "_c10d_functional", "c10d_functional")


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
        self.storages = LiveStorages(self.ledger, residents, beside_cpu=kernels.device_type != "cpu")
        self.hollow = HollowStorages()
        self.modules: list[str] = []  # the paths of the modules that are running, innermost last
        self.course = Course()
        self.searching = False  # the optimizer decides by values of the loss
        self.assumptions: dict[str, None] = {}
        self.host = host
        self._kernels = kernels
        self._accelerator = kernels.device_type if kernels.device_type != "cpu" else None
        self._clock = clock
        self._used: list[tuple[StorageRecord, int]] = []  # by the operator that is being answered
        # Of a library in a thread, each of which has a handle: the caller's, and autograd's for the device.
        self._workspaces: set[tuple[str, bool]] = set()
        self._fake = FakeKernels(on_cuda=kernels.is_cuda)
        self._answers: dict[Any, _Answer] = {}
        self._kinds: dict[OpOverload, tuple[Kind, bool]] = {}
        self._sites: dict[Any, int] = {}  # how often a line of the step has read stand-ins
        self._sum: Sum | None = None  # the last one
        self._node_paths: dict[int, str] = {}  # sequence number of an autograd node -> the module that made it

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
        if any(cls is not torch.Tensor and not issubclass(cls, torch.nn.Parameter) for cls in types):
            return NotImplemented  # a subclass takes itself apart, and its parts come back here
        if op.__class__ is not OpOverload:  # collectives, of process groups; operators of higher order
            if getattr(op, "namespace", "") in _BETWEEN_PROCESSES:
                raise is_distributed(str(op))
            return op(*args, **kwargs)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == self._accelerator:
            kwargs = {**kwargs, "device": _CPU}  # which stands for it
            if op is aten._to_copy.default and self._is_there(args[0], kwargs):
                return aten.alias.default(args[0])
        kind, loose = self._kinds.get(op) or self._learn(op)
        if kind is Kind.RUN:
            self.storages.away = False  # new ones here came from Python (`torch.tensor`), so their values are real
            if self.host is not None:
                self._used = []
                self.host.views()
            result = self._note(op, op(*args, **kwargs), _NOTHING, known=True)
            if op is _FROM_PYTHON and self.course.optimizing and self.storages.beside_cpu:
                # An optimizer counts its steps on the CPU, unless it is fused or capturable, with zeros of the device.
                self.storages.record(result).nbytes = 0
            return result
        tensors = tensors_in(args, kwargs)
        if _on_meta(tensors, kwargs):
            return op(*args, **kwargs)  # computes shapes and nothing else, as it is
        records = self.storages.of_arguments(tensors)
        if self.host is not None:
            pairs = zip(records, tensors, strict=True)
            self._used = [(record, min(tensor.nbytes, record.nbytes)) for record, tensor in pairs]
        if op is aten.embedding.default and (records[1].known or tensors[1].is_floating_point()):
            self._check_indices(*tensors[:2])
        known = op._opname in _CONSTANTS or (all(record.known for record in records) and all(map(is_small, tensors)))
        if op in _BY_LENGTHS:
            return self._from_values(op, args, kwargs, tensors, records)
        if op in _READS:
            return self._read(op, args, kwargs, tensors, records, known)
        try:
            answer = self._answer(op, args, kwargs, tensors, loose)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._from_values(op, args, kwargs, tensors, records)
        if answer.draws:
            torch.rand(())  # for a region to see that the generator moved, whose state it then keeps
        if answer.layout.is_view:
            return self._note(op, op(*args, **kwargs), answer)
        if kind is Kind.IN_PLACE:
            return self._in_place(op, args, kwargs, tensors, records, known, answer)
        if known and all(nbytes <= LARGEST_KNOWN for nbytes in answer.layout.storage_bytes):
            with contextlib.suppress(NotImplementedError):  # a kernel of the device's that a CPU does not have
                return self._compute(op, args, kwargs, records, answer)
        if records and op._opname in _CHOICES and not op._schema.is_mutable and tensors[0].numel() <= _LARGEST_GUESS:
            return self._choose(op, args, kwargs, tensors, answer)
        result = _with_scalars(op, answer.layout.build(self.hollow, tensors))
        self._note(op, result, answer)
        if self._follows(op, tensors, records, result):
            record = self.storages.record(result)
            constant = op._opname in _CONSTANTS
            contents = None if constant else [each.later for each in records]
            record.later = postponed(op, args, kwargs, tensors, contents, result)
            record.guess = "" if constant else _guess(records)
        else:
            self._trust([tensor for tensor in _results(result) if _stands_in(tensor)], SCALAR)
        if op in _IN_PLACE_WITHOUT_MODE:
            self._maybe_in_place(tensors, result)
        elif op is aten._safe_softmax.default:
            self._mask_added_in_place(tensors[0])
        return result

    def _is_there(self, tensor: torch.Tensor, wanted: Mapping[str, Any]) -> bool:
        """Whether `tensor` is on the device already, as it is wanted: ``x.to("cuda")`` copies nothing then."""
        return wanted.get("dtype") in (None, tensor.dtype) and not (tensor.is_meta or self.storages.is_away(tensor))

    def _check_indices(self, weight: torch.Tensor, indices: torch.Tensor) -> None:
        """Refuse what the kernel would refuse: no fake kernel looks at values."""
        if indices.is_floating_point():
            where = f" ({path})" if (path := self._path()) else ""
            raise ConfigError(
                f"the batch gives an embedding {str(indices.dtype).removeprefix('torch.')} numbers as rows{where}; "
                "tokens and positions are integers: pass batch.long()"
            )
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < weight.shape[0]:
            raise ConfigError(
                f"the batch asks for rows {int(indices.min())} to {int(indices.max())} of an embedding with "
                f"{weight.shape[0]} rows{f' ({path})' if (path := self._path()) else ''}; check the tokens or positions"
            )

    def _learn(self, op: OpOverload) -> tuple[Kind, bool]:
        if op.namespace in _BETWEEN_PROCESSES:
            raise is_distributed(str(op))
        reads_nothing = not any("Tensor" in str(value.type) for value in op._schema.returns) and op not in _READS
        kind = kind_of(op)
        if reads_nothing and kind is Kind.MAKE and not op._schema.is_mutable:
            kind = Kind.RUN  # sizes, devices, assertions: about tensors, not about their values
        loose = kind is Kind.IN_PLACE or torch.Tag.pointwise in op.tags
        self._kinds[op] = (kind, loose)
        return kind, loose

    def _answer(self, op: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor], loose: bool) -> _Answer:
        try:
            key = signature(op, args, kwargs, loose)
            answer = self._answers.get(key)
            if answer is not None:
                return answer
        except TypeError:  # a generator or another argument without a hash
            key = None
        try:
            if not op._schema.returns:
                # All in place: an optimizer's loop over lists, a custom operator's update.
                layout = ResultLayout(None, ())
            elif op in _KERNEL_DECIDES or (op._opname in _PRODUCTS and len({tensor.dtype for tensor in tensors}) > 1):
                layout = self._layout_on_zeros(op, args, kwargs, tensors)
            else:
                layout = self._fake.layout(op, args, kwargs, tensors)
        except (DynamicOutputShapeException, DataDependentOutputException):
            raise
        except Exception:
            # No fake kernel, or one that refuses what the real one takes. The real one, on zeros, also gives the
            # error that the user would have seen.
            layout = self._layout_on_zeros(op, args, kwargs, tensors)
        shown = layout.build(self.hollow, tensors) if not layout.is_view else tensors[0]
        work = work_of(op, args, kwargs, shown)
        program = PLAIN if layout.is_view else self._kernels.program(op, args, kwargs, shown, work.flops)
        seconds = self._kernels.seconds(op, args, kwargs, work)
        # The generator of a card has its state on the host.
        draws = self._kernels.device_type == "cpu" and torch.Tag.nondeterministic_seeded in op.tags
        answer = _Answer(layout, program, work, seconds, self._kernels.workspaces(op, args), draws)
        if key is not None:
            self._answers[key] = answer
        return answer

    def _layout_on_zeros(self, op: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> ResultLayout:
        if op._schema.is_mutable or sum(tensor.nbytes for tensor in tensors) > _LARGEST_RUN_BYTES:
            raise NeedsValues(f"{op} has no usable fake kernel and is too large to try on zeros", self._path())
        hollow = {id(tensor): self.hollow.like(tensor) for tensor in tensors if tensor.is_floating_point()}
        result = op(*exchanged(args, hollow), **exchanged(kwargs, hollow))  # the caller's tensors stay out of it
        return result_layout(result, [hollow.get(id(tensor), tensor) for tensor in tensors])

    def _note(self, op: OpOverload, result: Any, answer: _Answer, known: bool = False) -> Any:
        """Record the operator, its scratch memory and the storages of its results that are new."""
        new = [
            (storage, tensor)
            for tensor in self._kernels.in_order(op, _results(result))
            if (storage := tensor.untyped_storage())._cdata not in self.storages and tensor.device.type != "meta"
        ]
        work, program = answer.work, answer.program
        if not new and not work.flops and not work.nbytes and program == PLAIN:
            return result
        ledger, path, records = self.ledger, self._path(), torch.is_grad_enabled()
        in_backward, in_module = torch._C._current_graph_task_id() != -1, bool(self.modules)
        phase = self.course.phase(ledger.ops, in_backward=in_backward, in_module=in_module, records=records)
        if phase is Phase.FORWARD and records:
            self._node_paths[torch._C._autograd._get_sequence_nr() - 1] = path
        uncached_share = between = 0.0  # by the rates of a device it does not matter where operands are
        if self.host is not None:
            uncached_share = self.storages.caches.missing_share(self._used, [storage.nbytes() for storage, _ in new])
            between = self.host.taken(op.name())
        seconds: float | None
        if self.storages.away:  # the CPU beside an accelerator computes, from tensors of its own
            seconds = host_seconds(work.nbytes, self._kernels.hardware)
            self._clock.host_operator(seconds)
        else:
            seconds = None if answer.seconds is None else between + answer.seconds.at(uncached_share)
            self._clock.operator(seconds)
        ledger.ops.append(OpCall(op.name(), path, phase, work.flops, work.nbytes, work.dtype, seconds))
        at = len(ledger.ops) - 1
        for library, nbytes in answer.workspaces.items():
            if (library, in_backward) not in self._workspaces:
                self._workspaces.add((library, in_backward))
                ledger.birth(StorageRecord(nbytes, at, "workspace", path=library))
        scratch: list[int] = []  # what the kernel holds beside its results
        for nbytes in program:
            if nbytes > 0:
                scratch.append(ledger.birth(StorageRecord(nbytes, at, "workspace", path=path)))
            elif nbytes < 0:
                last = next(number for number in reversed(scratch) if ledger.records[number].nbytes == -nbytes)
                scratch.remove(last)
                ledger.death(last)
            else:
                self._take(op, result, new, at, path, known)
        for number in reversed(scratch):
            ledger.death(number)
        return result

    def _take(
        self,
        op: OpOverload,
        result: Any,
        new: list[tuple[torch.UntypedStorage, torch.Tensor]],
        at: int,
        path: str,
        known: bool,
    ) -> None:
        """Record the storages that operator `at` returns."""
        results, before = _results(result), self.storages.away
        beside = {id(results[number]) for number in self._kernels.on_host(op) if number < len(results)}
        for storage, tensor in new:
            if storage._cdata not in self.storages:
                self.storages.away = before or id(tensor) in beside
                self.storages.enter(storage, tensor, at, "", path, known)
        self.storages.away = before

    def _path(self) -> str:
        if self.modules:
            return self.modules[-1]
        node = torch._C._current_autograd_node()
        return "" if node is None else self._node_paths.get(node._sequence_nr(), "")

    def _in_place(
        self,
        op: OpOverload,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        records: list[StorageRecord],
        known: bool,
        answer: _Answer,
    ) -> Any:
        if op in _RESIZES:
            return self._resize(args[0], args[1] if op is aten.resize_.default else args[1].shape)
        written = written_by(op, args, kwargs)
        if known and not any(record.category == "parameter" for record in records):
            op(*args, **kwargs)
        else:
            later = None
            if len(written) == 1 and written[0] is args[0] and self._follows(op, tensors, records, args[0]):
                later = overwritten(op, args, kwargs, tensors, [record.later for record in records])
            for tensor in written:
                record = self.storages.record(tensor)
                # One number keeps its value, as a stand-in: a loss scaler's flag for overflow stays down.
                record.guess = SCALAR if later is None else _guess(records)
                record.known, record.later = record.known and later is None and _stands_in(tensor), later
        self._note(op, None, answer)
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

    def _compute(self, op: OpOverload, args: Any, kwargs: Any, records: list[StorageRecord], answer: _Answer) -> Any:
        result = self._note(op, op(*args, **kwargs), answer)
        drawn = torch.Tag.nondeterministic_seeded in op.tags
        self._trust(result, DRAW if drawn else "" if op._opname in _CONSTANTS else _guess(records))
        return result

    def _trust(self, result: Any, guess: str) -> None:
        for tensor in _results(result):
            if tensor.device.type != "meta":
                record = self.storages.record(tensor)
                record.known, record.guess = True, guess

    def _choose(self, op: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor], answer: _Answer) -> Any:
        """A choice: among activations of random ones, since the real ones are not computed."""
        source, guess = tensors[0], CHOICE
        if source.is_floating_point():
            values = torch.randn_like(source)
        elif (whole := self.value_of(source)) is not None:
            values, guess = whole, self.storages.record(source).guess
        else:
            values = torch.empty_like(source)
        chosen = op(*(values if arg is source else arg for arg in args), **kwargs)
        result = _integers_of(chosen, answer.layout.build(self.hollow, tensors))
        self._note(op, result, answer)
        self._trust([tensor for tensor in _results(result) if not tensor.is_floating_point()], guess)
        return result

    def _follows(self, op: OpOverload, tensors: list[torch.Tensor], records: list[StorageRecord], result: Any) -> bool:
        """Whether the values of `result` follow from known ones, so that computing them can be postponed."""
        if (
            not isinstance(result, torch.Tensor)
            or torch.Tag.nondeterministic_seeded in op.tags
            or op._opname.removeprefix("new_").startswith("empty")
        ):
            return False
        if op._opname in _CONSTANTS:
            return True
        # Large floats of before the step are a batch's, of which one on meta says nothing.
        return all(
            record.later or (record.known and (record.op >= 0 or is_small(tensor) or not tensor.is_floating_point()))
            for tensor, record in zip(tensors, records, strict=True)
        )

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A tensor with the values that `tensor` has, None where they are not known."""
        record = self.storages.record(tensor)
        if record.later is None:
            return tensor if record.known else None
        try:
            return value_of(tensor, record.later)
        except TooLarge:
            return None

    def _read(
        self,
        op: OpOverload,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        records: list[StorageRecord],
        known: bool,
    ) -> Any:
        values = {id(tensor): tensor if known else self.value_of(tensor) for tensor in tensors}
        if any(value is None for value in values.values()):
            raise NeedsValues(f"{op} reads a value that only a real run computes", self._path())
        self._assume(op, records)
        return op(*exchanged(args, values), **exchanged(kwargs, values))

    def _from_values(
        self, op: OpOverload, args: Any, kwargs: Any, tensors: list[torch.Tensor], records: list[StorageRecord]
    ) -> Any:
        """The result of an operator whose shape depends on values: of known ones, or it cannot be simulated."""
        deciding = [
            record
            for tensor, record in zip(tensors, records, strict=True)
            if len(tensors) == 1 or not tensor.is_floating_point()
        ]
        values = {
            id(tensor): self.value_of(tensor) for tensor, record in zip(tensors, records, strict=True) if record.later
        }
        if (
            not all(record.known or record.later for record in deciding)
            or sum(tensor.nbytes for tensor in tensors) > _LARGEST_RUN_BYTES
            or any(value is None for value in values.values())
        ):
            raise NeedsValues(f"the shape of what {op} returns depends on values", self._path())
        self._assume(op, deciding)
        result = op(*exchanged(args, values), **exchanged(kwargs, values))
        whole = result
        if not all(record.known or record.later for record in records):
            hollow = result_layout(result, tensors).build(self.hollow, tensors)
            result = _integers_of(result, hollow) if op in _BY_LENGTHS else hollow
        self._note(op, result, _NOTHING)
        trusted = {id(tensor) for tensor in _results(whole)}
        self._trust([tensor for tensor in _results(result) if id(tensor) in trusted], _guess(deciding))
        return result

    def _assume(self, op: OpOverload, records: list[StorageRecord]) -> None:
        """Note that a value is read which is a stand-in; a model must not decide on a scalar one."""
        guess = _guess(records)
        if not guess:
            return
        if guess == SCALAR and (self.modules or self.searching or self._reads_often()):
            raise NeedsValues(f"{op} reads a value that only a real run computes", self._path())
        where = self._path() or "the step"
        self.assumptions[f"{op.name()} in {where} {_ASSUMED[guess]}"] = None

    def _reads_often(self) -> bool:
        """Whether one line of the step keeps reading stand-ins: a loop that waits for a value would never end."""
        frame = sys._getframe(4)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        site = (frame.f_code, frame.f_lineno)
        self._sites[site] = self._sites.get(site, 0) + 1
        return bool(self._sites[site] > _MOST_READS)

    def _maybe_in_place(self, operands: list[torch.Tensor], total: torch.Tensor) -> None:
        """Note a sum that PyTorch makes in place where no mode is active: its engine's, its attention's."""
        self._sum = None
        if len(operands) < 2:
            return
        first, second, number = map(self.storages.number, (*operands[:2], total))
        born = len(self.ledger.events) - 1
        while self.ledger.events[born] != number + 1:  # scratch memory dies after the result is born
            born -= 1
        self._sum = Sum(born, first, second, number)
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


def is_distributed(what: str) -> ConfigError:
    """The error for a step that meets `what`."""
    return ConfigError(
        f"the step goes through {what}, which waits for other processes and takes this one's numbers to them; a "
        "simulation is of one process: profile the module before it is distributed (model.module of a "
        "DistributedDataParallel), and count what the distributed one holds beside it, such as buckets of gradients"
    )


def _on_meta(tensors: list[torch.Tensor], kwargs: Any) -> bool:
    device = kwargs.get("device")
    return any(tensor.is_meta for tensor in tensors) or (device is not None and torch.device(device).type == "meta")


def _integers_of(real: Any, hollow: Any) -> Any:
    """`hollow`, with the real tensors in place of its integer ones."""
    if isinstance(hollow, torch.Tensor):
        return hollow if hollow.is_floating_point() else real
    return type(hollow)([_integers_of(*pair) for pair in zip(real, hollow, strict=True)])


def _guess(records: list[StorageRecord]) -> str:
    guesses = {record.guess for record in records}
    return next((guess for guess in _ASSUMED if guess in guesses), "")


def _stands_in(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is one number, for which a value can stand in."""
    return tensor.numel() == 1 and (tensor.is_floating_point() or tensor.dtype == torch.bool)


def _with_scalars(op: OpOverload, result: Any) -> Any:
    """`result` with real tensors for single numbers: 1.0, and for flags what finite numbers would give."""
    if isinstance(result, (list, tuple)):
        return type(result)([_with_scalars(op, part) for part in result])
    if not isinstance(result, torch.Tensor) or not _stands_in(result):
        return result
    storage = torch.empty(result.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    number = HollowStorages.tensor(storage, result.dtype, result.shape, result.stride(), int(result.storage_offset()))
    # `isnan(x).any()` and `isfinite(x).all()` are what flags are made of.
    return number.fill_(op._opname != "any")


def _results(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for part in result for tensor in _results(part)]
    return []
