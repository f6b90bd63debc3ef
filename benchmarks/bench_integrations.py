"""What a step costs that only the callbacks and `wrap`'s watching add: nothing of the model, which is tiny.

python benchmarks/bench_integrations.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import memscale as ms
from memscale.integrations.hf import MemScaleCallback

TARGET_SECONDS = 50e-6
EVENTS = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end", "on_step_end")


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12)])


def callback_seconds(steps: int) -> float:
    """All the events of a step that the Trainer tells the callback, and a log."""
    callback = MemScaleCallback(plan={"*": ms.checkpoint()})
    model = blocks()
    callback.on_init_end(SimpleNamespace(n_gpu=1), None, None, model=model)
    logs: dict[str, Any] = {}
    begin = time.perf_counter()
    for _ in range(steps):
        for event in EVENTS:
            getattr(callback, event)(None, None, None, model=model)
        callback.on_log(None, None, None, logs=logs)
    return (time.perf_counter() - begin) / steps


def watching_seconds(steps: int, **config: Any) -> float:
    """A step of a model under `wrap` beside one under the same plan by `transform`, step by step in turn."""
    plain = ms.transform(blocks(), {"*": ms.checkpoint()})
    settings = ms.Config(force_optimize=True, enable_logging=False, **config)
    watched = ms.wrap(blocks(), settings, torch.ones(2, 8))
    optimizers = {model: torch.optim.SGD(model.parameters(), 1e-3) for model in (plain, watched)}
    times: dict[nn.Module, list[float]] = {plain: [], watched: []}
    for _ in range(steps):
        for model, optimizer in optimizers.items():
            begin = time.process_time()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            times[model].append(time.process_time() - begin)
    ms.detach(watched)
    return statistics.median(times[watched]) - statistics.median(times[plain])


def listening_seconds(steps: int) -> float:
    """What is done at each step of an optimizer, for a model of 1,000 parameters."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(500)])
    executor: Any = ms.wrap(model, ms.Config(force_optimize=True, enable_logging=False))._memscale_executor
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    executor.after_step(optimizer)
    begin = time.process_time()
    for _ in range(steps):
        executor.after_step(optimizer)
    seconds = (time.process_time() - begin) / steps
    ms.detach(model)
    return seconds


def main() -> None:
    """Print microseconds a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    events = statistics.median(callback_seconds(300) for _ in range(rounds))
    rows = {
        "the Trainer's callback, all events of a step and a log": events,
        "at a step of the optimizer, 1,000 parameters": listening_seconds(40 * rounds),
        "wrap beside transform, 12 regions": watching_seconds(40 * rounds),
        "the same, with figures served": watching_seconds(40 * rounds, observability_port=0),
    }
    for name, seconds in rows.items():
        print(f"{name:<56} {1e6 * seconds:6.1f} us  {'ok' if seconds <= TARGET_SECONDS else 'ABOVE 50 us'}")


if __name__ == "__main__":
    main()
