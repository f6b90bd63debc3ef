"""The benchmarks that have a small size run at it, so that they still do where a GPU is there for minutes only."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.deep
def test_bench_offload(tmp_path):
    result = tmp_path / "result.json"
    parts = ("--only", "hooks", "--only", "blocks", "--rounds", "1", "--directory", tmp_path, "--json", result)
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "bench_offload.py", "--quick", *parts],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["failures"] == {}
    assert {row["contender"] for row in found["parts"]["hooks"]} == {"offload", "save_on_cpu"}
    blocks = {row["contender"]: row for row in found["parts"]["blocks"]}
    assert list(blocks) == ["checkpoint", "offload, checkpoint", "torch checkpoint", "save_on_cpu, torch checkpoint"]
    assert blocks["checkpoint"]["inputs_moved"] is None
    assert blocks["checkpoint"]["inputs_freed"] == 0
    assert 0 < blocks["offload, checkpoint"]["inputs_moved"] < 1  # the last ones stay
    assert blocks["offload, checkpoint"]["inputs_freed"] > 0
    for name in ("offload, checkpoint", "save_on_cpu, torch checkpoint"):
        ratio = blocks[name]["step_seconds"] / blocks["checkpoint"]["step_seconds"]
        assert f"{blocks[name]['of_reference']:.6g}" == f"{ratio:.6g}"
    assert f"of checkpoint {blocks['offload, checkpoint']['of_reference']:.3f} (target <= 1.02" in done.stdout
