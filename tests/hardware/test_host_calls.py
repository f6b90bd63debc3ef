"""What the host of an H100 is taken to need for a step's calls, against what it took for those of small models."""

import json
import statistics
from pathlib import Path

import pytest

from memscale.hardware import Hardware, host_calls

ROWS = json.loads((Path(__file__).parents[2] / "benchmarks/results/host-calls-h100.json").read_text())["rows"]
# Of cuDNN's recurrences the host hands over every step of the sequence; Mamba's scan here is a thousand operators.
APART = {"lstm", "gru", "mamba"}
BESIDE_A_BUSY_CARD = 1.2


@pytest.mark.parametrize("variant", ["plain", "checkpoint", "policy", "offload", "checkpoint+offload", "cast"])
def test_calls_take_what_they_took_in_the_median(variant):
    costs = host_calls(Hardware.named("h100"))._asdict()
    ratios = []
    for row in ROWS:
        if row["variant"] == variant and row["model"] not in APART:
            said = sum(count * costs[kind] for kind, count in row["calls"].items()) / BESIDE_A_BUSY_CARD
            ratios.append(said / (row["forward"] + row["backward"]))
    assert len(ratios) >= 6
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.1)
