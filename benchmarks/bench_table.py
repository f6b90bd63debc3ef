"""The table of `python -m memscale.benchmarks`, trained on a card: peaks and times beside what was simulated for it.

Each row is trained as it is and as each of its columns says. The truth is `torch.cuda.max_memory_allocated` of steps
after the second, the most that was reserved by then, and the median of timed steps.

    python -m memscale.benchmarks --device h100 --output FILE   # on any machine, `table.json` below; then, on the card,
    python benchmarks/bench_table.py table.json [--models "GPT-2,Llama-8B"] [--steps 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from _environment import environment
from _truth import WARM_STEPS, described, median_seconds, release

import memscale as ms
from memscale.benchmarks.columns import plans
from memscale.benchmarks.subjects import TableSubject, chosen


def trained(subject: TableSubject, simulated: dict[str, Any], steps: int) -> dict[str, Any]:
    """What steps take that are as one cell of the table says."""
    release("cuda")
    held_bytes = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = subject.make().to(getattr(torch, simulated["dtype"]))
    plan = plans(model, subject)[simulated["how"]] if "how" in simulated else ms.Plan({})
    if "params" in repr(plan):  # such a model is never on the device as a whole
        model = model.cpu()
    release("cuda")
    # The batch is on the device as long as it is simulated to be: all of the step.
    batch = {name: torch.randint(1000, ids.shape, device="cuda") for name, ids in subject.inputs().items()}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    runs, optimizer = ms.transform(model, plan, optimizer=torch.optim.AdamW(parameters, lr=1e-4))
    runs = runs.to("cuda")

    def step() -> None:
        runs(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(WARM_STEPS):
        step()
    torch.cuda.reset_peak_memory_stats()
    seconds = median_seconds(step, steps)
    return {
        "peak_bytes": torch.cuda.max_memory_allocated() - held_bytes,
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "step_seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="what `python -m memscale.benchmarks --output` wrote for this card")
    parser.add_argument("--models", help="beginnings of titles, separated by commas")
    parser.add_argument("--columns", help="titles of columns, separated by commas; 'as it is' is one")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    about = environment("cuda", "transformers")
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    subjects = {each.title: each for each in chosen(options.models, None)}
    rows: list[dict[str, Any]] = []
    for row in json.loads(options.table.read_text())["rows"]:
        cells = {"as it is": row["plain"], **row["columns"]} if row["title"] in subjects else {}
        for title, simulated in cells.items():
            if options.columns is not None and title not in options.columns.split(","):
                continue
            line = f"{row['title']:22}{title:14}"
            if not simulated["fits"]:
                print(f"{line}does not fit", flush=True)
                continue
            found = {"model": row["title"], "column": title, "simulated": simulated}
            try:
                found["real"] = real = trained(subjects[row["title"]], simulated, options.steps)
            except Exception as error:
                found["failure"] = described(error)
                print(f"{line}failed: {found['failure']}", flush=True)
            else:
                print(line + compared(simulated, real, row["published_bytes"]), flush=True)
            rows.append(found)
            if options.json:
                options.json.write_text(json.dumps({**about, "rows": rows}, indent=1))


def compared(simulated: dict[str, Any], real: dict[str, Any], published_bytes: int | None) -> str:
    """The figures of the card, each with what was said of it."""

    def off(key: str) -> str:
        return f"{real[key] / 1e9:8.3f} GB, predicted {100 * (simulated[key] / real[key] - 1):+7.3f} %"

    line = f"{off('peak_bytes')}   reserved {off('reserved_bytes')}   step {1e3 * real['step_seconds']:8.1f} ms, "
    line += f"predicted of it {simulated['step_seconds'] / real['step_seconds']:.3f}"
    return line if published_bytes is None else f"{line}   of published {real['peak_bytes'] / published_bytes:.2f}"


if __name__ == "__main__":
    main()
