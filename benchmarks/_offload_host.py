"""offload() on a machine without a GPU: what a hook costs, and a GPT-2 whose activations wait on disk.

Every contender of the model trains in a process of its own, since freed memory is not always given back to the system,
and the processes take turns, a step each, so that times compare on a machine that does other things too.
"RSS growth" is how far a steady-state step drives the process's peak resident set above what it held after a step on
eight tokens, with gradients and optimizer state in place; the allocator's own count stands beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
import transformers
from bench_tile import gpt2

import memscale as ms
from memscale.runtime import Runtime

BLOCKS = "transformer.h.*"
PLAIN, THEIRS = "plain", "save_on_cpu"
PLANS: dict[str, dict[str, ms.Transform]] = {
    PLAIN: {},
    THEIRS: {},
    "offload the blocks": {BLOCKS: ms.offload()},
    "offload the model": {"": ms.offload()},
    "checkpoint": {BLOCKS: ms.checkpoint()},
    "offload, checkpoint": {BLOCKS: ms.compose(ms.offload(), ms.checkpoint())},
}


def resident_bytes(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))


@dataclasses.dataclass(frozen=True)
class Row:
    """What a step of one contender takes in steady state, and a digest of the parameters after all its steps."""

    contender: str
    step_seconds: float
    rss_growth_bytes: int
    allocator_growth_bytes: int
    out_bytes: int
    exposed_seconds: float
    digest: str


def train(name: str, steps: int, directory: str | None = None) -> Row:
    """Train in this process, each step when its turn comes."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    runtime = Runtime(disk_directory=directory)
    base = gpt2("cpu")
    model = ms.transform(base, PLANS[name], runtime=runtime)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 16_000, (4, 512))

    def step(ids: torch.Tensor = ids) -> None:
        with torch.autograd.graph.save_on_cpu() if name == THEIRS else contextlib.nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    step(ids[:1, :8])  # libraries, gradients and optimizer state are there before the first measurement
    before = resident_bytes("VmRSS")
    seconds, growth = [], []
    for _ in range(steps):
        wait_for_turn()
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # the peak of the resident set starts over
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
        growth.append(resident_bytes("VmHWM") - before)
    wait_for_turn()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    moved = runtime.stats().get("cpu")
    return Row(
        name,
        statistics.median(seconds),
        growth[-1],
        ms.measure(step).growth_bytes,
        sum(moved.out_bytes.values()) // steps if moved else 0,
        moved.exposed_seconds / steps if moved else 0.0,
        digest,
    )


def wait_for_turn() -> None:
    print(flush=True)
    sys.stdin.readline()


def measure_gpt2(steps: int, directory: str | None) -> Iterator[Row]:
    """Every contender, in a process of its own."""
    arguments = [str(steps), *([directory] if directory else [])]
    with contextlib.ExitStack() as stack:
        processes = []
        for name in PLANS:
            command = [sys.executable, __file__, name, *arguments]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            said(process)  # before the next one starts
            processes.append(process)
        for _ in range(steps):
            for process in processes:
                take_turn(process)
        for process in processes:
            yield Row(**json.loads(take_turn(process)))


def take_turn(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    print(file=process.stdin, flush=True)
    return said(process)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args} ended with code {process.wait()}, without a result")
    return line


def overhead_microseconds(saved: int = 100, rounds: int = 300) -> dict[str, float]:
    """What a saved tensor costs, forward and backward, when every tensor is too small to move."""
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(saved // 2):
            x = x * w  # saves two
        return x

    def theirs(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return chain(x)

    contenders: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        PLAIN: chain,
        "offload": ms.offload()(chain),
        THEIRS: theirs,
    }
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run(x).sum().backward()
            took[name].append(time.perf_counter() - start)
    plain = statistics.median(took[PLAIN])
    return {name: 1e6 * (statistics.median(took[name]) - plain) / saved for name in contenders if name != PLAIN}


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(train(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))))
