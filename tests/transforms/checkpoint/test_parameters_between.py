"""Parameters that are frozen, unfrozen or given other memory between forward and backward."""

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits, seed


def step(how, change, *, frozen=()):
    seed()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))
    for index in frozen:
        net[index].requires_grad_(False)
    x = torch.ones(5, 3, requires_grad=True)
    y = how(net)(x * 0.5).square().sum()
    change(net)
    flags = [p.requires_grad for p in net.parameters()]
    y.backward()
    assert [p.requires_grad for p in net.parameters()] == flags, "a recompute leaves no trace"
    return bits([x.grad, *[p.grad for p in net.parameters()]])


STREAMED = ms.compose(ms.checkpoint(), ms.offload(what="params", min_bytes=0))


@pytest.mark.parametrize("how", [ms.checkpoint(), ms.checkpoint(policy=ms.policies.dots_saveable), STREAMED])
@pytest.mark.parametrize(
    ("frozen", "change"),
    [
        ((0, 2, 3), lambda net: net.requires_grad_(True)),
        ((2,), lambda net: net.requires_grad_(True)),
        ((), lambda net: net.requires_grad_(False)),
        ((), lambda net: net[0].requires_grad_(False)),
        ((0,), lambda net: (net[0].requires_grad_(True), net[2].requires_grad_(False))),
    ],
)
def test_the_recompute_sees_what_was_trained_in_the_forward(how, frozen, change):
    assert step(how, change, frozen=frozen) == step(ms.identity, change, frozen=frozen)


def test_tied_weights_that_are_unfrozen_stay_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.Parameter(torch.full((3, 3), 0.3), requires_grad=False)

        def forward(self, x):
            assert self.a is self.b
            assert isinstance(self.a, nn.Parameter)
            return torch.tanh(torch.tanh(x @ self.a) @ self.b)

    net, x = Tied(), torch.ones(2, 3, requires_grad=True)
    y = ms.checkpoint()(net)(x).sum()
    net.requires_grad_(True)
    y.backward()
    assert net.a.grad is None
    expected = torch.ones(2, 3, requires_grad=True)
    net(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)


@pytest.mark.parametrize("times", [1, 2])  # the second time the allocator may hand out the first memory again
def test_an_assignment_to_data_before_backward_is_an_error_that_names_the_parameter(times):
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.ones(5, 3, requires_grad=True)
    y = ms.checkpoint()(net)(x).sum()
    for _ in range(times):
        net[0].weight.data = net[0].weight.data * 2
    with pytest.raises(ms.CorrectnessError, match=r"'0\.weight' of Sequential.*\.data was assigned"):
        y.backward()


def test_an_assignment_to_the_data_of_what_the_region_does_not_use_is_none():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)), torch.ones(5, 3, requires_grad=True)
    y = ms.checkpoint()(lambda x: net[0](x).tanh())(x).sum()
    net[1].weight.data = net[1].weight.data * 2
    y.backward()
    assert net[0].weight.grad is not None


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1, 1))
        self.register_buffer("other", torch.ones(1, 1))

    def forward(self, x):
        return torch.sin(x * self.scale.tolist()[0][0])


@pytest.mark.parametrize("name", ["scale", "other"])
def test_a_changed_buffer_that_the_region_only_lists_is_refused_too(name):
    """`tolist` is no operator: the watch for what was changed did not see it, and the gradient was wrong."""
    module, x = Scaled(), torch.ones(1, requires_grad=True)
    region = ms.checkpoint()(module)
    region(x)
    y = region(x)
    getattr(module, name).mul_(2)
    if name == "scale":
        with pytest.raises(ms.CorrectnessError, match="buffer 'scale' of Scaled"):
            y.backward()
    else:
        y.backward()
        assert x.grad == torch.ones(1).cos()


CHECKPOINT, DOTS = ms.checkpoint(), ms.checkpoint(policy=ms.policies.dots_saveable)
TILE, DOUBLE = ms.tile(chunks=2), ms.cast(compute=torch.float64)
AROUND = {
    "two": ms.compose(CHECKPOINT, CHECKPOINT),
    "three": ms.compose(CHECKPOINT, CHECKPOINT, CHECKPOINT),
    "policy in": ms.compose(CHECKPOINT, DOTS),
    "policy around": ms.compose(DOTS, CHECKPOINT),
    "offload around": ms.compose(ms.offload(min_bytes=0), CHECKPOINT, CHECKPOINT),
    "offload between": ms.compose(CHECKPOINT, ms.offload(min_bytes=0), CHECKPOINT),
    "tile around": ms.compose(TILE, CHECKPOINT),
    "cast in": ms.compose(CHECKPOINT, DOUBLE),
    "cast around": ms.compose(DOUBLE, CHECKPOINT, CHECKPOINT),
}


class Behind(nn.Module):
    """Has a region that captures all of it, and changes behind that what the region reads or does not read."""

    def __init__(self, region, *, reads, quiet=0):
        super().__init__()
        self.region, self.reads, self.quiet = region, reads, quiet  # calls before the first that changes something
        self.gain, self.norm = nn.Parameter(torch.rand(4)), nn.BatchNorm1d(4)
        self.register_buffer("average", torch.ones(2, 4))
        self.seen = [torch.ones(2, 4)]

    def forward(self, x):
        def scaled(t):
            t = torch.sin(t * self.gain).exp()
            return torch.sin(t * (self.average[0] + self.seen[0][1]).detach()) if self.reads else t

        x = self.region(scaled)(x)
        if self.quiet == 0:
            self.average.mul_(1.5)
            self.seen[0].add_(1)
        self.quiet = max(0, self.quiet - 1)
        return self.norm(x)


@pytest.mark.parametrize("how", AROUND.values(), ids=AROUND)
def test_what_a_region_captures_and_does_not_read_may_change_behind_it(how):
    """A region inside, and a cast, copy all that the region captures: no more than that is not to read it."""
    rounds = next((each for each in (TILE, DOUBLE) if repr(each) in repr(how)), ms.identity)
    assert steps_behind(how, reads=False) == steps_behind(rounds, reads=False)


def steps_behind(how, *, reads):
    def steps():
        seed()
        model = Behind(how, reads=reads)
        for _ in range(3):
            x = torch.randn(6, 4, requires_grad=True)
            model(x).square().sum().backward()
            yield bits([x.grad, model.gain.grad, *model.buffers(), model.seen])

    return list(steps())


@pytest.mark.parametrize("how", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("quiet", [0, 1])
def test_what_it_reads_may_not(how, quiet):
    if how.transforms[0] == DOUBLE:  # which copies outside of what is run again
        assert steps_behind(how, reads=True) == steps_behind(DOUBLE, reads=True)
        return
    model = Behind(how, reads=True, quiet=quiet)
    for _ in range(quiet):
        model(torch.randn(6, 4, requires_grad=True)).square().sum().backward()
    loss = model(torch.randn(6, 4, requires_grad=True)).square().sum()
    with pytest.raises(ms.CorrectnessError, match="at version"):
        loss.backward()
