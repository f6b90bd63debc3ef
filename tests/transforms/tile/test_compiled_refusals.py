"""Under `torch.compile` a region is refused for the same reasons: the watch sees the graph of its first piece."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale as ms
from memscale import tile
from memscale.core import internals
from tests.support.coverings import pairwise

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x)).relu()


class ByFunction(nn.Linear):
    def forward(self, x):
        return F.batch_norm(super().forward(x), None, None, training=self.training)


class Averaged(nn.Linear):
    def __init__(self, width, out):
        super().__init__(width, out)
        self.register_buffer("average", torch.zeros(1))

    def forward(self, x):
        self.average.add_(1.0)
        return super().forward(x).relu()


class Centred(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return (y - y.mean(0)).relu()


class Rotary(Averaged):
    def forward(self, x):
        return super(Averaged, self).forward(x).relu() + self.average


CASES = {
    "BatchNorm": (Normalized, r"BatchNorm"),
    "F.batch_norm": (lambda: ByFunction(4, 4), r"BatchNorm"),
    "a buffer": (lambda: Averaged(4, 4), r"would update 'average' once for every piece"),
    "a softmax": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(0)), "works along"),
    "a mean": (lambda: Centred(4, 4), "a number that it computes over its rows"),
}


def state(model):
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    ("case", "called_before", "recompute"), pairwise(itertools.product(CASES, [False, True], [True, False]))
)
def test_what_couples_the_rows_is_refused_and_leaves_nothing(case, called_before, recompute):
    model, x = CASES[case][0](), torch.randn(6, 4)
    fit = ms.transform(model, {"": tile(chunks=3, recompute=recompute)})
    before = state(model)
    if called_before:
        with pytest.raises(ms.TransformError):
            fit(x)
    # Of an error that leaves a `try`, Dynamo of 2.10 says that there was one.
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="tile" if internals.TORCH_VERSION >= (2, 12) else "exception"
    ):
        torch.compile(fit, backend="aot_eager", fullgraph=True)(x)
    torch._dynamo.reset()
    with pytest.raises(ms.TransformError, match=r"would (cut the rows|update|compute)"):
        torch.compile(fit, backend="aot_eager")(x)
    assert all(torch.equal(one, other) for one, other in zip(state(model), before, strict=True))


def test_a_closure_over_a_batch_norm_is_refused():
    norm, x = nn.BatchNorm1d(4), torch.randn(6, 4)
    fit = tile(chunks=3)(lambda x: norm(x).relu())
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"would update '.*num_batches_tracked"):
        torch.compile(fit, backend="aot_eager", fullgraph=True)(x)


def test_in_eval_a_batch_norm_is_a_function_of_its_row():
    model, x = Normalized().eval(), torch.randn(6, 4)
    fit = ms.transform(model, {"": tile(chunks=3)})
    torch.testing.assert_close(fit(x), model(x))
    torch.testing.assert_close(torch.compile(fit, backend="aot_eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_table_is_no_obstacle(dynamic):
    """One graph, without a call outside of the compiler before, and for every number of rows if they are open."""
    model = Rotary(4, 4)
    fit = torch.compile(ms.transform(model, {"": tile(chunks=3)}), backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (6, 9):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(fit(x), model(x))
