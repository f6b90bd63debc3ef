"""How deep to prefetch, of steps that are known to the last copy."""

import pytest

from memscale.simulation.schedule.schedule import DepthReplay, prefetch_depth
from memscale.simulation.trace import Transfer

LAYERS = 32


def step(copy_seconds, *, uneven=1.0):
    """A forward of layers that each send one tensor away, and a backward that fetches them, a second an operator."""
    transfers = []
    for layer in range(LAYERS):
        took = copy_seconds * (uneven if layer % 2 else 2 - uneven)
        transfers.append(Transfer(0.0, took, "out", "pinned", 1, False, requested=layer + 1))
        transfers.append(Transfer(0.0, took, "in", "pinned", 1, False, requested=0, awaited=2 * LAYERS - 1 - layer))
    return [1.0] * (2 * LAYERS), [0] * LAYERS + [1] * LAYERS, transfers


@pytest.mark.parametrize(
    ("copy_seconds", "uneven", "depth"),
    [
        (0.5, 1.0, 1),  # each hides behind one operator
        (0.99, 1.0, 1),
        (0.9, 2.0, 2),  # every other one takes 1.8 s, and hides behind two
        (1.5, 1.0, 1),  # more than the compute, and deeper would only keep more on the device
    ],
)
def test_the_depth_is_as_small_as_hides_the_copies(copy_seconds, uneven, depth):
    assert prefetch_depth(*step(copy_seconds, uneven=uneven), first=0) == depth


def test_both_directions_share_one_disk():
    """Every other operator sends something away, and the one after it fetches something."""
    transfers = []
    for at in range(LAYERS):
        transfers.append(Transfer(0.0, 1.5, "out", "pinned", 1, False, requested=2 * at))
        transfers.append(Transfer(0.0, 1.5, "in", "pinned", 1, False, requested=0, awaited=2 * at + 1))
    step = ([1.0] * (2 * LAYERS), [0] * (2 * LAYERS), transfers, 0)
    assert DepthReplay(*step).seconds(4) <= 2 * LAYERS + 1.5
    on_disk = [transfer._replace(tier="disk") for transfer in transfers]
    assert DepthReplay(step[0], step[1], on_disk, 0).seconds(4) >= 3 * (LAYERS - 4)
