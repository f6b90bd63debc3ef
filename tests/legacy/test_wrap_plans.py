"""wrap plans: at once with a batch, else at the first call of the loop, and again when larger batches come."""

import contextlib
import copy
import gc
import logging
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from memscale.algebra import chain
from memscale.hardware.device import Hardware
from memscale.simulation.measured import training_roles
from tests.legacy.test_legacy import equal, gpt2, gpt2_batch, traces, train
from tests.support.coverings import in_turn
from tests.support.models import Block

MIB = 2**20
WIDTH = 64


def stack(blocks=4):
    torch.manual_seed(0)
    return nn.Sequential(*[Block(WIDTH) for _ in range(blocks)])


def rows(count):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def config(**fields):
    return ms.Config(**{"target_gpu_utilization": 1, "enable_logging": False, **fields})


def spellings(plan):
    return {part.spelling for rule in plan for part in chain(rule.transform)}


def planned_rows(model):
    """How many rows the present plan was made for."""
    return model._memscale_executor._plans.present[0][0]


def test_a_budget_takes_the_place_of_a_share_of_the_device(device):
    device(1000)
    budget = "11MiB"
    model = ms.wrap(stack(), config(), rows(1024), budget=budget)
    executor = model._memscale_executor
    assert executor.plan.evidence.planned.taken_bytes <= 11 * MIB < executor.step_bytes
    later = ms.wrap(stack(), config(), budget=budget)  # the first call plans for it, too
    later(rows(1024)).sum().backward()
    assert later._memscale_executor.plan == executor.plan
    with pytest.raises(ms.ConfigError, match="budget='much' must be"):
        ms.wrap(stack(), config(), budget="much")


def test_a_later_plan_is_not_said_to_be_idle_before_its_first_step(device, caplog):
    caplog.set_level(logging.INFO, logger="memscale")
    device(11)
    model = ms.wrap(stack(), config(enable_logging=True))
    for count in (768, 1024):
        train(model, rows(count))
    assert planned_rows(model) == 1024
    assert model._memscale_executor.plan
    assert "nothing ran" not in caplog.text


def test_without_a_batch_the_first_call_of_the_loop_plans(device, caplog):
    caplog.set_level(logging.INFO, logger="memscale")
    device(11)
    given = ms.wrap(stack(), config(), rows(1024))._memscale_executor
    model = ms.wrap(stack(), config(enable_logging=True))
    executor = model._memscale_executor
    assert len(executor.plan) == 0
    assert "the first training call shows what activations take" in executor.skipped
    with torch.no_grad():
        model(rows(1024))
    model.eval()
    model(rows(1024)).sum().backward()
    assert len(executor.plan) == 0
    model.train()
    model.zero_grad()
    assert equal(train(model, rows(1024)), train(stack(), rows(1024)))
    assert executor.plan == given.plan
    assert executor.plan
    assert executor.skipped is None
    assert caplog.text.count("planning for a batch of shapes (1024, 64)") == 1


def test_the_call_that_plans_leaves_no_trace(device):
    device(11)
    model = stack()
    model(rows(8)).sum().backward()
    tensors = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    before, values = traces(model), [(tensor._version, tensor.clone()) for tensor in tensors]
    outside = nn.Linear(WIDTH, WIDTH)  # a graph before the model, which the simulated backward must not run through
    state = torch.get_rng_state()
    out = ms.wrap(model, config())(outside(rows(1024)))
    assert model._memscale_executor.plan
    assert torch.equal(torch.get_rng_state(), state)
    for tensor, (version, value) in zip(tensors, values, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, value)
    assert outside.weight.grad is None
    out.sum().backward()
    assert outside.weight.grad is not None
    ms.detach(model)
    assert traces(model) == before


def test_autocast_around_the_first_call_gets_no_weights_of_the_simulation(device):
    device(7)

    def step(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(rows(1024)).square().mean()
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    model = ms.wrap(stack(), config())
    assert equal(step(model), step(stack()))
    assert model._memscale_executor.plan, model._memscale_executor.step_bytes


def test_two_threads_that_call_first_plan_once(device, caplog):
    caplog.set_level(logging.INFO, logger="memscale")
    device(11)
    model, results = ms.wrap(stack(), config(enable_logging=True)), []
    threads = [threading.Thread(target=lambda: results.append(model(rows(1024)))) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    expected = stack()(rows(1024))
    assert len(results) == 3
    assert all(torch.equal(each, expected) for each in results)
    assert caplog.text.count("planning for a batch") == 1


def test_larger_batches_are_planned_for_between_steps_and_smaller_ones_are_served(device):
    device(1000)
    model = ms.wrap(stack(2), config())
    optimizer = torch.optim.AdamW(model.parameters())

    def step(*counts):
        for count in counts:
            model(rows(count)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return planned_rows(model)

    assert step(10) == 10
    assert step(7) == 10
    assert step(11) == 16  # it varies: up to the next power of two
    assert step(16, 3) == 16
    assert step(3, 100) == 16, "never inside a step"
    assert step(3) == 128, "but for what came there, at the next one"
    assert step(20) == 128
    for count in (2**power + 1 for power in range(7, 13)):
        assert step(count) >= count, "however many plans there are"


def test_batches_of_one_step_are_planned_for_together(device):
    """Neither covers the other, so that each was planned for at the other's turn, and the plan was for one of them."""
    device(1000)
    model = ms.wrap(stack(2), config())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for shape in ((2, 64, WIDTH), (16, 8, WIDTH)):
            model(torch.ones(shape)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model._memscale_executor._plans.present == ((16, 64, WIDTH),)


def test_a_larger_batch_gets_the_plan_that_it_needs(device):
    device(11)
    model = ms.wrap(stack(), config(), rows(100))
    executor = model._memscale_executor
    assert not executor.plan
    assert equal(train(model, rows(1000)), train(stack(), rows(1000)))
    assert executor.plan.evidence.planned.taken_bytes <= 11 * MIB
    assert planned_rows(model) == 1024
    assert len(executor.plan) > 0


def test_what_does_not_fit_at_all_runs_under_the_smallest_plan_with_a_warning(device, caplog, capsys):
    device(1)
    model = ms.wrap(stack(2), config(enable_logging=True), rows(1024))
    assert "no plan fits 1.00 MiB" in caplog.text
    assert "under the smallest plan, above target_gpu_utilization=1" in caplog.text
    assert "MiB, above the 1.00 MiB allowed: checkpoint on " in capsys.readouterr().out
    assert model._memscale_executor.plan
    assert equal(train(model, rows(1024)), train(stack(2), rows(1024)))


def test_no_output_outlives_the_loop_where_nothing_fits(device):
    device(6.2)
    model = ms.wrap(stack(), config())
    gc.collect()
    gc.disable()
    try:
        output = model(rows(1024))
        kept = weakref.ref(output.untyped_storage())
        output.sum().backward()
        del output
        assert len(model._memscale_executor.plan) > 0
        assert kept() is None
    finally:
        gc.enable()


def test_force_is_the_rule_for_what_fits_with_what_is_asked_for_by_name(device):
    device(1000)
    force = config(force_optimize=True, use_mixed_precision=True)
    model = ms.wrap(nn.Sequential(*stack(2), nn.Linear(WIDTH, 500)), force, rows(16))
    both = ms.compose(ms.checkpoint(), ms.cast())
    assert model._memscale_executor.plan == ms.Plan({"0": both, "1": both, "": ms.cast()})
    tiled = ms.wrap(nn.Sequential(*stack(2), nn.Linear(WIDTH, 500)), config(force_optimize=True, enable_tiling=True))
    assert tiled._memscale_executor.plan == ms.Plan(
        {"0": ms.checkpoint(), "1": ms.checkpoint(), "2": ms.tile(chunks=8)}
    )


def test_a_budget_is_kept_under_force_without_a_batch_too(device):
    """The rule held for every batch, whatever the budget was."""
    device(1000)
    model = ms.wrap(stack(), config(force_optimize=True), budget="11MiB")
    executor = model._memscale_executor
    assert executor.plan == ms.Plan({"*": ms.checkpoint()})
    model(rows(1024)).sum().backward()
    assert executor.plan.evidence.planned.taken_bytes <= 11 * MIB < executor.step_bytes


@pytest.mark.parametrize("mib", [25, 30])
def test_a_rule_that_takes_more_than_the_budget_warns(mib, monkeypatch):
    """On a card with unknown speeds of copies nothing is planned, and the rule exceeded the budget in silence."""
    card = Hardware(name="box", device_type="cuda", memory_bytes=1 << 34)
    monkeypatch.setattr(Hardware, "detect", lambda device=None: card)
    model = ms.wrap(stack(), config(async_offload=True, warmup_steps=0), budget=f"{mib}MiB")
    message = r"this Sequential takes 34.0 MiB of the 25.0 MiB .*under which it takes 28.0 MiB.*speed of its copies"
    with pytest.warns(RuntimeWarning, match=message) if mib < 28 else contextlib.nullcontext():
        model(rows(1024)).sum().backward()
    assert spellings(model._memscale_executor.plan) == {"checkpoint", "offload"}


class Reads(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if float(self[0](x).sum().item()) < 1e9 else x


def test_a_step_that_cannot_be_simulated_gets_the_rule_if_memory_is_short(device, caplog):
    caplog.set_level(logging.INFO, logger="memscale")
    message = (
        r"this Reads takes 12.1 MiB of the 9.00 MiB .*rule Plan.*checkpoint.*whose peak is not known.*transform\(model"
    )
    for mib, plan in ((9, {"*": ms.checkpoint()}), (1000, {})):
        device(mib)
        model = ms.wrap(Reads(*stack()), config(enable_logging=True, warmup_steps=0))
        with pytest.warns(RuntimeWarning, match=message) if plan else contextlib.nullcontext():
            model(rows(1024)).sum().backward()
        executor = model._memscale_executor
        assert executor.profile.method == "empirical"
        assert executor.plan == ms.Plan(plan)
    assert "the step cannot be planned: ConfigError" in caplog.text


@pytest.mark.parametrize(
    "duplicate",
    [pytest.param(copy.deepcopy, marks=pytest.mark.deep), lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_plans_by_itself_and_a_transformed_tree_does_not(duplicate, device):
    device(11)
    model = ms.wrap(stack(), config())
    other, tree = duplicate(model), ms.transform(model, {})
    tree(rows(1024)).sum().backward()
    assert not model._memscale_executor.plan
    other(rows(1024)).sum().backward()
    assert other._memscale_executor.plan
    assert not model._memscale_executor.plan
    model(rows(1024)).sum().backward()
    assert model._memscale_executor.plan == other._memscale_executor.plan
    ms.detach(other)
    assert not any("forward" in module.__dict__ for module in other.modules())


def test_under_functorch_and_a_compiler_nothing_is_planned(device):
    device(11)
    model = ms.wrap(stack(), config())
    fn, state = ms.functional(model)
    torch.func.grad(lambda state: fn(state, rows(1024)).sum())(state)
    assert not model._memscale_executor.plan
    torch.compile(model, backend="eager", fullgraph=True)(rows(1024)).sum().backward()
    assert not model._memscale_executor.plan


LOSSES = {
    "cross entropy": lambda output, y, hot: F.cross_entropy(output.flatten(0, 1), y.flatten()),
    "squares": lambda output, y, hot: F.mse_loss(output, hot),
    "binary": lambda output, y, hot: F.binary_cross_entropy_with_logits(output, hot),
}


@pytest.mark.parametrize(
    ("loss", "dtype", "accumulate"),
    [
        pytest.param(*case, marks=[pytest.mark.deep] * (case[0] != "squares"))
        for case in in_turn(LOSSES, [torch.float32, torch.bfloat16, torch.float16], [1, 3])
    ],
)
def test_a_loop_with_a_loss_of_its_own_keeps_the_budget(loss, dtype, accumulate):
    """`wrap` does not know this loss; the outputs are larger than what the layers keep."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, WIDTH), *[Block(WIDTH) for _ in range(2)], nn.Linear(WIDTH, 500)).to(dtype)
    x, y = torch.randint(500, (2, 16, 64))
    hot = F.one_hot(y, 500).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = []

    def step():
        for _ in range(accumulate):
            kept[:1] = [model(x)]
            kept[1:] = [LOSSES[loss](kept[0], y, hot)]
            kept[1].backward()
        optimizer.step()
        optimizer.zero_grad()

    def peak_bytes():
        step()  # makes the optimizer's states
        return ms.measure(step, roles=training_roles(model, optimizer, x)).peak_bytes

    plain = peak_bytes()
    ms.wrap(model, config(), x, budget=int(0.85 * plain), accumulate=accumulate)
    assert model._memscale_executor.plan
    assert peak_bytes() <= 0.85 * plain


def test_the_second_step_is_compared_with_what_was_predicted(device, caplog):
    caplog.set_level(logging.INFO, logger="memscale")
    device(11)

    def two(parameters, **options):  # none of which trains the whole model, so that plans stay for an AdamW
        half = list(parameters)
        return [torch.optim.SGD(each, **options) for each in (half[::2], half[1::2])]

    for make, level, text in (
        (lambda *given, **options: [torch.optim.AdamW(*given, **options)], logging.INFO, "the real step's bytes"),
        (lambda *given, **options: [torch.optim.SGD(*given, **options)], logging.INFO, "the real step's bytes"),
        (two, logging.WARNING, "the real step differs from the prediction"),
    ):
        caplog.clear()
        model = ms.wrap(stack(), config(enable_logging=True), rows(1024))
        optimizers = make(model.parameters(), lr=1e-3)
        for _ in range(4):
            model.zero_grad()
            model(rows(1024)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        (found,) = [record for record in caplog.records if "prediction" in record.message]
        assert found.levelno == level
        assert found.message.startswith(text)
    assert "optimizer state" in found.message


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ({"force_optimize": True}, None),
        ({"force_optimize": True, "enable_tiling": True}, None),
        pytest.param({}, "100KiB", marks=pytest.mark.deep),
        pytest.param({"enable_tiling": True}, "100KiB", marks=pytest.mark.deep),
    ],
)
def test_what_a_loop_reads_behind_the_update_is_there_unless_tile_was_asked_for(given, budget):
    """Logits of a head in pieces are made of its weight when they are read, which the update has changed by then."""

    def accuracies(model):
        batch, optimizer = gpt2_batch(), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            output = model(**batch)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield (output.logits.argmax(-1) == batch["labels"]).float().mean().item()

    expected = list(accuracies(gpt2()))
    model = ms.wrap(gpt2(), ms.Config(enable_logging=False, **given), gpt2_batch(), budget=budget)
    assert len(model._memscale_executor.plan) > 0
    if "enable_tiling" not in given:
        assert list(accuracies(model)) == expected
        return
    assert "tile" in spellings(model._memscale_executor.plan)
    with pytest.raises(ms.CorrectnessError, match="tiled output projection"):
        list(accuracies(model))


FORWARDS = {
    # As a U-Net of diffusers: the names, sorted, come in another order, and tensors were taken for one another.
    "context": (lambda self, sample, *, context: self.blocks(sample + context[:, :1, 0]), {"context": (1024, 3, 8)}),
    # No mapping is these arguments: the step counted as fitting, without a word.
    "positions": (lambda self, sample, /, *, scale: self.blocks(sample * scale), {"scale": (1,)}),
    "many": (lambda self, *samples, scale: [self.blocks(each * scale) for each in samples], {"scale": (1,)}),
}


@pytest.mark.parametrize(("forward", "named"), FORWARDS.values(), ids=FORWARDS)
def test_a_call_with_positions_and_names_is_planned_for(forward, named, device, caplog):
    model = nn.Module()
    model.blocks = stack()
    model.__class__ = type("Model", (nn.Module,), {"forward": forward})
    device(1000)
    ms.wrap(model, config(), budget="11MiB")
    output = model(rows(1024), **{name: torch.randn(shape) for name, shape in named.items()})
    (output[0] if isinstance(output, list) else output).sum().backward()
    executor = ms.Executor.of(model)
    assert executor.plan.evidence.planned.taken_bytes <= 11 * MIB < executor.step_bytes
    assert not caplog.records


def test_a_batch_that_fits_is_planned_for_where_its_rounded_lengths_do_not(device, caplog):
    """The next power of two is nearly twice as long, and its smallest plan was taken for the plan of the batch."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 16)) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())
    plain = ms.profile(model, torch.ones(1100, 16), loss=lambda y, _: y.square().mean(), optimizer=optimizer)
    device(1000)
    ms.wrap(model, config(), budget=(budget := int(0.8 * plain.taken_bytes)))

    def step(count):
        model(torch.randn(count, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(700)
    growth_bytes = ms.measure(lambda: step(1100)).growth_bytes
    executor = ms.Executor.of(model)
    assert planned_rows(model) == 1100
    assert executor.plan
    assert executor.predicted_bytes <= budget
    assert not [each for each in caplog.records if each.levelno > logging.INFO]
    assert growth_bytes <= executor.predicted_bytes, "planning takes no memory for longer batches"
