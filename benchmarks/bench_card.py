"""Predictions and plans against a real card, at sizes that fill one: peak and reserved bytes, step time, budgets kept.

Every prediction is made without the card, by `profile` and `plan` of models on meta with the data sheet of the card, in
processes of their own: plans that are exact, and plans that may use tiles. Then the card trains each: the truth is
`torch.cuda.max_memory_allocated`, the memory reserved, and the median of timed steps. Beside them PyTorch's own
checkpoint on every block, and the losses of the first steps, which plans that are exact do not change (a second run of
the plain model says whether the kernels repeat themselves).

    python benchmarks/bench_card.py [--only REGEX] [--steps 5] [--workers 8] [--json FILE] [--operators FILE]
    python benchmarks/bench_card.py --predict FILE --hardware h100   # on any machine; then, where the card is,
    python benchmarks/bench_card.py --predictions FILE
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import multiprocessing
import pickle
import re
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from _environment import environment
from _llama import LLAMA_VOCABULARY, llama
from _truth import median_seconds, release
from bench_plan import checkpointed
from torch import nn
from torch.autograd import DeviceType

import memscale as ms
from memscale.planning import repeated_blocks

BUDGETS = (0.8, 0.6, 0.45)  # of what the step takes as it is
ALMOST_ALL = 0.95  # of the card, for what does not fit on it as it is
PEER = "torch checkpoint"
AGAIN = "plain, again"
LOSSES = 3


def _tokens(vocabulary: int, *shape: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(*shape, dtype=torch.long).random_(vocabulary)
    return {"input_ids": tokens, "labels": tokens}


def _llama(layers: int, width: int, inner: int, heads: int, *shape: int) -> tuple[nn.Module, Any]:
    return llama(layers, width, inner, heads), _tokens(LLAMA_VOCABULARY, *shape)


def _gpt2_xl() -> tuple[nn.Module, Any]:
    config = transformers.GPT2Config(n_layer=48, n_embd=1600, n_head=25)
    return transformers.GPT2LMHeadModel(config), _tokens(50257, 4, 1024)


def _bert() -> tuple[nn.Module, Any]:
    return transformers.BertForMaskedLM(transformers.BertConfig()), _tokens(30522, 32, 512)


def _t5() -> tuple[nn.Module, Any]:
    config = transformers.T5Config(
        d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), _tokens(32128, 16, 512)


def _mixtral() -> tuple[nn.Module, Any]:
    config = transformers.MixtralConfig(
        num_hidden_layers=8,
        hidden_size=1024,
        intermediate_size=3584,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
    )
    return transformers.MixtralForCausalLM(config), _tokens(32000, 4, 1024)


def _images(count: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(count, 3, 224, 224), "labels": torch.zeros(count, dtype=torch.long).random_(2)}


def _vit() -> tuple[nn.Module, Any]:
    return transformers.ViTForImageClassification(transformers.ViTConfig()), _images(128)


def _resnet() -> tuple[nn.Module, Any]:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig()), _images(128)


def _swin() -> tuple[nn.Module, Any]:
    return transformers.SwinForImageClassification(transformers.SwinConfig()), _images(128)


def _convnext() -> tuple[nn.Module, Any]:
    return transformers.ConvNextForImageClassification(transformers.ConvNextConfig()), _images(128)


def _qwen3() -> tuple[nn.Module, Any]:
    config = transformers.Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        use_cache=False,
    )
    return transformers.Qwen3ForCausalLM(config), _tokens(config.vocab_size, 4, 2048)


def _whisper() -> tuple[nn.Module, Any]:
    config = transformers.WhisperConfig(
        d_model=768,
        encoder_layers=12,
        encoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_layers=12,
        decoder_attention_heads=12,
        decoder_ffn_dim=3072,
        use_cache=False,
    )
    batch = {
        "input_features": torch.randn(16, 80, 3000),
        "labels": torch.zeros(16, 256, dtype=torch.long).random_(51865),
    }
    return transformers.WhisperForConditionalGeneration(config), batch


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10_000, 1024), nn.Linear(1024, 10_000)
        self.lstm = nn.LSTM(1024, 1024, num_layers=2, batch_first=True)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.lstm(self.embed(input_ids))[0])
        return transformers.modeling_outputs.TokenClassifierOutput(
            loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        )


def _lstm() -> tuple[nn.Module, Any]:
    return _Tagger(), _tokens(10_000, 32, 256)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in training mode with its batch, built in float32 on the default device, and its parameters' dtype."""

    build: Callable[[], tuple[nn.Module, Any]]
    dtype: torch.dtype = torch.bfloat16
    head: str = ""
    fits: bool = True  # as it is
    peer: bool = True  # where PyTorch's checkpoint fails, what it leaves is reserved by all that follow

    def make(self, device: str) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        with torch.device(device):
            model, batch = self.build()
        moved = {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in batch.items()}
        return model.to(self.dtype).train(), moved


CASES = {
    "gpt2-xl": Case(_gpt2_xl, head="lm_head"),
    "llama-1b": Case(lambda: _llama(16, 2048, 8192, 32, 4, 2048), head="lm_head"),
    "bert": Case(_bert, torch.float32),
    "vit": Case(_vit),
    "resnet": Case(_resnet, torch.float32),
    "t5": Case(_t5, head="lm_head", peer=False),
    "qwen3": Case(_qwen3, head="lm_head"),
    "whisper": Case(_whisper, head="proj_out"),
    "swin": Case(_swin),
    "convnext": Case(_convnext, torch.float32),
    "mixtral": Case(_mixtral, head="lm_head"),
    "lstm": Case(_lstm, head="head"),
    "llama-8b": Case(lambda: _llama(32, 4096, 14336, 32, 1, 4096), head="lm_head", fits=False),
}


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step with a plan, as simulated."""

    plan: ms.Plan | None
    peak_bytes: int
    reserved_bytes: int
    step_seconds: float
    budget_bytes: int | None = None

    @property
    def figures(self) -> dict[str, Any]:
        return {**vars(self), "plan": None if self.plan is None else repr(self.plan)}


def predictions(name: str, hardware: ms.Hardware) -> dict[str, Prediction]:
    """By variant: transforms written by hand, then what `plan` makes of the budgets."""
    torch.set_num_threads(1)
    case = CASES[name]
    model, batch = case.make("meta")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    blocks = repeated_blocks(model)
    checkpoint = dict.fromkeys(blocks, ms.checkpoint())
    by_hand: dict[str, dict[str, ms.Transform] | None] = {"plain": None}
    if blocks:
        by_hand["checkpoint"] = checkpoint
        by_hand["offload"] = dict.fromkeys(blocks, ms.offload())
        by_hand["checkpoint+offload"] = dict.fromkeys(blocks, ms.compose(ms.offload(), ms.checkpoint()))
    if case.head:
        by_hand["head"] = {case.head: ms.tile(chunks=16)}
        by_hand["checkpoint+head"] = {**checkpoint, case.head: ms.tile(chunks=16)}

    def simulated(plan: ms.Plan | None, budget_bytes: int | None = None) -> Prediction:
        profile = ms.profile(model, batch, keeps_output=False, optimizer=optimizer, plan=plan, hardware=hardware)
        peak_bytes = max(profile.first_step_peak_bytes, profile.peak_bytes)
        return Prediction(plan, peak_bytes, profile.taken_bytes, profile.step_seconds or 0.0, budget_bytes)

    found = {name: simulated(None if rules is None else ms.Plan(rules)) for name, rules in by_hand.items()}
    most = found["plain"].reserved_bytes
    shares = {f"plan {share:.0%}": int(share * most) for share in BUDGETS}
    budgets = shares if case.fits else {"plan": int(ALMOST_ALL * hardware.usable_bytes)}
    for suffix, config in (("", ms.Config()), (", tiles", ms.Config(enable_tiling=True))):
        engine = ms.DecisionEngine(
            model, batch, keeps_output=False, optimizer=optimizer, config=config, hardware=hardware
        )
        for variant, budget in budgets.items():
            try:
                found[variant + suffix] = simulated(engine.plan(budget), budget)
            except ms.BudgetError as error:
                print(f"{name} {variant}{suffix}: {error}", flush=True)
    return found


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the card says of the steps of one variant; bytes are the most of all steps, the first included."""

    peak_bytes: int
    reserved_bytes: int
    step_seconds: float
    losses: list[float]


def real(
    made: tuple[nn.Module, Any], plan: ms.Plan | None, steps: int, *, peer: bool = False, operators: Path | None = None
) -> Truth:
    """Train copies of the model and batch, from an allocator that holds nothing."""
    release("cuda")
    held_bytes = torch.cuda.memory_allocated()  # what a contender that failed has left
    model, batch = copy.deepcopy(made[0]).to("cuda"), {name: value.to("cuda") for name, value in made[1].items()}
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)  # of dropout
    runs = checkpointed(model, 1) if peer else model if plan is None else ms.transform(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> torch.Tensor:
        loss = runs(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    losses = [step().item() for _ in range(LOSSES)]
    seconds = median_seconds(step, steps)
    truth = Truth(
        torch.cuda.max_memory_allocated() - held_bytes,
        torch.cuda.max_memory_reserved(),
        seconds,
        losses,
    )
    if operators is not None:
        operators.write_text(json.dumps(seconds_by_operator(step)))
    return truth


def seconds_by_operator(step: Callable[[], object]) -> list[dict[str, Any]]:
    """Where one step's time on the card goes: operators by the shapes of their inputs, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, record_shapes=True) as run:
        step()
        torch.cuda.synchronize()
    found = []
    for each in run.key_averages(group_by_input_shape=True):
        if each.self_device_time_total > 0:
            row = {"name": each.key, "shapes": str(each.input_shapes), "count": each.count}
            row |= {"seconds": each.self_device_time_total / 1e6, "kernel": each.device_type == DeviceType.CUDA}
            found.append(row)
    return sorted(found, key=lambda row: -row["seconds"])[:400]


def compared(variant: str, predicted: Prediction | None, truth: Truth, plain: Truth) -> str:
    line = f"  {variant:20}{truth.peak_bytes / 1e9:8.3f} GB"
    if predicted is not None:
        line += f"{100 * (predicted.peak_bytes / truth.peak_bytes - 1):+8.3f} %"
        line += f"   reserved {truth.reserved_bytes / 1e9:7.3f} GB"
        line += f"{100 * (predicted.reserved_bytes / truth.reserved_bytes - 1):+8.2f} %"
        line += f"   step {1e3 * truth.step_seconds:8.1f} ms, predicted of it "
        line += f"{predicted.step_seconds / truth.step_seconds:.3f}"
        if predicted.budget_bytes is not None:
            used = truth.reserved_bytes / predicted.budget_bytes
            line += f"   of budget {used:.3f}{'  OVER' if used > 1 else ''}"
    else:
        line += (
            f"{'':10}   reserved {truth.reserved_bytes / 1e9:7.3f} GB{'':10}   step {1e3 * truth.step_seconds:8.1f} ms"
        )
    line += f"   of plain's time {truth.step_seconds / plain.step_seconds:.3f}"
    if truth.losses != plain.losses:
        line += f"   losses {truth.losses}"
    return line


def on_card(name: str, found: dict[str, Prediction], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every variant; a failure is a row too."""
    case = CASES[name]
    model, batch = case.make("cuda")
    # From the host, tensors come into blocks of their own size, as a user's do.
    made = model.cpu(), {name: value.cpu() for name, value in batch.items()}
    del batch
    release("cuda")
    capacity = torch.cuda.mem_get_info()[0]
    variants: dict[str, Prediction | None] = {
        name: each for name, each in found.items() if each.reserved_bytes < capacity
    }
    if case.peer and repeated_blocks(model):
        variants[PEER] = None
    if "plain" in variants:
        variants[AGAIN] = None
    rows = []
    plain: Truth | None = None
    for at, (variant, predicted) in enumerate(variants.items()):
        plan = None if predicted is None else predicted.plan
        kept = Path(f"{options.operators}-{name}.json") if options.operators and at == 0 else None
        row: dict[str, Any] = {"model": name, "variant": variant}
        row["predicted"] = None if predicted is None else predicted.figures
        try:
            truth = real(made, plan, options.steps, peer=variant == PEER, operators=kept)
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            print(f"  {variant:20} failed: {row['failure']}", flush=True)
            if not isinstance(error, torch.OutOfMemoryError):
                traceback.print_exc()
        else:
            plain = plain or truth
            print(compared(variant, predicted, truth, plain), flush=True)
            row["real"] = dataclasses.asdict(truth)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regex: the models whose name it finds")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each variant, after three")
    parser.add_argument("--workers", type=int, default=8, help="processes that predict")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--operators", help="write a step's seconds by operator to this path and the model")
    parser.add_argument("--predict", type=Path, help="write the predictions to this file, and nothing else")
    parser.add_argument("--predictions", type=Path, help="take them from this file")
    parser.add_argument("--hardware", help="the card to predict for; None is the one at hand")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    hardware = ms.Hardware.detect("cuda") if options.hardware is None else ms.Hardware.named(options.hardware)
    names = [name for name in CASES if re.search(options.only, name)]
    found: dict[str, dict[str, Prediction]] = {}
    if options.predictions is not None:
        found = pickle.loads(options.predictions.read_bytes())
    else:
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            waiting = {name: pool.submit(predictions, name, hardware) for name in names}
            for name, future in waiting.items():
                try:
                    found[name] = future.result()
                except Exception as error:
                    print(f"{name}: not predicted: {type(error).__name__}: {error}", flush=True)
    if options.predict is not None:
        options.predict.write_bytes(pickle.dumps(found))
        return
    about = environment("cuda", "transformers")
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    rows: list[dict[str, Any]] = []
    for name in (name for name in names if name in found):
        print(f"{name}, predicted for {hardware.name}", flush=True)
        rows += on_card(name, found[name], options)
        if options.json:
            options.json.write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
