"""How long kernels take, by running them: which calls are timed, what is made of the others, and what is left alone."""

import time

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.hardware import Seconds, Work
from memscale.simulation.kernels import cpu_times
from memscale.simulation.kernels.caches import Caches
from memscale.simulation.kernels.cpu_times import CallTimer, CpuTimes

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _nothing_known(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMSCALE_CACHE", str(tmp_path))


class Ticks:
    """A clock that moves on by the next of `steps` each second time it is read, the last one from then on."""

    def __init__(self, *steps):
        self.now, self.steps, self.reads = 0.0, list(steps), 0

    def __call__(self):
        self.reads += 1
        if self.reads % 2 == 0:
            self.now += self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        return self.now


def test_a_call_is_timed_with_its_operands_cached_and_not(monkeypatch):
    monkeypatch.setattr(cpu_times, "_page_faults", lambda: 0)
    monkeypatch.setattr(cpu_times, "own_caches", lambda: Caches((0, 1 << 22), (0.0, 1.0)))
    a = torch.empty(256, 256)
    first = 100.0  # loads code
    assert CallTimer(Ticks(first, 5.0, 5.0, 5.0, 9.0)).seconds(aten.mm.default, (a, a), {}) == (5.0, 9.0)
    # What disturbed a call is left out.
    assert CallTimer(Ticks(first, 1.0, 9.0, 8.0, 7.0, 2.0, 9.0)).seconds(aten.mm.default, (a, a), {}) == (1.0, 2.0)
    tiny = torch.empty(4)
    assert CallTimer(Ticks(first, 5.0, 5.0, 5.0, 9.0)).seconds(aten.add.Tensor, (tiny, tiny), {}) == (5.0, 5.0)
    # Where half of what was there is left, all of it would take twice as much longer.
    monkeypatch.setattr(cpu_times, "own_caches", lambda: Caches((0, 1 << 22, 1 << 30), (0.0, 0.5, 1.0)))
    seconds = CallTimer(Ticks(first, 5.0, 5.0, 5.0, 9.0)).seconds(aten.mm.default, (a, a), {})
    assert seconds == (5.0, pytest.approx(13.0, rel=0.1))


def test_times_are_remembered_on_disk():
    a = torch.empty(64, 64)
    times = CpuTimes()
    found = times.get(aten.mm.default, (a, a), {}, Work(2 * 64**3, 1, "float32"))
    times.save()
    again = CpuTimes(budget_seconds=0.0)
    assert again.get(aten.mm.default, (a, a), {}, Work(2 * 64**3, 1, "float32")) == found
    assert again.estimated == {}


def test_a_profile_says_what_was_not_timed(monkeypatch):
    def seconds(timer, op, args, kwargs):
        if op is aten.tanh.default:
            raise RuntimeError("no")
        return Seconds(1e-6, 1e-6)

    monkeypatch.setattr(CallTimer, "seconds", seconds)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    profile = ms.profile(model, torch.ones(4, 8), loss=lambda y, _: y.sum(), hardware="cpu", probe=True)
    assert profile.notes == (
        "not all calls of aten::tanh could be timed: their times follow from those of other calls",
    )
    assert profile.step_seconds > 0


def test_a_call_that_wants_other_values_is_not_timed():
    lengths = torch.tensor([-1])  # the kernel refuses them
    x = torch.empty(1, 4)
    assert CpuTimes().get(aten._pack_padded_sequence.default, (x, lengths, True), {}, Work(0, 16, "float32")) is None


def test_the_callers_tensors_and_random_numbers_are_left_alone():
    x, state = torch.ones(1000), torch.get_rng_state()
    timer = CallTimer()
    timer.seconds(aten.mul_.Tensor, (x, 2.0), {})
    timer.seconds(aten.bernoulli_.float, (x, 0.5), {})
    assert torch.equal(x, torch.ones(1000))
    assert torch.equal(torch.get_rng_state(), state)


def test_operands_are_laid_out_as_the_callers():
    seen = []

    def op(*tensors):
        seen.append([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])

    op.tags = ()
    given = (torch.empty(8, 6).t(), torch.empty(5, 1).expand(5, 7), torch.arange(9)[::2], torch.empty(0, 3))
    CallTimer(Ticks(1.0)).seconds(op, given, {})
    assert seen[0] == [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in given]


def test_a_probed_step_has_a_time_on_hardware_without_speeds():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    step = {"batch": torch.ones(32, 64), "loss": lambda y, _: y.sum(), "hardware": "cpu"}
    assert ms.profile(model, **step).step_seconds is None
    assert 0 < ms.profile(model, probe=True, **step).step_seconds < 1


def test_python_between_the_operators_counts():
    class Slow(nn.Linear):
        def forward(self, x):
            until = time.thread_time() + 0.02
            while time.thread_time() < until:
                pass
            return super().forward(x)

    def seconds(cls):
        step = {"batch": torch.ones(4, 8), "loss": lambda y, _: y.sum(), "hardware": "cpu"}
        return ms.profile(cls(8, 8), probe=True, **step).step_seconds

    assert 0.02 <= seconds(Slow) < 0.03
    assert seconds(nn.Linear) < 0.005


def test_steps_simulated_again_for_their_time_read_no_oftener():
    # Adafactor reads a norm of each parameter: 200 of them, in as many steps as are timed.
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)])
    optimizer = torch.optim.Adafactor(model.parameters())
    step = {"optimizer": optimizer, "loss": lambda y, _: y.sum(), "hardware": "cpu"}
    assert ms.profile(model, torch.ones(1, 2), probe=True, **step).method == "static"
