"""Lightning's Trainer with memscale: the same numbers, and nothing left on the module, whatever ends the fit."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale as ms

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    lightning = pytest.importorskip("lightning", reason="the Trainer is of Lightning")

from memscale.integrations.lightning import MemScaleCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders and loggers

FORCE = ms.Config(force_optimize=True)


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Calls the net, and has no forward of its own."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.net: Any = None if late else Net()
        self.regions: list[int] = []
        self.fails = False

    def validation_step(self, batch: Any, at: int) -> None:
        self.net(batch[0])

    def training_step(self, batch: Any, at: int) -> torch.Tensor:
        self.regions.append(sum("forward" in layer.__dict__ for layer in self.net.layers))
        if self.fails:
            raise ValueError("of the user's")
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class LateModule(Module):
    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = Net()


def module(kind: type[Module] = Module) -> Module:
    torch.manual_seed(0)
    return kind(late=kind is LateModule)


def loader() -> Any:
    rows = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Any]:
    def make(*callbacks: Any, **given: Any) -> Any:
        quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
        settings = {"max_epochs": 2, "accelerator": "cpu", "default_root_dir": tmp_path, "enable_checkpointing": False}
        return lightning.Trainer(callbacks=list(callbacks), **{**quiet, **settings, **given})

    return make  # type: ignore[return-value]


def fitted(trainer: Any, model: Module) -> list[torch.Tensor]:
    torch.manual_seed(5)
    trainer.fit(model, loader())
    return [parameter.detach().clone() for parameter in model.parameters()]


def is_plain(model: Module) -> bool:
    return not any({"forward", "configure_model"} & set(each.__dict__) for each in model.modules())


@pytest.mark.parametrize("kind", [Module, LateModule])
@pytest.mark.parametrize(
    "given", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}]
)
def test_a_fit_gives_the_same_numbers(kind: type[Module], given: dict[str, Any], trainer: Any) -> None:
    expected = fitted(trainer(**given), module(kind))
    model = module(kind)
    assert all(map(torch.equal, fitted(trainer(MemScaleCallback(FORCE), **given), model), expected))
    assert set(model.regions) == {3}
    assert is_plain(model)


def test_wrap_takes_the_trainer(trainer: Any) -> None:
    model = module()
    wrapped = ms.wrap(trainer(), FORCE)
    ms.wrap(wrapped, FORCE)
    assert sum(isinstance(each, MemScaleCallback) for each in wrapped.callbacks) == 1
    fitted(wrapped, model)
    assert set(model.regions) == {3}
    ms.detach(wrapped)
    assert not any(isinstance(each, MemScaleCallback) for each in wrapped.callbacks)


def test_an_exception_leaves_the_module_as_it_was(trainer: Any) -> None:
    model = module()
    model.fails = True
    with pytest.raises(ValueError, match="of the user's"):
        fitted(trainer(MemScaleCallback(FORCE)), model)
    assert model.regions == [3]
    assert is_plain(model)
    model.fails = False
    assert all(map(torch.equal, fitted(trainer(MemScaleCallback(FORCE)), model), fitted(trainer(), module())))


def test_a_checkpoint_has_the_plan_and_a_resumed_fit_tells_of_another(
    trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = ms.Plan({"layers.*": ms.checkpoint()})
    run = trainer(
        MemScaleCallback(plan=plan), lightning.pytorch.callbacks.ModelCheckpoint(tmp_path), enable_checkpointing=True
    )
    model = module()
    fitted(run, model)
    (path,) = tmp_path.glob("*.ckpt")
    saved = torch.load(path, weights_only=False)
    assert saved["state_dict"].keys() == model.state_dict().keys()
    (kept,) = [state["plan"] for state in saved["callbacks"].values() if "plan" in state]
    assert ms.Plan.from_json(kept) == plan
    for how, warns in (({"layers.0": ms.checkpoint()}, True), (plan, False)):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="memscale"):
            trainer(MemScaleCallback(plan=how), max_epochs=3).fit(
                module(), loader(), ckpt_path=path, weights_only=False
            )
        assert ("the run that is resumed had another plan" in caplog.text) is warns


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_the_trials_of_a_batch_size_finder_run_wrapped(late: bool, place: int, trainer: Any) -> None:
    class Sized(LateModule if late else Module):  # type: ignore[misc]
        batch_size = 2

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(loader().dataset, batch_size=self.batch_size)

        val_dataloader = train_dataloader

    torch.manual_seed(0)
    model = Sized(late=late)
    callbacks = [lightning.pytorch.callbacks.BatchSizeFinder(max_trials=1, steps_per_trial=1)]
    callbacks.insert(place, MemScaleCallback(FORCE))
    trainer(*callbacks, max_epochs=1).fit(model)
    assert set(model.regions) == {3}
    assert is_plain(model)


def test_what_ends_a_fit_detaches(trainer: Any) -> None:
    model = module()
    callback = MemScaleCallback(FORCE)

    class Stop(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer(callback, Stop()).fit(model, loader())
    assert is_plain(model)
    averaging = lightning.pytorch.callbacks.WeightAveraging(device="cpu")
    run = trainer(callback, averaging, max_epochs=1)
    run.fit(model, loader())
    run.fit_loop.max_epochs = 2
    run.fit(model, loader())
    run.validate(model, loader(), verbose=False)
    assert is_plain(model)
    assert set(model.regions) == {3}


def test_loggers_get_the_memory_at_logging_steps(trainer: Any, tmp_path: Path) -> None:
    class Kept(lightning.pytorch.loggers.CSVLogger):  # type: ignore[misc, name-defined]
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            kept.append((step, dict(metrics)))

    kept: list[tuple[int, dict[str, float]]] = []
    rows = next(iter(loader()))[0]
    # Planned, since only then something is predicted.
    callback = MemScaleCallback(ms.Config(enable_logging=False), sample_input=rows)
    trainer(callback, logger=Kept(tmp_path), log_every_n_steps=2).fit(module(), loader())
    found = {step: metrics for step, metrics in kept if "memory/predicted_gib" in metrics}
    assert set(found) == {2, 4, 6}
    assert all(metrics["memory/predicted_gib"] > 0 for metrics in found.values())
