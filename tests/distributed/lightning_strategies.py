"""Lightning's strategies over two processes, DDP and FSDP2 by ModelParallelStrategy, with and without memscale."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

import memscale as ms
from tests.support.coverings import DEEP

# The strategy, whether layers are made late on `meta`, and the module that no batch uses.
CASES = {
    **({"ddp": {"strategy": "ddp", "late": False, "spare": False}} if DEEP else {}),
    "ddp, some unused": {"strategy": "ddp_find_unused_parameters_true", "late": False, "spare": True},
    "model parallel": {"strategy": "fsdp2", "late": True, "spare": False},
}


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def module(late: bool, spare: bool) -> Any:
    import lightning

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([block() for _ in range(3)])
            self.spare = nn.Linear(8, 8) if spare else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None if late else Net()
            self.losses: list[float] = []
            self.regions = 0

        def configure_model(self) -> None:
            if self.net is None:
                from torch.distributed.fsdp import fully_shard

                self.net = Net()
                for layer in self.net.layers:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, at: int) -> torch.Tensor:
            self.regions = sum("forward" in layer.__dict__ for layer in self.net.layers)
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


def losses(case: str, wrapped: bool, folder: str) -> list[float]:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    from memscale.integrations.lightning import MemScaleCallback

    settings = CASES[case]
    torch.manual_seed(0)
    made = module(settings["late"], settings["spare"])
    plan = {"layers.*": ms.checkpoint()}
    strategy = (
        ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        if settings["strategy"] == "fsdp2"
        else settings["strategy"]
    )
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[MemScaleCallback(plan=plan)] if wrapped else [],
    )
    trainer.fit(made, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2))
    assert made.regions == (3 if wrapped else 0)
    found: list[float] = made.losses
    return found


def run(rank: int, folder: str) -> dict[str, object]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return {case: [losses(case, wrapped, folder) for wrapped in (False, True)] for case in CASES}
