"""What single operators and convolutions take on a card: the measurements behind the clock's and cuDNN's rules.

python benchmarks/bench_operators.py [--json FILE]                  # seconds, beside what the clock says
python benchmarks/bench_operators.py --convolutions [--json FILE]   # workspaces and seconds of cuDNN
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _environment import environment
from torch.utils._python_dispatch import TorchDispatchMode

import memscale as ms
from memscale.hardware import seconds
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.rule import CardTraits
from memscale.simulation.rules.work import work_of

ROWS = ((8192, 4096), (16384, 768), (4096, 50257), (8192, 128256))
PRODUCTS = ((4096, 1600, 50257), (4096, 1600, 50304), (16384, 768, 30522), (8192, 4096, 4096), (4096, 50257, 1600))
HEADS = ((4, 16, 2048, 64, 16), (1, 32, 4096, 128, 8), (32, 12, 512, 64, 12), (128, 12, 197, 64, 12))
IMAGES = ((128, 64, 112), (128, 256, 56), (32, 512, 28))
SHORTEST_SECONDS = 80e-6  # below, the host may be what takes the time
# Batch, channels in and out, width, kernel, stride, groups.
CONVOLUTIONS = (
    (128, 3, 64, 224, 7, 2, 1),
    (128, 3, 768, 224, 16, 16, 1),
    (128, 64, 64, 56, 3, 1, 1),
    (128, 64, 256, 56, 1, 1, 1),
    (128, 256, 512, 56, 1, 2, 1),
    (128, 256, 256, 14, 3, 1, 1),
    (128, 1024, 256, 14, 1, 1, 1),
    (32, 64, 64, 56, 3, 1, 1),
    (8, 320, 320, 64, 3, 1, 1),
    (8, 1280, 1280, 16, 3, 1, 1),
    (16, 50, 50, 30, 3, 1, 1),
    (64, 96, 96, 56, 7, 1, 96),
)


def seconds_of(run: Callable[[], object], rounds: int = 6) -> float:
    """A launch's share of `rounds` in a row, by the card's own clock."""
    for _ in range(2):
        run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds / 1e3


class Calls(TorchDispatchMode):
    """The operators of what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        self.found.append((op, args, kwargs or {}, work_of(op, args, kwargs or {}, result)))
        return result


def steps(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """Forwards and backwards that meet the operators of usual models."""

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

    for rows, columns in ROWS:
        x, other = new(rows, columns), new(rows, columns).detach()
        labels = torch.randint(columns, (rows,), device="cuda")
        yield lambda x=x, labels=labels: torch.autograd.grad(F.cross_entropy(x, labels), x)
        for act in (F.gelu, F.silu, torch.relu, lambda t: t.softmax(-1), lambda t: F.dropout(t, 0.1)):
            yield lambda x=x, other=other, act=act: torch.autograd.grad(act(x), x, other)
        yield lambda x=x, other=other: (x + other, x * 2.0, x.sum(0), torch.cat([x, other]), x.float())
        if columns < 10_000:
            weight, bias = new(columns), new(columns)
            yield lambda x=x, o=other, w=weight, b=bias, n=columns: torch.autograd.grad(
                F.layer_norm(x, (n,), w, b), (x, w, b), o
            )
            yield lambda x=x, o=other, w=weight, n=columns: torch.autograd.grad(F.rms_norm(x, (n,), w), (x, w), o)
            table, places = new(32_000, columns), torch.randint(32_000, (rows,), device="cuda")
            yield lambda t=table, p=places, o=other: torch.autograd.grad(F.embedding(p, t), t, o)
    for m, k, n in PRODUCTS:
        left, right, turned = new(m, k), new(n, k), new(k, n)
        yield lambda left=left, right=right, turned=turned: (left @ right.t(), left @ turned)
    for batch, heads, length, width, shared in HEADS:
        query, key, value = new(batch, heads, length, width), *(new(batch, shared, length, width) for _ in range(2))
        for causal in (False, True):
            yield lambda q=query, k=key, v=value, c=causal, g=heads != shared: torch.autograd.grad(
                F.scaled_dot_product_attention(q, k, v, is_causal=c, enable_gqa=g).sum(), (q, k, v)
            )
    for batch, channels, width in IMAGES:
        image = new(batch, channels, width, width)
        for norm in (torch.nn.BatchNorm2d(channels), torch.nn.GroupNorm(8, channels), torch.nn.MaxPool2d(3, 2, 1)):
            layer = norm.to("cuda", dtype)
            yield lambda image=image, layer=layer: torch.autograd.grad(layer(image).sum(), image)


def operators() -> list[dict[str, Any]]:
    card = ms.Hardware.detect("cuda")
    traits = CardTraits(card.capability or (8, 0))
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for step in steps(dtype):
            with Calls() as calls:
                step()
            for op, args, kwargs, work in calls.found:
                if not (work.flops or work.nbytes):
                    continue
                with torch.no_grad():
                    real = seconds_of(lambda op=op, args=args, kwargs=kwargs: op(*args, **kwargs))
                if real < SHORTEST_SECONDS:
                    continue
                shapes = str([list(each.shape) for each in args if isinstance(each, torch.Tensor)])
                name = op._opname
                clock = seconds(rule_of(op).time(args, work, traits), card, op=name)
                found[name, shapes + str(dtype)] = {
                    "operator": name,
                    "shapes": shapes,
                    "dtype": str(dtype).removeprefix("torch."),
                    "microseconds": round(1e6 * real, 1),
                    "clock_of_real": round(clock / real, 2),
                }
    return list(found.values())


def workspace_bytes(run: Callable[[], object]) -> int:
    """The most that a call takes beside what it returns."""
    run()  # loads kernels
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    del result
    return torch.cuda.max_memory_allocated() - before - held


def convolution(shape: tuple[int, ...], dtype: torch.dtype, last: bool) -> dict[str, Any]:
    aten, format = torch.ops.aten, torch.channels_last if last else torch.contiguous_format
    batch, inside, outside, width, size, stride, groups = shape
    image = torch.randn(batch, inside, width, width, device="cuda", dtype=dtype).contiguous(memory_format=format)
    kernel = torch.randn(outside, inside // groups, size, size, device="cuda", dtype=dtype)
    kernel = kernel.contiguous(memory_format=format)
    places = [stride] * 2, [0 if size == stride else size // 2] * 2, [1, 1], False, [0, 0], groups
    grad = torch.randn_like(aten.convolution(image, kernel, None, *places))

    def backward(*wanted: bool) -> object:
        return aten.convolution_backward(grad, image, kernel, None, *places, [*wanted, False])

    row: dict[str, Any] = {"image": list(image.shape), "kernel": list(kernel.shape), "stride": stride}
    row |= {"groups": groups, "dtype": str(dtype).removeprefix("torch."), "channels_last": last}
    runs: dict[str, Callable[[], object]] = {
        "result": lambda: aten.convolution(image, kernel, None, *places),
        "image": lambda: backward(True, False),
        "weight": lambda: backward(False, True),
    }
    for name, run in runs.items():
        row |= {f"{name}_bytes": workspace_bytes(run), f"{name}_us": round(1e6 * seconds_of(run, 3), 1)}
    return row


def convolutions() -> list[dict[str, Any]]:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return [convolution(*each) for each in itertools.product(CONVOLUTIONS, dtypes, (False, True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--convolutions", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    about = environment("cuda")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    rows = convolutions() if options.convolutions else operators()
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
