"""`profile` against the allocator, to the byte: optimizers, and the loops that users write."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from tests.support.coverings import pairwise
from tests.support.profiled import ROWS, mlp, train, x
from tests.support.steps import NUMBERS_BYTES, Training, assert_equal_bytes, assert_exact, mean, real_peaks

# ------------------------------------------------------------------------------------------------------ optimizers


OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "adamw foreach": functools.partial(torch.optim.AdamW, foreach=True),
    "adamw fused": functools.partial(torch.optim.AdamW, fused=True),
    "sgd fused": functools.partial(torch.optim.SGD, momentum=0.9, fused=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_step_of_every_optimizer_is_simulated_to_the_byte(optimizer):
    assert_exact(train(mlp(144, 80), x(9, 144), optimizer))


def test_a_step_of_muon_is_simulated_to_the_byte():
    model = nn.Sequential(nn.Linear(48, 64, bias=False), nn.Linear(64, 80, bias=False))
    assert_exact(train(model, x(9, 48), functools.partial(torch.optim.Muon, lr=0.1)))


def test_an_optimizer_that_has_stepped():
    training = train(mlp(), x(9, 48))
    training.step()
    profile = assert_exact(training)
    assert profile.first_step_peak_bytes == profile.peak_bytes


def test_param_groups_and_a_part_of_the_parameters():
    model = mlp(48, 48)
    groups = [{"params": model[0].weight, "lr": 0.1, "foreach": True}, {"params": [model[2].weight, model[2].bias]}]
    assert_exact(Training(model, x(9, 48), torch.optim.AdamW(groups), mean))


def test_sparse_gradients_are_measured():
    model = nn.Sequential(nn.Embedding(400, 48, sparse=True), nn.Linear(48, 20))
    model[1].requires_grad_(False)
    training = train(model, torch.arange(30), torch.optim.SparseAdam)
    profile = training.profile()
    assert profile.method == "empirical"
    assert "sparse" in profile.notes[0]
    assert_equal_bytes(profile, *real_peaks(training.step, model, training.optimizer, training.batch))


# -------------------------------------------------------------------------------------------------- the user's own loop


def assert_step_exact(step, model, optimizer=None, batch=None, held=tuple):
    profile = ms.profile(step)
    assert_equal_bytes(profile, *real_peaks(step, model, optimizer, batch, held))
    assert profile.method == "static", profile.notes
    return profile


class _Outputs(nn.Module):
    """As a language model that returns its logits beside its loss, which works on a copy of them."""

    def __init__(self):
        super().__init__()
        self.body, self.head = mlp(48, 48), nn.Linear(48, 400)

    def forward(self, batch):
        logits = self.head(self.body(batch))
        return {"loss": torch.log_softmax(logits * 1, -1).square().mean(), "logits": logits}


@pytest.mark.parametrize("plan", [{}, {"body": ms.checkpoint()}], ids=["plain", "checkpoint"])
def test_an_output_that_the_loop_keeps(plan):
    model, batch = _Outputs(), x(ROWS, 48)
    fit = ms.transform(model, plan)
    optimizer, kept = torch.optim.SGD(fit.parameters(), lr=0.1), []

    def step():
        kept[:] = [fit(batch)]
        kept[0]["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    def steps():  # in one measurement, which does not see what was there before
        for _ in range(3):
            step()

    drops, keeps = (ms.profile(model, batch, optimizer=optimizer, plan=plan, keeps_output=k) for k in (False, True))
    assert keeps.peak_bytes - drops.peak_bytes >= ROWS * 400 * 4
    _, real = real_peaks(steps, fit, optimizer, batch)
    assert abs(keeps.taken_bytes - real) <= NUMBERS_BYTES


LOOP_PLANS = {"plain": None, "checkpoint": {"*": ms.checkpoint()}, "tile": {"1": ms.tile(chunks=3)}}
LOSSES = {"mean": mean, "classes": lambda y, _: F.cross_entropy(y, y.detach().argmax(-1))}


@pytest.mark.parametrize(
    ("plan", "loss", "keeps", "accumulate"),
    pairwise(itertools.product(LOOP_PLANS, LOSSES, [True, False], [1, 2])),
)
def test_both_loops_take_what_is_said_to_the_byte(plan, loss, keeps, accumulate):
    plan, loss = LOOP_PLANS[plan], LOSSES[loss]
    model = nn.Sequential(mlp(48, 64), mlp(64, 48), mlp(48, 700))  # logits that are most of what the step holds
    assert_exact(train(model, x(ROWS, 48), loss=loss, accumulate=accumulate, plan=plan, keeps=keeps))


def test_the_default_loop_keeps_its_loss_too():
    """The result of `mse_loss` is a scalar over a storage with a number for each element of the output."""
    model, batch = nn.Sequential(mlp(48, 64), mlp(64, 48), nn.Dropout(0.1)), x(ROWS, 48)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.1), {}

    def step():
        kept["output"] = model(batch)
        kept["loss"] = F.mse_loss(kept["output"], batch)
        kept["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    profile = ms.profile(model, batch, optimizer=optimizer, loss=F.mse_loss)
    assert_equal_bytes(profile, *real_peaks(step, model, optimizer, batch))


def test_a_function_is_a_loop_of_its_own():
    with pytest.raises(ms.ConfigError, match="a function is its own loop"):
        ms.profile(lambda: None, keeps_output=False)


def test_a_step_function_with_a_schedule_a_scaler_and_clipping():
    model, batch = mlp(48, 48), x(ROWS, 48)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10)
    scaler = torch.amp.GradScaler("cpu")

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()

    assert_step_exact(step, model, optimizer, batch)


def test_what_comes_after_backward_is_part_of_the_update():
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")

    def step():
        for part in torch.ones(2, 9, 48):
            scaler.scale(mean(model(part / 2), None)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)
        optimizer.zero_grad()

    assert [name for name, _ in ms.profile(step).phases] == [*["forward", "backward"] * 2, "optimizer"]


def test_gradients_that_stay_allocated():
    model, batch = mlp(48, 48), x(9, 48)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()

    profile = assert_step_exact(step, model, optimizer, batch)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert profile.by_category["gradient"] == weights


def test_an_average_of_the_weights():
    model, batch = mlp(48, 48), x(9, 48)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    by_hand = copy.deepcopy(model).requires_grad_(False)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            for mine, theirs in zip(by_hand.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)

    both = nn.ModuleList([model, average, by_hand])
    assert_step_exact(step, both, optimizer, batch)
    assert int(average.n_averaged) == 3


def test_two_models_that_train_against_each_other():
    maker, judge, noise, truth = mlp(16, 48), mlp(48, 80), x(ROWS, 16), x(ROWS, 48)
    optimizers = torch.optim.Adam(maker.parameters()), torch.optim.RMSprop(judge.parameters())

    def step():
        made = maker(noise)
        (judge(made.detach()).mean() - judge(truth).mean()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        (-judge(made).mean()).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        judge.zero_grad()

    def states():
        return [t for optimizer in optimizers for state in optimizer.state.values() for t in state.values()]

    profile = assert_step_exact(step, nn.ModuleList([maker, judge]), None, [noise, truth], states)
    assert {path.split(".")[0] for path in profile.by_module} >= {"Sequential"}


class Trainer:
    def __init__(self):
        self.model, self.batch, self.steps, self.losses = mlp(48, 48), x(ROWS, 48), 0, []
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def train(self):
        self.steps += 1
        loss = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_partial_and_globals():
    trainer = Trainer()
    assert_step_exact(functools.partial(Trainer.train, trainer), trainer.model, trainer.optimizer, trainer.batch)
    global _trainer
    _trainer = trainer = Trainer()

    def step():
        _trainer.train()

    assert_step_exact(step, trainer.model, trainer.optimizer, trainer.batch)


def test_a_loss_that_is_logged_with_item():
    trainer = Trainer()

    def step():
        loss = trainer.model(trainer.batch).square().mean()
        loss.backward()
        trainer.losses.append(loss.item())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()

    profile = assert_step_exact(step, trainer.model, trainer.optimizer, trainer.batch)
    assert len(trainer.losses) == 3
    assert any("without overflow" in note for note in profile.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_on_meta_may_be_a_tuple(dtype):
    with torch.device("meta"):
        model, batch = nn.Embedding(64, 8, dtype=dtype), (torch.zeros(16, dtype=torch.long), torch.randn(16, 8))
    optimizer = torch.optim.SGD(model.parameters())

    def loss():
        tokens, weights = batch
        return (model(tokens) * weights * torch.arange(8, device=weights.device)).sum()

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    profile = ms.profile(step)
    assert profile.method == "static"
    assert profile.peak_bytes >= model.weight.nbytes + sum(part.nbytes for part in batch)
    assert all(part.is_meta for part in batch)
