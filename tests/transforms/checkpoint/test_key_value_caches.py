"""Hugging Face models with their cache of keys and values on, as by default: each block is given it and grows it."""

import itertools

import pytest
import torch
import transformers

import memscale as ms
from memscale import checkpoint, policies
from tests.support.checks import bits
from tests.support.coverings import pairwise

IDS = torch.arange(1, 17).reshape(2, 8)
TEXT = {"input_ids": IDS, "labels": IDS}
SMALL = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def gpt2(**attention):
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=20, **attention)
    return transformers.GPT2LMHeadModel(config), "transformer.h.*", TEXT


def llama(**attention):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **attention)), "model.layers.*", TEXT


def mixtral(**attention):  # its cache drops what has slid out of the window
    config = transformers.MixtralConfig(**SMALL, num_local_experts=2, sliding_window=4, **attention)
    return transformers.MixtralForCausalLM(config), "model.layers.*", TEXT


def t5(**attention):
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0, **attention
    )
    return transformers.T5ForConditionalGeneration(config), "*.block.*", TEXT


def whisper(**attention):
    config = transformers.WhisperConfig(
        vocab_size=20,
        d_model=8,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_mel_bins=4,
        max_source_positions=6,
        max_target_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **attention,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return model, "model.*.layers.*", {"input_features": torch.linspace(-1, 1, 96).reshape(2, 4, 12), "labels": IDS}


MODELS = [gpt2, llama, mixtral, t5, whisper]


def made(make, attention):
    torch.manual_seed(0)
    try:
        return make(attn_implementation=attention)
    except ValueError as refused:
        if "support" not in str(refused):
            raise
        pytest.skip(f"transformers {transformers.__version__} has no {attention} attention for {make.__name__}")


def step(model, batch):
    torch.manual_seed(1)
    output = model(**batch)
    output.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return output.loss, gradients, lengths(output.past_key_values)


def lengths(cache):
    if isinstance(cache, tuple):  # of transformers 4.50, where a model has no cache of its own making
        return cache[0][0].shape[-2], cache[1][0].shape[-2]
    return cache.get_seq_length(0), cache.get_seq_length(1)


def keys_and_values(cache):
    if hasattr(cache, "layers"):
        return [(layer.keys, layer.values) for layer in cache.layers]
    return zip(cache.key_cache, cache.value_cache, strict=True)


@pytest.mark.parametrize(
    ("make", "attention", "train", "plan"),
    pairwise(itertools.product(MODELS, ["eager", "sdpa"], [True, False], ["blocks", "nested", "dots"])),
)
def test_models_with_a_cache_train_to_the_same_bits(make, attention, train, plan):
    model, pattern, batch = made(make, attention)
    model.train(train)
    how = checkpoint(policy=policies.dots_saveable) if plan == "dots" else checkpoint()
    fit = ms.transform(model, {**({"": checkpoint()} if plan == "nested" else {}), pattern: how})
    wanted = step(model, batch)
    assert wanted[2] == (8, 8)
    for _ in range(2):
        assert bits(step(fit, batch)) == bits(wanted)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("make", MODELS)
def test_torch_func_has_the_same_gradients_through_a_cache(make, attention):
    model, pattern, batch = made(make, attention)
    # The encoder's states go to every block of the decoder, and a region adds up its own uses of them first: another
    # order of the same sum.
    exact = make not in (t5, whisper)
    if not exact:
        model, batch = model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}

    def gradients(model):
        fn, state = ms.functional(model)
        torch.manual_seed(1)
        floats = {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}  # GPT-2 has had masks
        return torch.func.grad(lambda floats: fn({**state, **floats}, **batch).loss)(floats)

    wanted, found = gradients(model), gradients(ms.transform(model, {pattern: checkpoint()}))
    if exact:
        assert bits(found) == bits(wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def test_keys_and_values_carry_gradients():
    model, pattern, batch = made(llama, "eager")

    def gradients(model):
        cache = model(**batch).past_key_values
        loss = sum((keys.square() * values).sum() for keys, values in keys_and_values(cache))
        return torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)

    def functional_gradients(model):
        fn, state = ms.functional(model)

        def loss(state):
            cache = fn(state, **batch).past_key_values
            return sum((keys.square() * values).sum() for keys, values in keys_and_values(cache))

        return torch.func.grad(loss)(state)

    for gradients_of in (gradients, functional_gradients):
        for plan in ({pattern: checkpoint()}, {"": checkpoint()}, {"": checkpoint(), pattern: checkpoint()}):
            found, wanted = gradients_of(ms.transform(model, plan)), gradients_of(model)
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_tile_names_the_remedy(make):
    model, pattern, batch = made(make, "eager")
    if isinstance(model(**batch).past_key_values, tuple):
        pytest.skip(f"transformers {transformers.__version__} gives the blocks of this model no cache that they change")
    with pytest.raises(ms.TransformError, match=r"changes one of its arguments, a Dynamic\w+, .*use_cache=False"):
        ms.transform(model, {pattern: ms.tile(chunks=2)})(**batch)
    ms.transform(model, {pattern: ms.tile(chunks=2)})(**batch, use_cache=False).loss.backward()
