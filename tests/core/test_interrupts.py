"""Ctrl-C at any line of a recompute or a simulation leaves nothing behind."""

import contextlib
import gc
import random
import signal
import sys
import threading

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.core import one_at_a_time
from memscale.regions import in_recompute


def _interrupted_at(number, run):
    """Call `run` and press Ctrl-C at line `number` of memscale's code. Returns whether `run` has so many lines."""
    left = number

    def trace(frame, event, _):
        nonlocal left
        # A signal never comes between a `with` and its lock, as a line's event does.
        if "memscale/" not in frame.f_code.co_filename or frame.f_code is one_at_a_time.__wrapped__.__code__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    own = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        assert left <= 0
    finally:
        sys.settrace(own)
    return left <= 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(4, 4), nn.BatchNorm1d(4), 0

    def forward(self, x):
        self.calls += 1
        return nn.functional.dropout(self.norm(self.linear(x)), random.random())


def _state(model):
    buffers = [(name, id(each), each._version) for name, each in model.named_buffers()]
    modes = torch.is_grad_enabled(), torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()
    counters = [(each.training, getattr(each, "calls", None)) for each in model.modules()]
    generators = torch.get_rng_state().tolist(), random.getstate()
    return buffers, modes, counters, generators, signal.getsignal(signal.SIGINT)


def test_ctrl_c_at_a_line_of_a_recompute_leaves_nothing_behind():
    model = ms.transform(nn.Sequential(Block(), Block()), {"*": ms.checkpoint()})
    number = 1
    while True:
        loss = model(torch.randn(8, 4)).sum()
        torch.rand(1)
        random.random()
        before = _state(model)
        if not _interrupted_at(number, loss.backward):
            break
        assert _state(model) == before, number
        number += 11
    assert number > 100


def test_ctrl_c_at_a_line_of_a_simulation_leaves_nothing_behind():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)

    def profile():
        return ms.profile(model, x, loss=lambda y, _: y.sum(), hardware="h100")

    def patched():
        return vars(torch).copy(), vars(torch.cuda).copy(), vars(nn.Module).copy(), gc.get_threshold()

    profile()
    number, before = 1, (_state(model), patched())
    while _interrupted_at(number, profile):
        assert (_state(model), patched()) == before, number
        assert torch.ones(2).sum().item() == 2, number
        number += 101
    thread = threading.Thread(target=profile, daemon=True)  # which waits for ever if a press left the lock taken
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert number > 1000


def test_ctrl_c_while_a_simulation_takes_its_lock_leaves_it_free():
    def press(frame, event, called):
        if event == "c_return" and getattr(called, "__name__", "") == "acquire":
            raise KeyboardInterrupt

    sys.setprofile(press)
    try:
        with contextlib.suppress(KeyboardInterrupt), one_at_a_time():
            pass
    finally:
        sys.setprofile(None)
    thread = threading.Thread(target=lambda: one_at_a_time().__enter__(), daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_second_ctrl_c_acts_at_once():
    class Presses:
        count = 0

    def hangs(x):
        while in_recompute():
            Presses.count += 1
            signal.raise_signal(signal.SIGINT)
        return x.sigmoid()

    loss = ms.checkpoint()(hangs)(torch.ones(2, requires_grad=True)).sum()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert Presses.count == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
