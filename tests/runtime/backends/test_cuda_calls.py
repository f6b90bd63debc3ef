"""The order of the CUDA backend's calls, over the real caching allocator, on fake CUDA libraries."""

import contextlib
import os
from functools import partial

import pytest
import torch

import memscale as ms
from memscale.runtime import Runtime
from tests.ghost.mutants import MUTANTS
from tests.ghost.programs import Failure, run, run_two_regions
from tests.ghost.record import Accessing, Order, recorded, recording, tried_on_the_cpu  # noqa: F401

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("tried_on_the_cpu"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning"),
]
CASES = int(os.environ.get("GHOST_CASES", "100"))
FIRST = int(os.environ.get("GHOST_FIRST", "0"))  # the seed of the first
lib = recording


def races(lib, program, delay, *, fails=()):
    with contextlib.suppress(*fails), recorded(lib, delay=delay) as calls:
        program()
    return Order().check(calls), calls


@pytest.mark.parametrize("start", range(FIRST, FIRST + CASES, 20))
def test_copies_are_in_order_with_what_they_read_and_write(lib, start):
    """Who reads comes after who wrote, who has a block next after all that its last owner did, on any stream."""
    for case in range(start, min(start + 20, FIRST + CASES)):
        found, calls = races(lib, partial(run, case, lambda: Accessing(lib)), 0 if case % 5 == 0 else case)
        assert found == [], case
        assert any(call.kind == "copy" for call in calls)


def test_a_record_loses_no_exception(lib):
    """A tensor is freed while an exception passes: PyTorch would call hooks in Python there, and drop the exception."""

    def fail():
        raise Failure

    def free_while_failing():
        max(torch.ones(1 << 20, device="cuda"), fail())

    with pytest.raises(Failure), recorded(lib) as calls:
        free_while_failing()
    (block,) = [call.to for call in calls if call.kind == "handed out"]
    assert [call.to for call in calls if call.kind == "given back"] == [block]


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_parameters_wait_for_a_stream_inside_their_region(lib, fails):
    """A region ends, or fails, before its streams meet: their memory is not reused while one of them reads it."""
    assert races(lib, partial(run_two_regions, fails), 1)[0] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_record_shows_what_a_mutant_does_wrong(monkeypatch, lib, mutant):
    monkeypatch.setattr(*MUTANTS[mutant], mutant)
    programs = [(partial(run_two_regions, fails), 1) for fails in (False, True)]
    programs += [(partial(run, case, lambda: Accessing(lib)), case + 1) for case in (12, 49, *range(40))]
    assert any(races(lib, program, delay, fails=(RuntimeError,))[0] for program, delay in programs)


def test_pinned_memory_is_what_was_asked_for(lib):
    """Slabs are cut to size: after the first step, which cannot know, 3% and a page at most are pinned beyond it."""
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=0))
    blocks = [torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.Linear(900, 700)) for _ in range(20)]
    fit = ms.transform(torch.nn.Sequential(*blocks).cuda(), {"*": ms.offload(min_bytes=0)}, runtime=runtime)
    with recorded(lib) as calls:
        for _ in range(3):
            fit(torch.ones(1001, 700, device="cuda")).sum().backward()
    pinned = {}
    for call in calls:
        if call.kind == "pinned":
            pinned[call.to] = call.size
        elif call.kind == "unpinned":
            pinned.pop(call.to, None)  # earlier tests' runtimes may give theirs back meanwhile
    (stats,) = runtime.stats().values()
    asked = stats.high_water_bytes["pinned"]
    assert asked > 20 * 1001 * 700 * 4
    assert sum(pinned.values()) <= asked * 1.03 + 4096
