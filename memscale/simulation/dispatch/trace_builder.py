"""`TraceBuilder`: collects the trace of a step while the step runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from memscale.simulation.dispatch.lazy_values import LazyValue
from memscale.simulation.schedule.clock import Clock
from memscale.simulation.trace import OpCall, Phase, Storage, Trace

#: The origin of indices chosen by random activations, such as of an expert or a token.
CHOICE = "choice"
#: The origin of a random number; one draw stands for all draws.
DRAW = "draw"
#: The origin of a stand-in for a loss, a norm or a flag, with a value in the usual range.
SCALAR = "scalar"
#: The origin of values computed from the batch, from state that the step has changed, or from other devices' tensors.
GIVEN = "given"


@dataclass(slots=True)
class StorageRecord:
    """A storage and the state of its values; attributes that are not listed are those of `Storage`.

    Attributes:
        category: a member of `CATEGORIES`; "" until the end of the step, which tells activations from temporaries.
        known: whether the storage has real values, rather than address space without memory.
        guess: the origin of known values: `CHOICE`, `SCALAR` or `DRAW` for stand-ins, `GIVEN` for computed values, ""
            for values that follow from constants alone.
        later: the lazy value of the storage, if its values are known and not computed yet.
    """

    nbytes: int
    op: int
    category: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    path: str = ""
    known: bool = False
    guess: str = ""
    offloaded: bool = False
    later: LazyValue | None = None
    stream: int = 0


@dataclass(slots=True)
class Course:
    """The progress of a step, which decides the phase of an operator outside of any module.

    Operators between a backward and the optimizer, and after the optimizer, are the update: clipping, unscaling, weight
    averages. While autograd records, they may also prepare the next batch of an accumulating loop, or be a forward
    without modules; before another backward, they may be a loss that computes gradients piece by piece in forward. The
    operators that follow decide.

    >>> course, ops = Course(), []
    >>> for in_backward in (True, False, True, False):
    ...     phase = course.phase(ops, in_backward=in_backward, in_module=False, records=True)
    ...     ops.append(OpCall("aten::mul", "", phase))
    >>> [op.phase.value for op in ops]
    ['backward', 'forward', 'backward', 'optimizer']
    """

    optimizing: bool = False
    _after: bool = False  # whether a backward or an optimizer ran, and no module since
    _undecided: list[tuple[int, bool]] = field(default_factory=list)  # (operator, whether autograd records)

    def phase(self, ops: list[OpCall], *, in_backward: bool, in_module: bool, records: bool) -> Phase:
        """Returns the phase of the next operator of `ops`, and sets the phase of undecided operators."""
        if self.optimizing:
            self._after = True
            self._undecided.clear()
            return Phase.OPTIMIZER
        if in_backward or in_module:
            self._after = in_backward
            for at, recorded in self._undecided:
                if recorded or in_backward:
                    ops[at] = ops[at]._replace(phase=Phase.FORWARD)
            self._undecided.clear()
            return Phase.BACKWARD if in_backward else Phase.FORWARD
        if not self._after:
            return Phase.FORWARD
        self._undecided.append((len(ops), records))
        return Phase.OPTIMIZER


@dataclass(slots=True)
class Sum:
    """An addition that autograd may do in place: `total` reuses `first` if `first` dies at once."""

    event: int
    first: int
    total: int
    always: bool = False  # whenever `first` dies: a temporary of C++ ends with its statement


@dataclass
class TraceBuilder:
    """Collects births (``number + 1``) and deaths (``-(number + 1)``) of ``records[number]``, in order."""

    records: list[StorageRecord] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    event_ops: list[int] = field(default_factory=list)
    ops: list[OpCall] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    #: (index of the first event, index of the first operator) of each step.
    steps: list[tuple[int, int]] = field(default_factory=list)
    #: The indices of the events before which the allocator's cached memory was returned to the device.
    trims: list[int] = field(default_factory=list)
    #: The same, on condition that the allocator's memory had grown since the last return.
    trims_if_grown: list[int] = field(default_factory=list)

    def birth(self, record: StorageRecord) -> int:
        """Notes that a storage is allocated, and returns its number."""
        self.records.append(record)
        number = len(self.records) - 1
        self.events.append(number + 1)
        self.event_ops.append(len(self.ops) - 1)
        return number

    def death(self, number: int) -> None:
        """Notes that storage `number` is freed."""
        self.events.append(-number - 1)
        self.event_ops.append(len(self.ops) - 1)

    def begin_step(self) -> None:
        """Marks the beginning of a step."""
        self.steps.append((len(self.events), len(self.ops)))

    def repeats(self) -> bool:
        """Whether another step would repeat this one: it frees what it allocates.

        >>> builder = TraceBuilder()
        >>> for nbytes in (8, 16, 16):
        ...     builder.begin_step()
        ...     number = builder.birth(StorageRecord(nbytes, 0))
        ...     _ = number and builder.death(number - 1)
        ...     print(builder.repeats())
        False
        False
        True
        """
        step = self.events[self.steps[-1][0] :]
        # Storages from before the step are entered at first use, constants in the second step.
        born = {event - 1 for event in step if event > 0 and self.records[event - 1].op >= 0}
        died = {-event - 1 for event in step if event < 0}
        left, former = (
            [size for number in sorted(numbers) if (size := self.records[number].nbytes)]
            for numbers in (born - died, died - born)
        )
        return left == former

    def trim(self, if_grown: bool) -> None:
        """Notes that the allocator's cached memory is returned to the device."""
        (self.trims_if_grown if if_grown else self.trims).append(len(self.events))

    def trace(self, clock: Clock, by_tier: Mapping[str, int], notes: tuple[str, ...], reads_random: bool) -> Trace:
        """Returns the trace, after `add_in_place`, timed by `clock`; the other arguments are those of `Trace`."""
        storages = [
            (each.nbytes, each.op, category, each.shape, each.dtype, each.path, each.offloaded, each.stream)
            for each, category in zip(self.records, self._categories(), strict=True)
        ]
        return Trace(
            clock.hardware,
            tuple(map(Storage._make, storages)),
            tuple(self.events),
            tuple(self.event_ops),
            tuple(self.ops),
            tuple(self.steps),
            tuple(self.trims),
            tuple(self.trims_if_grown),
            clock.times(),
            tuple(clock.events),
            tuple(by_tier.items()),
            notes,
            reads_random,
        )

    def _categories(self) -> Iterator[str]:
        """Returns the category of each storage; unmarked storages are activations if backward waited for them, else
        temporaries.
        """
        in_forward, in_backward = (
            [op.phase is phase for op in self.ops] + [False] for phase in (Phase.FORWARD, Phase.BACKWARD)
        )  # the last one is that of number -1: no operator
        backwards = (at for at, number in enumerate(self.event_ops) if in_backward[number])
        died = {-event - 1: at for at, event in enumerate(self.events) if event < 0}
        born = {event - 1: at for at, event in enumerate(self.events) if event > 0}
        next_backward = next(backwards, None)
        for number, record in enumerate(self.records):
            if record.category:
                yield record.category
                continue
            at = born.get(number, 0)
            while next_backward is not None and next_backward < at:
                next_backward = next(backwards, None)
            lives_on = next_backward is not None and died.get(number, len(self.events)) > next_backward
            yield "activation" if in_forward[record.op] and lives_on else "temporary"

    def add_in_place(self) -> None:
        """Makes additions of gradients happen in place where autograd would do so.

        A dispatch mode makes PyTorch add gradients out of place (`isTensorSubclassLike` is true under any mode).
        Without a mode PyTorch adds into the first operand if it has no other holder; such an operand dies right after
        the addition.
        """
        deaths = {-event - 1: at for at, event in enumerate(self.events) if event < 0}
        names: dict[int, int] = {}  # by storage that a sum was made in
        for total in sorted(self.sums, key=lambda total: total.event):
            first = names.get(total.first, total.first)
            if total.always:
                names[total.total] = first
                self._merge(total, first, self.events.index(-first - 1, total.event), deaths)
                continue
            after, op = total.event + 1, self.event_ops[total.event]
            # Scratch memory is allocated and freed between the operator's result and the death of its operands.
            while after < len(self.events) and (self.events[after] < 0 or self.event_ops[after] == op):
                if self.events[after] == -first - 1:
                    names[total.total] = first
                    self._merge(total, first, after, deaths)
                    break
                after += 1
        before = [0, *itertools.accumulate(map(bool, self.events))]  # the events up to each one that stay
        self.steps = [(before[event], op) for event, op in self.steps]
        self.trims, self.trims_if_grown = (
            [before[event] for event in trims] for trims in (self.trims, self.trims_if_grown)
        )
        self.event_ops = list(itertools.compress(self.event_ops, self.events))
        self.events = list(filter(None, self.events))
        self.sums = []
        self._order_deaths()

    def _order_deaths(self) -> None:
        """Sorts the deaths between two operators, which count as simultaneous, by the number of the storage.

        Some are in an order of addresses, which differs between processes, such as when autocast clears its cache.
        """
        events, ops, marks = self.events, self.event_ops, {*self.trims, *self.trims_if_grown, *dict(self.steps)}
        begin = 0
        for at in range(1, len(events) + 1):
            if at < len(events) and events[at] < 0 > events[at - 1] and ops[at] == ops[at - 1] and at not in marks:
                continue
            if at - begin > 1:
                events[begin:at] = sorted(events[begin:at], reverse=True)
            begin = at

    def _merge(self, total: Sum, operand: int, death: int, deaths: dict[int, int]) -> None:
        self.events[total.event] = 0
        # The sum lives on in the operand's storage, so a later death under its number is that storage's.
        merged = self.records[total.total]
        if merged.category and not self.records[operand].category:
            self.records[operand].category, self.records[operand].path = merged.category, merged.path
        at = deaths.get(total.total, -1)
        if at >= 0:
            self.events[max(at, death)], self.events[min(at, death)] = -operand - 1, 0
        else:
            self.events[death] = 0
