"""Measures the seconds of an accelerator's host for each kind of call in a step, on a small transformer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.core import OpOverload, pytrees

Clock = Callable[[], float]

#: The kinds of calls.
CALLS = ("operator", "backward", "view", "module")

# Blocks of the model, views per run, and the number of steps, of which the fastest counts; with these the seconds times
# `_IN_LIBRARIES` are those of benchmarks/bench_host.py.
_BLOCKS, _VIEWS, _REPEATS = 12, 400, 15
_LEAST_SECONDS = 1e-8  # so that no difference of times is 0 or less; assumed: less than any call takes
# The same calls take longer in models of Hugging Face, by these factors: their modules run more Python and miss the
# caches. The steps of 27 models in benchmarks/bench_host.py on a host with an H100, over the figures of this file.
_IN_LIBRARIES = {"operator": 2.0, "backward": 1.1, "view": 2.2, "module": 3.9}


def call_seconds(device: torch.device, *, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Measures the seconds that this host takes for each of `CALLS` on `device`.

    The model is a transformer so small that its kernels take no time, once with modules and once without.

    Args:
        device: a CUDA device.
        clock: returns seconds.
    """

    def by_functions() -> torch.Tensor:
        value = batch
        for weights in of_blocks:
            value = _block(value, *weights)
        return value

    def views() -> torch.Tensor:
        value = batch
        for _ in range(_VIEWS):
            value = value.transpose(0, 1)
        return value

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        with torch.device("cpu"):
            model = nn.Sequential(*(_Block(8) for _ in range(_BLOCKS)))
            batch = torch.ones(2, 4, 8, requires_grad=True)
            of_blocks = [tuple(block.parameters()) for block in model]
            counted = _Counting()
            with counted:  # autograd's threads for a device do not see this mode
                value = by_functions()
                operators, viewed = counted.operators, counted.views
                value.sum().backward()
        model, batch = model.to(device), batch.detach().to(device).requires_grad_()
        of_blocks = [tuple(block.parameters()) for block in model]
        found = _least((by_functions, lambda: model(batch), views), clock)
    (forward, backward), (through, _), (viewing, _) = found
    view = viewing / _VIEWS
    calls = {
        "operator": (forward - viewed * view) / operators,
        "backward": (backward - (counted.views - viewed) * view) / (counted.operators - operators),
        "view": view,
        "module": (through - forward) / sum(1 for _ in model.modules()),
    }
    return {kind: max(_LEAST_SECONDS, _IN_LIBRARIES[kind] * seconds) for kind, seconds in calls.items()}


def _least(forwards: Sequence[Callable[[], torch.Tensor]], clock: Clock) -> list[tuple[float, float]]:
    """Returns the least seconds of each forward and of its backward. The forwards alternate; the fastest run counts."""
    least = [(math.inf, math.inf)] * len(forwards)
    for _ in range(_REPEATS):
        for at, forward in enumerate(forwards):
            began = clock()
            value = forward()
            of_forward = clock() - began
            total = value.sum()
            began = clock()
            total.backward()
            least[at] = min(least[at][0], of_forward), min(least[at][1], clock() - began)
    return least


def _block(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    scale, shift, of_qkv, qkv_bias, of_out, out_bias, up, up_bias, down, down_bias = weights
    normed = F.layer_norm(x, x.shape[-1:], scale, shift)
    q, k, v = F.linear(normed, of_qkv, qkv_bias).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + F.dropout(F.linear(attended, of_out, out_bias), 0.1)
    return x + F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.act, self.drop = nn.GELU(), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(attended))
        result: torch.Tensor = x + self.down(self.act(self.up(x)))
        return result


class _Counting(TorchDispatchMode):
    """Counts the operators that launch work, and those that do not: views, and memory that nothing is written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.views = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if isinstance(op, OpOverload):
            given, made = ({each.untyped_storage()._cdata for each in pytrees.tensors(of)} for of in (args, result))
            is_view = made <= given and not op._schema.is_mutable
            if is_view or op.overloadpacket.__name__.startswith("empty"):
                self.views += 1
            else:
                self.operators += 1
        return result
