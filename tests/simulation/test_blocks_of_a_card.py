"""What the allocator of a card hands out besides what tensors need, as the CUDA build does on the fake libraries."""

import functools

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.simulation.rules.recurrences import flattened_bytes
from tests.support.steps import mean

MIB = 1 << 20


class Last(nn.Module):
    """An LSTM whose last output is the result."""

    def __init__(self, dtype, **options):
        super().__init__()
        self.lstm = nn.LSTM(256, 512, batch_first=True, dtype=dtype, device="meta", **options)

    def forward(self, x):
        return self.lstm(x)[0][:, -1].float().square().mean()


def profiled(model, *shape, dtype=torch.float32):
    batch = torch.empty(*shape, dtype=dtype, device="meta")
    return ms.profile(model, batch, loss=lambda output, _: output, hardware="h100")


def parameters(profile):
    return [holding.nbytes for holding in profile.holdings if holding.category == "parameter"]


def test_a_card_has_the_weights_of_an_lstm_in_one_block():
    model = Last(torch.float32, num_layers=2)
    nbytes = sum(weight.nbytes for weight in model.parameters())
    assert flattened_bytes(model.lstm) == nbytes
    assert max(parameters(profiled(model, 4, 8, 256))) == nbytes


def test_unless_cudnn_does_not_take_them_so():
    model = Last(torch.bfloat16)
    found = parameters(profiled(model, 4, 8, 256, dtype=torch.bfloat16))
    assert sorted(found) == sorted(weight.nbytes for weight in model.parameters())


def test_room_for_biases_that_are_not_there():
    model = Last(torch.float32, bias=False)
    nbytes = sum(weight.nbytes for weight in model.parameters())
    assert parameters(profiled(model, 4, 8, 256))[0] == nbytes + 2 * 4 * 512 * 4


class Chosen(nn.Module):
    def __init__(self, choose):
        super().__init__()
        self.rows = nn.Parameter(torch.empty(4096, 512, device="meta"))
        self.choose = choose

    def forward(self, numbers):
        return self.choose(self.rows, numbers).mean()


@pytest.mark.parametrize(
    "choose",
    [lambda rows, numbers: rows[numbers], lambda rows, numbers: rows.index_select(0, numbers)],
    ids=["rows[...]", "index_select"],
)
def test_the_gradient_of_a_selection_is_summed_up_in_place(choose):
    numbers = torch.arange(16, device="meta")
    found = ms.profile(Chosen(choose), numbers, loss=lambda output, _: output, hardware="h100")
    assert 2 * 8 * MIB <= found.peak_bytes < 2 * 8 * MIB + MIB  # the rows and their gradient, and no second one


class Growing(nn.Module):
    """Keeps as many MiB as it has had steps, up to two."""

    def __init__(self):
        super().__init__()
        self.weight, self.kept = nn.Parameter(torch.ones(4)), None

    def forward(self, x):
        steps = 1 if self.kept is None else 2
        self.kept = torch.zeros(steps * MIB, dtype=torch.uint8, device=x.device)
        return (x * self.weight).sum()


def test_a_second_step_that_leaves_something_else_is_followed_by_a_third():
    """As DDP's, which has other buckets after the first: the step that all later ones are like is the third."""
    found = ms.profile(Growing(), torch.ones(4), loss=lambda output, _: output, hardware="h100")
    assert 4 * MIB <= found.peak_bytes < 5 * MIB  # 2 MiB of the step before, and 2 of its own


@pytest.mark.parametrize(
    ("optimizer", "states", "counts"),
    [
        (torch.optim.RMSprop, 1, 0),  # by `torch.zeros(())`, which is on the CPU
        (torch.optim.Rprop, 2, 0),
        (torch.optim.Adagrad, 1, 0),  # before the step
        (functools.partial(torch.optim.Adagrad, fused=True), 1, 1),
        (functools.partial(torch.optim.Adam, capturable=True), 2, 1),
        (functools.partial(torch.optim.RAdam, capturable=True, foreach=False), 2, 1),
        (torch.optim.ASGD, 1, 3),  # with its rates, always on the card
    ],
)
def test_an_optimizer_counts_steps_where_it_does_on_a_card(optimizer, states, counts):
    model = nn.Linear(64, 32, bias=False, device="meta")
    profile = ms.profile(
        model, torch.empty(2, 64, device="meta"), optimizer=optimizer(model.parameters()), loss=mean, hardware="h100"
    )
    assert profile.by_category["optimizer state"] == states * model.weight.nbytes + counts * 4


def test_what_is_counted_on_meta_changes_nothing_else_there():
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), torch.zeros(2, 3, dtype=torch.long)
    optimizer = torch.optim.Adagrad(model.parameters(), fused=True)  # a count in float32, which would be a large token
    assert ms.profile(model, batch, optimizer=optimizer, loss=mean, hardware="h100").method == "static"
