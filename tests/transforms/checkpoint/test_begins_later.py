"""What a region does for the first time in a later call is right, or an error that names it, and is learned."""

import collections
import functools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale as ms
from tests.support.checks import bits, seed

LATE = 3  # the call in which it begins
SEEN, COUNTS = [], collections.Counter()


class Norm(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(4, **options), 0

    def forward(self, x):
        self.calls += 1
        return torch.sin(self.normed(x, self.calls >= LATE))


class Functional(Norm):
    def normed(self, x, late):
        return F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=late)


class NothingTrained(Norm):
    def normed(self, x, late):
        return F.batch_norm(x.detach(), self.norm.running_mean, self.norm.running_var, training=True) + x if late else x


class Switched(Norm):
    def normed(self, x, late):
        self.norm.train(late)
        return self.norm(x)


class SwitchedAndBack(Norm):
    def normed(self, x, late):
        self.norm.train(late)
        x = self.norm(x)
        self.norm.eval()
        return x


class Tracks(Norm):
    def normed(self, x, late):
        self.norm.track_running_stats = late
        return self.norm(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls >= LATE:
            self.count.add_(1)
        return torch.sin(x * (self.count + 1))


class Grows(nn.Module):
    """A list that grows by a tensor a call, all of which are changed in each."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.detach() * 2)
        for each in self.seen:
            each.mul_(1.1)
        return torch.sin(x * sum(self.seen))


class Drops(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.sin(F.dropout(x) if self.calls >= LATE else x)


def count(module, args, output):
    SEEN.append(1)
    COUNTS["hook"] += 1
    return output * len(SEEN) * COUNTS["hook"]


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.tanh = nn.Tanh()
        self.tanh.register_forward_hook(count)

    def forward(self, x):
        return self.tanh(x).sin()


def own_forward(module, x):
    return count(module, (), x.sin())


class OwnForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.forward = functools.partial(own_forward, self)


KINDS = [Functional, NothingTrained, Switched, SwitchedAndBack, Tracks, Counts, Grows, Drops, Hooked, OwnForward]


def steps(make, how, count=6):
    seed()
    SEEN.clear()
    COUNTS.clear()
    module, found = make(), []
    region = how(module)
    for step in range(count):
        x = (torch.arange(12.0).view(3, 4) / 10 + step).requires_grad_()
        y = region(x * 1.0).sum()
        y.backward()
        found += [y.detach(), x.grad, torch.rand(1), *map(torch.clone, module.buffers())]
        found.append(torch.tensor([len(SEEN), sum(COUNTS.values())]))
    return bits(found)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_as_without_checkpoint(kind):
    assert steps(kind, ms.checkpoint()) == steps(kind, ms.identity)


@pytest.mark.parametrize("numbers", [1, 312, 624])
@pytest.mark.parametrize(
    "draw", [np.random.rand, lambda n: [random.random() for _ in range(n)]], ids=["NumPy", "Python"]
)
def test_numbers_of_the_host_that_are_drawn_later_are_refused_and_learned(draw, numbers):
    """312 of them take as many words as a generator makes at a time: it stands where it stood."""

    class Draws(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return torch.sin(x * (float(sum(draw(numbers))) if self.calls > 1 else 1.0))

    region, x = ms.checkpoint()(Draws()), torch.ones(2, requires_grad=True)
    region(x).sum().backward()
    with pytest.raises(ms.CorrectnessError, match="had not done on its first call"):
        region(x)
    y = region(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    factor = gradient / torch.cos(torch.asin(y.detach()))  # of a sine, up to its sign
    assert torch.allclose(torch.sin(factor.abs()).abs(), y.abs(), atol=1e-3)


def test_a_codebook_that_is_reset_later_is_refused_by_name_and_learned():
    class Codes(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.ones(4, 4))

        def forward(self, x):
            self.calls += 1
            if self.calls >= LATE:
                self.codes.mul_(2)
            return torch.sin(x @ self.codes.clone())

    module, x = Codes(), torch.ones(3, 4, requires_grad=True)
    region = ms.checkpoint()(module)
    for _ in range(2):
        region(x)
    with pytest.raises(ms.CorrectnessError, match=r"buffer 'codes' of Codes in place.*not done on an earlier call"):
        region(x)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(region(x).sum(), x)
        assert torch.equal(gradient, torch.autograd.grad(torch.sin(x @ module.codes).sum(), x)[0])


def test_a_region_that_is_given_something_else_in_each_call_is_not_watched_for_ever():
    watched = []

    def region(*xs):
        watched.append(torch._C._len_torch_dispatch_stack())
        return torch.sin(sum(xs))

    fn, x = ms.checkpoint()(region), torch.ones(2, requires_grad=True)
    for number in range(1, 40):
        fn(*[x * 1.0 for _ in range(number)])
    assert sum(watched[:16]) == 16
    assert not any(watched[16:])
    assert len(fn.learned[0].effects) == 16
