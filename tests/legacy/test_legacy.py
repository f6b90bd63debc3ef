"""wrap, optimize, detach: the same numbers in place, less kept, and every trace taken off again."""

import copy
import logging
import pickle
import types

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from memscale.config import Config
from memscale.core.errors import ConfigError, CorrectnessError, TransformError
from memscale.hardware.device import Hardware
from memscale.legacy import executor as executor_module
from memscale.legacy.executor import Executor
from memscale.legacy.verbs import detach, optimize, wrap

FORCE = Config(force_optimize=True)


class ConvBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(torch.relu(self.norm(self.conv(x))))


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), ConvBlock(8), ConvBlock(8), nn.Flatten(), nn.Linear(8 * 36, 1))


def conv_batch():
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def gpt2():
    transformers = pytest.importorskip("transformers", reason="GPT-2 comes from transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config).train()


def gpt2_batch():
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


MODELS = [pytest.param(convnet, conv_batch, id="convnet"), pytest.param(gpt2, gpt2_batch, id="gpt2")]


def loss_of(model, batch):
    return model(**batch).loss if isinstance(batch, dict) else model(batch).square().mean()


def train(model, batch, steps=2):
    """Everything that a few steps compute."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(3)
    numbers = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        numbers += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
    return [*numbers, *(t.clone() for t in model.state_dict().values()), torch.get_rng_state()]


def traces(model):
    """The identity of all that a module tree is made of."""
    return {
        path: (
            type(module),
            id(module.__dict__),
            {key: id(value) for key, value in module.__dict__.items()},
            [id(value) for value in (*module._parameters.values(), *module._buffers.values())],
            [len(value) for key, value in module.__dict__.items() if key.endswith("_hooks")],
        )
        for path, module in model.named_modules()
    }


def backward_flops(model, batch):
    loss = loss_of(model, batch)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops()


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("make", "make_batch"), MODELS)
def test_trains_to_the_same_bits_and_recomputes(make, make_batch):
    batch = make_batch()
    plain = train(make(), batch)
    assert equal(train(wrap(make(), FORCE), batch), plain)
    assert backward_flops(wrap(make(), FORCE), batch) > backward_flops(make(), batch)


@pytest.mark.parametrize(("make", "make_batch"), MODELS)
def test_detach_restores_every_object(make, make_batch):
    model = make()
    # Somebody else's patch on an instance, and a hook, must both survive.
    block = next(module for name, module in model.named_modules() if name in ("1", "transformer.h.0"))
    block.forward = types.MethodType(type(block).forward, block)
    block.register_forward_hook(lambda *_: None)
    before = traces(model)
    assert wrap(model, FORCE) is model
    assert isinstance(model._memscale_executor, Executor)
    loss_of(model, make_batch()).backward()
    detach(model)
    assert traces(model) == before
    assert not hasattr(model, "_memscale_executor")


def test_use_cache_is_off_while_wrapped(caplog):
    caplog.set_level(logging.INFO, logger="memscale")
    model = gpt2()
    settings = vars(model.config).copy()
    assert model.config.use_cache is True
    wrap(model)
    assert model.config.use_cache is False
    assert "GPT2Config.use_cache is False while wrapped; detach() restores it" in caplog.text
    assert model(**gpt2_batch()).past_key_values is None
    detach(model)
    assert vars(model.config) == settings


def test_wrapping_twice_plans_again(caplog):
    caplog.set_level(logging.INFO, logger="memscale")
    model = convnet()
    before = traces(model)
    first = wrap(model)._memscale_executor
    second = wrap(model, FORCE)._memscale_executor
    assert first.skipped is not None
    assert second.skipped is None
    assert "Sequential is wrapped already: detaching it to plan again" in caplog.text
    first.detach()
    assert model._memscale_executor is second
    detach(model)
    assert traces(model) == before
    flops = backward_flops(model, conv_batch())
    assert backward_flops(wrap(model, FORCE), conv_batch()) > flops


def test_optimize_detaches_after_the_block_and_after_an_exception():
    model = convnet()
    before = traces(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with optimize(model, optimizer, FORCE) as executor:
        assert model._memscale_executor is executor
        loss_of(model, conv_batch()).backward()
    assert traces(model) == before
    error = RuntimeError("the user's own")
    with pytest.raises(RuntimeError, match="the user's own") as caught, optimize(model, config=FORCE):
        raise error
    assert caught.value is error
    assert traces(model) == before


def test_a_trainer_is_accepted_and_returned():
    trainer = types.SimpleNamespace(model=convnet())
    assert wrap(trainer, FORCE) is trainer
    assert trainer.model._memscale_executor.model is trainer.model
    detach(trainer)
    assert not hasattr(trainer.model, "_memscale_executor")


@pytest.mark.parametrize("target", [None, 3, {}, nn.Linear, lambda x: x, types.SimpleNamespace(model="gpt2")])
@pytest.mark.parametrize("verb", [wrap, detach, lambda target: optimize(target).__enter__()])
def test_other_targets_are_type_errors(target, verb):
    with pytest.raises(TypeError, match=r"takes an nn.Module, or a trainer .* got \w+; pass the model itself"):
        verb(target)


def test_bad_arguments_of_wrap_are_refused():
    model = convnet()
    before = traces(model)
    with pytest.raises(ConfigError, match=r"config={} must be a memscale.Config or None; build one with"):
        wrap(model, {})
    with pytest.raises(ConfigError, match=r"config='20GiB' must be .*; a budget is given by its name: budget='20GiB'"):
        wrap(model, "20GiB")
    with pytest.raises(ConfigError, match=r"Config\(async_offload=1\) must be True or False"):
        wrap(model, async_offload=1)
    with pytest.raises(ConfigError, match=r"Config\(async_config=3\) must be an AsyncOffloadConfig"):
        wrap(model, async_config=3)
    with pytest.raises(ConfigError, match=r"a batch is a tensor, .* got str; pass what"):
        wrap(model, sample_input="text")
    with pytest.raises(ConfigError, match="compares real steps and needs a batch; pass sample_input="):
        wrap(model, Config(verify_correctness=True))
    with pytest.raises(ConfigError, match=r"verify_correctness=True, use_mixed_precision=True\) contradict each other"):
        wrap(model, Config(verify_correctness=True, use_mixed_precision=True), conv_batch())
    with pytest.raises(ConfigError, match=r"log_file='/nowhere/at/all'\) cannot be written .*; pass a path"):
        wrap(model, Config(log_file="/nowhere/at/all"))
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer or None, got int; pass the optimizer"):
        optimize(model, 3).__enter__()
    assert traces(model) == before


def test_a_batch_that_does_not_run_is_told(caplog):
    detach(wrap(convnet(), sample_input=torch.ones(2, 3)))
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warning.startswith("the step cannot be profiled: ConfigError: the step fails when it runs")


@pytest.mark.parametrize(
    ("make", "config", "reason"),
    [
        (convnet, Config(), "the step fits: about .* transforms it all the same"),
        (convnet, Config(force_optimize=True, enable_checkpointing=False), "enable_checkpointing is False"),
        (lambda: nn.Linear(2, 2), FORCE, "no repeated blocks"),
        (lambda: nn.Sequential(), FORCE, "nothing to train"),
        (lambda: convnet().requires_grad_(False), FORCE, "nothing to train"),
    ],
)
def test_reasons_to_leave_a_model_alone(make, config, reason, caplog):
    caplog.set_level(logging.INFO, logger="memscale")
    model = wrap(make(), config)
    executor = model._memscale_executor
    assert len(executor.plan) == 0
    assert reason.split(":")[0] in executor.skipped
    waits = reason.startswith("the step fits")  # only a batch shows what activations take
    logged = "stays unchanged until its first" if waits else f"unchanged: {executor.skipped}"
    assert logged in " ".join(caplog.text.split())
    assert " ".join(str(executor).split()).endswith(f"unchanged: {executor.skipped}")
    assert all("forward" not in module.__dict__ for module in list(model.modules())[1:])


def test_a_forced_step_above_the_budget_gets_its_plan_without_repeated_blocks():
    model = nn.Sequential(nn.Linear(16, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 16))
    config = Config(force_optimize=True, enable_tiling=True)
    evidence = Executor.of(wrap(model, config, torch.randn(2048, 16), budget="14MiB")).plan.evidence
    assert evidence.planned.taken_bytes <= 14 * 2**20 < evidence.plain.taken_bytes


@pytest.mark.parametrize(("make", "make_batch"), MODELS)
def test_verify_correctness_leaves_no_trace(make, make_batch):
    model, batch = make(), make_batch()
    loss_of(model, batch).backward()
    before, random_state = traces(model), torch.get_rng_state()
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    wrap(model, Config(force_optimize=True, verify_correctness=True), batch)
    assert all(p.grad is g and torch.equal(g, c) for p, (g, c) in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model._memscale_executor.skipped is None
    detach(model)
    assert traces(model) == before


def test_verify_correctness_catches_a_difference(monkeypatch):
    real = executor_module.check_same_numbers

    def spoiled(model, apply, undo, batch):
        def apply_and_spoil():
            apply()
            forward = model[1].forward
            model[1].__dict__["forward"] = lambda x: forward(x) + 1

        def restore_and_undo():
            model[1].__dict__.pop("forward")  # it would stay, as any forward that is not of the plan
            undo()

        real(model, apply_and_spoil, restore_and_undo, batch)

    monkeypatch.setattr(executor_module, "check_same_numbers", spoiled)
    model = convnet()
    before = traces(model)
    with pytest.raises(CorrectnessError, match=r"differs from the plain one in .*output 0.*left unwrapped"):
        wrap(model, Config(force_optimize=True, verify_correctness=True), conv_batch())
    assert traces(model) == before


def test_verify_correctness_tells_a_model_that_differs_from_itself():
    class Drifts(nn.Sequential):
        calls = 0

        def forward(self, x):
            Drifts.calls += 1
            return super().forward(x) + Drifts.calls

    with pytest.raises(CorrectnessError, match="two plain steps of this Drifts differ from each other"):
        wrap(Drifts(*convnet()), Config(force_optimize=True, verify_correctness=True), conv_batch())


def test_the_log_and_its_file(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="memscale")
    path = tmp_path / "run.log"
    path.write_text("earlier\n")
    model = wrap(gpt2(), Config(force_optimize=True, log_file=path), gpt2_batch())
    table = str(model._memscale_executor.plan)
    detach(model)
    text = path.read_text()
    assert text.startswith("earlier\n")
    for record in caplog.records:
        assert record.name != "memscale" or f" {record.getMessage()}\n" in text
    assert "transformer.h.*  exact    checkpoint()" in table
    for part in (
        f"GPT2LMHeadModel on {Hardware.detect('cpu').name}",
        "step without memscale: ",
        " at its peak, in ",
        table,
        "use_cache is False",
        "detached GPT2LMHeadModel",
    ):
        assert part in text
    size = path.stat().st_size
    logging.getLogger("memscale").warning("after")
    assert path.stat().st_size == size


def test_a_wrapped_part_is_refused():
    model = convnet()
    wrap(model[1], FORCE)
    with pytest.raises(TransformError, match="module '1' inside the model is wrapped on its own; detach it first"):
        wrap(model, FORCE)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_wrapped_model_detaches_by_itself(duplicate):
    model = wrap(convnet(), FORCE)
    other = duplicate(model)
    flops = backward_flops(model, conv_batch())
    assert backward_flops(other, conv_batch()) == flops
    detach(other)
    assert not any({"forward", "_memscale_executor"} & module.__dict__.keys() for module in other.modules())
    assert backward_flops(other, conv_batch()) < flops
    assert backward_flops(model, conv_batch()) == flops
    detach(model)
    assert backward_flops(model, conv_batch()) < flops
