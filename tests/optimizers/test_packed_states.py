"""8-bit states lie in few blocks of memory, and only those of parameters that step."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.optimizers import packed

pytest.importorskip("bitsandbytes")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(packed, "_LEAST_BYTES", 0)


def stepped(optimizer, parameters):
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def blocks(optimizer):
    """The bytes of each block of memory under codes and magnitudes, and the bytes of these."""
    states = [value for each in optimizer.state.values() for name, value in each.items() if name.startswith("exp")]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in states}
    return list(storages.values()), sum(each.nbytes for each in states)


def test_one_block_for_all(small_blocks):
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((64, 65), (5000,), (10,), (3, 5, 700))]
    optimizer = ms.quantize_states()(torch.optim.AdamW(parameters))
    stepped(optimizer, parameters)
    (nbytes, *small), own = blocks(optimizer)
    assert small == [40, 40]  # those of the one with too few numbers
    assert own - 80 <= nbytes < own - 80 + 3 * 264
    before = {name: value.data_ptr() for name, value in optimizer.state[parameters[0]].items() if name != "step"}
    stepped(optimizer, parameters)
    after = {name: value.data_ptr() for name, value in optimizer.state[parameters[0]].items() if name != "step"}
    assert before == after
    added = [nn.Parameter(torch.randn(80, 80))]
    optimizer.add_param_group({"params": added})
    stepped(optimizer, parameters + added)
    assert len(blocks(optimizer)[0]) == 4


def test_blocks_are_taken_when_they_are_needed(small_blocks, monkeypatch):
    monkeypatch.setattr(packed, "_BLOCK_BYTES", 2**15)
    parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(12)]
    optimizer = ms.quantize_states()(torch.optim.AdamW(parameters))
    stepped(optimizer, parameters[:2])
    sizes, own = blocks(optimizer)
    assert len(sizes) == 1
    assert own <= sizes[0] <= 2**15
    large = [nn.Parameter(torch.randn(256, 256))]  # larger than a block
    optimizer.add_param_group({"params": large})
    stepped(optimizer, parameters + large)
    sizes, own = blocks(optimizer)
    assert len(sizes) == 5
    assert own <= sum(sizes) < own + 13 * 256


def test_states_below_the_device_leave_no_block_behind(small_blocks):
    parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(3)]
    optimizer = ms.compose(ms.offload_states(), ms.quantize_states())(torch.optim.AdamW(parameters))
    stepped(optimizer, parameters)
    assert all(nbytes < 3 * 4096 for nbytes in blocks(optimizer)[0])


def test_a_few_bytes_are_in_no_block():
    """For what is larger than 1 MiB and smaller than 10, PyTorch's allocator for a card may take 20."""
    parameters = [nn.Parameter(torch.randn(64, 64)) for _ in range(3)]
    optimizer = ms.quantize_states()(torch.optim.AdamW(parameters))
    stepped(optimizer, parameters)
    sizes, own = blocks(optimizer)
    assert len(sizes) == 3 * 2 * 2
    assert sum(sizes) == own


def test_parameters_that_go_to_several_devices_share_no_block(small_blocks):
    one, two = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(device=torch.device("cpu"))
    places = packed.Packed()
    places.attend([one, two], lambda each: 1024)
    two.device = torch.device("meta")  # as where a model is spread over cards after its optimizer was made
    assert places.room(one).numel() == 1024
    assert places.room(two) is None
