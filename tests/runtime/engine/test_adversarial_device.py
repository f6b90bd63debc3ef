"""The engine on a device that is as unkind as it may be, and mutants of the engine that must not survive there."""

import inspect
import os
import random
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memscale.runtime.engine import loader, transfers
from memscale.runtime.engine import offload_engine as _engine
from tests.support.adversarial_device import AdversarialDevice, Deadlock
from tests.support.checking import hazards
from tests.support.checking.checked_engine import CheckedEngine
from tests.support.checking.hazards import Checked
from tests.support.schedules import NBYTES, Program, results, run_case

pytestmark = pytest.mark.filterwarnings(r"ignore:offload\(\) keeps a tensor:RuntimeWarning")
CHUNK, CHUNKS = 100, 400 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 2


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs_on_random_devices(chunk):
    """200 cases, 40 000 under the deep profile: bitwise the results of PyTorch, no hazard, no leak."""
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        assert run_case(seed) == [], f"case {seed}"


@settings(max_examples=max(60, settings().max_examples))
@given(st.integers(0, 10_000), st.lists(st.integers(0, 5), max_size=300))
def test_schedules_that_hypothesis_chooses(seed, choices):
    """A failing schedule shrinks, towards one on which everything happens at once."""
    remaining = iter(choices)
    caps = {"pinned": 2 * NBYTES, "disk": 64 * NBYTES}
    program = Program(seed)
    engine = CheckedEngine(Checked(AdversarialDevice(lambda n: next(remaining, 0) % n, caps)), depth=2)
    assert results(program, engine, steps=1) == results(program, None, steps=1)
    assert engine.backend.finish() == []


# ---------------------------------------------------------------------------------------------------- mutants


def mutate(monkeypatch, edits):
    """Change the text of methods; each edit is (method, old text, new text), after the class if not the engine's."""
    changed = {}
    for *owner, method, old, new in edits:
        key = (*owner, _engine.Engine)[0], method
        source = changed.get(key) or textwrap.dedent(inspect.getsource(getattr(*key)))
        assert source.count(old) == 1, f"{key} has {source.count(old)} times {old!r}"
        changed[key] = source.replace(old, new)
    for (owner, method), source in changed.items():
        namespace = dict(vars(sys.modules[owner.__module__]))
        exec(f"from __future__ import annotations\n{source}", namespace)
        monkeypatch.setattr(owner, method, namespace[method])


NO_LIVE_CHECK = ("_load_ahead", " and candidate.is_live():", ":")
OUT_WAITED = "event = self.transfers.release(departure)\n    while"
IN_WAITED = "self._transfers.arrive(item.arrival, item.base)"
LOADER = loader.Loader
FREED = "self._backend.free(item.buffer, after=())"
NOT_WAITED = "event = departure.need()\n    while"
MUTANTS = {
    "a load is not waited for": (hazards.USED_EARLY, [(LOADER, "arrived", IN_WAITED, "item.arrival.need()")]),
    "memory is freed without waiting": (hazards.SOURCE_FREED, [("_retire", OUT_WAITED, NOT_WAITED)]),
    "a copy out does not wait for the operators before": (
        hazards.READ_EARLY,
        [(transfers.Transfers, "ask_out", '"out", after=after', '"out", after=()')],
    ),
    "a slot is given back when its load starts": (
        hazards.SLOT_REUSED,
        [(LOADER, "load", "self._transfers.pump()", "self._transfers.pump(); " + FREED)],
    ),
    "a load does not wait for the operators before": (
        hazards.RELOAD_OVERWRITTEN,
        [(LOADER, "load", "after = [self._backend.record()]", "after = []")],
    ),
    "a dropped load is not waited for": (
        hazards.RELOAD_FREED,
        [
            (LOADER, "let_go", "self._transfers.no_longer(item.arrival)", "pass"),
            ("_close", "self.transfers.no_longer(copy)", "pass"),
        ],
    ),
    "a load does not wait for its copy out": (
        hazards.READ_BEFORE_WRITE,
        [("_retire", OUT_WAITED, NOT_WAITED), (LOADER, "load", "after += item.written()", "pass")],
    ),
    "a load is started again": (
        hazards.PREFETCHED_TWICE,
        [
            (
                "_load_ahead",
                "candidate.state is LoadState.OFFLOADED",
                "candidate.state in (LoadState.OFFLOADED, LoadState.BACK)",
            )
        ],
    ),
    "what was consumed is loaded": (
        hazards.PREFETCHED_LATE,
        [
            NO_LIVE_CHECK,
            ("_forget", "self._moved.pop(ordinal, None)", "self._moved.get(ordinal)"),
            ("_free_buffer", "buffer, entry.buffer = entry.buffer, None", "buffer = entry.buffer"),
        ],
    ),
    "a full pool is waited for": (
        hazards.DEADLOCK,
        [
            (
                "_take_out",
                "into.buffer = self._allocate(nbytes, into.tier)",
                "while into.buffer is None: into.buffer = self._allocate(nbytes, into.tier)",
            )
        ],
    ),
    "bytes are not given back": (hazards.LEAK, [("_forget", "self._free_buffer(entry)", "pass")]),
}


def hazards_of(seed):
    """The kinds of hazard that the checker reports in a case; it goes on after the first."""
    program = Program(seed)
    draw = random.Random(seed)
    caps = {"pinned": draw.choice([2, 4, 16]) * NBYTES, "disk": draw.choice([0, 4]) * NBYTES}
    engine = CheckedEngine(Checked(AdversarialDevice(draw.randrange, caps)), depth=draw.randrange(1, 4))
    engine.backend.raise_hazards = lambda: None
    try:
        results(program, engine)
    except (Deadlock, AssertionError) as error:
        return {hazards.DEADLOCK} if "exhausted pool" in str(error) else set()
    return {hazard.kind for hazard in engine.backend.finish()}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("hazard", "edits"), MUTANTS.values(), ids=MUTANTS)
def test_the_checker_catches_the_mutant(hazard, edits, monkeypatch):
    mutate(monkeypatch, edits)
    # Most show within ten cases; asking which copies are done, the link puts many in order by accident.
    assert any(hazard in hazards_of(seed) for seed in range(400))


# ----------------------------------------------------------------------------------------------- the device itself
