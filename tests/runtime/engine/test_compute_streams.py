"""Many compute streams: each copy is ordered with those that own its memory and use it, whichever one is current."""

import copy
import itertools
import random
import types
import weakref

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.runtime import Runtime
from memscale.runtime.backends.cuda import CudaBackend
from memscale.runtime.engine import entry, loader, transfers
from memscale.runtime.engine.offload_engine import Engine
from memscale.runtime.storage.budget import HostBudget
from tests.runtime.engine.test_adversarial_device import mutate
from tests.support.fake_cuda import FakeCupy
from tests.support.schedules import Program, results

KIB, MIB = 1024, 1024**2
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* is in RAM"),
    pytest.mark.filterwarnings(r"ignore:offload\(\) keeps a tensor:RuntimeWarning"),
]


class Races(FakeCupy):
    """Knows, of what runs on streams, what comes before what, by the calls of CUDA alone: a vector clock for each.

    Attributes:
        found: pairs of accesses to the same bytes, one of them a write, without an order; and memory that was freed
            where its owner, whose next work may reuse it, does not come after an access.
    """

    def __init__(self, draw):
        super().__init__()
        self.found = []
        self.clocks = {"host": {}}
        self.marks = {}
        self.accesses = []
        self.owners = {}
        self.lent = {}
        self.ticks = itertools.count(1)
        known = set()
        event = self.cuda.Event
        synchronize, done = event.synchronize, event.done

        def learn(self_):
            """What the host is given from here on comes after the event, on every stream."""
            known.add(self_.ptr)
            self.join(self.clocks["host"], self.marks[self_.ptr])

        def synchronized(self_):
            synchronize(self_)
            learn(self_)

        def is_done(self_):
            """A device may always be later than this one, where what a stream waits for happens at once."""
            if done.fget(self_) and self_.ptr not in known and draw.random() < 0.1:
                learn(self_)
            return self_.ptr in known

        event.synchronize, event.done = synchronized, property(is_done)

    def clock(self, stream):
        clock = self.clocks.setdefault(stream, {})
        self.join(clock, self.clocks["host"])
        return clock

    @staticmethod
    def join(clock, other):
        for stream, time in other.items():
            clock[stream] = max(time, clock.get(stream, 0))

    def eventRecord(self, event, stream):
        self.marks[event] = dict(self.clock(stream))
        super().eventRecord(event, stream)

    def streamWaitEvent(self, stream, event):
        self.join(self.clock(stream), self.marks[event])
        super().streamWaitEvent(stream, event)

    def memcpyAsync(self, target, source, nbytes, kind, stream):
        self.access(stream, source, nbytes, "read")
        self.access(stream, target, nbytes, "write")
        super().memcpyAsync(target, source, nbytes, kind, stream)

    def access(self, stream, start, nbytes, kind):
        clock = self.clock(stream)
        for other in self.touching(start, start + nbytes):
            if "write" in (kind, other.kind) and clock.get(other.stream, 0) < other.time:
                self.found.append((other.kind, other.stream, kind, stream))
        clock[stream] = next(self.ticks)
        self.accesses.append(
            types.SimpleNamespace(stream=stream, start=start, stop=start + nbytes, kind=kind, time=clock[stream])
        )

    def touching(self, start, stop):
        return [access for access in self.accesses if access.start < stop and start < access.stop]

    # -------------------------------------------------------------------------------------- PyTorch's allocator

    def allocated(self, tensor):
        """`tensor` was made on the current stream, whose memory it is."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        self.owners[start] = self.compute_stream
        self.lent[start] = set()
        weakref.finalize(storage, self.freed, start, storage.nbytes())
        self.access(self.compute_stream, start, storage.nbytes(), "write")

    def record_stream(self, tensor, stream):
        self.lent[tensor.untyped_storage().data_ptr()].add(stream)

    def freed(self, start, nbytes):
        owner, clock = self.owners.pop(start), {}
        for stream in (owner, *self.lent.pop(start)):
            self.join(clock, self.clock(stream))
        for access in self.touching(start, start + nbytes):
            if clock.get(access.stream, 0) < access.time:
                self.found.append((access.kind, access.stream, "freed", owner))
        gone = [access for access in self.accesses if start <= access.start < start + nbytes]
        self.accesses = [access for access in self.accesses if access not in gone]


class Wandering(Engine):
    """An engine whose caller, autograd for one, is on another stream at each call."""

    def __init__(self, fake, draw, backend, **options):
        super().__init__(backend, **options)
        self.fake, self.draw = fake, draw
        self.before = {}  # of each handle: the clock of its stream, which autograd lets a later user come after
        empty = backend.empty

        def new(nbytes, like):
            tensor = empty(nbytes, like)
            fake.allocated(tensor)
            return tensor

        backend.empty = new
        backend.inner = backend  # where `results` looks for a device

    def wander(self):
        self.fake.compute_stream = self.draw.randrange(7, 10)

    def stash(self, tensor, *, tier="auto"):
        start = tensor.untyped_storage().data_ptr()
        self.wander()
        if start not in self.fake.owners:
            if tensor.untyped_storage().nbytes() == 0:
                return super().stash(tensor, tier=tier)
            self.fake.allocated(tensor)
        elif self.fake.lent[start]:  # brought back, and kept by a backward that is differentiated: where it was used
            self.fake.compute_stream = self.draw.choice(sorted(self.fake.lent[start]))
        else:
            self.fake.compute_stream = self.fake.owners[start]
        handle = super().stash(tensor, tier=tier)
        self.before[id(handle.record)] = dict(self.fake.clock(self.fake.compute_stream))
        self.wander()
        return handle

    def fetch(self, handle):
        self.wander()
        stream = self.fake.compute_stream
        self.fake.join(self.fake.clock(stream), self.before.get(id(handle.record), {}))
        tensor = super().fetch(handle)
        start, nbytes = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if nbytes:
            if handle.record.alias is not None or handle.entry.arrival is None:  # it never left: the caller's business
                self.fake.lent[start].add(stream)
            self.fake.access(stream, start, nbytes, "read")
        self.wander()
        return tensor

    def look_again(self):
        self.wander()
        super().look_again()


def races_of(seed, tmp_path, monkeypatch):
    """What goes wrong between streams in a random program, whose results must be right."""
    draw = random.Random(seed)
    engine = wandering(draw, tmp_path, monkeypatch, pinned_bytes=draw.choice([8 * 512, 64 * KIB]))
    program = Program(seed)
    assert results(program, engine) == results(program, None), f"case {seed}"
    return engine.fake.found


def wandering(draw, tmp_path, monkeypatch, pinned_bytes=MIB):
    """An engine with pinned memory only: no thread takes part, and a case is the same each time."""
    fake = Races(draw)
    fake.install(monkeypatch)
    budget = HostBudget(pinned_bytes, kept_free_bytes=0, available_bytes=lambda: None)
    backend = CudaBackend(pinned_bytes=pinned_bytes, budget=budget, disk_bytes=0, disk_directory=tmp_path)
    backend.compute = lambda seconds: None
    return Wandering(fake, draw, backend, depth=draw.randrange(4))


def test_random_programs_whose_streams_change_at_every_step(tmp_path, monkeypatch):
    for seed in range(60):
        assert races_of(seed, tmp_path, monkeypatch) == [], f"case {seed}"


COPIES = transfers.Transfers
MUTANTS = {
    "what leaves is ordered by whichever stream is current": [("_copy_out", "owners=entry.streams", "owners=None")],
    "whichever stream is current waits before memory is freed": [
        (COPIES, "release", "in copy.owners", "in (self._backend.compute_stream(),)")
    ],
    "nobody waits before memory is freed": [(COPIES, "release", "self._follow(copy, stream)", "pass")],
    "only the first stream that fetches waits": [(COPIES, "_follow", "stream not in copy.behind", "not copy.behind")],
    "memory is used on another stream unsaid": [(COPIES, "arrive", "self._backend.lend(memory)", "pass")],
    "a load does not wait for what its memory was used for": [
        (loader.Loader, "load", "after = [self._backend.record()]", "after = []")
    ],
    "a slot is reused while a load that one stream has waited for still reads it": [
        (entry.Entry, "copies", "(self.departure, self.arrival)", "(self.departure,)")
    ],
}


def notices(races, seed, tmp_path, monkeypatch):
    try:
        return races(seed, tmp_path, monkeypatch) != []
    except AssertionError:  # not even the results are right
        return True


@pytest.mark.parametrize("edits", MUTANTS.values(), ids=MUTANTS)
def test_random_programs_notice_the_mutant(edits, tmp_path, monkeypatch):
    mutate(monkeypatch, edits)
    assert any(notices(races_of, seed, tmp_path, monkeypatch) for seed in range(50))


# ------------------------------------------------------------------------------------------------- parameters


def streamed_races_of(seed, tmp_path, monkeypatch):
    """What goes wrong between streams in some steps of a model whose parameters are streamed."""
    draw = random.Random(seed)
    engine = wandering(draw, tmp_path, monkeypatch)
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0), backend=engine.backend)
    runtime._engines[torch.device("cpu")] = engine
    mover = runtime.mover(torch.empty(0))
    fake, enter, fetch, ask_out = engine.fake, mover.enter, mover.fetch, engine.transfers.ask_out

    def enter_and_use(residency, hosts):
        engine.wander()  # a region's stream is its own; in the graph, also its backward's
        tensors = enter(residency, hosts)
        for tensor in tensors:
            fake.access(fake.compute_stream, tensor.untyped_storage().data_ptr(), tensor.nbytes, "read")
        return tensors

    def fetch_and_use(saved):
        engine.wander()
        tensor = fetch(saved)
        fake.access(fake.compute_stream, tensor.untyped_storage().data_ptr(), tensor.nbytes, "read")
        engine.wander()
        return tensor

    def compute_and_ask(source, buffer, **options):
        fake.allocated(*source)  # the gradient, made on the stream on which it is sent
        copy = ask_out(source, buffer, **options)
        engine.wander()
        return copy

    monkeypatch.setattr(mover, "enter", enter_and_use)
    monkeypatch.setattr(mover, "fetch", fetch_and_use)
    monkeypatch.setattr(engine.transfers, "ask_out", compute_and_ask)
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(draw.randrange(1, 5))])
    plain = copy.deepcopy(model)
    fit = ms.transform(model, {"*": ms.offload(what="params")}, runtime=runtime)
    for _ in range(3):
        x = torch.randn(3, 6)
        for each in (fit, plain):
            each(x).square().sum().backward()
    found = [(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    assert all(torch.equal(*pair) for pair in found), f"case {seed}"
    assert engine.stats().out_bytes == {"pinned": 3 * sum(parameter.nbytes for parameter in model.parameters())}
    return fake.found


def test_parameters_on_streams_that_change_at_every_region(tmp_path, monkeypatch):
    for seed in range(20):
        assert streamed_races_of(seed, tmp_path, monkeypatch) == [], f"case {seed}"


@pytest.mark.parametrize(
    "mutant", ["whichever stream is current waits before memory is freed", "memory is used on another stream unsaid"]
)
def test_parameters_notice_the_mutant(mutant, tmp_path, monkeypatch):
    mutate(monkeypatch, MUTANTS[mutant])
    assert any(notices(streamed_races_of, seed, tmp_path, monkeypatch) for seed in range(20))
