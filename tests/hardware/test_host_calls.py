"""What the host of an H100 is taken to need for a step's calls, against what it took for those of small models."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from memscale.hardware import Hardware, host_calls

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
ROWS = json.loads((RESULTS / "host-calls-h100.json").read_text())["rows"]
# Of cuDNN's recurrences the host hands over every step of the sequence; Mamba's scan here is a thousand operators.
APART = {"lstm", "gru", "mamba"}
BESIDE_A_BUSY_CARD = 1.2


def said_over_real(row):
    costs = host_calls(Hardware.named("h100"))._asdict()
    return sum(count * costs[kind] for kind, count in row["calls"].items()) / (row["forward"] + row["backward"])


@pytest.mark.parametrize("variant", ["plain", "checkpoint", "offload", "checkpoint+offload", "cast"])
def test_calls_take_what_they_took_in_the_median(variant):
    rows = [row for row in ROWS if row["variant"] == variant and row["model"] not in APART]
    assert len(rows) >= 6
    ratios = [said_over_real(row) / BESIDE_A_BUSY_CARD for row in rows]
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.1)


def test_a_policy_takes_what_it_took_beside_checkpoint():
    """On another machine's host, without a card: as many times the step with `checkpoint()` as is said."""
    found = defaultdict(dict)
    for row in json.loads((RESULTS / "host-calls-fake-cuda.json").read_text())["rows"]:
        found[row["model"]][row["variant"]] = said_over_real(row)
        assert (row["calls"].get("watched", 0) > 0) == (row["variant"] == "policy")
    assert len(found) >= 6
    ratios = [each["policy"] / each["checkpoint"] for each in found.values()]
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.1)
