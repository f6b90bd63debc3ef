"""Compiled modules in a simulated step: as the graphs that AOTAutograd hands to a compiler, or as written."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.simulation.sandbox import compiled_modules

# `torch.compile` says so when it loads its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")

ROWS, WIDTH = 64, 1024
TENSOR = 4 * ROWS * WIDTH


class Wave(nn.Module):
    """Two operators a round, each of which keeps its argument."""

    def forward(self, x):
        for _ in range(6):
            x = x.sin() + x.cos()
        return x


class Waves(nn.Module):
    def __init__(self, part=Wave, compiles=True):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.waves = nn.ModuleList(part() for _ in range(4))
        for wave in self.waves if compiles else ():
            wave.compile()

    def forward(self, x):
        x = self.first(x)
        for wave in self.waves:
            x = wave(x)
        return x


def profiled(model):
    return ms.profile(model, torch.randn(ROWS, WIDTH), loss=lambda out, batch: out.mean(), hardware="h100")


@pytest.mark.deep  # it loads PyTorch's compiler: 2 s
def test_a_compiled_block_keeps_what_its_graph_keeps():
    """Its one kernel makes again in backward what lies between. An H100's caching allocator has the same 11 fewer."""
    written, compiled = profiled(Waves(compiles=False)), profiled(Waves())
    assert (written.peak_bytes - compiled.peak_bytes) // TENSOR in (10, 11)
    (note,) = compiled.notes
    assert note.startswith("4 modules are compiled, and simulated as the graphs that AOTAutograd hands to a compiler")


class Region(nn.Module):
    def __init__(self):
        super().__init__()
        self.wave = Wave()

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.wave, x, use_reentrant=False)


@pytest.mark.deep  # likewise
def test_a_compiled_block_that_recomputes_runs_as_written():
    (note,) = profiled(Waves(Region)).notes
    assert note.startswith("4 modules are compiled, and simulated as written (a region inside the compiled module")
    assert profiled(Waves(Region)).peak_bytes == profiled(Waves(Region, compiles=False)).peak_bytes


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("expected stride 24")


def test_an_error_of_a_graph_as_it_runs_is_the_error_of_the_step(monkeypatch):
    monkeypatch.setattr(compiled_modules._Program, "__init__", lambda self, *made_of: None)
    monkeypatch.setattr(compiled_modules._Program, "__call__", lambda self, tensors: FailsInBackward.apply(tensors[-1]))
    with pytest.raises(ms.MemscaleError, match="AssertionError: expected stride 24"):
        profiled(Waves())


def test_the_steps_of_a_planner_trace_a_module_once_as_long_as_it_is_what_it_was(monkeypatch):
    traced = []
    monkeypatch.setattr(compiled_modules._Program, "__init__", lambda self, module, *of: traced.append(module))
    monkeypatch.setattr(compiled_modules._Program, "__call__", lambda self, tensors: tensors[-1].sin())
    model = Waves()
    step = {"loss": lambda out, batch: out.mean(), "hardware": "h100"}
    steps = ms.DecisionEngine(model, torch.randn(ROWS, WIDTH), **step).steps
    numbers = [len(traced)]
    for rules in ((), (("first", ms.checkpoint()),), (("waves.0", ms.cast()),), (("waves.0", ms.cast()),)):
        steps.simulate(rules, True)
        numbers.append(len(traced))
    model.waves[1].rounds = 3
    steps.simulate((), True)
    assert [*numbers, len(traced)] == [4, 4, 4, 5, 6, 7]


@pytest.mark.deep  # it loads PyTorch's compiler: 2 s
def test_a_mask_for_backward_is_made_where_its_operand_is_read():
    """A graph lists the masks of all ReLUs at its end; a kernel there would keep what each product made."""
    layers = [(nn.Linear(32, 32), nn.ReLU(), nn.Dropout()) for _ in range(8)]
    model = nn.Sequential(*(layer for three in layers for layer in three))
    rows = torch.randn(1 << 16, 32)

    def peak_bytes(model):
        return ms.profile(model, rows, loss=lambda out, batch: out.mean(), hardware="h100").peak_bytes

    assert round((peak_bytes(model) - peak_bytes(torch.compile(model))) / rows.nbytes) == 6  # 1, if products were kept
