"""A recording of PyTorch's profiler goes on around a simulation, which runs kernels to see what they allocate."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import memscale as ms
from memscale.simulation.measured import part_times

SETTINGS = {"activities": [ProfilerActivity.CPU], "profile_memory": True, "acc_events": True}


@pytest.fixture(autouse=True)
def _nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSCALE_CACHE", str(tmp_path))
    monkeypatch.setattr(part_times, "_is_clean", lambda samples: True)  # a busy machine measures, too


def convolutions(width: int) -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(width * 100, 1)).to(torch.bfloat16)


def images(width: int) -> torch.Tensor:
    return torch.randn(4, width, 10, 10, dtype=torch.bfloat16)


@contextmanager
def recorded() -> Iterator[None]:
    """Checks that operators before the body and after it are in one recording."""
    with profile(**SETTINGS) as recording:
        torch.ones(1234)
        yield
        torch.ones(4321)
    assert sum(event.name == "aten::ones" for event in recording.events()) >= 2


@pytest.mark.parametrize("probe", [False, True])
def test_a_prediction_is_that_without_a_profiler(probe: bool) -> None:
    def peak_bytes() -> int:
        return ms.profile(convolutions(7), images(7), loss=lambda y, _: y.sum(), probe=probe).peak_bytes

    with recorded():
        found = peak_bytes()
    assert found == peak_bytes()


def test_the_first_call_of_a_wrapped_model_plans() -> None:
    with recorded():
        # What a convolution in bfloat16 needs besides its result differs by CPU.
        plain = ms.profile(convolutions(5), images(5), loss=lambda y, _: y.sum())
        model = ms.wrap(convolutions(5), ms.Config(enable_logging=False), budget=int(0.95 * plain.taken_bytes))
        model(images(5)).sum().backward()
    executor = ms.Executor.of(model)
    assert executor is not None
    assert executor.profile is not None
    assert executor.plan


def test_a_measurement_is_refused() -> None:
    with recorded(), pytest.raises(ms.RuntimeUnavailable, match="already records this thread"):
        ms.measure(lambda: torch.ones(1))
