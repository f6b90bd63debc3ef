"""``memscale demo``: plans for a memory budget, then runs the same training without and with the plan."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import torch
from rich.console import Console
from rich.table import Table
from typer import Option

import memscale as ms
from memscale.cli.options import Options, file, number, size
from memscale.cli.subject import offline
from memscale.cli.terminal import Progress, progress, show, simulations
from memscale.cli.training import HEAD_WIDTH, MAX_SEQ, Job, TrainingRun, gpt2, read_text, train
from memscale.core import (
    ConfigError,
    RuntimeUnavailable,
    budget_bytes,
    format_bytes,
    format_seconds,
    format_unlike,
    package,
)

if TYPE_CHECKING:
    from memscale.planning import Evidence, ProvenPlan

_MIB = 1 << 20
_SHARE = 0.4  # the default budget, as a share of the memory of the plain step
_ROOM = 1.01  # the default budget as a multiple of the least reachable memory, if that is more


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Options):
    """The command line of ``memscale demo``, as typed."""

    steps: Annotated[
        int, number("Optimizer steps of each model; the first warms up, the last is measured.", least=3)
    ] = 8
    layers: Annotated[int, number("Transformer blocks.", least=1)] = 8
    width: Annotated[int, number("Hidden size, a multiple of 64.", least=HEAD_WIDTH)] = 256
    batch: Annotated[int, number("Rows of text in a step.", least=1)] = 8
    seq: Annotated[int, number("Bytes of text in a row, at most 1024.", least=2)] = 256
    device: Annotated[str, Option(help="cpu, cuda or cuda:N; auto takes CUDA if it can.")] = "auto"
    budget: Annotated[str | None, size("Memory of a step, by default 2/5 of the step without a plan")] = None
    out: Annotated[Path, file("File of the picture, a .png.", ".png")] = Path("memscale-demo.png")

    def check(self) -> None:
        if self.seq > MAX_SEQ:
            raise ConfigError(f"--seq must be at most {MAX_SEQ}, GPT-2's longest text, got {self.seq}")
        if self.width % HEAD_WIDTH:
            raise ConfigError(f"--width must be a multiple of {HEAD_WIDTH}, the width of a head, got {self.width}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {self.device!r}")


def demo(options: DemoOptions) -> int:
    """Plans, trains twice, prints the comparison and writes the picture. Returns 0, or 1 if a check fails.

    The checks: equal numbers in both trainings, and a measured peak within the budget.

    Raises:
        ConfigError: an option is out of range.
        BudgetError: no plan fits the budget.
        RuntimeUnavailable: the device, transformers or matplotlib is missing.
    """
    job, budget, out = _job(options), options.budget, options.out
    if budget is not None:
        budget_bytes(budget, ms.Hardware.detect(job.device.type).usable_bytes)
    with offline():
        package("transformers", "memscale demo", "hf")
        package("matplotlib", "memscale demo", "plot")
    text = read_text()
    with _deterministic(job.device):
        with simulations() as simulated:
            plan = _planned(job, budget, simulated)
        show(
            f"Training GPT-2 with {job.layers} layers of width {job.width} and dropout on {len(text):,} bytes of "
            f"Python source: {job.steps} AdamW steps of {job.batch} × {job.seq} bytes on {job.device}."
        )
        said = [line for line in plan.evidence.trace if line.startswith(("memory pressure", "no plan needed", "proof"))]
        show("\n".join([*said, "", str(plan), ""]))
        with progress("training") as bar:
            task = bar.add_task("", total=2 * job.steps)
            baseline, planned = (train(job, text, each, lambda: bar.advance(task)) for each in (None, plan))
            bar.update(task, description="picture")
            limit = format_bytes(plan.evidence.budget_bytes)
            from memscale.reports import plot_timelines

            plot_timelines(out, {"as written": baseline.trace, f"planned for {limit}": planned.trace})
    screen = Console()
    screen.print(_table(baseline, planned, plan.evidence))
    screen.print(f"Memory over one step: {out.resolve()}", soft_wrap=True, highlight=False)
    different = [name for name, digest in baseline.digests.items() if planned.digests[name] != digest]
    if different:
        screen.print(f"NOT EQUAL: {', '.join(different)} differ from the baseline's", style="bold red")
    too_large = planned.trace.peak_bytes > plan.evidence.budget_bytes
    if too_large:
        screen.print("OVER BUDGET: the measured peak is above the budget", style="bold red")
    return 1 if different or too_large else 0


def _planned(job: Job, budget: str | None, progress: Progress) -> ProvenPlan:
    """Returns the plan of the job's step, without tiling, which changes the order of sums; the demo compares bits."""
    model = gpt2(job)
    tokens = torch.zeros(job.batch, job.seq, dtype=torch.long, device=job.device)
    engine = ms.DecisionEngine(
        model,
        {"input_ids": tokens, "labels": tokens},
        optimizer=torch.optim.AdamW(model.parameters()),
        config=ms.Config(mode="balanced"),
        keeps_output=False,  # the demo's loop keeps only the loss of the output
        progress=progress,
    )
    if budget is not None:
        return engine.plan(budget)
    share = math.ceil(_SHARE * engine.plain.taken_bytes / _MIB) * _MIB
    nearest = engine.nearest(share)
    least = nearest.evidence.planned.taken_bytes
    if least <= share:
        return nearest
    return engine.plan(math.ceil(_ROOM * least / _MIB) * _MIB)  # with room for allocations besides the step


def _job(options: DemoOptions) -> Job:
    """Returns the training job of the options.

    Raises:
        ConfigError: the device has too little free memory.
        RuntimeUnavailable: the device does not exist.
    """
    kind = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device, free_bytes = torch.device(kind), psutil.virtual_memory().available
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            found = f"it finds {count}" if count else "it finds none; use --device cpu"
            raise RuntimeUnavailable(f"--device {kind} needs a CUDA device that PyTorch can use, and {found}")
        free_bytes = torch.cuda.mem_get_info(device)[0]
    width, tokens = options.width, options.batch * options.seq
    # Weights, gradients and two moments, and the baseline's activations: only exact enough to refuse a job.
    kept = 20 * width + 3 * (width // HEAD_WIDTH) * options.seq
    needed_bytes = 4 * options.layers * (4 * 12 * width * width + tokens * kept)
    if needed_bytes > free_bytes:
        needed, free = format_unlike(needed_bytes, free_bytes)
        raise ConfigError(
            f"the demo would need about {needed} and {device} has {free} free; lower "
            "--batch, --seq, --layers or --width"
        )
    return Job(options.steps, options.layers, width, options.batch, options.seq, device)


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Turns deterministic kernels on for the body: others on CUDA sum in any order, so that no two runs are equal."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)


def _table(baseline: TrainingRun, planned: TrainingRun, evidence: Evidence) -> Table:
    table = Table(title="One training, twice", title_justify="left", title_style="bold")
    table.add_column("")
    for name in ("as written", "planned", ""):
        table.add_column(name, justify="right")
    first, second = baseline.trace, planned.trace
    kept = second.peak_bytes <= evidence.budget_bytes
    table.add_row(
        "budget", "", format_bytes(evidence.budget_bytes), "[green]kept[/]" if kept else "[bold red]EXCEEDED[/]"
    )

    def compare(name: str, before: float, after: float, form: Callable[[float], str]) -> None:
        table.add_row(name, form(before), form(after), f"{after / before:.2f} ×")

    compare("peak memory, simulated", evidence.plain.peak_bytes, evidence.planned.peak_bytes, format_bytes)
    compare("peak memory, measured", first.peak_bytes, second.peak_bytes, format_bytes)
    compare("  above weights and moments", first.growth_bytes, second.growth_bytes, format_bytes)
    compare(
        "  kept for backward",
        int(first.timeline.live_bytes["activation"].max()),
        int(second.timeline.live_bytes["activation"].max()),
        format_bytes,
    )
    compare("step time (median)", baseline.step_seconds, planned.step_seconds, format_seconds)
    table.add_section()
    for name, index in (("loss, first step", 0), ("loss, last step", -1)):
        table.add_row(name, f"{baseline.losses[index]:.9f}", f"{planned.losses[index]:.9f}")
    table.add_section()
    for name, digest in baseline.digests.items():
        same = planned.digests[name] == digest
        verdict = "[green]equal[/]" if same else "[bold red]DIFFERENT[/]"
        table.add_row(name, "", "bit for bit", verdict)
    return table
