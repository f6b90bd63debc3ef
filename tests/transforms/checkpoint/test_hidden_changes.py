"""Parameters and buffers that a region changes behind `.data`: once, as without checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits


def assigns(slow, fast):
    slow.data = slow.data * 0.5 + fast.data * 0.5


def in_place(slow, fast):
    slow.data.mul_(0.5).add_(fast.data, alpha=0.5)


def in_one_operator(slow, fast):
    torch._foreach_lerp_([slow.data], [fast.data], 0.5)


def both(slow, fast):
    slow.data.mul_(0.5)
    slow.data = slow.data + fast.data * 0.5


def without_grad(slow, fast):
    with torch.no_grad():
        slow.lerp_(fast, 0.5)


WAYS = [assigns, in_place, in_one_operator, both, without_grad]


class Momentum(nn.Module):
    """Two encoders that are equal at first: the first update changes no value (MoCo)."""

    def __init__(self, update):
        super().__init__()
        self.update = update
        self.query, self.key = nn.Linear(4, 4), nn.Linear(4, 4)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)

    def forward(self, x):
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            self.update(slow, fast)
        return torch.tanh(self.query(x)) * torch.tanh(self.key(x))


class Buffers(Momentum):
    """The same with buffers."""

    def __init__(self, update):
        super().__init__(update)
        for name, parameter in list(self.key.named_parameters()):
            delattr(self.key, name)
            self.key.register_buffer(name, parameter.detach().clone())

    def forward(self, x):
        for name, buffer in self.key.named_buffers():
            self.update(buffer, getattr(self.query, name))
        return torch.tanh(self.query(x)) * torch.tanh(nn.functional.linear(x, self.key.weight, self.key.bias))


class MaxNorm(nn.Module):
    """A trained weight that is limited before it is used (EEGNet)."""

    def __init__(self, update):
        super().__init__()
        self.update = update
        self.query = nn.Linear(4, 4)
        self.limit = nn.Parameter(torch.full((4, 4), 0.1), requires_grad=False)

    def forward(self, x):
        self.update(self.query.weight, self.limit)
        return torch.tanh(self.query(x))


def train(kind, update, how, *, accumulate=1):
    torch.manual_seed(0)
    model = kind(update)
    fn = how(model)
    optimizer = torch.optim.SGD(model.query.parameters(), 0.5)
    found = []
    for step in range(4):
        xs = [torch.linspace(-1, 1, 8).reshape(2, 4).mul(step + i + 1).requires_grad_() for i in range(accumulate)]
        losses = [fn(x * 1.0).square().sum() for x in xs]
        for loss in reversed(losses):
            loss.backward(retain_graph=step == 2)
            if step == 2:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(bits([losses, [x.grad for x in xs]]))
    return found, bits(model.state_dict())


@pytest.mark.parametrize("update", WAYS)
@pytest.mark.parametrize("kind", [Momentum, Buffers, MaxNorm])
def test_the_update_happens_once(kind, update):
    assert train(kind, update, ms.checkpoint()) == train(kind, update, lambda model: model)


def test_two_forwards_before_their_backwards():
    """Each has its own weights. Not in place: autograd would not notice that saved weights were changed."""
    expected = train(Momentum, assigns, lambda model: model, accumulate=2)
    assert train(Momentum, assigns, ms.checkpoint(), accumulate=2) == expected


def test_an_update_with_forces_inside():
    """The recompute in the middle of the run finds the old weights, too."""

    class Forces(Momentum):
        def forward(self, x):
            return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]

    for update in WAYS:
        assert train(Forces, update, ms.checkpoint()) == train(Forces, update, lambda model: model)


def test_an_assignment_that_begins_later_is_refused_and_learned():
    class Later(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls > 1:
                self.weight.data = self.weight.data * 0.5
            return torch.tanh(super().forward(x))

    model = Later(4, 4)
    fn = ms.checkpoint()(model)
    x = torch.ones(2, 4, requires_grad=True)
    fn(x).sum().backward()
    with pytest.raises(ms.CorrectnessError, match=r"parameter 'weight' of Later through \.data"):
        fn(x)
    x.grad = model.weight.grad = model.bias.grad = None
    fn(x).sum().backward()

    plain = nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    again = torch.ones(2, 4, requires_grad=True)
    torch.tanh(plain(again)).sum().backward()
    assert bits([x.grad, model.weight.grad]) == bits([again.grad, plain.weight.grad])


TWICE = ms.compose(ms.checkpoint(), ms.checkpoint())
MIXED = ms.compose(ms.checkpoint(policy=ms.policies.dots_saveable), ms.checkpoint())


@pytest.mark.parametrize("how", [ms.checkpoint(), TWICE, MIXED, ms.cast(compute="float32")], ids=repr)
def test_operators_of_higher_order_run_in_a_first_call(how):
    """A mode that keeps PyTorch from compiling `cond` takes the gradients of what its branches capture."""
    model = nn.Linear(3, 3)

    def region(x):
        return torch.cond(x.sum() > 0, lambda x: model(x).sin(), lambda x: model(x).cos(), (x,))

    x = torch.ones(2, 3, requires_grad=True)
    wanted = [x, *model.parameters()]
    expected = torch.autograd.grad(region(x).sum(), wanted)
    try:
        assert bits(torch.autograd.grad(how(region)(x).sum(), wanted)) == bits(expected)
        assert ms.saved_residuals(how(region), x)
        assert bits(torch.autograd.grad(region(x).sum(), wanted)) == bits(expected)
    finally:
        torch._dynamo.reset()


def test_a_checkpoint_in_another_one_takes_the_numbers_of_kernels_that_conjugate():
    weight = torch.randn(4, 4, dtype=torch.cfloat, requires_grad=True)

    def region(x):
        return torch.linalg.pinv(x @ weight).sin()

    x = torch.randn(4, 4, dtype=torch.cfloat)
    (expected,) = torch.autograd.grad(region(x).abs().sum(), weight)
    (found,) = torch.autograd.grad(TWICE(region)(x).abs().sum(), weight)
    assert bits(found.resolve_conj()) == bits(expected.resolve_conj())


@pytest.mark.parametrize("given", [False, True], ids=["buffers", "arguments"])
def test_statistics_move_once_also_after_a_first_batch_that_left_them(given):
    """Zeros leave a mean of zero, and the kernel tells no version counter: each later step moved it twice."""
    torch.manual_seed(0)
    found = []
    for how in (ms.identity, ms.checkpoint()):
        norm = nn.BatchNorm1d(4, affine=False)
        fn = how(lambda x, mean, var: nn.functional.batch_norm(x, mean, var, training=True)) if given else how(norm)
        for x in (torch.zeros(3, 4), torch.arange(12.0).view(3, 4)):
            x.requires_grad_()
            (fn(x, norm.running_mean, norm.running_var) if given else fn(x)).square().sum().backward()
        found.append(bits([norm.running_mean, norm.running_var]))
    assert found[0] == found[1]
