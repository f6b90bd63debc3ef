"""offload() against PyTorch: its link, its hooks, activations and parameters that wait elsewhere.

On a CPU, where what moves goes to disk:
    hooks   what a saved tensor costs that is too small to move
    gpt2    a training step of a GPT-2: memory, time, bits
On a CUDA device:
    link    copies of the backend against plain pinned ones
    small   the host's time for saved tensors of 16 bytes to 512 KiB, against save_on_cpu; on `tests/ghost` too
On both, on blocks of Llama 8B's shape (on a CPU, smaller ones):
    blocks  compose(offload(), checkpoint()) against checkpoint(), and against save_on_cpu around PyTorch's checkpoint
    params  offload(what="params") on a stack three times as large as the device's share, against the link's bound

Every ratio is printed beside its target and what PyTorch does in the same run; times are medians of rounds in which the
contenders take turns, except in `params` and `gpt2`, where each has the machine for itself.

    python benchmarks/bench_offload.py [--device cuda] [--only PART] [--rounds 4] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch loads: the profiler logs to the terminal otherwise

import torch
from _environment import environment
from _link import MIB, measure_link, rate_of
from _llama import LLAMA_8B, Shape, build
from _offload_blocks import MOVED, measure_blocks
from _offload_host import PLAIN, THEIRS, measure_gpt2, overhead_microseconds
from _offload_params import measure_params
from _offload_small import OURS as SMALL
from _offload_small import THEIRS as PINNED
from _offload_small import measure_small

TARGETS: dict[str, tuple[Literal[">=", "<="], float]] = {
    "hook microseconds": ("<=", 5.0),
    "gpt2 RSS growth of plain": ("<=", 0.5),
    "link of plain": (">=", 0.90),
    "small of save_on_cpu": ("<=", 1.0),
    "blocks step of checkpoint": ("<=", 1.02),
    "blocks inputs freed": (">=", 0.95),
    "blocks inputs moved": (">=", 0.95),
    "params of peak": (">=", 3.0),
    "params of bound": (">=", 0.60),
}


def against(target: str, value: float) -> str:
    """`value` and the target, with a word where it is missed."""
    sign, limit = TARGETS[target]
    met = value >= limit if sign == ">=" else value <= limit
    return f"{value:.3f} (target {sign} {limit:g}{'' if met else ', MISSED'})"


@dataclasses.dataclass(frozen=True)
class Scale:
    """How large the stacks are.

    The inputs of the last few blocks stay where they are, since backward asks for them at once. So the share that
    leaves depends on how many blocks there are: where copies hide behind compute, 62 of 64 and 30 of 32 move.
    """

    shape: Shape
    most_blocks: int
    blocks_tokens: tuple[int, ...]
    params_layers: int
    params_tokens: dict[str, int]


SCALES = {
    "cuda": Scale(LLAMA_8B, 64, (4096, 8192), 24, {"few": 128, "many": 1024}),
    "cpu": Scale(Shape(384, 6, 2, 1344, torch.float32), 12, (512,), 12, {"few": 64, "many": 256}),
    "quick": Scale(Shape(256, 8, 2, 896, torch.float32), 6, (64,), 6, {"few": 16, "many": 32}),
}
LINK_SIZES = tuple(mib * MIB for mib in (1, 16, 64, 256))
WORKING_BYTES = 14 << 30  # beside weights, gradients and inputs: one block's recompute, and what contenders leave over


def layers_that_fit(scale: Scale, device: str) -> int:
    if device == "cpu":
        return scale.most_blocks
    free, _ = torch.cuda.mem_get_info()
    each = 2 * scale.shape.parameter_bytes + scale.shape.input_bytes(max(scale.blocks_tokens))
    return max(1, min(scale.most_blocks, (free - WORKING_BYTES) // each))


def hooks(options: argparse.Namespace, scale: Scale) -> list[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = overhead_microseconds(rounds=30 if options.quick else 300)
    torch.set_num_threads(threads)
    ours, theirs = found["offload"], found[THEIRS]
    print("  a saved tensor below min_bytes, forward and backward, one thread, in microseconds")
    print(f"  offload {against('hook microseconds', ours)}   save_on_cpu {theirs:.3f}")
    return [{"contender": name, "microseconds": value} for name, value in found.items()]


def gpt2(options: argparse.Namespace, scale: Scale) -> list[Any]:
    print("  GPT-2 shape, 8 layers, width 512, vocabulary 16 000, 4 x 512 tokens, fp32, AdamW")
    print("  save_on_cpu keeps its tensors in memory here: they are on the CPU already")
    rows = {}
    for row in measure_gpt2(options.steps, options.directory):
        rows[row.contender] = row
        plain, theirs = rows[PLAIN], rows.get(THEIRS, row)
        growth = row.rss_growth_bytes / plain.rss_growth_bytes
        print(
            f"  {row.contender:20} RSS growth {row.rss_growth_bytes / 1e6:7.1f} MB, of plain "
            f"{against('gpt2 RSS growth of plain', growth) if row.contender.endswith('blocks') else f'{growth:.3f}'}   "
            f"allocator {row.allocator_growth_bytes / 1e6:7.1f} MB "
            f"({row.allocator_growth_bytes / plain.allocator_growth_bytes:.3f})   "
            f"step {row.step_seconds:6.3f} s, of plain {row.step_seconds / plain.step_seconds:.2f}, of save_on_cpu "
            f"{row.step_seconds / theirs.step_seconds:.2f}   "
            f"moved {row.out_bytes / 1e6:6.1f} MB, {row.exposed_seconds:.3f} s exposed   "
            f"{'same bits' if row.digest == plain.digest else 'OTHER NUMBERS'}",
            flush=True,
        )
    return list(rows.values())


def link(options: argparse.Namespace, scale: Scale) -> list[Any]:
    rates = measure_link(options.device, LINK_SIZES[:1] if options.quick else LINK_SIZES, options.rounds)
    for rate in rates:
        if rate.contender == "memscale":
            plain = rate_of(rates, "plain", rate.direction, rate.copy_bytes)
            print(
                f"  {rate.direction:13}{rate.copy_bytes // MIB:5} MiB   {rate.bytes_per_second / 1e9:6.2f} GB/s, "
                f"plain {plain.bytes_per_second / 1e9:6.2f} GB/s: of plain "
                f"{against('link of plain', rate.bytes_per_second / plain.bytes_per_second)}   "
                f"caller {1e6 * rate.caller_seconds:5.1f} us a copy, plain {1e6 * plain.caller_seconds:5.1f} us"
            )
    return rates


def small(options: argparse.Namespace, scale: Scale) -> list[Any]:
    rows = measure_small(options.device, options.rounds)
    beyond = {(row.block, row.contender): row.beyond_plain for row in rows}
    for block in dict.fromkeys(row.block for row in rows):
        ours, theirs = beyond[block, SMALL], beyond[block, PINNED]
        print(
            f"  a block of {block:6} host beyond plain: {SMALL} {ours:.3f} ms, {PINNED} {theirs:.3f} ms, "
            f"of that {against('small of save_on_cpu', ours / theirs)}"
        )
    return rows


def blocks(options: argparse.Namespace, scale: Scale) -> list[Any]:
    layers = layers_that_fit(scale, options.device)
    stack = build(scale.shape, layers, options.device)
    rows = []
    for tokens in scale.blocks_tokens:
        inputs = layers * scale.shape.input_bytes(tokens)
        print(f"  {layers} blocks, {scale.shape}, 1 x {tokens} tokens: inputs of {inputs / 1e9:.3f} GB")
        for row in measure_blocks(stack, scale.shape, tokens, options.rounds, options.device, options.directory):
            rows.append(row)
            line = f"  {row.contender:30} step {row.step_seconds:7.3f} s, of checkpoint "
            if row.contender == MOVED:
                assert row.inputs_moved is not None
                line += (
                    f"{against('blocks step of checkpoint', row.of_reference)}   peak {row.peak_bytes / 1e9:.3f} GB, "
                    f"inputs freed {against('blocks inputs freed', row.inputs_freed)}, all but "
                    f"{layers * (1 - row.inputs_freed):.1f}, "
                    f"moved {against('blocks inputs moved', row.inputs_moved)}"
                )
            else:
                line += (
                    f"{row.of_reference:.3f}   peak {row.peak_bytes / 1e9:.3f} GB, inputs freed {row.inputs_freed:.3f}"
                )
            print(line, flush=True)
    return rows


def params(options: argparse.Namespace, scale: Scale) -> list[Any]:
    layers = scale.params_layers
    print(f"  {layers} blocks, {scale.shape}: parameters of {layers * scale.shape.parameter_bytes / 1e9:.3f} GB")
    rows = measure_params(scale.shape, layers, scale.params_tokens, options.rounds, options.device, options.directory)
    for row in rows:
        line = (
            f"  {row.contender:30} {row.tokens:5} tokens   step {row.step_seconds:7.3f} s   "
            f"out {row.out_bytes / 1e9:.3f} GB, in {row.in_bytes / 1e9:.3f} GB"
        )
        of_peak = row.parameter_bytes / row.peak_bytes
        if row.of_bound is not None and row.bound_seconds is not None:
            is_ours = "offload" in row.contender
            line += f", which need {row.bound_seconds:.3f} s: of the bound "
            line += against("params of bound", row.of_bound) if is_ours else f"{row.of_bound:.3f}"
            line += f"   peak {row.peak_bytes / 1e9:.3f} GB, parameters of peak "
            line += against("params of peak", of_peak) if is_ours else f"{of_peak:.3f}"
        else:
            line += f"   peak {row.peak_bytes / 1e9:.3f} GB"
        print(line, flush=True)
    return rows


PARTS: dict[str, Callable[[argparse.Namespace, Scale], list[Any]]] = {
    "hooks": hooks,
    "gpt2": gpt2,
    "link": link,
    "small": small,
    "blocks": blocks,
    "params": params,
}
OF_DEVICE = {"cpu": ("hooks", "gpt2", "blocks", "params"), "cuda": ("link", "small", "blocks", "params")}
SLOW = ("gpt2",)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=list(OF_DEVICE))
    parser.add_argument("--only", action="append", choices=list(PARTS), help="these parts; all that the device has")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of each contender of gpt2")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs; without gpt2")
    parser.add_argument("--directory", help="where the disk tier is")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    scale = SCALES["quick" if options.quick else options.device]
    names = options.only or [name for name in OF_DEVICE[options.device] if not (options.quick and name in SLOW)]
    if unknown := set(names) - set(OF_DEVICE[options.device]):
        parser.error(f"--only {', '.join(sorted(unknown))}: --device {options.device} has {OF_DEVICE[options.device]}")
    about = environment(options.device)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    done: dict[str, Any] = {}
    failures: dict[str, str] = {}
    for name in names:
        print(f"\n{name}", flush=True)
        try:
            rows = PARTS[name](options, scale)
            done[name] = [dataclasses.asdict(row) if dataclasses.is_dataclass(row) else row for row in rows]
        except Exception as error:  # one part must not hide the others
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        if options.json is not None:
            document = {**about, "rounds": options.rounds, "targets": TARGETS, "parts": done, "failures": failures}
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
