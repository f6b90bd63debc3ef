"""Streamed parameters on a device that is as unkind as it may be, and mutants that must not survive there."""

import functools
import os
import random

import pytest

import memscale as ms
from memscale.regions import snapshot
from memscale.runtime.engine import link, loader, prefetch
from memscale.runtime.parameters import gradients, host_parameters, mapped
from tests.runtime.engine.test_adversarial_device import mutate
from tests.support.layers import PARAMS
from tests.support.streaming import device, run_case
from tests.transforms.offload import test_streamed, test_streamed_parameters, test_streamed_surprises

pytestmark = pytest.mark.filterwarnings(r"ignore:offload\(\) keeps a tensor:RuntimeWarning")
CHUNK, CHUNKS = 50, 400 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 1


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_models_on_random_devices(chunk):
    """50 cases, 20 000 under the deep profile: bitwise the results of PyTorch, no hazard, no leak."""
    streamed = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        hazards, in_bytes = run_case(seed)
        assert hazards == [], f"case {seed}"
        streamed += in_bytes > 0
    assert streamed > CHUNK // 2


# ---------------------------------------------------------------------------------------------------- mutants


MUTANTS = {
    "a gradient is not waited for where no tier has room for the next": [
        (gradients.Gradients, "_retire", "gradient.target.copy_(gradient.source)", "pass")
    ],
    "a gradient's memory is freed before it is out": [
        (gradients.Gradients, "_retire", "transfers.release(gradient.copy)", "gradient.copy.need()")
    ],
    "a load is not waited for": [
        (loader.Loader, "arrived", "self._transfers.arrive(item.arrival, item.base)", "item.arrival.need()")
    ],
    "a change by the region is lost": [(host_parameters.HostParameters, "exit", "self._bring_changes(host)", "pass")],
    "mapped memory is not given back": [
        (mapped.Mapped, "give_back", "backend.free(buffer, after=[*after, *copied])", "pass")
    ],
}


def notices(seed):
    """Whether anything is wrong with a case: results, hazards or books."""
    runtime = device(random.Random(seed))
    try:
        return run_case(seed, runtime)[0] != []
    except (AssertionError, ms.MemscaleError):
        return True


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("edits", MUTANTS.values(), ids=MUTANTS)
def test_random_cases_notice_the_mutant(edits, monkeypatch):
    mutate(monkeypatch, edits)
    assert any(notices(seed) for seed in range(100))


EFFECTS = {
    "a parameter may be written while it is read, after forward": (
        test_streamed.check_parameters_may_be_written_after_each_pass,
        [(host_parameters.HostParameters, "exit", "self._finish_reading(hosts)", "pass")],
    ),
    "a parameter may be written while it is read, after backward": (
        test_streamed.check_parameters_may_be_written_after_each_pass,
        [(host_parameters.HostParameters, "_finish_copies", "self._finish_reading(list(self._reading))", "pass")],
    ),
    "an old copy is used after a change that no counter sees": (
        functools.partial(
            test_streamed_parameters.check_other_contents_between_steps,
            test_streamed_parameters.change_data,
            PARAMS,
            depth=2,
        ),
        [(host_parameters.HostParameters, "_ask", "(anew or host.loaded[0] != now)", "host.loaded[0] != now")],
    ),
    "an old copy is used after a change between two regions": (
        test_streamed_parameters.check_a_change_between_two_regions,
        [(host_parameters.HostParameters, "_ask", "(anew or host.loaded[0] != now)", "anew")],
    ),
    "a gradient is not waited for": (
        test_streamed.check_the_cpu_waits_for_each_gradient,
        [(gradients.Gradients, "received", "self._engine.transfers.synchronize(arriving.copy.need())", "pass")],
    ),
    "a gradient is waited for at once": (
        functools.partial(test_streamed.check_gradients_leave_while_the_next_region_computes, 2, 1.0),
        [(gradients.Gradients, "send", "torch.is_anomaly_enabled() and ", "")],
    ),
    "a gradient that others have is not copied": (
        test_streamed_surprises.check_a_gradient_that_others_have_too_may_be_changed_in_place,
        [(gradients.Gradients, "send", "elif not is_alone(gradient):", "elif False:")],
    ),
    "the link takes all that it is asked for": (
        test_streamed.check_what_is_needed_at_once_overtakes_what_is_loaded_ahead,
        [(link.Link, "pump", "len(self._under_way) >= self._window", "False")],
    ),
    "the link ignores deadlines": (
        test_streamed.check_the_earliest_deadline_goes_first,
        [(link.Link, "ask", "(deadline, self._count, copy)", "(0.0, self._count, copy)")],
    ),
    "depth ignores the measured times": (
        test_streamed.check_depth_follows_the_measured_times,
        [(prefetch.Prefetch, "depth", "return max(1, math.ceil(copying / self._gap_seconds))", "return self.most")],
    ),
    "fast copies have fewer regions loaded ahead": (
        test_streamed.check_as_many_regions_are_ahead_as_in_a_simulation,
        [(host_parameters.HostParameters, "_copied", "self._reading[host] = event", "self._forward.copied(event)")],
    ),
    "regions never leave the device": (
        functools.partial(test_streamed.check_one_region_at_a_time_is_on_the_device, PARAMS),
        [(host_parameters.HostParameters, "exit", "[] if stay and not failed else over", "[]")],
    ),
    "a checkpoint in a region keeps what stood for its parameters": (
        functools.partial(
            test_streamed.check_one_region_at_a_time_is_on_the_device, ms.compose(PARAMS, ms.checkpoint())
        ),
        [(snapshot.Snapshot, "conclude", "self._let_go_of_stand_ins()", "pass")],
    ),
    "the memory of a home is given back at once": (
        test_streamed.check_memory_of_a_host_parameter_waits_for_the_load_that_reads_it,
        [(mapped.Mapped, "give_back", "after=[*after, *copied]", "after=copied")],
    ),
}


@pytest.mark.parametrize(("check", "edits"), EFFECTS.values(), ids=EFFECTS)
def test_the_effect_notices_the_mutant(check, edits, monkeypatch):
    check()
    mutate(monkeypatch, edits)
    # A region that runs with an old copy is refused by now, where its numbers told before.
    with pytest.raises((AssertionError, ms.CorrectnessError)):
        check()
