"""What stands in for the speeds of a CPU that was not measured."""

import pytest
import torch

from memscale.hardware import Hardware, Work, host_calls, nominal, seconds

BOX = Hardware("box", "cpu", 2**34)


@pytest.fixture(params=[1, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("op", "work", "of_one"),
    [
        ("mm", Work(10**12, 10**6, "float32"), 10.0),
        ("gelu", Work(0, 10**10, "float32"), 2.0),
        ("relu", Work(0, 24 * 10**9, "float32"), 1.0),
    ],
)
def test_threads_share_the_kernels_and_python_has_one(threads, op, work, of_one):
    found = nominal(BOX)
    assert seconds(work, found, op=op) == pytest.approx(of_one / threads, rel=1e-3)
    assert host_calls(found).operator == host_calls(nominal(BOX)).operator > 1e-6


def test_no_operator_that_moves_bytes_is_faster_than_memory():
    found = nominal(BOX)
    computing = ("bmm", "convolution", "_scaled_dot_product")
    rates = [rate for name, rate in found.operator_rates.items() if not name.startswith(computing)]
    assert len(rates) > 60
    assert max(rates) < found.bandwidth_bytes_per_second
