"""What a simulation takes by itself at each operator, found by simulating programs whose real time is known."""

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
    """The cost in this process, which takes it some tenths of a second to find."""
    x, y = torch.ones(8, requires_grad=True), torch.ones(8)
    # Simulated with the times of a probe, as a step is: these have the call from Python in them.
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
    """By how much a simulation says that `step` takes longer than it does."""
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
    return min(simulated) - min(real)  # what else the machine does only ever adds to both
