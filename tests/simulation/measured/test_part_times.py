"""The seconds of a step's parts, by running them: what is one part, which runs count, and what is left alone."""

import json

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.simulation.measured import part_times
from memscale.simulation.measured.part_times import PartTimes

ROWS = torch.ones(32, 64)


@pytest.fixture(autouse=True)
def _nothing_known(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMSCALE_CACHE", str(tmp_path))
    # What counts is tested apart: this machine may be busy.
    monkeypatch.setattr(part_times, "_is_clean", lambda samples: True)


@pytest.fixture
def known(tmp_path):
    """Reads the parts in the cache, each with when it was measured and its seconds."""

    def read():
        (path,) = (tmp_path / "parts").iterdir()
        return json.loads(json.loads(path.read_text())["body"])

    return read


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def profiled(model, batch=ROWS, optimizer=None, **options):
    step = {"loss": lambda y, _: y.square().mean(), "hardware": "cpu", "probe": True} | options
    return ms.profile(model, batch, optimizer=optimizer, **step)


def test_a_step_has_the_seconds_of_its_operators_on_hardware_without_speeds():
    model = nn.Sequential(Block(), Block())
    assert ms.profile(model, ROWS, loss=lambda y, _: y.square().mean(), hardware="cpu").step_seconds is None
    profile = profiled(model)
    operators = profile.schedule.operators
    assert profile.step_seconds == pytest.approx(sum(operator.seconds for operator in operators))
    assert 0 < profile.step_seconds < 1
    assert all(operator.seconds > 0 for operator in operators if operator.name == "aten::addmm")


def test_repeated_blocks_run_once(known):
    profiled(nn.Sequential(*[Block() for _ in range(5)]))
    few = known()
    profiled(nn.Sequential(*[Block() for _ in range(5)], Block()))
    assert known() == few  # the sixth is like the others
    assert len(few) < 5 + 5


def test_measured_seconds_are_cached_for_a_while(known, monkeypatch):
    model = nn.Sequential(Block(), Block())
    profiled(model)
    first = known()
    profiled(model)
    assert known() == first
    monkeypatch.setattr(part_times, "_AGE_SECONDS", 0.0)
    profiled(model)
    assert known() != first


def test_a_busy_machine_keeps_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(part_times, "_is_clean", lambda samples: False)
    monkeypatch.setattr(PartTimes.__init__, "__kwdefaults__", {"budget_seconds": 0.0})
    profile = profiled(nn.Sequential(Block()))
    assert profile.step_seconds is None
    (note,) = profile.notes
    assert "nothing was measured" in note
    assert "probe=True when the machine is quiet" in note
    assert not [path for path in tmp_path.rglob("*.json") if "parts" in str(path)]


def test_the_callers_tensors_and_random_numbers_are_left_alone():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows, state, generator = torch.rand(32, 64), torch.get_rng_state(), torch.Generator().manual_seed(3)
    given, drawn = rows.clone(), generator.get_state()

    def loss(y, _):
        return (y * torch.rand(y.shape, generator=generator)).sum()

    profiled(model, rows, optimizer, loss=loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(generator.get_state(), drawn)
    assert torch.equal(rows, given)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


TOKENS = torch.arange(40).view(4, 10)


@torch.library.custom_op("memscale_part_times::counting", mutates_args=())
def counting(tokens: torch.Tensor) -> torch.Tensor:
    if not torch.equal(tokens, TOKENS):
        raise RuntimeError("not the tokens of the caller")
    return tokens.clone()


@counting.register_fake
def _(tokens):
    return torch.empty_like(tokens)


def test_the_indices_of_the_batch_are_the_callers():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, 8)

        def forward(self, tokens):
            return self.table(counting(tokens))

    assert profiled(Words(), TOKENS).notes == ()


@torch.library.custom_op("memscale_part_times::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        raise RuntimeError("takes no such numbers")
    return x.clone()


@picky.register_fake
def _(x):
    return torch.empty_like(x)


def test_a_part_that_cannot_run_is_named_and_takes_what_the_others_take():
    class Picky(nn.Module):
        def forward(self, x):
            return x + picky(x.detach())

    profile = profiled(nn.Sequential(nn.Linear(64, 64), Picky()))
    assert profile.notes == ("1 could not be measured: RuntimeError: takes no such numbers",)
    (refused,) = [each for each in profile.schedule.operators if "picky" in each.name]
    assert 0 < refused.seconds < profile.step_seconds


def test_a_damaged_cache_is_measured_again(tmp_path, known):
    model = nn.Sequential(Block())
    profiled(model)
    (path,) = (tmp_path / "parts").iterdir()
    entry = json.loads(path.read_text())
    path.write_text(json.dumps(entry | {"body": entry["body"].replace("[", "{")}))
    assert profiled(model).step_seconds > 0
    assert known()
