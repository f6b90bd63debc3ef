"""`profile` against the allocator, to the byte: transformed models, and what is offloaded."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from memscale.runtime import Runtime, host_parameter_of
from memscale.runtime.storage.copy_pool import CopyFuture
from memscale.simulation.measured.allocator_trace import measure
from tests.support.profiled import ROWS, Cases, Forward, mlp, train, x
from tests.support.steps import NUMBERS_BYTES, assert_exact, mean, real_peaks

CASES = Cases()
case, forward_case = CASES.case, CASES.forward_case


# ------------------------------------------------------------------------------------------------------ transforms


def _blocks():
    return nn.Sequential(*[mlp(48, 48) for _ in range(3)])


@case
def plan_checkpoint():
    return train(_blocks(), x(ROWS, 48), plan={"*": ms.checkpoint()})


@case
def plan_checkpoint_with_a_policy():
    return train(_blocks(), x(ROWS, 48), plan={"*": ms.checkpoint(policy=ms.policies.dots_saveable)})


@case
def plan_nested_checkpoints():
    model = nn.Sequential(_blocks(), _blocks())
    return train(model, x(ROWS, 48), plan={"*": ms.checkpoint(), "*.*": ms.checkpoint()})


@case
def plan_tile():
    return train(_blocks(), x(ROWS, 48), plan={"*": ms.tile(chunks=3)})


@case
def plan_tiled_head():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(211, 24), mlp(24, 24), nn.Linear(24, 211, bias=False)

        def forward(self, ids):
            return F.cross_entropy(self.head(self.body(self.embed(ids))).flatten(0, 1), ids.flatten())

    return train(Language(), torch.arange(90).reshape(6, 15), loss=None, plan={"head": ms.tile(chunks=3)})


class Attending(nn.Module):
    """Draws no random number where `drop` is 0, though its attention could; the state of a generator is 5,056 bytes."""

    def __init__(self, drop):
        super().__init__()
        self.mixed, self.mlp = nn.Linear(16, 48), nn.Sequential(mlp(16, 16), nn.Dropout(drop))

    def forward(self, x):
        q, k, v = self.mixed(x).unsqueeze(1).chunk(3, -1)
        return x + self.mlp(F.scaled_dot_product_attention(q, k, v).squeeze(1))


def _attending(drop, transform):
    plan = {"*": transform, "*.mlp": ms.tile(chunks=4)}
    return train(nn.Sequential(*[Attending(drop) for _ in range(3)]), x(8, 24, 16), plan=plan)


@case
def plan_random_states_that_nobody_keeps():
    return _attending(0.0, ms.checkpoint())


@case
def plan_random_states():
    return _attending(0.1, ms.checkpoint())


@case
def plan_choices():
    """Chooses by activations, and draws nothing."""

    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(16, 16), nn.Linear(4, 16)

        def forward(self, x):
            y = self.one(x)
            return x + self.two(y.topk(4)[0] + y.gather(-1, y.argsort(-1)[..., :4])) * y.argmax(-1, keepdim=True)

    return train(nn.Sequential(*[Choosing() for _ in range(3)]), x(8, 24, 16), plan={"*": ms.checkpoint()})


SELECTIONS = {
    "max": lambda y: y.max(-1)[0],
    "median": lambda y: y.median(-1)[0],
    "topk": lambda y: y.topk(4)[0],
    "gather": lambda y: y.gather(-1, y.argsort(-1)[:, :3]),
    "index": lambda y: y[:, [0, 5, 6]],
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS)
def test_the_backward_of_a_selection_scatters_in_place(select):
    assert_exact(train(Forward(lambda m, y: select(m.one(y)), one=nn.Linear(48, 96)), x(ROWS, 48)))


def test_attention_on_strided_heads():
    def forward(m, y):
        query, key, value = m.one(y).reshape(4, 33, 3, 2, 24).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value)

    assert_exact(train(Forward(forward, one=nn.Linear(48, 144)), x(4, 33, 48)))


DRAWN = {
    "least": lambda: bool(torch.rand([]) < 0.01),
    "most": lambda: torch.rand([]).item() > 0.99,
    "Python's": lambda: random.uniform(2, 4) > 3.99,
    "NumPy's": lambda: np.random.uniform(high=0.5) > 0.499,
    "whatever": lambda: True,
}


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=DRAWN)
def test_a_model_that_decides_by_a_draw_takes_what_most_draws_do(drawn):
    """What comes once in a hundred steps, or less, is what its layers are for in most steps of LayerDrop."""

    def forward(m, y):
        return m.one(y).exp().tanh() if drawn() else m.one(y)

    profile = ms.profile(Forward(forward, one=nn.Linear(8, 8)), x(4, 8), loss=mean)
    most = ms.profile(Forward(lambda m, y: m.one(y).exp().tanh(), one=nn.Linear(8, 8)), x(4, 8), loss=mean)
    assert profile.peak_bytes - most.peak_bytes in range(128)  # the numbers drawn
    said = any("the largest with the least, most or typical draws" in note for note in profile.notes)
    assert said == (drawn is not DRAWN["whatever"])


def test_a_recompute_of_a_simulated_step_repeats_its_draws():
    """The region read the process's generator, which a simulated step does not draw from: stochastic depth failed."""

    def forward(m, y):
        return y + torch.tanh(m.one(y)) if torch.rand(()).item() < 0.5 else y * 2

    model = nn.Sequential(nn.Linear(8, 8), *[Forward(forward, one=nn.Linear(8, 8)) for _ in range(6)])
    profile = ms.profile(model, x(4, 8), loss=mean, plan={"[1-6]": ms.checkpoint()})
    assert not [note for note in profile.notes if "fails" in note]


@pytest.mark.parametrize("hardware", [pytest.param(None, marks=pytest.mark.deep), "h100"])
def test_a_model_of_graphs_is_planned_and_trains_to_the_same_numbers(hardware):
    def forward(m, y, graph):
        return y + m.two(torch.tanh(graph @ m.one(y)))

    def layers(m, y, graph):
        for layer in m.children():
            y = layer(y, graph)
        return y

    names = ("first", "second", "third", "fourth")
    model = Forward(layers, **{name: Forward(forward, one=nn.Linear(16, 64), two=nn.Linear(64, 16)) for name in names})
    where = torch.arange(2 * 400).reshape(2, 400) * 7 % 2_000
    batch = (x(2_000, 16), torch.sparse_coo_tensor(where, x(400), (2_000, 2_000), check_invariants=True).coalesce())
    step = {"loss": mean, "hardware": hardware}
    before = ms.profile(model, batch, **step)
    budget = before.taken_bytes - 2_000 * 64 * 4
    plan = ms.plan(model, batch, budget=budget, **step)
    assert plan.evidence.planned.taken_bytes <= budget
    assert any("sparse" in note for note in before.notes) == (hardware is not None)
    fit = ms.transform(model, plan)
    wanted = torch.autograd.grad(mean(model(*batch), None), list(model.parameters()))
    assert all(map(torch.equal, torch.autograd.grad(mean(fit(*batch), None), list(fit.parameters())), wanted))


def train_offloaded(how):
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0))
    return train(ms.transform(_blocks(), {"*": how}, runtime=runtime), x(ROWS, 48))


@case
def plan_offload():
    return train_offloaded(ms.offload())


def test_the_bytes_of_a_step_do_not_depend_on_how_quick_the_disk_is(monkeypatch):
    monkeypatch.setattr(CopyFuture, "span", lambda self: (0.0, 0.0))
    assert_exact(train_offloaded(ms.offload()))


STREAMED = ms.offload(what="params")


@pytest.mark.parametrize(
    "how", [STREAMED, ms.compose(ms.checkpoint(), STREAMED), ms.compose(STREAMED, ms.checkpoint())]
)
def test_a_step_with_streamed_parameters_takes_what_it_takes(how):
    training = train_offloaded(how)
    profile = training.profile()
    for _ in range(3):  # the first one sends the parameters home
        training.step()
        training.optimizer.zero_grad()
    steady = measure(lambda: (training.step(), training.optimizer.zero_grad()))
    resident_bytes = training.batch.nbytes + sum(
        tensor.nbytes for state in training.optimizer.state.values() for tensor in state.values()
    )
    assert all(host_parameter_of(parameter) is not None for parameter in training.model.parameters())
    assert abs(profile.peak_bytes - resident_bytes - steady.growth_bytes) <= NUMBERS_BYTES


def test_offload_around_checkpoint_takes_what_it_takes():
    training = train_offloaded(ms.compose(ms.offload(), ms.checkpoint()))
    profile = training.profile()
    # Which input of the first step moves in time depends on what the runtime learns in it.
    _, steady_bytes = real_peaks(training.step, training.model, training.optimizer, training.batch)
    assert profile.method == "static"
    assert abs(profile.peak_bytes - steady_bytes) <= NUMBERS_BYTES


def test_what_is_offloaded_is_counted_on_its_tier():
    plan = {"*": ms.compose(ms.offload(min_bytes=0), ms.checkpoint())}
    model, batch = _blocks(), x(ROWS, 48)
    profile = ms.profile(model, batch, loss=mean, plan=plan)
    # The first block's input is the caller's, and the last one's is asked for at once: both stay.
    inputs = sum(1 for _ in model.children()) - 2
    assert profile.by_tier == {"disk": inputs * batch.nbytes}
    assert ms.profile(model, batch, loss=mean).by_tier == {}
    assert set(ms.profile(model, batch, loss=mean, plan=plan, hardware="h100").by_tier) == {"pinned"}


@case
def plan_cast():
    return train(_blocks(), x(ROWS, 48), plan={"*": ms.cast()})


@case
def plan_composed():
    plan = {"*": ms.compose(ms.checkpoint(), ms.tile(chunks=4)), "2": ms.cast()}
    return train(_blocks(), x(ROWS, 48), plan=plan)


@case
def already_transformed():
    return train(
        ms.transform(_blocks(), {"0": ms.checkpoint(), "2": ms.compose(ms.checkpoint(), ms.tile(chunks=2))}),
        x(ROWS, 48),
    )


@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_a_simulated_step_takes_what_a_real_one_takes(make):
    assert_exact(make())


class Descends(nn.Module):
    """Goes down the gradient of an energy, with a graph."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(48, 96), nn.Softplus(), nn.Linear(96, 1))

    def forward(self, y):
        (grad,) = torch.autograd.grad(self.energy(y).sum(), y, create_graph=True)
        return y - 0.1 * grad


@pytest.mark.parametrize("policy", [ms.policies.nothing_saveable, ms.policies.dots_saveable])
def test_a_region_that_differentiates_what_it_has_computed(policy):
    model = nn.Sequential(nn.Linear(48, 48), Descends())
    assert_exact(train(ms.transform(model, {"1": ms.checkpoint(policy=policy)}), x(ROWS, 48)))
