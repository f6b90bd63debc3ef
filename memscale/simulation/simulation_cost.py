"""The simulator's own time at each operator, measured by simulating programs whose real time is known."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from memscale.hardware import Hardware
from memscale.simulation.dispatch.host_time import HostTime, Own
from memscale.simulation.kernels.kernels import Kernels
from memscale.simulation.sandbox.sandbox import Simulation

_LENGTH = 60
_REPEATS = 5
_TIMED_STEPS = 4


@functools.cache
def own_cost() -> Own:
    """Returns the simulator's own cost in this process; the measurement takes some tenths of a second, once."""
    x, y = torch.ones(8, requires_grad=True), torch.ones(8)
    # With a probe, as real profiles have: probed operator times include the call from Python.
    kernels = Kernels(Hardware.detect("cpu"), probe=True)

    def arithmetic() -> None:
        value = x
        for _ in range(_LENGTH):
            value = value * y
        value.backward(y)
        x.grad = None

    def with_views() -> None:
        value = x
        for _ in range(_LENGTH):
            value = (value * y).view(2, 4).view(8)
        value.backward(y)
        x.grad = None

    at_operator = _excess(arithmetic, kernels, Own()) / (2 * _LENGTH)
    at_view = _excess(with_views, kernels, Own(at_operator)) / (4 * _LENGTH)
    return Own(at_operator, at_view)


def _excess(step: Callable[[], None], kernels: Kernels, own: Own) -> float:
    """Returns the simulated minus the real seconds of `step`."""
    simulated, real = [], []
    with torch.enable_grad():
        for _ in range(_REPEATS):
            host = HostTime(own)
            with Simulation(step, None, None, None, kernels=kernels, host=host) as simulation:
                for _ in range(2 + _TIMED_STEPS):
                    simulation.step(step)
            simulated.append(simulation.clock.end - simulation.clock.steps[-1])
            began = time.thread_time()
            step()
            real.append(time.thread_time() - began)
    return min(simulated) - min(real)  # minima, since other load only adds time
