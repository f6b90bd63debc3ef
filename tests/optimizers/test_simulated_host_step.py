"""The step of offloaded states, as a simulation times it: the link, the host, and the disk."""

import pytest
import torch
from torch import nn

import memscale as ms

LINK, HOST, DISK = 10e9, 40e9, 1e9
CARD = ms.Hardware(
    name="card",
    device_type="cuda",
    memory_bytes=2**34,
    flops_per_second={"float32": 1e15},
    bandwidth_bytes_per_second=1e15,
    host_to_device_bytes_per_second=LINK,
    device_to_host_bytes_per_second=LINK,
    host_bandwidth_bytes_per_second=HOST,
    disk_read_bytes_per_second=DISK,
    disk_write_bytes_per_second=DISK,
    measured=True,
)
SIDE, LAYERS = 4096, 6
NUMBERS = SIDE * SIDE * LAYERS
# Gradients and weights go out and weights come back; the kernel reads four tensors of float32 and writes three.
OUT, IN, ON_THE_HOST = 2 * 4 * NUMBERS / LINK, 4 * NUMBERS / LINK, 7 * 4 * NUMBERS / HOST
# One layer steps while the next is on its way out and the last on its way in: the longest of the three takes all the
# time, and what the last layer waits for when it has come out.
OVERLAPPED = OUT + (ON_THE_HOST + IN) / LAYERS
TIMES = {
    "host": (ms.offload_states(), OVERLAPPED),
    "in backward": (ms.compose(ms.step_in_backward(), ms.offload_states()), OVERLAPPED),
    # What is read and written there is more than all the rest can hide.
    "disk": (ms.offload_states(tier="disk"), 2 * 8 * NUMBERS / DISK),
}


@pytest.mark.parametrize(("how", "expected"), TIMES.values(), ids=TIMES)
def test_a_simulated_step_overlaps_what_its_copies_and_its_host_take(how, expected):
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False, device="meta") for _ in range(LAYERS)])
    step = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": lambda y, _: y.sum(), "hardware": CARD}
    plain, below = (
        ms.profile(model, torch.empty(1, SIDE, device="meta"), plan=plan, **step).step_seconds
        for plan in (None, {"": how})
    )
    assert expected * 0.98 <= below - plain <= expected * 1.02


def test_8_bit_states_below_the_device_are_restored_there_and_take_nothing_of_it():
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE, bias=False, device="meta") for _ in range(LAYERS)])
    step = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": lambda y, _: y.sum(), "hardware": CARD}
    full, small = (
        ms.profile(model, torch.empty(1, SIDE, device="meta"), plan={"": how}, **step)
        for how in (ms.offload_states(), ms.compose(ms.offload_states(), ms.quantize_states()))
    )
    assert small.peak_bytes == full.peak_bytes
    assert small.by_tier["pinned"] < 0.7 * full.by_tier["pinned"]
