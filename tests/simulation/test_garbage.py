"""Python's garbage collections around a simulation: few, of what it made alone, and as before afterwards."""

import gc
import weakref

import pytest

from memscale.simulation.process.process_state import few_collections

# Each goes through all objects of the process; by default test_process_snapshot sees that the collector is as before.
pytestmark = pytest.mark.deep


@pytest.fixture(autouse=True)
def _as_python_collects():
    before = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.collect()  # garbage that is frozen stays for good, with the hooks that it has
    gc.freeze()  # as all tests are, so that their collections are quick


class InCycle:
    """Garbage once nobody has it, which only a collection finds."""

    def __init__(self):
        self.own = self


def test_collections_are_rare_and_as_before_after_an_error():
    before, found = gc.get_threshold(), []

    def fails():
        with few_collections():
            found.append(gc.get_threshold())
            raise ValueError("the step's")

    with pytest.raises(ValueError, match="the step's"):
        fails()
    assert found != [before]
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_what_the_body_leaves_is_gone_after_it_and_what_was_there_stays():
    gc.collect()
    before = weakref.ref(InCycle())
    with few_collections():
        inside = weakref.ref(InCycle())
        gc.collect()
        assert inside() is None
        inside = weakref.ref(InCycle())
    assert inside() is None
    assert before() is not None  # Python's own come to it in their time
    gc.collect()
    assert before() is None


@pytest.mark.parametrize("nested", [False, True])
def test_what_the_caller_froze_stays_frozen(nested):
    frozen = weakref.ref(InCycle())
    gc.freeze()
    with few_collections():
        if nested:
            with few_collections():
                pass
        gc.collect()
        assert frozen() is not None
    gc.collect()
    assert frozen() is not None
    gc.unfreeze()
    gc.collect()
    assert frozen() is None


def test_where_collections_are_off_there_are_none():
    gc.disable()
    try:
        with few_collections():
            inside = weakref.ref(InCycle())
        assert inside() is not None
    finally:
        gc.enable()
    gc.collect()
    assert inside() is None
