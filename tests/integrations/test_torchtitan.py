"""torchtitan's policy (case D2), against a stand-in of the part of torchtitan 0.3.0 that it builds on.

torchtitan needs more than the test environment has. The stand-in has the protocol of its
``distributed/activation_checkpoint.py``: a config that builds its policy, ``policy.apply(model)`` and the fields.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import memscale as ms

OWNERS: dict[type, type] = {}  # of the configs


class Policy:
    """As torchtitan's ``ActivationCheckpointing``, with the ``build`` of its ``Configurable``."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        preserve_rng_state: bool = True
        determinism_check: str = "default"
        debug: bool = False

        def build(self, **kwargs: Any) -> Any:
            return OWNERS[type(self)](config=self, **kwargs)

    def __init_subclass__(cls) -> None:
        OWNERS[cls.Config] = cls

    def __init__(self, config: Any, dump_folder: str = "") -> None:
        self.config = config


FILE = "torchtitan.distributed.activation_checkpoint"


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("torchtitan", "torchtitan.distributed", FILE):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[FILE].ActivationCheckpointing = Policy  # type: ignore[attr-defined]
    sys.modules.pop("memscale.integrations.torchtitan", None)
    yield importlib.import_module("memscale.integrations.torchtitan").MemScaleAC
    sys.modules.pop("memscale.integrations.torchtitan", None)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/group")
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.dropout(torch.tanh(self.up(x)), 0.1, self.training))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(at): Block() for at in range(3)})
        self.output = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x)


def trained(config: Any, *, compiles: bool) -> tuple[list[torch.Tensor], list[str], int]:
    """As torchtitan parallelises and trains: policy, compile by block, FSDP, weights, two steps."""
    torch.manual_seed(0)
    weights = Decoder().state_dict()
    with torch.device("meta"):
        model = Decoder()
    if config is not None:
        config.build(dump_folder="").apply(model)
    for layer in model.layers.values():
        if compiles:
            layer.compile(backend="aot_eager")
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        parameter.to_local().detach().copy_(weights[name])  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(1)
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.to_local().clone() for each in model.parameters()], list(model.state_dict()), kept  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")  # the compiler's own, over FSDP
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_a_model_trains_under_the_policy_as_without(policy: Any, group: None, compiles: bool) -> None:
    plain, names, kept = trained(None, compiles=compiles)
    found, found_names, found_kept = trained(policy.Config(), compiles=compiles)
    assert all(map(torch.equal, found, plain))
    assert found_names == names == list(Decoder().state_dict())
    assert compiles or found_kept < kept  # a compiled graph keeps weights, which the hooks count
    if compiles:
        torch._dynamo.reset()


def test_the_plan_comes_from_a_file(policy: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(ms.Plan({"layers.1": ms.checkpoint()}).to_json())
    model = Decoder()
    policy.Config(plan=str(path)).build().apply(model)
    assert ["forward" in layer.__dict__ for layer in model.layers.values()] == [False, True, False]
    ms.detach(model)
    with pytest.raises(ms.PlanError, match=r"none.json.*No such file.*give a file that Plan.save\(\) wrote"):
        policy.Config(plan=str(tmp_path / "none.json")).build().apply(model)


def test_without_torchtitan_the_import_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FILE, None)
    monkeypatch.delitem(sys.modules, "memscale.integrations.torchtitan", raising=False)
    with pytest.raises(ms.RuntimeUnavailable, match="needs torchtitan"):
        importlib.import_module("memscale.integrations.torchtitan")
