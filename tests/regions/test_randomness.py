"""Whether a generator was drawn from is read from its memory: it must show every draw, and nothing else."""

import random
import types

import numpy as np
import pytest
import torch
from torch import nn

import memscale as ms
from memscale.regions import randomness
from tests.support.checks import bits, seed

DRAWS = {
    "one uniform number": lambda: torch.rand(1),
    "as many as the twister makes at a time": lambda: torch.rand(624),
    "one normal number, of a pair": lambda: torch.randn(1),
    "one normal number of double precision": lambda: torch.randn(1, dtype=torch.float64),
    "a permutation": lambda: torch.randperm(3),
    "another seed": lambda: torch.manual_seed(1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_moves_the_position(name):
    for _ in range(3):  # the second normal number of a pair draws nothing: it is the one that was left
        before = randomness.position()
        assert before is not None
        assert before == randomness.position()
        DRAWS[name]()
        assert (randomness.position() != before) == (name != "another seed" or _ == 0)


def test_where_the_position_is_not_found_whole_states_are_compared(monkeypatch):
    def step(how):
        seed()
        x = torch.ones(8, requires_grad=True)
        how(lambda x: torch.nn.functional.dropout(x).sin())(x).sum().backward()
        return bits([x.grad, torch.rand(1)])

    expected = step(ms.identity)
    assert step(ms.checkpoint()) == expected
    monkeypatch.setattr(randomness, "_position_of_torch", lambda: None)
    assert step(ms.checkpoint()) == expected


@pytest.mark.parametrize("place", ["attribute", "argument", "closure", "in a list"])
@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (random.Random, lambda dice: dice.gauss(0, 1)),
        (np.random.default_rng, lambda dice: dice.normal()),
        (np.random.RandomState, lambda dice: dice.randn()),  # which draws two at a time
    ],
    ids=["Python", "NumPy", "NumPy's older"],
)
def test_a_generator_of_the_users_own_repeats_its_numbers(make, draw, place):
    def step(how):
        dice, owner = make(3), nn.Module()
        owner.dice = dice if place == "attribute" else None
        regions = {
            "attribute": types.MethodType(lambda self, x: torch.sin(x * draw(self.dice)), owner),
            "argument": lambda x, given: torch.sin(x * draw(given)),
            "closure": lambda x: torch.sin(x * draw(dice)),
            "in a list": lambda x, given: torch.sin(x * draw(given[0])),
        }
        given = {"argument": (dice,), "in a list": ([dice],)}.get(place, ())
        found, fn = [], how(regions[place])
        for _ in range(3):
            x = torch.ones(2, requires_grad=True)
            fn(x, *given).sum().backward()
            found += [x.grad.tolist(), draw(dice)]
        return found

    assert step(ms.checkpoint()) == step(ms.identity)
