"""A piece and its two halves give the same numbers, or the region is refused in its first call."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale as ms
from memscale import tile
from tests.support.whole_run import true_peaks

torch.manual_seed(0)
X, W, TARGETS = torch.randn(12, 5), torch.randn(5, 7), torch.arange(12) % 7
TABLE = torch.randn(12, 5)
COUPLED = {
    "count": (tile(chunks=3), lambda x: x / len(x)),
    "count in the last dimension": (tile(chunks=3), lambda x: F.pad(x, (0, 1), value=float(x.shape[0]))[:, -1:]),
    "sum over count": (
        tile(chunks=3, reduce="sum"),
        lambda x: F.cross_entropy(x @ W, x.argmax(-1), reduction="sum") / len(x),
    ),
    "mean as sum": (tile(chunks=3, reduce="sum"), lambda x: F.cross_entropy(x @ W, x.argmax(-1))),
    "sum as mean": (tile(chunks=3, reduce="mean"), lambda x: (x @ W).square().sum()),
    "count as an output": (tile(chunks=3), lambda x: (x * 2, len(x))),
    "rows of a table": (tile(chunks=3), lambda x: x + TABLE.narrow(0, len(x), len(x))),
    "integers": (tile(chunks=3), lambda x: torch.full((len(x), 2), len(x)) + x[:, :2].long() * 0),
    "kept": (tile(chunks=3, recompute=False), lambda x: x * len(x)),
}
ROWWISE = {
    "projection": (tile(chunks=3), lambda x: torch.relu(x @ W)),
    "mean": (tile(chunks=3, reduce="mean"), lambda x: F.cross_entropy(x @ W, x.argmax(-1))),
    "sum": (tile(chunks=3, reduce="sum"), lambda x: (x @ W).square().sum()),
    "few bits": (tile(chunks=3), lambda x: (x.bfloat16() @ W.bfloat16()).softmax(-1)),
    "noise": (tile(chunks=3), lambda x: (x @ W).softmax(-1).sum(-1) - 1),
    "nothing": (tile(chunks=3), lambda x: x[:, :0]),
    "not a number": (tile(chunks=3), lambda x: (x - 100).log()),
    "sums of as many rows": (
        tile(chunks=2, reduce="sum"),
        lambda x: torch.zeros(3, 5).index_add(0, torch.arange(len(x)) % 3, x),
    ),
    "pairs only": (tile(chunks=3), lambda x: x.view(-1, 4, 5).mul(2).view(-1, 5)),
}


@pytest.mark.parametrize(("how", "fn"), COUPLED.values(), ids=COUPLED)
def test_a_function_that_couples_its_rows_is_refused(how, fn):
    with pytest.raises(ms.TransformError, match=r"other numbers than its two halves|differs between pieces"):
        how(fn)(X)


@pytest.mark.parametrize(("how", "fn"), ROWWISE.values(), ids=ROWWISE)
def test_a_function_of_single_rows_is_not(how, fn):
    torch.testing.assert_close(how(fn)(X), fn(X), equal_nan=True)


def test_the_halves_leave_nothing_behind():
    """No count, no random number, no gradient, no cast that a later call finds."""
    linear, calls = nn.Linear(5, 5), []

    def fn(x):
        calls.append(len(x))
        return linear(x) * 2

    region, state = tile(chunks=3)(fn), torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        out = region(X)
    assert len(calls) == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert linear.weight.grad is None
    out.float().sum().backward()
    assert linear.weight.grad is not None
    drop = tile(chunks=3)(lambda x: F.dropout(x, 0.5) / len(x))  # random numbers differ in any case: not compared
    assert drop(X).shape == X.shape


def test_rows_that_the_region_writes_are_written_once():
    x = torch.zeros(6, 2)
    tile(chunks=2)(lambda x: x.add_(1))(x)
    assert x.tolist() == [[1.0, 1.0]] * 6


def test_each_mode_is_compared():
    class Scaled(nn.Module):
        def forward(self, x):
            return x if self.training else x / len(x)

    fit = ms.transform(Scaled(), {"": tile(chunks=3)})
    assert torch.equal(fit(X), X)
    with pytest.raises(ms.TransformError, match="two halves"):
        fit.eval()(X)


@pytest.mark.parametrize("fails", ["other numbers", "structures"])
def test_a_refused_call_counts_nothing(fails):
    class Counted(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x / len(x) if fails == "other numbers" else [x] * len(x)

    model = Counted()
    fit = ms.transform(model, {"": tile(chunks=3)})
    with pytest.raises(ms.TransformError, match=fails):
        fit(X)
    assert fit.calls == model.calls == 0


def test_the_first_call_of_tiled_convolutions_takes_no_more_than_later_ones():
    """A CPU's kernel for a single volume has scratch memory of many times the volume."""

    def make_step():
        net = nn.Sequential(nn.Conv3d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv3d(8, 8, 3, padding=1))
        model, x = ms.transform(net, {"": tile(chunks=2)}), torch.randn(4, 8, 16, 16, 16)
        return lambda: model(x).sum().backward()

    first, later, _ = true_peaks(make_step)
    assert first <= 1.05 * later
