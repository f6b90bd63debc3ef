"""Recomputes in several threads take turns, and forwards of regions wait for them."""

import threading
import time

import pytest
import torch
import torch.nn.functional as F
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


def prepared():
    seed()
    net = Net()
    return net, ms.checkpoint()(net)


def test_a_forward_in_another_thread_waits_for_a_recompute_and_finds_the_present(monkeypatch):
    net, region = prepared()
    region(torch.randn(4, 3)).sum().backward()  # learns what the region changes
    y = region(torch.randn(4, 3)).sum()
    net.eval()
    net.calls = 40
    x, found = torch.randn(4, 3), []
    expected = net(x)
    net.calls = 40

    def evaluate():
        with torch.no_grad():  # outside of any region
            assert net.calls in (1, 2, 40)
        found.append((region(x), net.calls, net.training))

    other = threading.Thread(target=evaluate)
    monkeypatch.setattr(Paused, "at", staticmethod(lambda: other.ident or (other.start(), time.sleep(0.05))))
    y.backward()
    monkeypatch.undo()
    other.join()
    assert torch.equal(found[0][0], expected)
    assert found[0][1:] == (41, False)
    assert (net.calls, net.training) == (41, False)


def test_two_backwards_at_once_over_one_module_take_turns_and_draw_their_own_numbers(monkeypatch):
    def run(how, at_once):
        seed()
        net = Net()
        region = how(net)
        region(torch.randn(4, 3)).sum().backward()
        net.zero_grad()
        xs = [torch.randn(64, 3, requires_grad=True) for _ in range(2)]
        losses = [region(x).sum() for x in xs]
        net.eval()
        before = bits(dict(net.named_buffers()))
        if at_once:
            monkeypatch.setattr(Paused, "at", staticmethod(lambda: time.sleep(0.02)))
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
        return bits([[x.grad for x in xs], torch.rand(3)])

    for _ in range(3):
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


def draws_twice(x):
    once = F.dropout(x, 0.5)
    Paused.at()
    return torch.stack([once, twice := F.dropout(x, 0.5), once * twice])


def draws_elsewhere():
    other = threading.Thread(target=torch.rand, args=(3,))
    other.start()
    other.join()


@pytest.mark.parametrize("how", [ms.checkpoint(), ms.checkpoint(policy=ms.policies.dots_saveable)], ids=repr)
@pytest.mark.parametrize("calls", [0, 1], ids=["first call", "later call"])
@pytest.mark.parametrize("during", ["run", "recompute"])
def test_draws_of_another_thread_while_a_region_draws_are_an_error(how, calls, during, monkeypatch):
    region, x = how(draws_twice), torch.ones(5, 5, requires_grad=True)
    for _ in range(calls):
        region(x).sum().backward()
    if during == "run":
        monkeypatch.setattr(Paused, "at", staticmethod(draws_elsewhere))
    y = region(x)
    monkeypatch.undo()
    if during == "recompute":
        monkeypatch.setattr(Paused, "at", staticmethod(draws_elsewhere))
    with pytest.raises(ms.CorrectnessError, match="another thread drew from PyTorch's generator of the cpu device"):
        y.sum().backward()
    monkeypatch.undo()
    once, twice, _ = (y := region(x)).detach()
    x.grad = None
    y.sum().backward()
    assert torch.equal(x.grad, once + twice + 2 * once * twice)


@pytest.mark.parametrize("unused", [False, True], ids=["all results used", "the last result unused"])
def test_draws_of_another_thread_outside_of_a_region_or_beside_one_that_does_not_draw_are_none_of_its_business(unused):
    def fn(x):
        draws_elsewhere()
        return x.sin(), x.cos()

    region, x = ms.checkpoint()(fn), torch.ones(3, requires_grad=True)
    drawn = ms.checkpoint()(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)))
    for _ in range(3):
        found = [*region(x), *drawn(x)]
        draws_elsewhere()
        wanted = [each.detach() for each in found]
        x.grad = None
        (found[0] + found[1] + found[2] + (0 if unused else found[3])).sum().backward()
        assert torch.equal(x.grad, x.cos() - x.sin() + wanted[2] + (0 if unused else wanted[3]))
