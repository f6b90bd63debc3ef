"""Settings of each process that runs tests: hypothesis profiles, seeds, and the skip of what needs a GPU."""

import gc
import logging
import os
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from memscale.core import internals
from tests.support.coverings import DEEP

# What collection imports is no garbage, and looking for some took a third of its time: not until it is over.
gc.disable()

# The tests' tensors are tiny, and on a busy machine threads wait for each other longer than they compute.
torch.set_num_threads(1)

# pytest adds two handlers to each logger that does not propagate, three times a test: PyTorch's 40 took a millisecond.
for _logger in list(logging.root.manager.loggerDict.values()):
    if isinstance(_logger, logging.Logger):
        _logger.propagate = True

# `ci` finds the same examples at every run; `deep` (HYPOTHESIS_PROFILE=deep) looks for new ones;
# `fuzz` is `make fuzz`.
settings.register_profile("ci", derandomize=True, max_examples=20, deadline=None, database=None)
settings.register_profile("deep", max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "fuzz", settings.get_profile("deep"), max_examples=int(os.environ.get("EXAMPLES", "5000")), print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items):
    skips = {"cuda": "needs a CUDA device, and PyTorch finds none here", "deep": "run by `make test-deep`"}
    if torch.cuda.is_available():
        del skips["cuda"]
    if DEEP:
        del skips["deep"]
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} has another name in each process, and none can run it; give ids=")
        for name in skips.keys() & item.keywords.keys():
            item.add_marker(pytest.mark.skip(reason=skips[name]))


def pytest_collection_finish():
    """The collector, which many tests and each measurement call, need not look at all that was imported.

    As rare as a simulation has it, or each simulation would first count what is frozen: a tenth of all tests' time.
    """
    _freeze()
    gc.enable()
    gc.set_threshold(100_000, 10, 10)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Nor at what a test was the first to import, as a compiler, and what a file leaves: 0.1 seconds a collection."""
    if len(sys.modules) > _frozen_modules + 50 or nextitem is None or nextitem.path != item.path:
        _freeze()


_frozen_modules = 0


def _freeze():
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Plans and probes of kernels are kept where no other run has been, so that no test depends on what one left.

    The tests of the planner plan from scratch (tests/planning/conftest.py); elsewhere a plan stays known.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMSCALE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_workspace():
    """Bytes of a step on a card are the same with every release: from 2.12 on PyTorch has one workspace unless told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
        yield


@pytest.fixture(scope="session")
def cast_in_one_graph():
    """For tests of a `cast` that is compiled: `test_where_the_compiler_lists_no_attributes` is of the others."""
    if internals.TORCH_VERSION < (2, 12):
        pytest.skip("Dynamo traces what attributes a module has from torch 2.12 on")


# Where there is no card, `torch.manual_seed` takes half a millisecond, to keep the call stack for one.
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _seeds():
    _seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
