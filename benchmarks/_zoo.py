"""The zoo: small training steps of many architectures, to hold memory predictions against the allocator.

A case builds a model with random weights and a batch (a tensor is one positional argument, a tuple positional
arguments, a mapping keyword arguments), seeded, on the default device: under `torch.device("meta")` too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import _zoo_torch as own
import optree
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import memscale as ms
from memscale.planning.parts.blocks import repeated_blocks

Built = tuple[nn.Module, Any]
Loss = Callable[[Any, Any], torch.Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AUTOCAST = "autocast"  # float32 parameters, and the forward under torch.autocast of CUDA
LOOPS = ("foreach", "fused")
ADAMW: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-4)


@dataclass(frozen=True)
class Case:
    """One training step.

    Args:
        name: its key in `ZOO`.
        build: the model in training mode and its batch, in float32.
        loss: `loss(output, batch)`; None is `output.loss`.
        make_optimizer: over the parameters that train.
        accumulate: forward and backward passes before the optimizer steps.
        head: path of the projection to the vocabulary, which `tile` may cut; "" for a model without one.
        casts: whether the variants with `cast` are measured.
        refused: by dtype, why PyTorch cannot run this step in it on a CPU.
    """

    name: str
    build: Callable[[], Built]
    loss: Loss | None = None
    make_optimizer: MakeOptimizer = ADAMW
    accumulate: int = 1
    head: str = ""
    casts: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)

    def make(self, dtype: str = "fp32", device: torch.device | str | None = None) -> Built:
        """Build, and move both to `dtype` (its name; floating inputs are cast) and to `device`."""
        model, batch = self.build()
        if dtype == AUTOCAST:
            model, dtype = own.Autocast(model), "fp32"

        def moved(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.to(device=device, dtype=DTYPES[dtype] if leaf.is_floating_point() else None)

        return model.to(device=device, dtype=DTYPES[dtype]), optree.tree_map(moved, batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over what trains."""
        return self.make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])

    def plans(self, model: nn.Module, dtype: str = "fp32") -> dict[str, ms.Plan | None]:
        """The variants of this case by name; None is the model as it is."""
        blocks = repeated_blocks(model)
        head = ms.tile(chunks=8)
        path = f"model.{self.head}" if dtype == AUTOCAST else self.head
        plans: dict[str, Mapping[str, ms.Transform]] = {}
        if blocks:
            plans["checkpoint"] = dict.fromkeys(blocks, ms.checkpoint())
        if self.head:
            plans["tile"] = {path: head}
        if self.head and blocks:
            plans["checkpoint+tile"] = {**plans["checkpoint"], path: head}
        if self.casts and dtype == "fp32":
            plans["cast"] = {"": ms.cast()}
            plans["checkpoint+cast"] = {"": ms.cast(), **dict.fromkeys(blocks, ms.compose(ms.checkpoint(), ms.cast()))}
        return {"plain": None, **{variant: ms.Plan(plan) for variant, plan in plans.items()}}

    def moving_plans(self, model: nn.Module) -> dict[str, ms.Plan]:
        """Variants of a device that has a host beside it, and those that cut the rows of the MLPs."""
        blocks = repeated_blocks(model)
        rows = [
            name for name, module in model.named_modules() if re.search(r"MLP|FFN|FeedForward", type(module).__name__)
        ]
        plans: dict[str, Mapping[str, ms.Transform]] = {}
        if rows:
            plans["rows"] = dict.fromkeys(rows, ms.tile(chunks=4))
        if blocks:
            plans["offload"] = dict.fromkeys(blocks, ms.offload(min_bytes=1 << 16))
            plans["checkpoint+offload"] = dict.fromkeys(
                blocks, ms.compose(ms.offload(min_bytes=1 << 16), ms.checkpoint())
            )
            plans["params"] = dict.fromkeys(blocks, ms.offload(what="params"))
        return {variant: ms.Plan(plan) for variant, plan in plans.items()}

    def with_loop(self, loop: str) -> Case:
        """This case with AdamW's loop of that name."""
        return replace(self, make_optimizer=partial(torch.optim.AdamW, lr=1e-4, **{loop: True}))


ZOO: dict[str, Case] = {}


def _case(name: str, **options: Any) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Enter the builder that follows into the zoo; its random numbers are its own."""

    def enter(builder: Callable[[], Built]) -> Callable[[], Built]:
        def build() -> Built:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model, batch = builder()
            return model.train(), batch

        ZOO[name] = Case(name, build, **options)
        return builder

    return enter


def _tokens(words: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, words, (batch, length))


def _causal(model: nn.Module, words: int = 8000, batch: int = 4, length: int = 256) -> Built:
    tokens = _tokens(words, batch, length)
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def _both_sides(**fields: int) -> dict[str, int]:
    return {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in fields.items()}


def _to_class(output: Any, batch: Any) -> torch.Tensor:
    """Cross entropy of the first output dimension against labels that stand still."""
    labels = torch.zeros(output.shape[0], dtype=torch.long, device=output.device)
    return F.cross_entropy(output, labels)


def _to_input(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.mse_loss(output, batch[0] if isinstance(batch, tuple) else batch)


def _to_next_token(output: torch.Tensor, batch: Any) -> torch.Tensor:
    tokens = batch[-1] if isinstance(batch, tuple) else batch
    return F.cross_entropy(output[:, :-1].flatten(0, 1).float(), tokens[:, 1 : output.shape[1]].flatten())


def _to_itself(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Cross entropy of a map of classes against class 1 everywhere."""
    shape = (output.shape[0], *output.shape[2:])
    return F.cross_entropy(output, torch.ones(shape, dtype=torch.long, device=output.device))


# Decoders, encoders and both, from Hugging Face configs.

_DECODER = {
    "vocab_size": 8000,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "use_cache": False,
}
_EXPERTS = {**_DECODER, "num_hidden_layers": 3, "intermediate_size": 384}


@_case("gpt2", head="lm_head", casts=True)
def _gpt2() -> Built:
    config = transformers.GPT2Config(vocab_size=8000, n_positions=512, n_embd=256, n_layer=4, n_head=8, use_cache=False)
    return _causal(transformers.GPT2LMHeadModel(config))


@_case("gpt2-accumulate", accumulate=2, make_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
def _gpt2_accumulate() -> Built:
    return _gpt2()


def _llama(**changes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_DECODER, **changes}))


@_case("llama", head="lm_head", casts=True)
def _llama_untied() -> Built:
    return _causal(_llama(tie_word_embeddings=False))


@_case("llama-tied", head="lm_head")
def _llama_tied() -> Built:
    return _causal(_llama(tie_word_embeddings=True))


@_case("llama-eager")
def _llama_eager() -> Built:
    return _causal(_llama(attn_implementation="eager"))


@_case("llama-lora", head="lm_head")
def _llama_lora() -> Built:
    return _causal(own.add_lora(_llama(), ("q_proj", "v_proj", "down_proj")))


@_case("gemma2", head="lm_head")
def _gemma2() -> Built:
    config = transformers.Gemma2Config(**_DECODER, head_dim=32, sliding_window=64, query_pre_attn_scalar=32)
    return _causal(transformers.Gemma2ForCausalLM(config))


@_case("phi3")
def _phi3() -> Built:
    config = transformers.Phi3Config(**_DECODER, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return _causal(transformers.Phi3ForCausalLM(config))


@_case("qwen3", head="lm_head")
def _qwen3() -> Built:
    return _causal(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_DECODER, head_dim=32)))


@_case("mixtral", head="lm_head")
def _mixtral() -> Built:
    config = transformers.MixtralConfig(**_EXPERTS, num_local_experts=4, output_router_logits=True)
    return _causal(transformers.MixtralForCausalLM(config), batch=2)


@_case("qwen2-moe")
def _qwen2_moe() -> Built:
    config = transformers.Qwen2MoeConfig(
        **_EXPERTS, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192, shared_expert_intermediate_size=256
    )
    return _causal(transformers.Qwen2MoeForCausalLM(config), batch=2)


@_case("qwen3-moe")
def _qwen3_moe() -> Built:
    config = transformers.Qwen3MoeConfig(
        **_EXPERTS, head_dim=32, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192
    )
    return _causal(transformers.Qwen3MoeForCausalLM(config), batch=2)


@_case("granite-moe")
def _granite_moe() -> Built:
    config = transformers.GraniteMoeConfig(**_EXPERTS, num_local_experts=4, num_experts_per_tok=2)
    return _causal(transformers.GraniteMoeForCausalLM(config), batch=2)


@_case("patchtst")
def _patchtst() -> Built:
    config = transformers.PatchTSTConfig(
        num_input_channels=7, context_length=256, patch_length=16, patch_stride=8, d_model=128, num_attention_heads=8,
        num_hidden_layers=3, ffn_dim=512, prediction_length=48,
    )  # fmt: skip
    series = {"past_values": torch.randn(16, 256, 7), "future_values": torch.randn(16, 48, 7)}
    return transformers.PatchTSTForPrediction(config), series


@_case("mamba", head="lm_head")
def _mamba() -> Built:
    config = transformers.MambaConfig(
        vocab_size=4000, hidden_size=128, num_hidden_layers=3, state_size=16, use_cache=False
    )
    return _causal(transformers.MambaForCausalLM(config), words=4000, batch=4, length=96)


@_case("bert", casts=True)
def _bert() -> Built:
    config = transformers.BertConfig(
        vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, intermediate_size=1024
    )
    tokens = _tokens(8000, 8, 128)
    mask = torch.ones_like(tokens)
    mask[:, 96:] = 0
    return transformers.BertForMaskedLM(config), {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


@_case("distilbert", make_optimizer=partial(torch.optim.Adafactor, lr=1e-3))
def _distilbert() -> Built:
    config = transformers.DistilBertConfig(vocab_size=8000, dim=256, n_layers=4, n_heads=8, hidden_dim=1024)
    return _causal(transformers.DistilBertForMaskedLM(config), batch=8, length=128)


@_case("t5", head="lm_head")
def _t5() -> Built:
    config = transformers.T5Config(
        vocab_size=8000, d_model=256, d_kv=32, d_ff=1024, num_layers=3, num_heads=8, decoder_start_token_id=0,
        use_cache=False,  # a recompute that finds the cache filled runs another branch, and checkpoint() refuses it
    )  # fmt: skip
    batch = {"input_ids": _tokens(8000, 4, 192), "labels": _tokens(8000, 4, 128)}
    return transformers.T5ForConditionalGeneration(config), batch


@_case("bart")
def _bart() -> Built:
    sides = _both_sides(layers=3, attention_heads=8, ffn_dim=1024)
    config = transformers.BartConfig(
        vocab_size=8000, d_model=256, max_position_embeddings=512, use_cache=False, **sides
    )
    batch = {"input_ids": _tokens(8000, 4, 192), "labels": _tokens(8000, 4, 128)}
    return transformers.BartForConditionalGeneration(config), batch


# Pictures and sound, from Hugging Face configs.


def _pictures(model: nn.Module, batch: int, side: int) -> Built:
    return model, {"pixel_values": torch.randn(batch, 3, side, side), "labels": torch.randint(0, 2, (batch,))}


@_case("vit", casts=True)
def _vit() -> Built:
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=6, intermediate_size=768, image_size=128, patch_size=8
    )
    return _pictures(transformers.ViTForImageClassification(config), 8, 128)


@_case("swin")
def _swin() -> Built:
    config = transformers.SwinConfig(
        image_size=112, patch_size=4, embed_dim=48, depths=[2, 2, 2], num_heads=[2, 4, 8], window_size=7
    )
    return _pictures(transformers.SwinForImageClassification(config), 8, 112)


@_case("convnext")
def _convnext() -> Built:
    config = transformers.ConvNextConfig(hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 3, 2], image_size=128)
    return _pictures(transformers.ConvNextForImageClassification(config), 8, 128)


@_case("resnet", casts=True, make_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
def _resnet() -> Built:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic"
    )
    return _pictures(transformers.ResNetForImageClassification(config), 16, 128)


@_case("whisper")
def _whisper() -> Built:
    sides = _both_sides(layers=3, attention_heads=6, ffn_dim=768)
    config = transformers.WhisperConfig(
        vocab_size=4000, d_model=192, max_source_positions=300, pad_token_id=0, decoder_start_token_id=1,
        use_cache=False, **sides,
    )  # fmt: skip
    batch = {"input_features": torch.randn(4, 80, 600), "labels": _tokens(4000, 4, 64)}
    return transformers.WhisperForConditionalGeneration(config), batch


@_case("wav2vec2")
def _wav2vec2() -> Built:
    config = transformers.Wav2Vec2Config(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768, conv_dim=(128,) * 7,
        num_conv_pos_embeddings=32, apply_spec_augment=False, layerdrop=0.0, classifier_proj_size=64,
    )  # fmt: skip
    batch = {"input_values": torch.randn(4, 16_000), "labels": torch.randint(0, 2, (4,))}
    return transformers.Wav2Vec2ForSequenceClassification(config), batch


# Plain PyTorch.


def _simple(name: str, model: Callable[[], nn.Module], batch: Callable[[], Any], loss: Loss, **options: Any) -> None:
    _case(name, loss=loss, **options)(lambda: (model(), batch()))


def _images(batch: int, side: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(batch, 3, side, side)


def _rows(batch: int, length: int, words: int) -> Callable[[], torch.Tensor]:
    return lambda: _tokens(words, batch, length)


_simple("convnet", own.convnet, _images(16, 64), _to_class, accumulate=2)
_simple("unet", own.UNet, _images(4, 96), _to_itself)
_simple("depthwise", own.depthwise, _images(16, 112), _to_class)
_simple(
    "conv3d",
    own.conv3d,
    lambda: torch.randn(8, 3, 16, 40, 40),
    _to_class,
    refused={"bf16": "avg_pool3d is not implemented for bfloat16 on CPU"},
)
_simple("conv1d", own.conv1d, lambda: torch.randn(8, 1, 16_384), lambda output, batch: output.square().mean())
_simple("groupnorm", own.groupnorm_net, _images(4, 64), _to_input)
_simple("diffusion", own.DiffusionUNet, lambda: (torch.randn(16, 3, 32, 32), torch.randint(0, 1000, (16,))), _to_input)
_simple("autoencoder", own.Autoencoder, _images(8, 128), _to_input)
_simple("lstm", partial(own.RecurrentTagger, nn.LSTM, bidirectional=True), _rows(16, 64, 1000), _to_next_token)
_simple(
    "lstm-packed",
    partial(own.RecurrentTagger, nn.LSTM, lengths=tuple(range(64, 0, -2))),
    _rows(32, 64, 1000),
    _to_next_token,
)
_simple("gru", partial(own.RecurrentTagger, nn.GRU), _rows(32, 64, 1000), _to_next_token)
_simple("cells", own.Cells, lambda: torch.randn(24, 16, 96), lambda output, batch: output.square().mean())
_simple("rms-norm", own.gated, lambda: torch.randn(8, 256, 256), lambda output, batch: output.float().square().mean())
_simple("transformer", own.Translator, lambda: (_tokens(4000, 8, 96), _tokens(4000, 8, 80)), _to_next_token)
_simple("gpt-sdpa", own.sdpa_gpt, _rows(4, 256, 8000), _to_next_token, head="head", accumulate=2)
_simple("gpt-autocast", partial(own.sdpa_gpt, autocast=True), _rows(4, 256, 8000), _to_next_token)
_simple("gpt-softmax", own.softmax_gpt, _rows(4, 256, 8000), _to_next_token, head="head", casts=True)
_simple(
    "embedding-bag",
    own.BagClassifier,
    lambda: (torch.randint(0, 60_000, (16_384,)), torch.arange(0, 16_384, 16), torch.randint(0, 20_000, (1024, 8))),
    _to_class,
)
_simple("mlp", own.mlp, lambda: torch.randn(4096, 512), _to_class)
# Few rows, so that the peak is in the optimizer, where implementations differ.
for _name, _make_optimizer in {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam-loop": partial(torch.optim.Adam, foreach=False),
    "adam-foreach": partial(torch.optim.Adam, foreach=True, amsgrad=True),
    "adamw-foreach": partial(torch.optim.AdamW, foreach=True),
    "adam-fused": partial(torch.optim.Adam, fused=True),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-3),
    "adafactor-foreach": partial(torch.optim.Adafactor, lr=1e-3, foreach=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
}.items():
    _simple(
        f"mlp-{_name}",
        partial(own.mlp, 1024, 5),
        lambda: torch.randn(256, 1024),
        _to_class,
        make_optimizer=_make_optimizer,
    )
