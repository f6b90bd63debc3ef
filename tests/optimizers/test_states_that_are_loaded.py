"""States that come from a plain optimizer, or go to a file, under transforms that keep them each in its own way."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.optimizers import on_host, quantized
from tests.support.coverings import pairwise
from tests.support.optimizers import numbers

SMALL = ms.quantize_states(block=64)
DISK = ms.offload_states(tier="disk")
# What the first is around the second changes nothing of the second's numbers.
COMPOSED = {
    f"{outer!r} {inner!r}": (outer, inner)
    for outer in (DISK, ms.compose(ms.step_in_backward(), ms.offload_states()))
    for inner in (SMALL, ms.compensate_rounding(), ms.compose(SMALL, ms.round_stochastically()))
}
MAKERS = {
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}


@pytest.fixture(autouse=True)
def _small_states_move_and_shrink_too(monkeypatch):
    monkeypatch.setattr(on_host, "_LEAST_BYTES", 16)
    monkeypatch.setattr(quantized, "_LEAST", 16)


class Scaled(nn.Module):
    """Has a parameter of no dimensions."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(2)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=dtype))

    def forward(self, x):
        return self.inner(x) * self.scale


def train(model, optimizer, steps):
    for number in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        model(x.to(model.scale.dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def taken_over(make, how, dtype, *, loads):
    """A plain optimizer's training that goes on under `how`: what it is made of, or what it loads from a file."""
    model = Scaled(dtype)
    optimizer = make(model.parameters())
    train(model, optimizer, [0, 1])
    if loads:
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = how(make(model.parameters()))
        optimizer.load_state_dict(saved)
    else:
        optimizer = how(optimizer)
    train(model, optimizer, [2, 3])
    return model, optimizer


@pytest.mark.parametrize(("how", "maker", "loads"), pairwise(itertools.product(COMPOSED, MAKERS, [False, True])))
def test_training_goes_on_from_a_plain_optimizer_to_the_same_numbers_wherever_states_are(how, maker, loads):
    (outer, inner), make = COMPOSED[how], MAKERS[maker]
    expected = numbers(*taken_over(make, inner, torch.bfloat16, loads=loads))
    model, optimizer = taken_over(make, ms.compose(outer, inner), torch.bfloat16, loads=loads)
    assert numbers(model, optimizer) == expected
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    del optimizer  # or both would step
    plain = make(model.parameters())
    plain.load_state_dict(torch.load(file))  # in bfloat16 again, with which it steps
    train(model, plain, [4])


def test_an_optimizer_that_is_under_it_for_a_while_steps_on_by_itself():
    """States of a parameter without dimensions, and factors, are in bfloat16 again, as its class has them."""
    for make in MAKERS.values():
        model = Scaled(torch.bfloat16)
        optimizer = make(model.parameters())
        train(model, optimizer, [0])
        under = ms.optimizers.InPlace(
            optimizer, [(name, each, [ms.compensate_rounding()]) for name, each in model.named_parameters()]
        )
        train(model, optimizer, [1])
        under.undo()
        train(model, optimizer, [2])


class Counts(torch.optim.SGD):
    """Counts its calls in each group, whether there are gradients or not."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad, alpha=group["lr"] / group["count"])


@pytest.mark.parametrize("how", [ms.step_in_backward(), ms.step_in_groups(group_bytes=1), DISK], ids=repr)
def test_a_group_without_gradients_counts_its_steps(how):
    def run(transform):
        model = Scaled(torch.float32)
        groups = [{"params": model.inner.parameters()}, {"params": [model.scale]}]
        optimizer = transform(Counts(groups, lr=0.1))
        model.scale.requires_grad_(False)
        train(model, optimizer, [0, 1])
        model.scale.requires_grad_(True)
        train(model, optimizer, [2])
        optimizer.step()
        return [group["count"] for group in optimizer.param_groups], numbers(model, optimizer)

    assert run(how) == run(ms.identity)


def test_an_optimizer_that_steps_what_has_no_gradient_is_refused():
    class Decays(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data.mul_(0.9)
                if p.grad is not None:
                    p.data.sub_(p.grad)

    with pytest.raises(ms.TransformError, match="Decays steps parameters that have no gradient, such as frozen ones"):
        ms.step_in_backward()(Decays(Scaled(torch.float32).parameters(), lr=0.1))


@pytest.mark.parametrize("maker", [lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), MAKERS["AdamW, fused"]])
@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "loaded without"])
def test_states_on_disk_go_with_the_entries_of_their_parameters(clears, maker):
    def run(how):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 64))
        optimizer = how(maker([weight]))
        new = optimizer.state_dict()
        for number in range(4):
            if number == 2 and clears:
                optimizer.state.clear()
            elif number == 2:
                optimizer.load_state_dict(new)
            weight.grad = torch.randn(64, 64)
            optimizer.step()
        return numbers(nn.ParameterList([weight]), optimizer)

    assert run(DISK) == run(ms.identity)


@pytest.mark.parametrize("how", [DISK, SMALL, ms.compose(DISK, SMALL)], ids=repr)
@pytest.mark.parametrize("way", ["one moment", "all states", "none"])
@pytest.mark.parametrize("maker", [lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), MAKERS["AdamW, fused"]])
def test_states_that_the_caller_assigns_count_as_loaded_ones_do(maker, way, how):
    def run(loads):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 64))
        optimizer = how(maker([weight]))
        for number in range(4):
            if number == 2:
                saved = optimizer.state_dict()
                assigned = {key: torch.zeros_like(state) for key, state in saved["state"][0].items()}
                if way == "one moment":
                    assigned = dict(itertools.islice(((k, v) for k, v in assigned.items() if v.dim()), 1))
                if loads:
                    saved["state"][0] = {**saved["state"][0], **assigned} if way == "one moment" else assigned
                    saved["state"] = {} if way == "none" else saved["state"]
                    optimizer.load_state_dict(saved)
                elif way == "one moment":
                    optimizer.state[weight].update(assigned)
                else:
                    optimizer.state[weight] = {} if way == "none" else assigned
            weight.grad = torch.randn(64, 64)
            optimizer.step()
        return numbers(nn.ParameterList([weight]), optimizer)

    assert run(loads=False) == run(loads=True)
