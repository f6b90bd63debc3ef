"""Transformed optimizers against the plain one and against peers: step time, allocator peak, the same bits.

A stack in the shape of GPT-2. All contenders run in one process, their steps interleaved; figures are medians. Peers
that are not installed are left out: bitsandbytes, torchao.

    python benchmarks/bench_optimizers.py [--device cuda] [--rounds 20] [--quick] [--only stack]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from _blocks import TransformerBlock
from bench_checkpoint import interleaved_seconds
from bench_tile import gpt2, training_step
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import memscale as ms
from memscale.runtime.storage import page_aligned_memory
from memscale.runtime.storage.disk import DiskSlab
from memscale.simulation.measured import training_roles

WIDTH, HEADS, DEPTH, LENGTH, BATCH = 512, 8, 6, 64, 2

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
}
_PEER = "apply_optimizer_in_backward"
_BELOW = "torchao CPUOffloadOptimizer"
HOWS: dict[str, Any] = {
    "plain": ms.identity,
    "step_in_backward": ms.step_in_backward(),
    "step_in_groups": ms.step_in_groups(group_bytes="4MiB"),
    "offload_states": ms.offload_states(),
    "both": ms.compose(ms.step_in_backward(), ms.offload_states()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="one small round of each, to see that it runs")
    parts = {
        "optimizers": lambda: _optimizers(options),
        "small": lambda: _small_states(options.device, 2**16 if options.quick else 2**20, 1 if options.quick else 5),
        "large": lambda: _large_states(*((1, 2**16, 1) if options.quick else (8, 2**22, 7))),
        "stack": lambda: _stack(options.device, 1 if options.quick else 7),
    }
    parser.add_argument("--only", choices=parts)
    options = parser.parse_args()
    for name, part in parts.items():
        if options.only in (None, name):
            part()


def _optimizers(options: argparse.Namespace) -> None:
    depth, rounds = (1, 1) if options.quick else (DEPTH, options.rounds)
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        first = nn.Sequential(*[TransformerBlock(WIDTH, HEADS) for _ in range(depth)]).to(options.device)
        x = torch.randn(BATCH, LENGTH, WIDTH, device=options.device)
        steps, models, peaks = {}, {}, {}
        for title, how in HOWS.items():
            models[title] = model = copy.deepcopy(first)
            steps[title] = step = _step(model, optimizer := how(make(model.parameters())), x)
            step()
            trace = ms.measure(step, device=options.device, roles=training_roles(model, optimizer))
            peaks[title] = trace.growth_bytes
        if name == "AdamW":
            models[_PEER] = model = copy.deepcopy(first)
            _apply_optimizer_in_backward(torch.optim.AdamW, model.parameters(), {})
            steps[_PEER] = step = _backward(model, x)
            step()
            peaks[_PEER] = ms.measure(step, device=options.device).growth_bytes
        if name == "AdamW, fused" and (peer := _offloading_peer()) is not None:
            for title, how in {_BELOW: {}, f"{_BELOW}, gradients": {"offload_gradients": True}}.items():
                model = copy.deepcopy(first)
                try:
                    optimizer = peer(list(model.parameters()), torch.optim.AdamW, fused=True, **how)
                except AssertionError as error:
                    print(f"{title}: {error}")  # it refuses a CPU
                    continue
                models[title], steps[title] = model, (step := _step(model, optimizer, x))
                step()
                peaks[title] = ms.measure(step, device=options.device).growth_bytes
        took = interleaved_seconds(steps, rounds, options.device)
        print(f"{name}: {sum(p.nbytes for p in first.parameters()):,} bytes of parameters")
        for title, seconds in took.items():
            same = all(map(torch.equal, models[title].parameters(), models["plain"].parameters()))
            print(
                f"  {title:27} step {1e3 * seconds:7.1f} ms, {seconds / took['plain']:.3f} of plain   "
                f"peak above weights and states {peaks[title]:12,} bytes   bitwise equal: {same}"
            )


def _offloading_peer() -> Any:
    with contextlib.suppress(ImportError):
        from torchao.optim import CPUOffloadOptimizer

        return CPUOffloadOptimizer
    return None


def _small_states(device: str, numel: int, rounds: int) -> None:
    """Steps alone, with states in fewer bits, next to those of others."""
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": torch.optim.AdamW,
        "quantize_states": lambda p: ms.quantize_states()(torch.optim.AdamW(p)),
        "quantize_states, fused": lambda p: ms.quantize_states()(torch.optim.AdamW(p, fused=True)),
    }
    with contextlib.suppress(ImportError):
        import bitsandbytes

        makers["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit
    with contextlib.suppress(ImportError):
        from torchao.optim import AdamW8bit

        makers["torchao AdamW8bit"] = AdamW8bit
    steps, bytes_of = {}, {}
    for title, make in makers.items():
        parameters = [nn.Parameter(torch.randn(numel)) for _ in range(4)]
        optimizer = make(parameters)  # on a CPU, where the trial of the optimizer has numbers also on fake libraries
        for parameter in parameters:
            parameter.data = parameter.data.to(device)
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        steps[title] = optimizer.step
        bytes_of[title] = sum(map(_nbytes, optimizer.state.values()))
    took = interleaved_seconds(steps, rounds, device)
    print(f"AdamW over 4 parameters of {numel:,} numbers, states in 8 bits")
    peer = took.get("bitsandbytes AdamW8bit")
    for title, seconds in took.items():
        share = bytes_of[title] / bytes_of["AdamW"]
        ratio = "" if peer is None else f", {seconds / peer:.2f} of bitsandbytes'"
        print(
            f"  {title:27} {1e9 * seconds / (4 * numel):7.3f} ns a number{ratio}   "
            f"states {share:.4f} of float32's bytes"
        )


def _nbytes(states: dict[str, Any]) -> int:
    """Those of torchao's are subclasses that are made of several tensors."""
    found = 0
    for value in states.values():
        if isinstance(value, torch.Tensor):
            inner = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
            found += sum(getattr(value, name).nbytes for name in inner) or value.nbytes
    return found


def _large_states(count: int, numel: int, rounds: int) -> None:
    """Steps alone, over states that are most of the memory; and what the disk can do at best."""
    parameters = [nn.Parameter(torch.randn(numel)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    plain = torch.optim.AdamW(parameters, fused=True)
    plain.step()
    hows = {"fused=True": ms.identity, "auto": ms.offload_states(), "disk": ms.offload_states(tier="disk")}
    optimizers = {title: how(plain) for title, how in hows.items()}
    nbytes = 2 * sum(parameter.nbytes for parameter in parameters)
    slab, memory = DiskSlab(cap_bytes=2**33), [page_aligned_memory(2 * numel * 4) for _ in range(count)]
    extents = [slab.write(each, slab.reserve(each.nbytes)).result() for each in memory]

    def raw() -> None:
        # The traffic of a step: every state is read and written, both directions at once.
        running = [slab.read(extents[0], memory[0])]
        for before in range(count):
            running.append(slab.write(memory[before], extents[before]))
            if before + 1 < count:
                running.append(slab.read(extents[before + 1], memory[before + 1]))
        for each in running:
            each.result()

    steps = {key: each.step for key, each in optimizers.items()}
    # Apart: the system writes back what "auto" has mapped while others keep the disk busy, and it steps half as fast.
    took = interleaved_seconds({key: steps[key] for key in ("fused=True", "auto")}, rounds, "wall")
    took |= interleaved_seconds({"disk": steps["disk"], "raw": raw}, rounds, "wall")
    print(f"AdamW(fused=True) over {count} parameters, {nbytes:,} bytes of states; the disk alone, with O_DIRECT:")
    for title, seconds in took.items():
        print(
            f"  {title:20} {1e9 * seconds / (count * numel):6.2f} ns a parameter, {seconds / took['fused=True']:.2f} "
            f"of fused=True   {2e-9 * nbytes / seconds:6.2f} GB/s of states, {took['raw'] / seconds:.2f} of the disk"
        )


def _stack(device: str, rounds: int) -> None:
    """All of it together on the model of `bench_tile`, against per-block `torch.utils.checkpoint`."""
    torch.manual_seed(0)
    base, ids = gpt2(device), torch.randint(0, 16_000, (4, 512), device=device)
    batch = {"input_ids": ids, "labels": ids}
    theirs = copy.deepcopy(base)
    theirs.gradient_checkpointing_enable({"use_reentrant": False})
    steps = {"torch checkpoint": training_step(theirs, batch, fused=True)}
    cut = {chunks: ms.tile(chunks=chunks) for chunks in (2, 4)}
    kept = ms.compose(ms.tile(chunks=4, recompute=False), ms.checkpoint(policy=ms.policies.attention_saveable))
    plans = {
        "blocks in four pieces": [cut[4]] * 8,
        # Backward begins with the last blocks, where memory is most, and what attention gives is worth more time there
        # than any other bytes; it comes to the first ones when the others' checkpoints are gone.
        "in two first, last attention kept": [cut[2]] * 3 + [cut[4]] * 2 + [kept] * 3,
    }
    for title, blocks in plans.items():
        rest = {"lm_head": ms.tile(size=256, late_gradient=True), "": ms.step_in_backward()}
        plan = {f"transformer.h.{number}": how for number, how in enumerate(blocks)} | rest
        ours = copy.deepcopy(base)
        optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-4, fused=True)
        ours, optimizer = ms.transform(ours, plan, optimizer=optimizer)
        steps[title] = _training(ours, optimizer, batch)
    peaks = {}
    for title, step in steps.items():
        step()
        peaks[title] = ms.measure(step, device=device).growth_bytes
    took = interleaved_seconds(steps, rounds, device)
    print("GPT-2 shape, 8 layers, width 512, vocabulary 16 000, 4 x 512 tokens, fp32, AdamW(fused=True)")
    for title, seconds in took.items():
        of_peak, of_time = peaks[title] / peaks["torch checkpoint"], seconds / took["torch checkpoint"]
        print(
            f"  {title:34} transient {peaks[title] / 1e6:6.1f} MB, {of_peak:.3f}   step {seconds:.3f} s, {of_time:.3f}"
        )


def _training(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> Callable[[], None]:
    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _backward(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    return lambda: model(x).square().mean().backward()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
