"""What a region leaves in its arguments and outputs under `torch.func`, where only outputs carry gradients."""

import types

import pytest
import torch

import memscale as ms
from memscale import checkpoint


def same_gradients(loss, x):
    wanted = torch.func.grad(lambda x: loss(ms.identity, x))(x)
    assert torch.equal(torch.func.grad(lambda x: loss(checkpoint(), x))(x), wanted)


def test_a_run_that_fails_leaves_no_inner_tensor_behind():
    cache = types.SimpleNamespace(entries=[], total=torch.zeros(3))
    before = dict(vars(cache))

    def fn(x, cache):
        cache.total = x.sin()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        torch.func.grad(lambda x: checkpoint()(fn)(x, cache))(torch.ones(3))
    assert vars(cache) == before


@pytest.mark.parametrize("kind", [list, dict])
def test_a_list_that_the_region_is_given_keeps_what_is_put_there(kind):
    x = torch.linspace(0, 1, 4)

    def loss(transform, x):
        found = kind()

        def fn(x, found):
            found.append(x.sin()) if kind is list else found.update(a=x.sin())
            return x.cos()

        y = transform(fn)(x, found)
        return (y * sum(found if kind is list else found.values())).sum()

    same_gradients(loss, x)


def test_an_object_that_is_returned_carries_gradients():
    x = torch.linspace(0, 1, 4)

    def loss(transform, x):
        y, entry = transform(lambda x: (x.cos(), types.SimpleNamespace(value=[x.sin()])))(x)
        return (y * entry.value[0]).sum()

    same_gradients(loss, x)


def test_an_input_can_be_returned_as_it_is():
    x = torch.linspace(0, 1, 4)

    def loss(transform, x):
        y, same = transform(lambda x: (x.cos(), x))(x * 2)
        return (y * same).sum()

    same_gradients(loss, x)


def test_a_rerun_that_leaves_other_tensors_is_refused():
    class hidden:  # memscale does not see what a class keeps
        runs = []  # noqa: RUF012

    def fn(x, cache):
        hidden.runs.append(1)
        cache.entries.extend([x.sin()] * len(hidden.runs))
        return x.cos()

    with pytest.raises(ms.CorrectnessError, match=r"the region left 4 tensors .* and the run had left 3"):
        torch.func.grad(lambda x: checkpoint()(fn)(x, types.SimpleNamespace(entries=[], total=torch.zeros(3))).sum())(
            torch.ones(3)
        )
