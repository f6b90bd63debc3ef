"""Predicted against real time of a training step, on this CPU: plain, and what plans cost over plain.

For each model, the steps of all plans take turns, a step each, before and after `profile` predicts them: with
`probe=True`, and by the rates of `Hardware.measure()` alone. The real time is the lower quartile of the turns, since
what disturbs a step only ever makes it longer, and what a plan costs is its time over plain's. With one thread the time
is that of the thread, so that other jobs on the machine disturb less. glibc is told to keep freed memory: whether a
step gives it back to the system and takes it again, a page at a time, is a matter of how the heap happens to lie, and
takes nothing or up to a tenth of the step.

    python benchmarks/bench_clock.py --rounds 7 --json benchmarks/results/clock-cpu.json   # everything, in six minutes
    python benchmarks/bench_clock.py [--only REGEX] [--variant REGEX] [--rounds 5] [--threads 1] [--seconds 340]
    python benchmarks/bench_clock.py --offload   # only: what steps wait for the disk, which needs a quiet machine
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import logging
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from _environment import environment
from _truth import described, training_step
from _zoo import ZOO, Case

import memscale as ms
from memscale.runtime import Runtime

WARM_STEPS = 1
FEWEST_ROUNDS = 3
# Of glibc's malloc.h. What `mallopt` fixes, glibc does not adapt any more.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
OFFLOAD_SHARE = 1.5  # of the time that is left, in models
# What has rows that nothing mixes, by the pattern of its path; the models without are not tiled by rows.
ROWS = {
    "gpt2": "transformer.h.*.mlp",
    "llama": "model.layers.*.mlp",
    "qwen3": "model.layers.*.mlp",
    "bert": "bert.encoder.layer.*.intermediate",
    "distilbert": "distilbert.transformer.layer.*.ffn",
    "t5": "*.block.*.layer.*.DenseReluDense",
    "vit": "vit.layers.*.mlp",
    "mlp": "",
}
OFFLOADED = {"gpt2": "transformer.h.*", "bert": "bert.encoder.layer.*", "vit": "vit.layers.*"}
MODELS = (*ROWS, "gpt-softmax", "convnext", "resnet", "unet")
COLUMNS = f"{'model':12}{'plan':12}{'real ms':>9}{'probe':>8}{'roofline':>9}   {'real':>6}{'probe':>7}{'roofline':>9}"


@dataclasses.dataclass(frozen=True)
class Row:
    """A plan of a model: seconds of a step, real (one of each turn) and predicted in two ways.

    `probe_seconds` is None where the machine was too busy for the probe, which then keeps nothing.
    """

    model: str
    plan: str
    turns: tuple[float, ...]
    probe_seconds: float | None
    roofline_seconds: float
    predict_seconds: float

    @property
    def real_seconds(self) -> float:
        return sorted(self.turns)[len(self.turns) // 4]


@dataclasses.dataclass(frozen=True)
class Compared:
    """A row beside plain's: what the plan costs."""

    row: Row
    plain: Row

    @property
    def real_cost(self) -> float:
        return self.row.real_seconds / self.plain.real_seconds

    def errors(self) -> dict[str, float]:
        """Relative errors of the step's time and of the plan's cost, signed."""
        found = {}
        for how in ("probe", "roofline"):
            predicted, of_plain = (getattr(row, f"{how}_seconds") for row in (self.row, self.plain))
            if predicted is None:
                continue
            found[f"{how} step"] = predicted / self.row.real_seconds - 1
            if self.row.plan != "plain" and of_plain is not None:
                found[f"{how} cost"] = predicted / of_plain / self.real_cost - 1
        return found

    def __str__(self) -> str:
        row, plain = self.row, self.plain
        errors = self.errors()
        step, cost = (f"{1 + errors[key]:.2f}" if key in errors else "" for key in ("probe step", "probe cost"))
        return (
            f"{row.model:12}{row.plan:12}{1e3 * row.real_seconds:9.1f}{step or 'busy':>8}"
            f"{row.roofline_seconds / row.real_seconds:9.2f}   {self.real_cost:6.3f}{cost:>7}"
            f"{row.roofline_seconds / plain.roofline_seconds / self.real_cost:9.3f}"
        )


def plans_of(case: Case, model: torch.nn.Module) -> dict[str, ms.Plan | None]:
    """The plans by name, as far as the model has something for them; None is the model as it is."""
    of_zoo = case.plans(model)
    plans = {"plain": None} | {name: of_zoo[of] for name, of in (("checkpoint",) * 2, ("head", "tile")) if of in of_zoo}
    if case.name in ROWS:
        plans["rows"] = ms.Plan({ROWS[case.name]: ms.tile(chunks=4)})
    return plans | {"cast": ms.Plan({"": ms.cast()})}


def keep_freed_memory() -> None:
    """Have malloc neither give memory back to the system nor map what is large; nothing where there is no glibc."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_TRIM_THRESHOLD, -1)
        mallopt(M_MMAP_THRESHOLD, 1 << 30)


def measured(name: str, options: argparse.Namespace, hardware: ms.Hardware, until: float) -> list[Row]:
    """Everything about one model, with fewer turns than were asked for where they would go on after `until`."""
    case = ZOO[name]
    torch.manual_seed(0)
    model, batch = case.make()
    plans = {
        plan: value
        for plan, value in plans_of(case, model).items()
        if plan == "plain" or re.fullmatch(options.variant, plan)
    }
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    steps: dict[str, Callable[[], None]] = {}
    for plan, value in plans.items():
        # Models of their own, so that each has gradients and states where its own steps left them.
        own, _ = case.make()
        runs = own if value is None else ms.transform(own, value)
        steps[plan] = training_step(case, runs, batch, case.optimizer(own))
        for _ in range(WARM_STEPS):
            steps[plan]()
    turns: dict[str, list[float]] = {plan: [] for plan in plans}

    def take_turns(rounds: int) -> None:
        while len(turns["plain"]) < rounds and (
            len(turns["plain"]) < min(rounds, FEWEST_ROUNDS) or time.perf_counter() < until
        ):
            for plan, step in steps.items():
                began = clock()
                step()
                turns[plan].append(clock() - began)

    take_turns(options.rounds // 2)
    predicted: dict[str, tuple[float | None, float, float]] = {}
    for plan, value in plans.items():
        settings: dict[str, Any] = {"plan": value, "accumulate": case.accumulate, "hardware": hardware}
        began = time.perf_counter()
        profiles = [
            ms.profile(
                model,
                batch,
                keeps_output=False,
                optimizer=case.optimizer(model),
                loss=case.loss,
                probe=probe,
                **settings,
            )
            for probe in (True, False)
        ]
        if measured_ones := [profile.notes[0] for profile in profiles if profile.method != "static"]:
            raise RuntimeError(f"{plan}: {measured_ones[0]}")
        by_probe, by_roofline = (profile.step_seconds or 0.0 for profile in profiles)
        was_busy = any("nothing was measured" in note for note in profiles[0].notes)
        predicted[plan] = None if was_busy else by_probe, by_roofline, time.perf_counter() - began
    take_turns(options.rounds)
    return [Row(name, plan, tuple(turns[plan]), *predicted[plan]) for plan in plans]


def offloaded(name: str, options: argparse.Namespace, hardware: ms.Hardware) -> dict[str, Any]:
    """Seconds that a step with `offload()` of the blocks waits for the disk, real and predicted."""
    case = ZOO[name]
    plan = ms.Plan({OFFLOADED[name]: ms.offload()})
    model, batch = case.make()
    runtime = Runtime()
    own, _ = case.make()
    step = training_step(case, ms.transform(own, plan, runtime=runtime), batch, case.optimizer(own))

    def waited() -> float:
        return sum(stats.exposed_seconds for stats in runtime.stats().values())

    turns = []
    for turn in range(2 + options.rounds):
        before = waited()
        step()
        if turn >= 2:  # the first makes files, the second learns what comes back when
            turns.append(waited() - before)
    settings: dict[str, Any] = {"plan": plan, "hardware": hardware, "loss": case.loss, "probe": True}
    profile = ms.profile(model, batch, keeps_output=False, optimizer=case.optimizer(model), **settings)
    real, predicted = statistics.median(turns), sum(profile.exposed_seconds.values())
    print(f"{name:12}waits {1e3 * real:8.1f} ms   predicted {1e3 * predicted:8.1f} ms   {predicted / real:6.2f}")
    return {"model": name, "real_seconds": real, "predicted_seconds": predicted}


def summary(found: list[Compared]) -> dict[str, float]:
    """Median and worst absolute errors, in percent."""
    errors: dict[str, list[float]] = {}
    for one in found:
        for name, error in one.errors().items():
            errors.setdefault(name, []).append(100 * abs(error))
    return {
        f"{name}, {which} %": function(values)
        for name, values in sorted(errors.items())
        for which, function in (("median", statistics.median), ("worst", max))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regex: the models whose name it finds")
    parser.add_argument("--variant", default=".*", help="regex: the plans whose whole name it matches")
    parser.add_argument("--rounds", type=int, default=5, help="real steps of each plan")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--offload", action="store_true", help="only what steps wait for the disk")
    parser.add_argument("--seconds", type=float, default=340.0, help="for everything, where the rounds allow it")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    began = time.perf_counter()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    about = environment("cpu", "transformers")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    hardware = ms.Hardware.measure("cpu")
    if not options.offload:
        print(f"{COLUMNS}\n{'':24}{'step, of real':>26}   {'cost; of real':>22}")
    found: list[Compared] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MEMSCALE_CACHE"] = cache  # what was timed on another day, beside other jobs, is no prediction
        wanted = [] if options.offload else [name for name in MODELS if re.search(options.only, name)]
        for at, name in enumerate(wanted):
            now = time.perf_counter()
            until = now + (began + options.seconds - now) / (len(wanted) - at + OFFLOAD_SHARE)
            try:
                rows = measured(name, options, hardware, until)
            except Exception as error:
                failures[name] = described(error)
                print(f"{name:12}failed: {failures[name]}", flush=True)
                continue
            compared = [Compared(row, rows[0]) for row in rows]
            print(*compared, sep="\n", flush=True)
            found += compared
            gc.collect()
        waits = [offloaded(name, options, hardware) for name in OFFLOADED if re.search(options.only, name)]
    totals = summary(found)
    totals |= {
        f"offload waits, {which} %": function(
            [100 * abs(each["predicted_seconds"] / each["real_seconds"] - 1) for each in waits]
        )
        for which, function in (("median", statistics.median), ("worst", max))
        if waits
    }
    print("\n" + "\n".join(f"{name:28}{value:7.1f}" for name, value in totals.items()))
    if options.json is not None:
        rows = [dataclasses.asdict(one.row) | {"cost": one.real_cost, "errors": one.errors()} for one in found]
        text = json.dumps({**about, "summary": totals, "failures": failures, "waits": waits, "results": rows}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
