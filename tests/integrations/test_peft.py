"""PEFT: adapters of a wrapped model train as those of a plain one, with frozen embeddings and no hook on inputs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memscale as ms
from tests.support.checks import bits
from tests.support.coverings import in_turn

transformers = pytest.importorskip("transformers", reason="GPT-2 comes from transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    peft = pytest.importorskip("peft", reason="LoRA is of PEFT")

# PEFT calls these by their old names.
pytestmark = pytest.mark.filterwarnings(
    r"ignore:`(is_gradient_checkpointing|gradient_checkpointing_enable)`:FutureWarning"
)
FORCE = ms.Config(force_optimize=True, enable_logging=False)


def plain_gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 61, "n_positions": 16}
    return transformers.GPT2LMHeadModel(  # type: ignore[no-any-return]
        transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)
    )


def adapted(*, wrap_first: bool | None, dora: bool = False) -> nn.Module:
    model = plain_gpt2()
    if wrap_first:
        ms.wrap(model, FORCE)
    settings = peft.LoraConfig(target_modules=["c_attn"], use_dora=dora, lora_dropout=0.1, fan_in_fan_out=True)
    model = peft.get_peft_model(model, settings)
    return ms.wrap(model, FORCE) if wrap_first is False else model


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-2)
    torch.manual_seed(3)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return peft.get_peft_model_state_dict(model)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("wrap_first", [True, False])
def test_adapters_train_to_the_same_numbers(wrap_first: bool, dora: bool) -> None:
    expected = trained(adapted(wrap_first=None, dora=dora))
    model = adapted(wrap_first=wrap_first, dora=dora)
    assert sum("forward" in module.__dict__ for module in model.modules()) >= 2
    found = trained(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(bool(found[name].any()) for name in found if "lora_B" in name)


TOKENS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(1))
KIND = {"target_modules": ["c_attn"], "lora_dropout": 0.1, "fan_in_fan_out": True}


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS, labels=TOKENS).loss  # type: ignore[no-any-return]


def switched(model: nn.Module) -> torch.Tensor:
    loss = loss_of(model)
    model.set_adapter("other")
    loss.backward()
    return loss


def both_in_one_graph(model: nn.Module) -> torch.Tensor:
    loss = loss_of(model)
    model.set_adapter("other")
    (loss + loss_of(model)).backward()
    return loss


def disabled(model: nn.Module) -> torch.Tensor:
    loss = loss_of(model)
    with model.disable_adapter():
        reference = loss_of(model)
        loss.backward()
    return torch.stack([loss, reference])


@pytest.mark.parametrize("turn", [switched, both_in_one_graph, disabled])
def test_adapters_that_are_switched_before_backward_get_the_gradients_of_their_forward(turn: Any) -> None:
    def run(wraps: bool) -> tuple[Any, ...]:
        model = adapted(wrap_first=None)
        model.add_adapter("other", peft.LoraConfig(r=4, **KIND))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, when it makes no difference which adapter it is
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
        if wraps:
            ms.wrap(model, FORCE)
        torch.manual_seed(3)
        return bits(turn(model).detach()), bits([parameter.grad for parameter in model.parameters()])

    assert run(True) == run(False)


def test_copies_of_modules_that_are_saved_with_the_adapter_train() -> None:
    def run(wraps: bool) -> Any:
        model = peft.get_peft_model(plain_gpt2(), peft.LoraConfig(modules_to_save=["ln_f", "mlp"], **KIND))
        if wraps:
            ms.wrap(model, FORCE)
        return bits(trained(model))

    assert run(True) == run(False)


class Tanhs(TorchDispatchMode):
    """Counts those of GPT-2's activations: one for each run of a block."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.aten.tanh.default
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter")  # PEFT does not pass it
@pytest.mark.parametrize(("wrap_first", "its_own"), in_turn([True, False], [True, False]))
def test_a_model_in_4_bits_that_peft_prepares_recomputes_once_and_is_counted(wrap_first: bool, its_own: bool) -> None:
    def prepared(wraps: bool) -> nn.Module:
        model = plain_gpt2().bfloat16()
        model.is_loaded_in_4bit = True  # by which PEFT knows it
        if wraps and wrap_first:
            ms.wrap(model, FORCE)
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=its_own)
        model = peft.get_peft_model(model, peft.LoraConfig(**KIND))
        return ms.wrap(model, FORCE) if wraps and not wrap_first else model

    model, expected = prepared(True), prepared(False)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with Tanhs() as counted:
        found = trained(model)
    assert counted.calls == 2 * 2 * 2  # two blocks, twice each, in two steps
    assert bits(found) == bits(trained(expected))
    profile = ms.profile(expected, {"input_ids": TOKENS, "labels": TOKENS}, hardware="h100")
    assert profile.by_category["parameter"] == sum(parameter.nbytes for parameter in expected.parameters())


@pytest.mark.parametrize("in_bits", [4, 8])
@pytest.mark.parametrize("wrap_first", [True, False])
def test_adapters_of_weights_in_few_bits_train_to_the_same_numbers(wrap_first: bool, in_bits: int) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="the weights in few bits are of bitsandbytes")

    def packing(linear: nn.Linear) -> nn.Module:
        sizes = {"input_features": linear.in_features, "output_features": linear.out_features, "bias": False}
        if in_bits == 4:
            small = bitsandbytes.nn.Linear4bit(**sizes, compute_dtype=torch.float32)
            small.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False)
        else:  # whose first call moves the scales from the weight to the layer
            small = bitsandbytes.nn.Linear8bitLt(**sizes, has_fp16_weights=False)
            small.weight = bitsandbytes.nn.Int8Params(linear.weight.data, requires_grad=False)
        return small  # type: ignore[no-any-return]

    def run(wraps: bool) -> Any:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, vocab_size=61, max_position_embeddings=16, attention_dropout=0.1)
        )
        for layer in model.model.layers:
            for name, linear in layer.mlp.named_children():
                if isinstance(linear, nn.Linear):
                    setattr(layer.mlp, name, packing(linear))
        model = model.to("cpu")  # which packs them
        setattr(model, f"is_loaded_in_{in_bits}bit", True)
        if wraps and wrap_first:
            ms.wrap(model, FORCE)
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["up_proj"], lora_dropout=0.1))
        if wraps and not wrap_first:
            ms.wrap(model, FORCE)
        assert {each.dtype for name, each in model.named_parameters() if "mlp.gate" in name} == {
            torch.uint8 if in_bits == 4 else torch.int8
        }
        assert sum("forward" in each.__dict__ for each in model.modules()) >= (2 if wraps else 0)
        return bits(trained(model))

    assert run(True) == run(False)
