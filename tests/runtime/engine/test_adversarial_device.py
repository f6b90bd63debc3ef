"""The engine on a device that is as unkind as it may be."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.adversarial_device import AdversarialDevice
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
