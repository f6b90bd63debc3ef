"""Predicted against real peak memory of a training step, over the zoo of architectures, dtypes and transforms.

The truth is PyTorch's allocator in the third step of a real run: on CPU its events, on CUDA its own peak counters. The
prediction is `memscale.profile` of a model that never ran. A step is forward, loss, backward (`accumulate` times),
`optimizer.step()`, `zero_grad(set_to_none=True)`; the output is let go before backward begins.

    python benchmarks/bench_predict.py [--only REGEX] [--dtype fp32] [--variant REGEX] [--probe] [--device cuda]
    python benchmarks/bench_predict.py --again results/predict-h100.json   # without a card, what a card has measured
    python benchmarks/bench_predict.py --ghost .ghost/bin/python --compiled   # blocks compiled by inductor
    python benchmarks/bench_predict.py --shapes   # only: seconds and memory of a prediction for Llama 8B and 70B
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read when torch loads: the profiler logs to the terminal otherwise

import torch
import transformers
from _environment import environment
from _ghost import ALLOCATORS, CARDS, SOURCES, Combination, Ghost, as_fake_libraries, at_once, case_of, covering, places
from _journal import Journal
from _truth import COMPILED, Truth, compiled, described, plans, real_step, release
from _zoo import ADAMW, AUTOCAST, DTYPES, ZOO, Case

import memscale as ms

# What cuDNN runs as a whole.
_CUDNN = re.compile("lstm|gru|rnn")
COLUMNS = f"{'case':23}{'dtype':6}{'variant':16}{'truth MB':>10}{'predicted':>11}{'error %':>9}{'seconds':>9}"

# Keyword arguments of LlamaConfig, and the seconds that a prediction may take on 2 cores.
SHAPES: dict[str, tuple[dict[str, int], float]] = {
    "Llama 8B": (
        {
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "intermediate_size": 14_336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        5.0,
    ),
    "Llama 70B": (
        {
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "intermediate_size": 28_672,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
        15.0,
    ),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One prediction beside its truth; `failure` says why there is none.

    A prediction whose `method` is "empirical" was measured on real steps, as the truth was. It shows that the step
    could not be simulated and says nothing about accuracy.
    """

    case: str
    dtype: str
    variant: str
    truth: Truth
    predicted_bytes: int | None
    predicted_reserved_bytes: int | None
    predict_seconds: float
    method: str = ""
    failure: str = ""
    notes: tuple[str, ...] = ()
    on: str = ""

    @property
    def error(self) -> float | None:
        """Relative error of the allocated peak, signed."""
        return None if self.predicted_bytes is None else self.predicted_bytes / self.truth.peak_bytes - 1

    @property
    def reserved_error(self) -> float | None:
        """Relative error of the reserved peak, signed; None where there is no truth of it."""
        real, predicted = self.truth.reserved_peak_bytes, self.predicted_reserved_bytes
        return None if real is None or predicted is None else predicted / real - 1

    def __str__(self) -> str:
        line = f"{self.case:23}{self.dtype:6}{self.variant:16}{self.truth.peak_bytes / 1e6:10.2f}"
        if self.predicted_bytes is None or self.error is None:
            return f"{line}  failed: {self.failure}"
        line += f"{self.predicted_bytes / 1e6:11.2f}{100 * self.error:+9.3f}{self.predict_seconds:9.2f}"
        if self.reserved_error is not None:
            line += f"   reserved {self.truth.reserved_peak_bytes / 1e6:.1f} MB {100 * self.reserved_error:+.2f} %"
        if self.method != "static":
            line += f"   {self.method}"
        return line + "".join(f"   {text}" for text in (self.on, self.truth.note) if text)


def predict(case: Case, dtype: str, variant: str, device: str, truth: Truth, **options: Any) -> Row:
    """Profile a fresh model; a failure is a row too, since one model must not hide the others."""
    torch.manual_seed(0)
    with torch.device("meta") if device == "meta" else contextlib.nullcontext():
        model, batch = case.make(dtype, device)
    runs = compiled(model) if variant == COMPILED else model
    plan = None if variant == COMPILED else plans(case, model, dtype)[variant]
    options |= {"plan": plan, "accumulate": case.accumulate}
    optimizer = case.optimizer(model)
    began = time.perf_counter()
    try:
        profile = ms.profile(runs, batch, keeps_output=False, optimizer=optimizer, loss=case.loss, **options)
    except Exception as error:
        seconds = time.perf_counter() - began
        return Row(case.name, dtype, variant, truth, None, None, seconds, failure=described(error))
    seconds = time.perf_counter() - began
    return Row(
        case.name,
        dtype,
        variant,
        truth,
        profile.peak_bytes,
        profile.reserved_peak_bytes,
        seconds,
        profile.method,
        notes=profile.notes,
    )


def combinations(options: argparse.Namespace) -> list[Combination]:
    """What `--ghost` compares: every two settings together, or everything that the patterns let through."""
    found = []
    for case in ZOO.values():
        if not re.search(options.only, case.name):
            continue
        for dtype in (*DTYPES, AUTOCAST) if options.dtype == "all" else (options.dtype,):
            with torch.device("meta"):
                model, _ = case.make(dtype)
            variants = (COMPILED,) if options.compiled else plans(case, model, dtype)
            loops = ("default", "fused") if case.make_optimizer is ADAMW else ("default",)
            found += [
                Combination(case.name, dtype, *rest)
                for rest in itertools.product(variants, loops, options.card, options.allocator)
                if re.fullmatch(options.variant, rest[0])
            ]
    return sorted(found, key=lambda one: (one.place, one.case)) if options.all else covering(found)[:: options.every]


def against_fake_libraries(options: argparse.Namespace, journal: Journal) -> Iterator[Row | str]:
    """Rows, and why there is none for a combination."""
    as_fake_libraries()
    for (card, allocator), group in places(combinations(options)):
        known = {one: journal.find(str(one)) for one in group}
        ghost = None if all(known.values()) else Ghost(options.ghost, card, allocator)
        os.environ["PYTORCH_ALLOC_CONF"] = allocator  # which is what a prediction takes the settings from
        for one in group:
            found = known[one]
            if found is None:
                assert ghost is not None
                found = compared(ghost, one)
                journal.add(str(one), found if isinstance(found, str) else dataclasses.asdict(found))
            yield found if isinstance(found, Row | str) else Row(**found | {"truth": Truth(**found["truth"])})
        if ghost is not None:
            ghost.close()


def compared(ghost: Ghost, one: Combination) -> Row | str:
    ghost.ask(one)
    row = predict(case_of(one), one.dtype, one.variant, "meta", Truth(1, 0, 0.0), hardware=at_once(one.card))
    found = ghost.answer()
    if "failure" in found:
        return f"{one!s:63}no truth: {found['failure']}"
    return dataclasses.replace(row, truth=Truth(**found), on="/".join(filter(None, (one.optimizer, *one.place))))


class Truths:
    """Truths by case, dtype, variant and environment, kept in a file if there is one."""

    def __init__(self, path: Path | None, device: str) -> None:
        self.path = path
        threads = f"{torch.get_num_threads()} threads"
        self.where = "/".join([torch.__version__, torch.cuda.get_device_name() if device == "cuda" else threads])
        stored = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.known = {key: Truth(**fields) for key, fields in stored.items()}

    def get(self, case: Case, dtype: str, variant: str, device: str) -> Truth:
        key = f"{case.name}/{dtype}/{variant}/{self.where}"
        if key not in self.known:
            self.known[key] = real_step(case, dtype, variant, device)
            if self.path is not None:
                self.path.write_text(
                    json.dumps({name: dataclasses.asdict(truth) for name, truth in self.known.items()}, indent=1)
                )
        return self.known[key]


def chosen(options: argparse.Namespace) -> Iterator[tuple[Case, str, str]]:
    """The combinations asked for; says which ones PyTorch refuses."""
    # Last those after which cuDNN keeps the states of its dropout until the process ends, 6.5 MB in one of 20 MiB.
    for case in sorted(ZOO.values(), key=lambda case: bool(_CUDNN.search(case.name))):
        if not re.search(options.only, case.name):
            continue
        with torch.device("meta"):
            model, _ = case.build()
        for dtype in DTYPES if options.dtype == "all" else (options.dtype,):
            if options.device == "cpu" and dtype in case.refused:
                print(f"{case.name:23}{dtype:6}skipped: {case.refused[dtype]}", flush=True)
                continue
            for variant in case.plans(model, dtype):
                if re.fullmatch(options.variant, variant):
                    yield case, dtype, variant


def again(document: dict[str, Any]) -> Iterator[Row]:
    """Predicts the rows of a result once more, on the machine at hand, for the card that measured them.

    Other versions of PyTorch and transformers than the result's save other tensors: take an environment of the same.
    """
    for row in document["rows"]:
        truth = Truth(int(1e6 * row["real_mb"]), 0, 0.0, int(1e6 * row["reserved_mb"]))
        yield predict(ZOO[row["case"]], row["dtype"], row["variant"], "cpu", truth, hardware=document["device"])


def summary(rows: list[Row]) -> dict[str, float]:
    """Median and worst absolute error, in percent, of what was simulated: allocated and, on CUDA, reserved peak."""
    simulated = [row for row in rows if row.method == "static"]
    found: dict[str, float] = {
        "predictions": len(rows),
        "simulated": len(simulated),
        "failed": sum(bool(row.failure) for row in rows),
    }
    for name, errors in {
        "allocated": [abs(row.error) for row in simulated if row.error is not None],
        "reserved": [abs(row.reserved_error) for row in simulated if row.reserved_error is not None],
    }.items():
        if errors:
            found[f"{name} median %"] = 100 * statistics.median(errors)
            found[f"{name} worst %"] = 100 * max(errors)
    return found


def by_setting(rows: list[Row]) -> dict[str, dict[str, float]]:
    """The summaries of all rows of one dtype, transform, loop, card or allocator, and of cuDNN's recurrent kernels."""
    groups: dict[str, list[Row]] = {"cuDNN's RNNs": [row for row in rows if _CUDNN.search(row.case)]}
    for row in rows:
        loop, card, *allocator = row.on.split("/")
        for group in ("all", row.dtype, row.variant, loop, card, *(allocator or ["segments of fixed size"])):
            groups.setdefault(group, []).append(row)
    return {group: summary(those) for group, those in sorted(groups.items()) if those}


def ghost_document(about: dict[str, Any], rows: list[Row], missing: list[str]) -> dict[str, Any]:
    """What `--ghost --json` writes: a short line for each comparison."""

    def percent(error: float | None) -> float | None:
        return None if error is None else round(100 * error, 3)

    found = [
        {
            "case": row.case,
            "dtype": row.dtype,
            "variant": row.variant,
            "on": row.on,
            "real_mb": round(row.truth.peak_bytes / 1e6, 2),
            "error_percent": percent(row.error),
            "reserved_mb": round((row.truth.reserved_peak_bytes or 0) / 1e6, 1),
            "reserved_error_percent": percent(row.reserved_error),
            **({"failure": row.failure} if row.failure else {}),
        }
        for row in rows
    ]
    return {
        **about,
        "fake libraries": "tests/ghost",
        "by setting": by_setting(rows),
        "without truth": missing,
        "rows": found,
    }


def high_water_bytes() -> int:
    """The most physical memory that this process ever held."""
    # Not getrusage: its maximum survives exec, so a child would report its parent's.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM: this part needs Linux")


def predict_shape(name: str) -> dict[str, float]:
    """Seconds and memory to profile one shape, in this process."""
    config = transformers.LlamaConfig(
        **SHAPES[name][0], vocab_size=128_256, max_position_embeddings=8192, use_cache=False
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(1, 4096, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    before_bytes = high_water_bytes()
    began = time.perf_counter()
    profile = ms.profile(
        model, {"input_ids": tokens, "labels": tokens}, keeps_output=False, optimizer=optimizer, hardware="h100"
    )
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "peak_bytes": profile.peak_bytes,
        "high_water_bytes": high_water_bytes(),
        "before_bytes": before_bytes,
    }


def shapes(threads: int) -> dict[str, dict[str, float]]:
    """Each shape in a process of its own, so that the memory is that of one prediction."""
    print("\nLlama shapes, bf16, AdamW, 1 x 4096 tokens, built on meta, simulated for an H100")
    found = {}
    for name, (_, allowed_seconds) in SHAPES.items():
        command = [sys.executable, __file__, "--shape", name, "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"  {name:10} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
            continue
        result = found[name] = json.loads(done.stdout.splitlines()[-1])
        print(
            f"  {name:10} {result['seconds']:6.2f} s (at most {allowed_seconds:.0f})   process "
            f"{result['high_water_bytes'] / 1e6:.0f} MB, of which {result['before_bytes'] / 1e6:.0f} before the call   "
            f"predicted peak {result['peak_bytes'] / 1e9:.2f} GB",
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regex: the cases whose name it finds")
    parser.add_argument("--dtype", default="all", choices=[*DTYPES, AUTOCAST, "all"])
    parser.add_argument("--variant", default=".*", help="regex: the variants whose whole name it matches")
    parser.add_argument("--probe", action="store_true", help="let profile() run each distinct op once for real")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--ghost", metavar="PYTHON", help="hold predictions for cards against fake libraries; see tests/ghost"
    )
    parser.add_argument("--card", nargs="+", default=CARDS, help="with --ghost")
    parser.add_argument(
        "--allocator", nargs="+", default=ALLOCATORS, help="with --ghost: settings of PYTORCH_ALLOC_CONF"
    )
    parser.add_argument(
        "--compiled", action="store_true", help="with --ghost, in an environment with triton: blocks that are compiled"
    )
    parser.add_argument(
        "--all", action="store_true", help="with --ghost: all combinations, instead of every two settings"
    )
    parser.add_argument("--every", type=int, default=1, help="with --ghost: one in so many of them")
    parser.add_argument(
        "--journal", type=Path, help="with --ghost: keep what is compared in this file, and go on where a run was cut"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="some kernels allocate for each")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument(
        "--truth-cache",
        type=Path,
        help="keep truths in this file and do not measure them again; it does not see changes to a case or a transform",
    )
    parser.add_argument("--again", type=Path, help="predict the rows of this result of a card again, without the card")
    parser.add_argument("--truth-only", action="store_true", help="measure, without predicting")
    parser.add_argument("--shapes", action="store_true", help="predict the large Llama shapes, and nothing else")
    parser.add_argument("--shape", choices=SHAPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)

    if options.again:
        document = json.loads(options.again.read_text())
        found = []
        for row in again(document):
            found.append(row)
            print(row, flush=True)
        print("\n" + ", ".join(f"{key} {value:.3g}" for key, value in summary(found).items()))
        return int(any(row.failure for row in found))
    if options.shape:
        print(json.dumps(predict_shape(options.shape)))
        return 0
    about = environment(options.device, "transformers")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    rows: list[Row] = []
    missing: list[str] = []
    unmeasured = 0
    large = shapes(options.threads) if options.shapes else {}
    if not options.shapes:
        print(COLUMNS)
        journal = Journal(options.journal, SOURCES, f"{about['torch']}, transformers {about['transformers']}")
        for found in against_fake_libraries(options, journal) if options.ghost else ():
            print(found, flush=True)
            if isinstance(found, Row):
                rows.append(found)
            else:
                missing.append(found)
        journal.close()
        truths = Truths(options.truth_cache, options.device)
        for case, dtype, variant in () if options.ghost else chosen(options):
            release(options.device)
            try:
                truth = truths.get(case, dtype, variant, options.device)
            except Exception as error:
                unmeasured += 1
                print(f"{case.name:23}{dtype:6}{variant:16}no truth: {described(error)}", flush=True)
                continue
            release(options.device)
            if options.truth_only:
                print(f"{case.name:23}{dtype:6}{variant:16}{truth.peak_bytes / 1e6:10.2f}   {truth.note}", flush=True)
                continue
            rows.append(
                predict(case, dtype, variant, options.device, truth, **({"probe": True} if options.probe else {}))
            )
            print(rows[-1], flush=True)
    if rows:
        print("\n" + ", ".join(f"{key} {value:.3g}" for key, value in summary(rows).items()))
    if options.ghost:
        for group, figures in by_setting(rows).items():
            print(f"{group:28}" + ", ".join(f"{key} {value:.3g}" for key, value in figures.items()))
    if options.json is not None and options.ghost:
        options.json.write_text(json.dumps(ghost_document(about, rows, missing), indent=1) + "\n")
    elif options.json is not None:
        results = [
            {**dataclasses.asdict(row), "error": row.error, "reserved_error": row.reserved_error} for row in rows
        ]
        document = {**about, "probe": options.probe, "summary": summary(rows), "results": results, "shapes": large}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return int(unmeasured > 0 or len(missing) > 0 or any(row.failure for row in rows))


if __name__ == "__main__":
    sys.exit(main())
