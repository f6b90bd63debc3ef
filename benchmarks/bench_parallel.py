"""Predicted against real peak memory of one process's step under FSDP2 and DDP, over worlds, dtypes and transforms.

The truth is PyTorch's CPU allocator in the third step of a real run that it watches from before the model is made, in a
process group of the fake backend, where collectives write nothing and nothing else is left out. DDP takes no results of
fake collectives, so a communication hook of its gives it its own buckets back. The prediction is `memscale.profile` of
a fresh model.

    PYTHONPATH=. python benchmarks/bench_parallel.py [--only REGEX] [--worlds 2 8 64] [--json FILE]
    PYTHONPATH=. python benchmarks/bench_parallel.py --gloo 2     # so many real processes, each with its own allocator
    PYTHONPATH=. python benchmarks/bench_parallel.py --device cuda --worlds 8    # or on fake libraries (tests/ghost)

On CUDA models are larger, and the truth is the card's allocator in the third step, with what it reserves.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")
import torch
import torch.distributed as dist
import transformers
from _environment import environment
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memscale as ms
from memscale.planning import repeated_blocks
from memscale.simulation.parallel.spec import split
from tests.support.whole_run import true_peaks, with_own_buckets

ON_CARD = "cuda" in sys.argv
WIDTH, TOKENS, VOCABULARY = (768, (8, 512), 16003) if ON_CARD else (128, (4, 96), 2003)
HEADS = {"num_attention_heads": 4, "num_hidden_layers": 4, "hidden_size": WIDTH, "vocab_size": VOCABULARY}


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(0))


def causal(model: nn.Module) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return model, {"input_ids": tokens(), "labels": tokens()}


def gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=4, n_embd=WIDTH, n_head=4, vocab_size=VOCABULARY, use_cache=False)
    return causal(transformers.GPT2LMHeadModel(config))


def llama() -> Any:
    config = transformers.LlamaConfig(**HEADS, num_key_value_heads=2, intermediate_size=3 * WIDTH, use_cache=False)
    return causal(transformers.LlamaForCausalLM(config))


def tied_llama() -> Any:
    config = transformers.LlamaConfig(
        **HEADS, num_key_value_heads=2, intermediate_size=3 * WIDTH, use_cache=False, tie_word_embeddings=True
    )
    return causal(transformers.LlamaForCausalLM(config))


class Adapted(nn.Module):
    """A layer that stays as it is, and two thin ones that learn what to add."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def lora() -> Any:
    model, batch = llama()
    model.requires_grad_(False)
    for layer in model.model.layers:
        for owner, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "up_proj")):
            setattr(owner, name, Adapted(getattr(owner, name)))
    return model, batch


def bert() -> Any:
    return causal(transformers.BertForMaskedLM(transformers.BertConfig(**HEADS, intermediate_size=4 * WIDTH)))


def t5() -> Any:
    config = transformers.T5Config(
        d_model=WIDTH, d_kv=32, d_ff=4 * WIDTH, num_layers=3, num_heads=4, use_cache=False, decoder_start_token_id=0
    )
    return causal(transformers.T5ForConditionalGeneration(config))


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **HEADS, num_key_value_heads=2, intermediate_size=2 * WIDTH, num_local_experts=4, use_cache=False
    )
    return causal(transformers.MixtralForCausalLM(config))


def vit() -> Any:
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        image_size=64,
        patch_size=8,
        num_labels=10,
    )
    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.arange(8)}


MODELS: dict[str, Callable[[], Any]] = {
    "GPT-2": gpt2,
    "Llama": llama,
    "BERT": bert,
    "T5": t5,
    "Mixtral": mixtral,
    "ViT": vit,
}
# Beside the ways that all go: models with what a way has to mind, and other ways for two of them.
PARTICULAR: dict[str, Callable[[], Any]] = {"tied Llama": tied_llama, "LoRA": lora}
BUCKETS: dict[str, dict[str, bool]] = {
    "ddp": {},
    "ddp static": {"static_graph": True},
    "ddp views": {"gradient_as_bucket_view": True},
}
HEAD = {
    "GPT-2": "lm_head",
    "Llama": "lm_head",
    "T5": "lm_head",
    "Mixtral": "lm_head",
    "BERT": "cls.predictions.decoder",
}
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def plans(name: str, model: nn.Module) -> dict[str, dict[str, ms.Transform]]:
    blocks = repeated_blocks(model)
    found: dict[str, dict[str, ms.Transform]] = {
        "plain": {},
        "checkpoint": dict.fromkeys(blocks, ms.checkpoint()),
        "offload": dict.fromkeys(blocks, ms.offload(min_bytes=0)),
    }
    if name in HEAD:
        found["tiled head"] = {HEAD[name]: ms.tile(chunks=4)}
    return found


def under(parallel: str, policy: str) -> Callable[[nn.Module, list[nn.Module]], nn.Module]:
    world, device = dist.get_world_size(), "cuda" if ON_CARD else "cpu"
    if parallel in BUCKETS:
        own = with_own_buckets if dist.get_backend() == "fake" else lambda replica: replica
        return lambda model, _: own(nn.parallel.DistributedDataParallel(model.to(device), **BUCKETS[parallel]))
    options: dict[str, Any] = {"mp_policy": POLICIES[policy]}
    if parallel in ("hybrid", "with tensors"):
        mesh = init_device_mesh(
            device, (2, world // 2) if parallel == "hybrid" else (world // 2, 2), mesh_dim_names=("data", "other")
        )
        options["mesh"] = mesh if parallel == "hybrid" else mesh["data"]
    elif parallel != "fsdp2":
        options["reshard_after_forward"] = False if parallel == "kept" else world // 2

    def shard(model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
        if parallel == "with tensors":
            split(model.to(device), mesh["other"])
        for block in blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return shard


def made(name: str, variant: str, distribute: Callable[..., nn.Module]) -> tuple[Any, Any, Any, Callable[[], None]]:
    torch.manual_seed(0)
    model, batch = (MODELS | PARTICULAR)[name]()
    plan = ms.Plan(plans(name, model)[variant])
    blocks = plan_paths(model)
    if plan:
        model = ms.transform(model, plan)
    if ON_CARD:
        batch = {name: value.cuda() for name, value in batch.items()}
    model = distribute(model, [model.get_submodule(path) for path in blocks])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, batch, optimizer, step


def plan_paths(model: nn.Module) -> list[str]:
    """The paths of the repeated blocks."""
    patterns = [re.compile(pattern.replace(".", r"\.").replace("*", r"[^.]+")) for pattern in repeated_blocks(model)]
    return [path for path, _ in model.named_modules() if any(pattern.fullmatch(path) for pattern in patterns)]


def card_peaks(make_step: Callable[[], Callable[[], None]]) -> tuple[int, int]:
    """The most that the card's allocator had out in the third step, beside what was out before, and had reserved."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = make_step()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        step()
    return torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()


def row(name: str, policy: str, variant: str, parallel: str, world: int) -> dict[str, Any]:
    """One prediction beside its truth, in the process group that there is."""
    found: dict[str, Any] = {
        "model": name,
        "policy": policy,
        "variant": variant,
        "parallel": parallel,
        "world": world,
    }
    try:
        distribute = under(parallel, policy)

        def make_step() -> Callable[[], None]:
            return made(name, variant, distribute)[3]

        truth, reserved = card_peaks(make_step) if ON_CARD else (true_peaks(make_step)[-1], None)
        gc.collect()
        model, batch, optimizer, _ = made(name, variant, distribute)
        began = time.perf_counter()
        profile = ms.profile(model, batch, keeps_output=False, optimizer=optimizer)
        found |= {"seconds": round(time.perf_counter() - began, 2), "method": profile.method}
        found |= {"truth_bytes": truth, "predicted_bytes": profile.peak_bytes}
        found["error_percent"] = round(100 * (profile.peak_bytes / truth - 1), 4)
        if reserved is not None and profile.reserved_peak_bytes is not None:
            found["reserved_error_percent"] = round(100 * (profile.reserved_peak_bytes / reserved - 1), 2)
    except Exception as error:
        found["failure"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    gc.collect()
    return found


def alone(case: tuple[str, str, str, str, int]) -> dict[str, Any]:
    """A row by one process among others that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case[-1])
    try:
        return row(*case)
    finally:
        dist.destroy_process_group()


def among_others(rank: int, world: int, folder: str, only: str) -> None:
    """The rows by real processes; the first writes them."""
    prepare()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    rows = []
    for case in cases([world]):
        if re.search(only, " ".join(map(str, case))):
            rows.append(row(*case))
            dist.barrier()
            if rank == 0:
                print(" ".join(map(str, rows[-1].values())), flush=True)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)  # threads of gloo may abort the interpreter's own exit


def prepare() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if ON_CARD and "GHOST_CARD" in os.environ:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ghost"))
        import values

        from memscale.runtime.backends.cuda import CudaEvent

        values.not_packed()
        # As in _ghost.py: copies take no time there, and a runtime that measured that would keep less.
        CudaEvent.span = lambda self: None  # type: ignore[method-assign]


def cases(worlds: list[int]) -> Iterator[tuple[str, str, str, str, int]]:
    for name, make in MODELS.items():
        for variant in plans(name, make()[0]):
            for world in worlds:
                for policy in POLICIES:
                    yield name, policy, variant, "fsdp2", world
            yield name, "fp32", variant, "ddp", worlds[0]
    for name in ("Llama", *PARTICULAR):
        for variant in ("plain", "checkpoint"):
            for world in worlds:
                for way in ("kept", "regathered from half", "hybrid", "with tensors") if world > 2 else ("kept",):
                    # What transformers' plan splits is a Linear, and a weight of two modules in one way.
                    if way != "with tensors" or name == "Llama":
                        yield name, "bf16" if way == "kept" else "fp32", variant, way, world
            for way in ("ddp", "ddp static", "ddp views"):
                yield name, "fp32", variant, way, worlds[0]
        if name in PARTICULAR:
            yield from ((name, policy, "plain", "fsdp2", world) for policy in POLICIES for world in worlds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression for 'model policy variant parallel world'")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--gloo", type=int, default=None, metavar="N", help="so many real processes")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    asked = parser.parse_args()
    prepare()
    rows = []
    if asked.gloo is not None:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(among_others, (asked.gloo, folder, asked.only), nprocs=asked.gloo)
            rows = json.loads(Path(folder, "rows.json").read_text())
    for case in () if asked.gloo is not None else cases(asked.worlds):
        if re.search(asked.only, " ".join(map(str, case))):
            rows.append(alone(case))
            print(" ".join(map(str, rows[-1].values())), flush=True)
    errors: dict[bool, list[float]] = {True: [], False: []}
    for each in rows:
        if "error_percent" in each:
            errors[each["variant"] == "offload"].append(abs(each["error_percent"]))
    summary = {
        name: {"rows": len(found), "median_percent": statistics.median(found), "worst_percent": max(found)}
        for name, found in (("without offload", errors[False]), ("offload", errors[True]))
        if found
    }
    print(json.dumps(summary, indent=1), f"{sum('failure' in each for each in rows)} failed")
    if asked.json is not None:
        written = {"environment": environment(asked.device, "transformers"), "summary": summary, "rows": rows}
        asked.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
