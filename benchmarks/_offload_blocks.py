"""compose(offload(), checkpoint()) on a stack of blocks, against checkpoint(), and against PyTorch's own pair."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from _llama import VOCABULARY, Shape, Stack
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memscale as ms
from memscale.runtime import Runtime

MIB = 1024**2
WARM_STEPS = 2  # after them the order of backward and the length of a forward are known
REFERENCE = "checkpoint"
MOVED = "offload, checkpoint"
Step = Callable[[], None]


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender's step; `of_reference` and the shares compare it with `REFERENCE` in the same rounds."""

    contender: str
    tokens: int
    layers: int
    step_seconds: float
    of_reference: float
    peak_bytes: int
    inputs_freed: float
    """Share of all block inputs by which the peak is lower."""
    inputs_moved: float | None
    """Share of all block inputs that the runtime copied out in a step; None where none is used."""


def moved_bytes(runtime: Runtime) -> tuple[int, int]:
    """Bytes copied out and in, since the runtime was made, of all devices and tiers."""
    stats = runtime.stats().values()
    return sum(sum(of.out_bytes.values()) for of in stats), sum(sum(of.in_bytes.values()) for of in stats)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(step: Step, device: str) -> int:
    """The most that the allocator held in a step; on a CPU without what it held before."""
    if device == "cpu":
        return ms.measure(step).growth_bytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def contenders(stack: Stack, runtime: Runtime, ids: torch.Tensor, device: str) -> dict[str, Callable[[], torch.Tensor]]:
    ours = ms.transform(stack, {"layers.*": ms.checkpoint()})
    moved = ms.transform(stack, {"layers.*": ms.compose(ms.offload(), ms.checkpoint())}, runtime=runtime)

    def theirs() -> torch.Tensor:
        return stack(ids, through=lambda layer, x: torch_checkpoint(layer, x, use_reentrant=False))

    def theirs_moved() -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
            return theirs()

    return {
        REFERENCE: lambda: ours(ids),
        MOVED: lambda: moved(ids),
        "torch checkpoint": theirs,
        "save_on_cpu, torch checkpoint": theirs_moved,
    }


def measure_blocks(
    stack: Stack, shape: Shape, tokens: int, rounds: int, device: str, directory: str | None
) -> list[Row]:
    """Steps of all contenders in turn, on one set of weights and gradients."""
    layers, input_bytes = len(stack.layers), shape.input_bytes(tokens)
    config = ms.AsyncOffloadConfig(pool_bytes=layers * input_bytes + 256 * MIB, min_bytes=min(MIB, input_bytes))
    runtime = Runtime(config, disk_directory=directory)
    ids = torch.randint(VOCABULARY, (1, tokens), device=device)
    weights = torch.randn(1, tokens, shape.width, device=device, dtype=shape.dtype)

    def step_of(forward: Callable[[], torch.Tensor]) -> Step:
        def step() -> None:
            (forward() * weights).sum().backward()
            # The gradients stay allocated, or the peak would come at the end of backward, when all inputs are gone.
            stack.zero_grad(set_to_none=False)

        return step

    steps = {name: step_of(forward) for name, forward in contenders(stack, runtime, ids, device).items()}
    peaks: dict[str, int] = {}
    moved: dict[str, int] = {}
    for name, step in steps.items():
        for _ in range(WARM_STEPS):
            step()
        before, _ = moved_bytes(runtime)
        peaks[name] = peak_bytes(step, device)
        moved[name] = moved_bytes(runtime)[0] - before
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    took = {name: statistics.median(values) for name, values in seconds.items()}
    inputs_bytes = layers * input_bytes
    return [
        Row(
            name,
            tokens,
            layers,
            took[name],
            took[name] / took[REFERENCE],
            peaks[name],
            (peaks[REFERENCE] - peaks[name]) / inputs_bytes,
            moved[name] / inputs_bytes if name == MOVED else None,
        )
        for name in steps
    ]
