"""What an exception stops halfway: out of memory, a failing device, a Ctrl-C at a call of the device."""

import gc
import itertools

import pytest
import torch

import memscale as ms
from memscale import offload
from memscale.runtime import Runtime, host_parameter_of
from memscale.runtime.engine.offload_engine import Engine
from memscale.runtime.parameters.host_parameter import running
from tests.support.adversarial_device import AdversarialDevice
from tests.support.checks import bits
from tests.support.coverings import in_turn
from tests.support.layers import PARAMS, layers, rows, trained


class Unreliable(AdversarialDevice):
    """Nothing happens before somebody waits for it; a chosen call of a chosen method raises, once."""

    def __init__(self, **caps):
        super().__init__(lambda n: n - 1, caps or {"pinned": 1 << 20})
        self.plan = None

    def fail(self, method, error, calls=0):
        """Let the call after so many others raise."""
        self.plan = [method, error, calls]

    def _call(self, method, *arguments, **options):
        if self.plan is not None and self.plan[0] == method:
            _, error, calls = self.plan
            self.plan = None if calls == 0 else [method, error, calls - 1]
            if calls == 0:
                raise error
        return getattr(super(), method)(*arguments, **options)

    def allocate(self, *arguments):
        return self._call("allocate", *arguments)

    def empty(self, *arguments):
        return self._call("empty", *arguments)

    def record(self, *arguments):
        return self._call("record", *arguments)

    def copy(self, *arguments, **options):
        return self._call("copy", *arguments, **options)

    def wait(self, *arguments):
        return self._call("wait", *arguments)

    def map(self, *arguments):
        return self._call("map", *arguments)

    def synchronize(self, *arguments):
        return self._call("synchronize", *arguments)


METHODS = ("allocate", "empty", "record", "copy", "wait", "map", "synchronize")


def is_empty(backend):
    for pool in backend._pools.values():
        backend._reclaim(pool)
    return not any(pool.taken for pool in backend._pools.values())


def streamed(backend, depth=2):
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=depth), backend=backend)
    how = {"*": ms.compose(PARAMS, offload(min_bytes=0))}
    return ms.transform(layers(2), how, runtime=runtime), runtime


def halve(model):
    """In a way that no version counter sees."""
    model.zero_grad()
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def forget_what_autograd_was_to_run():
    """Its queue keeps what was ready when an exception ended a backward, until a node of an older number runs."""
    oldest = torch.ones(1, requires_grad=True).sum()
    oldest.grad_fn._set_sequence_nr(0)
    oldest.backward()


def expected():
    model = layers(2)
    halve(model)
    return trained(model)


# ------------------------------------------------------------------------------------------ a device that fails


@pytest.mark.parametrize(("method", "error"), in_turn(METHODS, [torch.OutOfMemoryError, KeyboardInterrupt, OSError]))
def test_after_any_call_that_fails_the_next_step_is_right_and_nothing_stays(method, error):
    for calls in itertools.count():
        backend = Unreliable()
        fit, runtime = streamed(backend)
        if method != "map":
            trained(fit)
        backend.fail(method, error("it fails"), calls)
        try:
            trained(fit)
        except error as raised:
            raised.__traceback__ = None  # whose frames would keep the graph
        if backend.plan is not None:
            break
        halve(fit)
        forget_what_autograd_was_to_run()
        gc.collect()
        assert bits(trained(fit)) == bits(expected()), calls
        engine = runtime.engine(torch.empty(0))
        runtime.settle()
        assert (engine._moved, engine._by_storage, running) == ({}, {}, {})
        del fit
        gc.collect()
        assert runtime.stats()["cpu"].live_bytes == {"pinned": 0}
        assert is_empty(backend)
    assert calls > 1


def test_a_region_that_runs_out_of_memory_halfway_has_nothing_in_use():
    backend = Unreliable()
    fit, _ = streamed(backend, depth=0)
    trained(fit)
    backend.fail("empty", torch.OutOfMemoryError("it fails"), 1)
    with pytest.raises(torch.OutOfMemoryError):
        fit[0](rows())
    assert not any(host_parameter_of(parameter).base is not None for parameter in fit.parameters())
    assert running == {}
    halve(fit)
    assert bits(trained(fit)) == bits(expected())


def test_a_forward_that_ended_behind_its_first_region_leaves_nothing_to_the_next():
    fit, _ = streamed(AdversarialDevice(lambda n: 0, {"pinned": 1 << 20}))  # copies run at once
    trained(fit, 2)  # from now on, the second region's parameters are asked for while the first one runs
    fit[0](rows())
    halve(fit)
    assert bits(trained(fit)) == bits(expected())


def test_tensors_that_outlive_a_runtime_give_their_bytes_back_to_a_backend_that_goes_on():
    backend = AdversarialDevice(lambda n: 0, {"pinned": 1 << 20})
    fit, runtime = streamed(backend)
    trained(fit)
    gradients = [parameter.grad for parameter in fit.parameters()]
    del fit, runtime
    gc.collect()
    assert not is_empty(backend), "the gradients lie there"
    gradients.clear()
    assert is_empty(backend)


def test_another_storage_at_the_address_of_one_that_is_over_is_not_taken_for_it():
    engine = Engine(AdversarialDevice(lambda n: 0, {"pinned": 1 << 20, "disk": 1 << 20}))
    for _ in range(100):
        tensor = torch.ones(1024)
        address = tensor.untyped_storage()._cdata
        handle = engine.stash(tensor, tier="pinned")
        with engine.lock:  # so that nobody closes it
            del tensor, handle
        found = [torch.ones(1024) for _ in range(10)]
        tensor = next((t for t in found if t.untyped_storage()._cdata == address), None)
        if tensor is not None:
            break
    else:
        pytest.skip("the allocator gives no address out twice")
    assert engine.stash(tensor, tier="disk").entry.tier == "disk"
