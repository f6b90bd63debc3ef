"""What other threads see of a module while a region of it is recomputed: the present, as every thread does."""

import copy
import pickle
import threading
import time

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits, seed


class Paused(nn.Module):
    """Calls `Paused.at` where it runs."""

    at = staticmethod(lambda: None)

    def forward(self, x):
        Paused.at()
        return x.sin()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.paused, self.calls, self.auxiliary = Paused(), 0, None

    def forward(self, x):
        self.calls += 1
        x = self.drop(self.norm(self.linear(x)))
        self.auxiliary = x.square().mean()
        return self.paused(x).cos()


def in_thread(work):
    """Run `work` in another thread, to its end."""
    failed = []

    def run():
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.fixture
def during_recompute(monkeypatch):
    """Runs a function in another thread, in the middle of the recompute of a backward."""

    def run(loss, work):
        ran = []
        monkeypatch.setattr(Paused, "at", staticmethod(lambda: ran or (ran.append(1), in_thread(work))))
        loss.backward()
        monkeypatch.undo()
        assert ran, "the recompute comes by"

    return run


def prepared():
    seed()
    net = Net()
    return net, ms.checkpoint()(net)


def test_another_thread_sees_flags_attributes_buffers_and_hooks_as_they_are_now(during_recompute):
    net, region = prepared()
    hook = net.linear.register_forward_hook(lambda m, args, out: out * 2)
    region(torch.randn(4, 3)).sum().backward()  # learns what the region changes
    net.zero_grad()
    y = region(torch.randn(4, 3)).sum()
    hook.remove()
    net.eval()
    net.calls = 40
    now = bits([net.norm.running_mean, net.auxiliary]), net.norm._buffers["running_mean"]
    x = torch.randn(4, 3)
    expected = net(x)
    net.calls = 40
    seen = []

    def look():
        seen.append((net.training, net.norm.training, net.calls, len(net.linear._forward_hooks), type(net.norm)))
        seen.append(net.norm.running_mean is now[1])
        assert torch.equal(net(x), expected)  # evaluates, and counts
        assert [name for name, _ in net.named_buffers()] == [
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
        ]

    during_recompute(y, look)
    assert seen[0][:4] == (False, False, 40, 0)
    assert issubclass(seen[0][4], nn.BatchNorm1d)
    assert seen[1]
    assert net.calls == 41, "the other thread's call counts, and the recompute's does not"
    assert type(net) is Net
    assert type(net.norm._buffers) is dict
    assert type(net.norm) is nn.BatchNorm1d


def test_a_thread_that_trains_meanwhile_loses_no_update_of_batch_norm(during_recompute):
    net, region = prepared()
    y = region(torch.randn(4, 3)).sum()
    before = net.norm.num_batches_tracked.item()
    expected = copy.deepcopy(net.norm)
    batch = torch.randn(4, 3)
    expected(batch)
    during_recompute(y, lambda: net.norm(batch))
    assert net.norm.num_batches_tracked.item() == before + 1
    assert torch.equal(net.norm.running_mean, expected.running_mean)


def test_a_copy_and_a_pickle_that_another_thread_makes_are_of_the_class_itself(during_recompute):
    net, region = prepared()
    y = region(torch.randn(4, 3)).sum()
    net.eval()
    net.auxiliary = None
    made = []
    during_recompute(y, lambda: made.extend([copy.deepcopy(net), pickle.loads(pickle.dumps(net))]))
    for other in made:
        assert type(other) is Net
        assert type(other.norm._buffers) is dict
        assert not other.training
        assert torch.equal(other.norm.running_mean, net.norm.running_mean)


def test_two_backwards_at_once_over_one_module_leave_the_present_and_give_the_right_gradients(monkeypatch):
    def run(how, at_once):
        seed()
        net = Net()
        net.drop = nn.Identity()  # those that draw take turns
        region = how(net)
        region(torch.randn(4, 3)).sum().backward()
        net.zero_grad()
        xs = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
        losses = [region(x).sum() for x in xs]
        net.eval()
        before = bits(dict(net.named_buffers()))
        if at_once:
            meet = threading.Barrier(2)
            monkeypatch.setattr(Paused, "at", staticmethod(lambda: meet.wait(20)))
            threads = [threading.Thread(target=loss.backward) for loss in losses]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            monkeypatch.undo()
        else:
            for loss in losses:
                loss.backward()
        assert bits(dict(net.named_buffers())) == before
        assert (net.calls, net.training, type(net)) == (3, False, Net)
        return bits([x.grad for x in xs])

    assert run(ms.checkpoint(), at_once=True) == run(ms.identity, at_once=False)


def test_recomputes_that_draw_random_numbers_take_turns(monkeypatch):
    def run(how, at_once):
        seed()
        region = how(Net())
        xs = [torch.randn(64, 3, requires_grad=True) for _ in range(2)]
        losses = [region(x).sum() for x in xs]
        if at_once:
            monkeypatch.setattr(Paused, "at", staticmethod(lambda: time.sleep(0.05)))
            threads = [threading.Thread(target=loss.backward) for loss in losses]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            monkeypatch.undo()
        else:
            for loss in losses:
                loss.backward()
        return bits([[x.grad for x in xs], torch.rand(3)])

    for _ in range(10):
        assert run(ms.checkpoint(), at_once=True) == run(ms.identity, at_once=False)


def test_recomputes_that_share_a_closure_take_turns(monkeypatch):
    def run(how, at_once):
        seed()
        scale, log = 1.0, []

        def fn(x):
            log.append(scale)
            Paused.at()
            return torch.sin(x * scale)

        region, xs, losses = how(fn), [torch.ones(2, requires_grad=True) for _ in range(2)], []
        for x in xs:
            scale += 1.0
            losses.append(region(x).sum())
        scale = 9.0
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        if at_once:
            monkeypatch.setattr(Paused, "at", staticmethod(lambda: threading.Event().wait(0.05)))
        for thread in threads:
            thread.start()
            if not at_once:
                thread.join()
        for thread in threads:
            thread.join()
        monkeypatch.undo()
        assert (scale, log) == (9.0, [2.0, 3.0])
        return bits([x.grad for x in xs])

    assert run(ms.checkpoint(), at_once=True) == run(ms.identity, at_once=False)


def test_an_attribute_that_a_class_has_too_is_absent_again_and_methods_bind():
    class Counts(nn.Module):
        calls = 0

        def scaled(self, x):
            return x * (self.calls + 1)

        def forward(self, x):
            y = self.scaled(x).sin()
            self.calls += 1
            self.later = y.detach()
            return y

    net, x = Counts(), torch.ones(2, requires_grad=True)
    y = ms.checkpoint()(net)(x).sum()
    net.scaled = lambda x: x * 100
    y.backward()
    assert torch.equal(x.grad, torch.ones(2).cos())
    assert net.calls == 1
    assert "scaled" in net.__dict__
