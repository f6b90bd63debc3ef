"""What the host of an H100 is taken to need for a step's calls, against what it took for those of small models."""

import json
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.hardware import Hardware, host_calls
from memscale.hardware.call_seconds import _Block, _Counting
from memscale.simulation.rules.work import work_of

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


def test_the_measurement_counts_as_launches_what_has_work():
    found = {True: 0, False: 0}

    class Works(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **(kwargs or {}))
            work = work_of(op, args, kwargs or {}, result)
            found[bool(work.flops or work.nbytes)] += 1
            return result

    with Works(), _Counting() as counted:
        _Block(8)(torch.ones(2, 4, 8, requires_grad=True)).sum().backward()
    assert (counted.operators, counted.views) == (found[True], found[False])
    assert min(found.values()) > 30
