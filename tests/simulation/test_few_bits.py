"""Models in 4 and 8 bits that exist on meta alone: the same bytes as with numbers, and those that a CPU takes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.core import ConfigError
from memscale.simulation.measured import measure, training_roles
from tests.support.coverings import DEEP, in_turn

bnb = pytest.importorskip("bitsandbytes", reason="the weights in few bits are of bitsandbytes")
transformers = pytest.importorskip("transformers", reason="the models are of transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    peft = pytest.importorskip("peft", reason="LoRA is of PEFT")

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`(is_gradient_checkpointing|gradient_checkpointing_enable)`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following .* keys did not match any targeted module:RuntimeWarning"),
]
# bitsandbytes makes a table of codes when the first weight is packed doubly, and keeps it.
bnb.nn.Params4bit(torch.ones(64, 64), requires_grad=False).to("cpu")
SIZES = {
    "num_attention_heads": 2,
    "num_hidden_layers": 2 if DEEP else 1,
    "vocab_size": 61,
    "hidden_size": 64,
    "use_cache": False,
}
WIDE = {"intermediate_size": 192, "max_position_embeddings": 32}
MODELS = {
    "llama": ("LlamaForCausalLM", {**WIDE, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2ForCausalLM", {**WIDE, "num_key_value_heads": 1}),  # has biases
    "gemma": ("GemmaForCausalLM", {**WIDE, "num_key_value_heads": 1, "head_dim": 32}),  # a tied head
    "opt": ("OPTForCausalLM", {"ffn_dim": 192, "max_position_embeddings": 32, "word_embed_proj_dim": 64}),
    "bert": ("BertForMaskedLM", WIDE),
}
KINDS = {
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "nf4, doubly": {"quant_type": "nf4", "compress_statistics": True},
    "fp4": {"quant_type": "fp4", "compress_statistics": False},
    "int8": None,
}
TOKENS = torch.arange(60).view(2, 30)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


def in_few_bits(name: str, kind: str, device: str, *, prepares: bool = True, compute: torch.dtype = torch.bfloat16):
    """A model with adapters over layers in few bits, packed where it has numbers."""
    of_model, sizes = MODELS[name]
    cls = getattr(transformers, of_model)
    torch.manual_seed(0)
    with torch.device(device):
        model = cls(cls.config_class(**SIZES, **sizes)).to(torch.bfloat16)
    for path, linear in list(model.named_modules()):
        if type(linear) is nn.Linear and linear is not model.get_output_embeddings():
            model.set_submodule(path, layer_of(linear, kind, compute))
    if device == "cpu":
        model = model.to("cpu")
    setattr(model, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
    if prepares:
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).train()


def layer_of(linear: nn.Linear, kind: str, compute: torch.dtype) -> nn.Module:
    sizes = linear.in_features, linear.out_features, linear.bias is not None
    with torch.device("meta"):
        layer = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
        if KINDS[kind] is not None:
            layer = bnb.nn.Linear4bit(*sizes, compute_dtype=compute, **KINDS[kind])
    weight = layer.weight
    settings = {"has_fp16_weights": False} if kind == "int8" else {**KINDS[kind], "module": layer}
    layer.weight, layer.bias = type(weight)(linear.weight.data, requires_grad=False, **settings), linear.bias
    return layer


def profiled(model: nn.Module, hardware: str, **options) -> ms.Profile:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], foreach=False)
    config = ms.Config(use_empirical_fallback=False)
    return ms.MemoryProfiler(model, optimizer, hardware=hardware, config=config, **options).profile(BATCH)


CASES = [(name, "nf4, doubly") for name in MODELS] + [("qwen2", kind) for kind in KINDS if kind != "nf4, doubly"]
# What differs: biases, a tied head, and what a card unpacks; the other models are of the same layers.
QUICK = [("gemma", "nf4, doubly", "t4"), ("qwen2", "int8", "t4")]


@pytest.mark.parametrize(
    ("name", "kind", "hardware"),
    [(*case, hardware) for case in CASES for hardware in ("cpu", "t4")] if DEEP else QUICK,
)
def test_a_model_on_meta_has_the_bytes_of_one_with_numbers(name, kind, hardware):
    on_meta = in_few_bits(name, kind, "meta", prepares=kind != "int8")  # which would cast what is not packed yet
    before = {path: (id(each), each.shape, each.dtype) for path, each in on_meta.named_parameters()}
    found = profiled(on_meta, hardware)
    assert before == {path: (id(each), each.shape, each.dtype) for path, each in on_meta.named_parameters()}
    assert not bnb.functional.name2qmap["dynamic"].is_meta
    real = in_few_bits(name, kind, "cpu", prepares=kind != "int8")
    expected = profiled(real, hardware)
    assert (found.by_category, found.by_module) == (expected.by_category, expected.by_module)
    for bytes_of in ("peak_bytes", "first_step_peak_bytes", "reserved_peak_bytes"):
        assert getattr(found, bytes_of) == getattr(expected, bytes_of)
    assert found.notes == expected.notes
    assert any("beyond their threshold (6)" in note for note in found.notes) == (kind == "int8")


@pytest.mark.parametrize(
    ("kind", "how"), in_turn([*KINDS] if DEEP else ["nf4, doubly", "int8"], ["plain", "checkpoint"])
)
def test_the_bytes_are_those_of_a_real_step(kind, how):
    model = in_few_bits("qwen2", kind, "cpu", prepares=kind != "int8")
    if how == "checkpoint":
        model = ms.transform(model, {"base_model.model.model.layers.*": ms.checkpoint()})
    found = profiled(model, "cpu", keeps_output=False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], foreach=False)

    def step():
        model(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    step()
    real = measure(step, device=torch.device("cpu"), roles=training_roles(model, optimizer, BATCH))
    shared = found.by_category.get("other", 0)  # a table of codes that bitsandbytes keeps for all layers
    assert found.peak_bytes - shared == pytest.approx(real.peak_bytes, rel=1e-2)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.deep] * (kind == "fp4")) for kind in KINDS])
def test_weights_take_what_their_format_says(kind):
    model = in_few_bits("llama", kind, "meta", prepares=False)
    linear = [each for each in model.modules() if isinstance(each, (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt))]
    numbers = [each.in_features * each.out_features for each in linear]
    scales = {
        "nf4": sum(4 * (-(-count // 64) + 16) for count in numbers),
        "fp4": sum(4 * (-(-count // 64) + 16) for count in numbers),
        "nf4, doubly": sum(-(-count // 64) + 4 * (-(-count // 64 // 256) + 16 + 256 + 1) for count in numbers),
        "int8": sum(4 * each.out_features for each in linear),
    }[kind]
    others = sum(
        each.nbytes for each in model.parameters() if not isinstance(each, (bnb.nn.Params4bit, bnb.nn.Int8Params))
    )
    found = profiled(model, "cpu").by_category
    assert found["parameter"] == others + sum(numbers) // (1 if kind == "int8" else 2)
    assert found["buffer"] == scales + sum(each.nbytes for each in model.buffers())


def test_a_weight_is_unpacked_for_each_product_on_a_card():
    """In backward to the dtype that it was packed from, and from that to the gradient's."""
    layer = bnb.nn.Linear4bit(64, 4096, bias=False, quant_type="nf4", device="meta")
    numbers = torch.empty(4096, 64, device="meta", dtype=torch.float16)
    layer.weight = bnb.nn.Params4bit(numbers, quant_type="nf4", module=layer)
    model, options = nn.Sequential(nn.Linear(8, 64), layer), {"loss": lambda y, _: y.sum(), "keeps_output": False}
    found = ms.profile(model, torch.ones(16, 8), hardware="t4", **options)
    unpacked = {each.dtype: each.nbytes for each in found.holdings if each.shape == (4096, 64)}
    assert unpacked == {"float16": 2 * numbers.numel(), "float32": 4 * numbers.numel()}
    assert (found.moment.phase, found.moment.op) == ("backward", "aten::_to_copy")


def test_fused_experts_that_stay_in_16_bits_are_told():
    config = transformers.MixtralConfig(**SIZES, **WIDE, num_key_value_heads=1, num_local_experts=4)
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).to(torch.bfloat16)
    if not any(each.dim() == 3 for each in model.parameters()):
        pytest.skip("before transformers 5 experts are linear layers, which are packed")
    assert not any("packed" in note for note in ms.profile(model, BATCH, hardware="t4").notes)
    for path, linear in list(model.named_modules()):
        if type(linear) is nn.Linear:
            model.set_submodule(path, layer_of(linear, "nf4", torch.bfloat16))
    (note,) = [note for note in ms.profile(model, BATCH, hardware="t4").notes if "packed" in note]
    experts = sum(each.nbytes for each in model.parameters() if each.dim() == 3)
    assert note.startswith(f"{experts / 2**10:.0f} KiB of the weights are not packed and stay in bfloat16, such as ")


def test_a_weight_with_numbers_that_is_not_packed_is_told_how_to_pack_it():
    model = nn.Sequential(bnb.nn.Linear4bit(8, 8))
    with pytest.raises(ConfigError, match=r"the weight of '0' is not packed .* call model.to\('cpu'\) first"):
        ms.profile(model, torch.ones(2, 8), loss=lambda y, _: y.sum())


def test_an_old_bitsandbytes_is_told_which_is_needed(monkeypatch):
    def refuse(*_):
        raise NotImplementedError("no kernel on meta")

    monkeypatch.setattr(bnb.nn.Params4bit, "_quantize", refuse)
    model = nn.Sequential(bnb.nn.Linear4bit(8, 8, device="meta"))
    with pytest.raises(ms.RuntimeUnavailable, match=r"no kernel on meta.*need bitsandbytes>=0\.46"):
        ms.profile(model, torch.ones(2, 8), loss=lambda y, _: y.sum(), hardware="t4")
