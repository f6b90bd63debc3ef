"""Random generators: each draw changes the mark of its generator, and a recompute repeats the numbers of all."""

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
@pytest.mark.parametrize("own", [False, True], ids=["of the process", "of the user's own"])
def test_a_generator_put_back_repeats_its_numbers(name, own):
    """A state is read from the generator's memory, where PyTorch keeps a left normal number behind the words."""
    generator = torch.Generator() if own else torch.default_generator
    generator.manual_seed(3)
    torch.set_rng_state(torch.get_rng_state())
    for draws in range(3):
        torch.randn(draws, generator=generator)
        state, whole = randomness.state_of(generator), generator.get_state()
        assert isinstance(state, bytes)
        DRAWS[name]()
        numbers = [torch.randn(3, generator=generator, dtype=dtype) for dtype in (torch.float32, torch.float64)]
        randomness.restore_state(generator, state)
        assert generator.get_state().equal(whole)
        DRAWS[name]()
        again = [torch.randn(3, generator=generator, dtype=dtype) for dtype in (torch.float32, torch.float64)]
        assert bits(again) == bits(numbers)


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_changes_the_mark_of_the_generator(name):
    for _ in range(3):  # the second normal number of a pair draws nothing: it is the one that was left
        before = randomness.draw_marks([torch.default_generator])
        assert before == randomness.draw_marks([torch.default_generator])
        DRAWS[name]()
        assert (randomness.draw_marks([torch.default_generator]) != before) == (name != "another seed" or _ == 0)


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


def putting_back(get, put, draw):
    def region(x):
        state = get()
        scale = draw()
        put(state)
        return torch.sin(x * scale)

    return region


OWN = torch.Generator(), random.Random(0)
PUT_BACK = {
    "fork_rng": putting_back(torch.get_rng_state, torch.set_rng_state, lambda: torch.rand(4)),
    "a generator of PyTorch's": putting_back(
        OWN[0].get_state, OWN[0].set_state, lambda: torch.rand(4, generator=OWN[0])
    ),
    "one of Python's": putting_back(OWN[1].getstate, OWN[1].setstate, OWN[1].random),
}


@pytest.mark.parametrize("region", PUT_BACK.values(), ids=PUT_BACK)
def test_a_region_that_puts_the_generator_back_itself(region):
    def steps(how):
        seed()
        OWN[0].manual_seed(0)
        OWN[1].seed(0)
        torch.set_rng_state(torch.get_rng_state())  # from now on that leaves no trace
        found, run = [], how(region)
        for _ in range(3):
            x = torch.ones(4, requires_grad=True)
            y = run(x).sum()
            drawn = torch.rand(1), torch.rand(1, generator=OWN[0]), torch.tensor(OWN[1].random())
            y.backward()
            found += [x.grad, *drawn]
        return bits(found)

    assert steps(ms.checkpoint()) == steps(ms.identity)


def test_a_region_that_seeds_and_so_ends_where_it_began():
    def region(x):
        torch.manual_seed(5)
        y = x * torch.rand(4)
        return y.exp() + torch.rand(4)  # after what a recompute is stopped behind

    def steps(how):
        found, x = [], torch.ones(4, requires_grad=True)
        for _ in range(2):
            how(region)(x)
            how(region)(x).sum().backward()
            found += [x.grad.clone(), torch.rand(1)]
        return bits(found)

    assert steps(ms.checkpoint()) == steps(ms.identity)
