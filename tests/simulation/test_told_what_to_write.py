"""Mistakes that are easily made: each is refused with what to write instead."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memscale as ms


def profile(model, batch, **options):
    return ms.profile(model, batch, loss=lambda y, _: y.mean(), **options)


def test_labels_in_the_batch_are_no_arguments():
    for batch in ((torch.ones(2, 4), torch.ones(2)), {"input": torch.ones(2, 4), "labels": torch.ones(2)}):
        with pytest.raises(ms.ConfigError, match="belong to the loss"):
            profile(nn.Linear(4, 4), batch)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_floats_are_no_rows(device):
    model = nn.Sequential(nn.Embedding(8, 4, device=device))
    with pytest.raises(ms.ConfigError, match=r"float32 numbers as rows.*batch\.long\(\)"):
        profile(model, torch.randn(2, 3, device=device))


def test_a_checkpoint_is_not_that_of_torch():
    with pytest.raises(ms.ConfigError, match=r"no Linear; write checkpoint\(\)\(function\)"):
        ms.checkpoint(nn.Linear(2, 2))


def test_a_module_is_no_key():
    layer = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
    with pytest.raises(ms.PlanError, match=r"got a Sequential$"):
        ms.Plan({layer: ms.checkpoint()})


def test_a_model_on_meta_is_not_verified():
    with pytest.raises(ms.ConfigError, match="has no numbers"):
        ms.verify(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2), torch.ones(1, 2))


def test_cast_takes_short_names():
    assert ms.cast(compute="bf16") == ms.cast(compute=torch.bfloat16)


def test_a_model_that_is_partly_on_meta_is_simulated():
    def model(device):
        return nn.Sequential(nn.Linear(8, 8, device=device), nn.Linear(8, 8))

    mixed, real = (profile(model(device), torch.ones(64, 8)) for device in ("meta", "cpu"))
    assert mixed.peak_bytes == real.peak_bytes


def test_a_model_in_ddp_is_told_to_come_out_of_it():
    wrapped = nn.Module.__new__(nn.parallel.DistributedDataParallel)  # its own init needs a process group
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(2, 2)
    with pytest.raises(ms.ConfigError, match=r"pass model\.module"):
        ms.profile(wrapped, torch.ones(1, 2), loss=lambda y, _: y.sum())
