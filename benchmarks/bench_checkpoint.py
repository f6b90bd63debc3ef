"""checkpoint() against torch.utils.checkpoint (non-reentrant): overhead, recomputed FLOPs, peak bytes, step time.

Both run in one process, their steps interleaved; figures are medians, and ratios are ours over PyTorch's.

    python benchmarks/bench_checkpoint.py [--device cuda] [--rounds 300]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch loads: the profiler logs to the terminal otherwise

import torch
from _blocks import REAL, TINY, Case
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

import memscale as ms

Step = Callable[[], None]
DEPTH = 4  # blocks in a stack: enough for the peak to be made of what is kept between them


def steps(case: Case, device: str, depth: int = 1) -> dict[str, Step]:
    """A forward and backward of `depth` such blocks: plain, under PyTorch's checkpoint, and under ours."""
    torch.manual_seed(0)
    make, shape = case
    model = nn.Sequential(*[make() for _ in range(depth)]).to(device)
    ours = ms.transform(model, {"*": ms.checkpoint()})
    x = torch.randn(*shape, device=device, requires_grad=True)

    def step_of(forward: Callable[[torch.Tensor], torch.Tensor]) -> Step:
        def step() -> None:
            # The input is an activation, as inside a model: both checkpoints then keep it, and free it.
            forward(x * 1.0).sum().backward()
            x.grad = None
            for parameter in model.parameters():
                parameter.grad = None

        return step

    def theirs(value: torch.Tensor) -> torch.Tensor:
        for block in model:
            value = torch_checkpoint(block, value, use_reentrant=False)
        return value

    return {"plain": step_of(model), "torch": step_of(theirs), "memscale": step_of(ours)}


def interleaved_seconds(contenders: dict[str, Step], rounds: int, device: str) -> dict[str, float]:
    """The median seconds of each step, one of each in every round; of the processor where one thread does it all."""
    clock = time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 5):
        for name, step in contenders.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= 5:
                seconds[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def flops(step: Step) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {options.device}, medians of {options.rounds} interleaved rounds")

    print("\noverhead of a region (checkpointed step minus plain step), tiny blocks, 1 thread")
    torch.set_num_threads(1)
    for name, case in TINY.items():
        took = interleaved_seconds(steps(case, options.device), options.rounds, options.device)
        ours, theirs = (1e6 * (took[who] - took["plain"]) for who in ("memscale", "torch"))
        print(
            f"  {name:12} plain {1e6 * took['plain']:7.0f} us   torch +{theirs:6.0f} us   memscale +{ours:6.0f} us   "
            f"ratio {ours / theirs:.2f}   (whole step: {took['memscale'] / took['torch']:.2f})"
        )
    torch.set_num_threads(threads)

    print(f"\n{DEPTH} real blocks: FLOPs of a step, allocator peak above the start of the step, time")
    for name, case in REAL.items():
        contenders = steps(case, options.device, DEPTH)
        for step in contenders.values():
            step()
            step()
        count = {who: flops(step) for who, step in contenders.items()}
        peak = {who: ms.measure(step, device=options.device).growth_bytes for who, step in contenders.items()}
        took = interleaved_seconds(contenders, max(options.rounds // 10, 10), options.device)
        print(
            f"  {name:12} FLOPs {count['memscale'] / count['torch']:.4f} of torch's ({count['memscale']:,})   "
            f"peak {peak['memscale'] / peak['torch']:.4f} of torch's, {peak['memscale'] / peak['plain']:.2f} of plain "
            f"({peak['memscale']:,} bytes)   time {took['memscale'] / took['torch']:.2f} of torch's"
        )


if __name__ == "__main__":
    main()
