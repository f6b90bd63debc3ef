"""A device of a certain size: cached memory is given back before an allocation fails, and blocks are counted whole."""

import pytest
import torch
from torch import nn

import memscale as ms

MIB = 1 << 20
CONTEXT = 512 * MIB  # what Hardware.usable_bytes leaves to the CUDA context


def card(usable_mib):
    return ms.Hardware(name="card", device_type="cuda", memory_bytes=CONTEXT + usable_mib * MIB, capability=(8, 0))


class Growing(nn.Module):
    """Makes larger and larger tensors, each of which is gone before the next: none fits in what the last one left."""

    def __init__(self, *sizes):
        super().__init__()
        self.sizes = sizes
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        with torch.no_grad():
            for size in self.sizes:
                torch.zeros(size * MIB, dtype=torch.uint8)
        return x * self.weight


def step(hardware, *sizes):
    return ms.profile(Growing(*sizes), torch.ones(1), loss=lambda y, _: y.sum(), hardware=hardware)


def test_cached_memory_is_given_back_when_the_device_is_full():
    roomy, tight = step(card(1000), 100, 150, 200), step(card(260), 100, 150, 200)
    assert roomy.reserved_peak_bytes == (2 + 450) * MIB
    assert tight.reserved_peak_bytes == (2 + 250) * MIB  # 100 and 150; then both go for 200
    assert tight.peak_bytes == roomy.peak_bytes
    assert "frees cached memory" in tight.notes[0]
    assert "452 MiB" in tight.notes[0]


@pytest.mark.parametrize(("usable_mib", "fits"), [(1000, True), (260, True), (201, False)])
def test_the_verdict_is_pytorchs(usable_mib, fits):
    predictor = ms.OOMPredictor(Growing(100, 150, 200), loss=lambda y, _: y.sum(), hardware=card(usable_mib))
    prediction = predictor.predict(torch.ones(1), recommend=False)
    assert prediction.fits is fits
    assert (prediction.peak_bytes <= usable_mib * MIB) is fits
    # A budget is a smaller device.
    of_budget = ms.OOMPredictor(Growing(100, 150, 200), loss=lambda y, _: y.sum(), hardware=card(1000))
    assert of_budget.predict(torch.ones(1), budget=usable_mib * MIB, recommend=False).fits is fits


def test_the_largest_batch_is_one_that_fits_after_giving_back():
    predictor = ms.OOMPredictor(Growing(60, 90), loss=lambda y, _: y.sum(), hardware=card(190))
    found = predictor.largest(lambda rows: torch.ones(rows * (MIB // 4)), at_most=4096)
    # Input, product, its gradient: the two sizes of before are both gone by then.
    assert found.n * MIB < 190 * MIB < found.next_peak_bytes
    assert predictor.predict(torch.ones(found.n * (MIB // 4)), recommend=False).fits


def test_expandable_segments_are_advised_where_they_leave_more_of_the_device():
    advice = "with PYTORCH_ALLOC_CONF=expandable_segments:True the step would reserve 202 MiB in place of 452 MiB"
    assert step(card(1000), 100, 150, 200).notes == (advice,)  # as simulated in the test that follows
    assert step(card(30_000), 100, 150, 200).notes == ()  # 250 MiB are no hundredth of that
    assert step(card(1000), 200, 150, 100).notes == ()  # the smaller ones find room


def test_expandable_segments_are_honoured(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    grown = step(card(1000), 100, 150, 200)
    assert grown.reserved_peak_bytes == (2 + 200) * MIB  # one range grows
    assert grown.notes == ()


def test_a_fraction_that_a_process_allows_itself_is_told(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.3")
    assert any("the step does not fit" in note for note in step(card(500), 100, 150, 200).notes)
    assert "frees cached" in step(card(900), 100, 150, 200).notes[0]


class Keeps(nn.Module):
    """Has a smaller tensor in the block that a larger one left: too little is left over for a block of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        with torch.no_grad():
            torch.zeros(24 * MIB, dtype=torch.uint8)
        return x * self.weight


def test_blocks_count_whole_and_the_rest_has_a_name():
    x = torch.ones(23 * MIB // 4 + 64 * 1024)  # 23.25 MiB, in a block of 24
    profile = ms.profile(Keeps(), x, keeps_output=False, loss=lambda y, _: y.sum(), hardware=card(1000))
    rounding = profile.by_category["rounding"]
    # Of the input and of the product, and what rounding up to 512 bytes adds.
    assert 2 * 3 * MIB // 4 <= rounding < 2 * 3 * MIB // 4 + 4096
    assert profile.by_module["allocator"] == rounding
    assert sum(profile.by_category.values()) == sum(profile.by_module.values()) == profile.peak_bytes
    assert sum(holding.nbytes for holding in profile.holdings) == profile.peak_bytes - rounding
    assert int(profile.timeline.total_bytes.max()) == profile.peak_bytes
    assert "rounding" in str(profile)
    assert "rounding" not in ms.profile(Keeps(), x, loss=lambda y, _: y.sum(), hardware="cpu").by_category
