"""Measures the rates of operators on a CPU, where most are slower than its memory, by timing training steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.hardware.work import PRODUCTS, rate_name, work_of

Clock = Callable[[], float]

_DTYPES = (torch.float32, torch.bfloat16)
# Timed steps, after a first one that loads code.
_REPEATS = 2
# Calls below this size measure the dispatch rather than the rate.
_SMALLEST_BYTES = 1 << 18


def operator_rates(clock: Clock | None = None) -> dict[str, Any]:
    """Measures the operators of this CPU. Returns their rates by the name of the field of `Hardware`.

    The operators are those of two training steps, of a language model and of an image model. The random state is
    restored.
    """
    # The time of one thread excludes other programs. For several threads only wall time exists.
    clock = clock or (time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)
    rates: dict[str, float] = {}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        for dtype in _DTYPES:
            for step in (_language(2, 256, 256, 4000, dtype), _pictures(8, 64, dtype)):
                rates |= _rates_of(step, clock)
    return {"operator_rates": rates}


def _rates_of(step: Callable[[], None], clock: Clock) -> dict[str, float]:
    # The first step loads code. Of the others the least time counts, since disturbances only make a call longer.
    runs = [_timed(step, clock) for _ in range(_REPEATS + 1)][1:]
    amounts: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for calls in zip(*runs, strict=True):
        name, amount, nbytes = calls[0][:3]
        if nbytes >= _SMALLEST_BYTES and name.split()[0] not in PRODUCTS:
            amounts[name] = amounts.get(name, 0.0) + amount
            seconds[name] = seconds.get(name, 0.0) + min(call[3] for call in calls)
    return {name: amounts[name] / seconds[name] for name in sorted(amounts) if seconds[name] > 0}


class _Timing(TorchDispatchMode):
    """Times each operator that does work, as (name and dtype, FLOPs or bytes, bytes, seconds)."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int, int, float]] = []
        self._clock = clock

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        began = self._clock()
        result = op(*args, **kwargs)
        taken = self._clock() - began
        if isinstance(op, OpOverload):
            work = work_of(op, args, kwargs, result)
            if work.flops or work.nbytes:
                self.calls.append((rate_name(op._opname, work.dtype), work.flops or work.nbytes, work.nbytes, taken))
        return result


def _timed(step: Callable[[], None], clock: Clock) -> list[tuple[str, int, int, float]]:
    timing = _Timing(clock)
    with timing:
        step()
    return timing.calls


class _Block(nn.Module):
    """A block with both forms of attention, common norms and activations, and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.up = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        hidden = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-2, -1)).masked_fill(future, -torch.inf).softmax(-1)
        hidden = hidden + F.scaled_dot_product_attention(q, k, v, attn_mask=~future, dropout_p=0.1)
        hidden = hidden + F.dropout(scores, 0.1) @ v
        x = x + hidden.transpose(1, 2).reshape(x.shape)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        up = self.up(x)
        up = F.gelu(up) + F.silu(up) * F.gelu(up, approximate="tanh") + up.tanh() * up.sigmoid() + up.exp().sqrt()
        down: torch.Tensor = self.down(F.dropout(F.relu(up) / 2, 0.1))
        return x - down.neg()


def _language(batch: int, length: int, width: int, words: int, dtype: torch.dtype) -> Callable[[], None]:
    with torch.device("cpu"):
        model = nn.Sequential(nn.Embedding(words, width), _Block(width), nn.Linear(width, words)).to(dtype)
        tokens = torch.randint(0, words, (batch, length))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        logits = model(tokens).float()
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _pictures(batch: int, side: int, dtype: torch.dtype) -> Callable[[], None]:
    with torch.device("cpu"):
        grow = nn.Upsample(scale_factor=2), nn.Conv2d(64, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU()
        model = nn.Sequential(
            *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.AvgPool2d(2)),
            *grow,
            nn.ConvTranspose2d(32, 16, 2, stride=2),
        ).to(dtype)
        images = torch.randn(batch, 3, side, side).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        F.mse_loss(model(images).float().mean(1), images.float().mean(1)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
