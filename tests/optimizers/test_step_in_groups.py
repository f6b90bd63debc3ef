"""`step_in_groups`: the temporaries of a few parameters at a time."""

import pytest
import torch
from torch import nn

import memscale as ms

ONE = 64 * 64 * 4


def stepping(how, **options):
    parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = how(torch.optim.AdamW(parameters, foreach=True, **options))
    optimizer.step()
    return optimizer


def most_at_once(how):
    return ms.measure(stepping(how).step).growth_bytes / ONE


@pytest.mark.parametrize(("size", "at_once"), [(1, 1), (ONE, 1), (2 * ONE, 2), (5 * ONE, 5), (99 * ONE, 8)])
def test_temporaries_are_those_of_a_group(size, at_once):
    alone = most_at_once(ms.step_in_groups(group_bytes=1))
    assert 1 <= alone <= 2
    assert most_at_once(ms.step_in_groups(group_bytes=size)) == pytest.approx(at_once * alone, rel=0.02)


@pytest.mark.parametrize("size", [0, -1, "", "many", True, 0.5, "50%", None])
def test_values_out_of_range_are_refused(size):
    with pytest.raises(ms.ConfigError, match=r"step_in_groups: group_bytes=.* must be"):
        ms.step_in_groups(group_bytes=size)
