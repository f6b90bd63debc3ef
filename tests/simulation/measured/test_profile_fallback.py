"""Steps that cannot be simulated: measured on real steps instead, or refused with one clear error."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

import memscale as ms
from tests.simulation.test_profile_purity import assert_same, trained, world
from tests.support.steps import assert_equal_bytes, mean, real_peaks
from tests.support.whole_run import true_peaks

ROWS = 50


class Forward(nn.Module):
    """A linear layer, and what `between` does with its output."""

    def __init__(self, between, width=24):
        super().__init__()
        self.layer, self.out, self.between = nn.Linear(width, width), nn.Linear(width, 20), between

    def forward(self, x):
        return self.out(self.between(self.layer(x)))


def branches(hidden):
    return hidden * 2 if hidden.sum().item() > 0 else hidden.sin()


def decides_on_a_tensor(hidden):
    return hidden * 2 if hidden.mean() > 0 else hidden.sin()


def lists(hidden):
    return hidden * max(hidden.detach().flatten().tolist())


def through_numpy(hidden):
    return hidden + torch.from_numpy(np.sin(hidden.detach().numpy()))


def selects_by_mask(hidden):
    return hidden[hidden[:, 0] > 0]


def formats(hidden):
    assert "tensor" in f"{hidden}"
    return hidden


READS = {
    "item": branches,
    "bool of a tensor": decides_on_a_tensor,
    "tolist": lists,
    "numpy": through_numpy,
    "a mask of activations": selects_by_mask,
    "printing": formats,
}


def setting(between):
    torch.manual_seed(5)
    model = nn.Sequential(Forward(between))
    return model, torch.randn(ROWS, 24), torch.optim.AdamW(model.parameters())


def real_step(model, batch, optimizer):
    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("between", READS.values(), ids=READS.keys())
def test_a_model_that_reads_activations_is_measured(between):
    model, batch, optimizer = setting(between)
    before = world(model, optimizers=[optimizer], tensors=[batch])
    keys = _keys_of_the_thread()
    profile = ms.profile(model, batch, optimizer=optimizer, loss=mean)
    assert profile.method == "empirical"
    assert_same(before, world(model, optimizers=[optimizer], tensors=[batch]))
    assert _keys_of_the_thread() == keys, "PyTorch turns torch.func off while it prints a tensor"
    first, steady = real_peaks(real_step(model, batch, optimizer), model, optimizer, batch)
    assert abs(profile.first_step_peak_bytes - first) < 0.1 * first
    assert abs(profile.peak_bytes - steady) < 0.1 * steady


def _keys_of_the_thread():
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def test_the_note_says_what_was_read_and_where():
    model, batch, optimizer = setting(branches)
    (note,) = ms.profile(model, batch, optimizer=optimizer, loss=mean).notes
    assert "measured on real steps" in note
    assert "_local_scalar_dense" in note
    assert "(in 0)" in note


def test_a_measured_profile_has_every_field_and_a_round_trip():
    model, batch, optimizer = setting(branches)
    measured = ms.profile(model, batch, optimizer=optimizer, loss=mean)
    simulated = ms.profile(*setting(torch.sin)[:2], optimizer=None, loss=mean)
    for field in dataclasses.fields(ms.Profile):
        assert (
            type(getattr(measured, field.name)) is type(getattr(simulated, field.name)) or field.name == "step_seconds"
        )
    assert ms.Profile.from_json(measured.to_json()) == measured
    assert "  measured; first step" in str(measured)
    assert sum(measured.by_category.values()) == measured.peak_bytes == int(measured.timeline.total_bytes.max())
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert measured.by_category["parameter"] == weights
    assert measured.by_category["optimizer state"] == 2 * weights + 4 * len(list(model.parameters()))
    assert measured.by_category["input"] == batch.nbytes
    assert measured.step_seconds > 0
    assert measured.first_step_peak_bytes < measured.peak_bytes


def test_a_measured_step_is_exact():
    model, batch, optimizer = setting(formats)
    profile = ms.profile(model, batch, optimizer=optimizer, loss=mean)
    first, steady = real_peaks(real_step(model, batch, optimizer), model, optimizer, batch)
    assert profile.method == "empirical"
    assert_equal_bytes(profile, first, steady)


@pytest.mark.parametrize("point", ["forward", "backward", "between", "optimizer", None])
def test_real_steps_leave_no_trace(point):
    trainer = trained(1)
    if point is not None:
        trainer.model.fail_in, trainer.model.failure = point, ZeroDivisionError
    profiler = ms.MemoryProfiler(trainer.train, config=ms.Config(use_static_profiling=False))
    before = trainer.world()
    if point is None:
        assert profiler.profile().method == "empirical"
    else:
        with pytest.raises(ms.ConfigError, match="ZeroDivisionError"):
            profiler.profile()
    assert_same(before, trainer.world())


def test_without_the_fallback_the_reason_and_the_remedy_are_given():
    model, batch, optimizer = setting(branches)
    profiler = ms.MemoryProfiler(model, optimizer, loss=mean, config=ms.Config(use_empirical_fallback=False))
    before = world(model, optimizers=[optimizer])
    with pytest.raises(ms.ConfigError, match=r"_local_scalar_dense.*\(in 0\).*use_empirical_fallback=True"):
        profiler.profile(batch)
    assert_same(before, world(model, optimizers=[optimizer]))


def test_on_meta_there_is_nothing_to_fall_back_to():
    with torch.device("meta"):
        model = Forward(branches)
    with pytest.raises(ms.RuntimeUnavailable, match=r"cannot be simulated .*_local_scalar_dense.*meta"):
        ms.profile(model, torch.ones(3, 24), loss=mean)
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


def test_another_device_cannot_be_measured_here():
    model, batch, optimizer = setting(branches)
    with pytest.raises(ms.RuntimeUnavailable, match=r"cannot be simulated .*H100"):
        ms.profile(model, batch, optimizer=optimizer, loss=mean, hardware="h100")


# -------------------------------------------------------------------------------------------------- custom operators


@torch.library.custom_op("memscale_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("memscale_tests::scaled_", mutates_args=("x",))
def scaled_(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("memscale_tests::with_fake", mutates_args=())
def with_fake(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])


with_fake.register_fake(lambda x: x.new_empty(2 * x.shape[0], *x.shape[1:]))
doubled.register_autograd(lambda ctx, gradient: gradient * 2)
with_fake.register_autograd(lambda ctx, gradient: gradient[: len(gradient) // 2] + gradient[len(gradient) // 2 :])


def writes(hidden):
    with torch.no_grad():
        copy = hidden.detach().clone()
        scaled_(copy, 2.0)
    return hidden + copy


@pytest.mark.parametrize("between", [doubled, with_fake, writes], ids=["no fake rule", "a fake rule", "writes"])
def test_custom_operators_are_simulated(between):
    model, batch, optimizer = setting(between)
    profile = ms.profile(model, batch, optimizer=optimizer, loss=mean)
    assert profile.method == "static", profile.notes
    assert_equal_bytes(profile, *real_peaks(real_step(model, batch, optimizer), model, optimizer, batch))


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute")  # of Dynamo, in the real step
def test_an_operator_of_higher_order_is_named_and_measured():
    model, batch, optimizer = setting(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))
    try:
        profile = ms.profile(model, batch, optimizer=optimizer, loss=mean)
        with pytest.raises(ms.ConfigError, match="a simulation does not follow cond, an operator of higher order"):
            ms.plan(model, batch, "1MiB", optimizer=optimizer, loss=mean)
    finally:
        torch._dynamo.reset()
    assert profile.method == "empirical"
    assert "a simulation does not follow cond, an operator of higher order (in cond of 0)" in profile.notes[0]


def test_a_custom_operator_does_not_see_the_weights():
    seen = []

    @torch.library.custom_op("memscale_tests::watched", mutates_args=())
    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x.abs().sum()))
        return x.clone()

    watched.register_autograd(lambda ctx, gradient: gradient)
    model, batch, optimizer = setting(watched)
    ms.profile(model, batch, optimizer=optimizer, loss=mean)
    assert set(seen) == {0.0}, "it runs on zeros"
    assert len(seen) == 1, "and once for each signature"


# ------------------------------------------------------------------------------------ loops that read what they train


def test_a_loop_until_the_loss_is_small_ends():
    model, batch, turns = nn.Linear(24, 20), torch.randn(ROWS, 24), []
    count = turns.append

    def step():
        for _ in range(3000):
            count(1)
            loss = model(batch).square().mean()
            loss.backward()
            if loss.item() < 0.9:
                break
        model.zero_grad()

    profile = ms.profile(step)
    assert profile.method == "empirical"
    assert len(turns) < 3000, "a stand-in that never gets small would go round for ever"


def test_an_optimizer_that_decides_on_numbers_is_measured():
    def make_step():
        torch.manual_seed(5)
        model, batch = nn.Linear(24, 20), torch.randn(ROWS, 24)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, history_size=4)

        def closure():
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        return lambda: optimizer.step(closure)

    profile = ms.profile(make_step())
    assert profile.method == "empirical"
    # It frees states of the steps before, and its batch is a variable of the closure.
    first, *_, steady = true_peaks(make_step, steps=2 + ms.Config().warmup_steps)
    assert_equal_bytes(profile, first, steady)


# -------------------------------------------------------------------------------------------------------- bad input


LAYER = nn.Linear(8, 4)
BATCH = torch.ones(3, 8)


BAD = {
    "another width": (lambda: ms.profile(LAYER, torch.ones(3, 9), loss=mean), r"3x9 and 8x4"),
    "an unknown keyword": (
        lambda: ms.profile(LAYER, {"input": BATCH, "y": BATCH}, loss=mean),
        r"unexpected keyword argument 'y'",
    ),
    "no batch": (lambda: ms.profile(LAYER, loss=mean), r"a batch is a tensor, .* got NoneType"),
    "an output that is not a scalar": (lambda: ms.profile(LAYER, BATCH), r"one element, got .* \[3, 4\]"),
    "a loss that is not a scalar": (lambda: ms.profile(LAYER, BATCH, loss=lambda y, _: y), r"loss\(output.*\[3, 4\]"),
    "a loss that is detached": (lambda: ms.profile(LAYER, BATCH, loss=lambda y, _: y.sum().detach()), r"not depend"),
    "a loss of one argument": (lambda: ms.profile(LAYER, BATCH, loss=lambda y: y.sum()), r"loss|argument"),
    "an optimizer that needs a closure": (
        lambda: ms.profile(LAYER, BATCH, optimizer=torch.optim.LBFGS(LAYER.parameters()), loss=mean),
        r"LBFGS.step needs closure, .* profile\(lambda: optimizer.step\(closure\)\)",
    ),
    "an optimizer's name": (lambda: ms.profile(LAYER, BATCH, optimizer="adamw", loss=mean), r"='adamw' must"),
    "hardware of another type": (lambda: ms.profile(LAYER, BATCH, loss=mean, hardware=80), r"hardware.*80"),
    "a function with a batch": (lambda: ms.profile(lambda: None, BATCH), r"batch for a module only"),
    "a function with a plan": (lambda: ms.profile(lambda: None, plan={"": ms.checkpoint()}), r"needs a module"),
    "a misfit plan": (lambda: ms.profile(LAYER, BATCH, loss=mean, plan={"body": ms.checkpoint()}), r"body"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_clear_error(call, message):
    before = world(LAYER, tensors=[BATCH])
    with pytest.raises((ms.ConfigError, ms.PlanError), match=message) as caught:
        call()
    assert len(str(caught.value)) < 700
    after = world(LAYER, tensors=[BATCH])
    assert_same({**before, "torch": None}, {**after, "torch": None})  # the call itself may make a layer


def test_a_step_that_fails_on_meta_says_that_it_fails():
    with pytest.raises(ms.ConfigError, match=r"the step fails: RuntimeError: .*\(2x5 and 4x4\).*Check that the batch"):
        ms.profile(nn.Linear(4, 4, device="meta"), torch.ones(2, 5), loss=lambda y, _: y.sum())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to probe")
def test_a_probe_needs_the_device():
    with pytest.raises(ms.RuntimeUnavailable, match="leave probe out to predict by formulas"):
        ms.profile(nn.Linear(4, 4), torch.ones(2, 4), loss=lambda y, _: y.sum(), hardware="h100", probe=True)
