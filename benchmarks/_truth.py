"""A real training step of a case of the zoo, and what PyTorch's allocator did in it."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import optree
import torch
from _zoo import Case

import memscale as ms
from memscale.core import matches
from memscale.core.batches import call
from memscale.planning.parts.blocks import repeated_blocks
from memscale.simulation.measured.allocator_trace import training_roles

COMPILED = "compiled"  # the variant without a plan whose repeated blocks, or the whole model, inductor compiles
WARM_STEPS = 2  # after them optimizer states and lazily made buffers exist


@dataclasses.dataclass(frozen=True)
class Truth:
    """What the allocator did in the third step; `note` is why the peak is an upper bound, or ""."""

    peak_bytes: int
    start_bytes: int
    step_seconds: float
    reserved_peak_bytes: int | None = None
    note: str = ""


def plans(case: Case, model: torch.nn.Module, dtype: str) -> dict[str, ms.Plan | None]:
    return {**case.plans(model, dtype), **case.moving_plans(model)}


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    """The model with its repeated blocks compiled; as a whole where all are of `torch.nn`, as Dynamo skips those."""
    patterns = repeated_blocks(model)
    repeated = [part for path, part in model.named_modules() if any(matches(pattern, path) for pattern in patterns)]
    blocks = [block for block in repeated if not type(block).__module__.startswith("torch.nn.")]
    for block in blocks:
        block.compile()
    return model if blocks else torch.compile(model)  # type: ignore[return-value]


def training_step(
    case: Case, model: torch.nn.Module, batch: Any, optimizer: torch.optim.Optimizer
) -> Callable[[], None]:
    def loss() -> torch.Tensor:
        output = call(model, batch)
        return output.loss if case.loss is None else case.loss(output, batch)

    def step() -> None:
        for _ in range(case.accumulate):
            loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def real_step(case: Case, dtype: str, variant: str, device: str) -> Truth:
    """Train three steps and measure the last."""
    torch.manual_seed(0)
    held_bytes = torch.cuda.memory_allocated() if device == "cuda" else 0
    # A model whose parameters are streamed never was on the device as a whole: docs/offload.md says how to build it.
    streams = variant == "params"
    model, batch = case.make(dtype, "cpu" if streams else device)
    plan = None if variant == COMPILED else plans(case, model, dtype)[variant]
    runs = model if plan is None else ms.transform(model, plan)
    if variant == COMPILED:
        runs = compiled(model)
    if streams:
        runs = runs.to(device)
        batch = optree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)
    optimizer = case.optimizer(model)
    step = training_step(case, runs, batch, optimizer)
    for _ in range(WARM_STEPS):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start_bytes, began = torch.cuda.memory_allocated(), time.perf_counter()
        step()
        torch.cuda.synchronize()
        return Truth(
            torch.cuda.max_memory_allocated() - held_bytes,
            start_bytes - held_bytes,
            time.perf_counter() - began,
            torch.cuda.max_memory_reserved(),
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trace = ms.measure(step, roles=training_roles(model, optimizer, batch))
    unseen = [str(warning.message) for warning in caught if "upper bound" in str(warning.message)]
    return Truth(trace.peak_bytes, trace.start_bytes, trace.seconds, note="".join(unseen))


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def median_seconds(step: Callable[[], object], steps: int) -> float:
    """Of so many steps on a CUDA device, each waited for."""
    times = []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def release(device: str) -> None:
    """Leave nothing of one case to the next."""
    gc.collect()
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
