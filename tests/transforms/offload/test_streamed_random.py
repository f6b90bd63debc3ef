"""Streamed parameters on a device that is as unkind as it may be."""

import os

import pytest

from tests.support.streaming import run_case

pytestmark = pytest.mark.filterwarnings(r"ignore:offload\(\) keeps a tensor:RuntimeWarning")
CHUNK, CHUNKS = 50, 400 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 1


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_models_on_random_devices(chunk):
    """50 cases, 20 000 under the deep profile: bitwise the results of PyTorch, no hazard, no leak."""
    streamed = 0
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        hazards, in_bytes = run_case(seed)
        assert hazards == [], f"case {seed}"
        streamed += in_bytes > 0
    assert streamed > CHUNK // 2
