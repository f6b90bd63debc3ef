"""offload(what="params"): a stack of blocks whose parameters wait on the host, against the bound of the link.

The bound is the time that the bytes of a step need on the link, in the direction that takes longer, at the rate of
plain copies. The peer is what one writes by hand in PyTorch: pinned parameters, copied to the device inside of a
checkpointed block, so that autograd brings their gradients back.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable

import torch
from _link import MIB, measure_link, rate_of
from _llama import VOCABULARY, Shape, Stack, build
from _offload_blocks import Step, moved_bytes, peak_bytes, synchronize
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import memscale as ms
from memscale.runtime import Runtime

WARM_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender's step. A share of the bound is None where nothing crosses the link."""

    contender: str
    tokens: int
    layers: int
    step_seconds: float
    out_bytes: int
    in_bytes: int
    parameter_bytes: int
    peak_bytes: int
    bound_seconds: float | None
    of_bound: float | None


@dataclasses.dataclass(frozen=True)
class Contender:
    """A stack that is ready to run, and the bytes that it has moved so far, out and in."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    module: nn.Module
    moved: Callable[[], tuple[int, int]]
    settle: Callable[[], None]


def ours(transform: ms.Transform) -> Callable[[Stack, str, Runtime], Contender]:
    def ready(stack: Stack, device: str, runtime: Runtime) -> Contender:
        module = ms.transform(stack, {"layers.*": transform}, runtime=runtime).to(device)
        return Contender(module, module, lambda: moved_bytes(runtime), runtime.settle)

    return ready


def on_device(stack: Stack, device: str, runtime: Runtime) -> Contender:
    module = ms.transform(stack.to(device), {"layers.*": ms.checkpoint()})
    return Contender(module, module, lambda: (0, 0), lambda: None)


def by_hand(stack: Stack, device: str, runtime: Runtime) -> Contender:
    stack.embed.to(device)
    if device == "cuda":
        for parameter in stack.layers.parameters():
            parameter.data = parameter.data.pin_memory()
    layers_bytes = sum(parameter.nbytes for parameter in stack.layers.parameters())
    steps = 0

    def through(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        named = dict(layer.named_parameters())

        def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
            here = (value.to(device, non_blocking=True) for value in values)
            return functional_call(layer, dict(zip(named, here, strict=True)), (x,))

        return torch_checkpoint(run, x, *named.values(), use_reentrant=False)

    def forward(ids: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        steps += 1
        return stack(ids, through=through)

    # Out: the gradients. In: the parameters, for forward and again for the recompute.
    return Contender(forward, stack, lambda: (steps * layers_bytes, 2 * steps * layers_bytes), lambda: None)


def contenders() -> dict[str, tuple[Callable[[Stack, str, Runtime], Contender], str]]:
    streamed = ms.offload(what="params")
    return {
        "offload params": (ours(streamed), "few"),
        "checkpoint, offload params": (ours(ms.compose(ms.checkpoint(), streamed)), "many"),
        "by hand": (by_hand, "many"),
        "all on the device, checkpoint": (on_device, "many"),
    }


def measure_params(
    shape: Shape, layers: int, tokens: dict[str, int], rounds: int, device: str, directory: str | None
) -> list[Row]:
    """Every contender after the other, each with a stack of its own, since each puts the parameters elsewhere.

    Args:
        tokens: "few" for the contender that keeps all activations, which may not fill the device, "many" for the rest.
    """
    link_bytes = min(256 * MIB, shape.parameter_bytes)
    rates = measure_link(device, (link_bytes,), rounds, directory, link_bytes)
    plain = "plain" if device == "cuda" else "memscale"
    out_rate, in_rate = (rate_of(rates, plain, way, link_bytes).bytes_per_second for way in ("out", "in"))
    rows = []
    for name, (ready, many) in contenders().items():
        stack = build(shape, layers, "cpu")
        parameter_bytes = sum(parameter.nbytes for parameter in stack.layers.parameters())
        config = ms.AsyncOffloadConfig(pool_bytes=3 * parameter_bytes, min_bytes=1 << 16)
        contender = ready(stack, device, Runtime(config, disk_directory=directory))
        del stack
        ids = torch.randint(VOCABULARY, (1, tokens[many]), device=device)
        gradient = torch.randn(1, tokens[many], shape.width, device=device, dtype=shape.dtype)
        step = step_of(contender, ids, gradient)
        for _ in range(WARM_STEPS):
            step()
        peak = peak_bytes(step, device)
        out_before, in_before = contender.moved()
        seconds = []
        for _ in range(rounds):
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        out_bytes, in_bytes = (
            (after - before) // rounds for after, before in zip(contender.moved(), (out_before, in_before), strict=True)
        )
        took = statistics.median(seconds)
        bound = max(out_bytes / out_rate, in_bytes / in_rate) or None
        rows.append(
            Row(
                name,
                tokens[many],
                layers,
                took,
                out_bytes,
                in_bytes,
                parameter_bytes,
                peak,
                bound,
                bound / took if bound else None,
            )
        )
        del contender, step
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def step_of(contender: Contender, ids: torch.Tensor, gradient: torch.Tensor) -> Step:
    def step() -> None:
        contender.forward(ids).backward(gradient)
        contender.settle()  # the gradients are where the parameters live
        contender.module.zero_grad(set_to_none=True)

    return step
