"""PEFT: adapters of a wrapped model train as those of a plain one, with frozen embeddings and no hook on inputs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import memscale as ms

transformers = pytest.importorskip("transformers", reason="GPT-2 comes from transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    peft = pytest.importorskip("peft", reason="LoRA is of PEFT")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks by the old name
FORCE = ms.Config(force_optimize=True, enable_logging=False)


def adapted(*, wrap_first: bool | None, dora: bool = False) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 61, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
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
