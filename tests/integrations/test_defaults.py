"""Every integration as its docs say it, with defaults, in each precision, for steps that fit and steps that do not.

`force_optimize=True` decides before the first call; with defaults the first call does, inside whatever the framework
has put around the model by then.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.legacy import executor as executor_module
from memscale.legacy.decide import Verdict
from tests.support.checks import bits
from tests.support.coverings import in_turn
from tests.support.models import own_checkpointing

accelerate = pytest.importorskip("accelerate", reason="one of the frameworks")
transformers = pytest.importorskip("transformers", reason="one of the frameworks")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning", reason="one of the frameworks")
    from memscale.integrations import hf
    from memscale.integrations import lightning as for_lightning

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS = 256
Config = ms.Config | None


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(2)]
    )


def batches() -> list[torch.Tensor]:
    return [torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(at)) for at in range(3)]


def plain_loop(precision: str, config: Config, wraps: bool) -> nn.Module:
    model = blocks()
    if wraps:
        ms.wrap(model, config)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    dtype = DTYPES[precision]
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(batch).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


def accelerate_loop(precision: str, config: Config, wraps: bool, *, first: bool = True) -> nn.Module:
    mixed = "no" if precision == "fp32" else precision
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed)
    accelerator.native_amp = precision != "fp32"  # as where there is a GPU, which alone gets it in fp16
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(ms.wrap(model, config) if wraps and first else model, optimizer)
    if wraps and not first:
        ms.wrap(model, config)
    for batch in batches():
        optimizer.zero_grad()
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
    return model if first else accelerator.unwrap_model(model)


def accelerate_wrapped_after(precision: str, config: Config, wraps: bool) -> nn.Module:
    return accelerate_loop(precision, config, wraps, first=False)


def fabric_loop(precision: str, config: Config, wraps: bool) -> nn.Module:
    names = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-true"}
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=names[precision])
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    inside = model
    model, optimizer = fabric.setup(ms.wrap(model, config) if wraps else model, optimizer)
    for batch in batches():
        optimizer.zero_grad()
        fabric.backward(model(batch).square().mean())
        optimizer.step()
    return inside


class Regression(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.net = blocks()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def lightning_fit(precision: str, config: Config, wraps: bool, how: str = "callback") -> nn.Module:
    names = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-true"}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        precision=names[precision],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[for_lightning.MemScaleCallback(config)] if wraps and how == "callback" else [],
    )
    if wraps and how == "wrap":
        ms.wrap(trainer, config)
    module = Regression()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how many workers its loader should have
        loader = torch.utils.data.DataLoader(torch.cat(batches()), batch_size=ROWS)
        trainer.fit(module, loader)
    return module.net


def lightning_wrapped(precision: str, config: Config, wraps: bool) -> nn.Module:
    return lightning_fit(precision, config, wraps, "wrap")


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 61, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def rows() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 61, (24, 32), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


FOLDER: list[Path] = []


def trainer(precision: str, config: Config, wraps: bool, how: str = "callback", **given: Any) -> nn.Module:
    accelerate.state.AcceleratorState._reset_state(True)
    settings = {"bf16": precision == "bf16", "use_cpu": True, "max_steps": 3, "per_device_train_batch_size": 8}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no", "seed": 1}
    run = transformers.Trainer(
        model=gpt2(),
        args=transformers.TrainingArguments(output_dir=str(FOLDER[-1]), **{**settings, **quiet, **given}),
        train_dataset=rows(),
        callbacks=[hf.MemScaleCallback(config)] if wraps and how == "callback" else [],
    )
    if wraps and how == "wrap":
        ms.wrap(run, config)
    with contextlib.redirect_stdout(None):
        run.train()
    model: nn.Module = run.model
    return model


def trainer_wrapped(precision: str, config: Config, wraps: bool, **given: Any) -> nn.Module:
    return trainer(precision, config, wraps, "wrap", **given)


Train = Callable[[str, Config, bool], nn.Module]
ALL: list[Train] = [
    plain_loop,
    accelerate_loop,
    accelerate_wrapped_after,
    fabric_loop,
    lightning_fit,
    lightning_wrapped,
    trainer,
    trainer_wrapped,
]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path) -> Iterator[None]:
    FOLDER.append(tmp_path)
    accelerate.state.AcceleratorState._reset_state(True)
    yield
    accelerate.state.AcceleratorState._reset_state(True)


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    found: list[Verdict] = []
    decide = executor_module.decide

    def noted(*args: Any, **kwargs: Any) -> Verdict:
        found.append(decide(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(executor_module, "decide", noted)
    return found


def numbers(model: nn.Module) -> Any:
    assert not torch.is_autocast_enabled("cpu")
    return bits([parameter.detach() for parameter in model.parameters()])


# A fit by the callback and one that is wrapped differ in who calls `wrap`, which the others show.
AGAIN = (lightning_wrapped, trainer)


@pytest.mark.parametrize(
    ("train", "precision"),
    [pytest.param(*case, marks=[pytest.mark.deep] * (case[0] in AGAIN)) for case in in_turn(ALL, DTYPES)],
)
def test_defaults_give_the_same_numbers(
    train: Train, precision: str, verdicts: list[Verdict], caplog: pytest.LogCaptureFixture
) -> None:
    if precision == "fp16" and train in (trainer, trainer_wrapped):
        pytest.skip("TrainingArguments(fp16=True) needs a GPU; accelerate, which does it, is tested")
    expected = numbers(train(precision, None, False))
    config: Config = None  # the default: it fits
    for fits in (True, False):
        verdicts.clear()
        with caplog.at_level(logging.INFO, logger="memscale"):
            model = train(precision, config, True)
        assert numbers(model) == expected
        assert len(verdicts) == 1  # at the first call
        assert bool(verdicts[0].plan) is not fits
        if executor := getattr(model, "_memscale_executor", None):
            assert bool(executor.regions_that_ran) is not fits
            ms.detach(model)
        assert not [
            each.getMessage() for each in caplog.records if each.name == "memscale" and each.levelno > logging.INFO
        ]
        assert not [name for each in model.modules() for name in vars(each) if "memscale" in name]
        config = ms.Config(target_gpu_utilization=0.9 * verdicts[0].step_bytes / ms.Hardware.detect().memory_bytes)


@pytest.mark.parametrize(
    ("train", "precision"), [pytest.param(trainer, "fp32", marks=pytest.mark.deep), (trainer_wrapped, "bf16")]
)
def test_its_own_checkpointing_is_off_where_a_plan_recomputes(
    train: Callable[..., nn.Module], precision: str, verdicts: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Look(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            flags.append(getattr(model, f"is_{own}"))

    own, flags = own_checkpointing(), list[bool]()
    monkeypatch.setattr(transformers.trainer, "DEFAULT_CALLBACKS", [*transformers.trainer.DEFAULT_CALLBACKS, Look])
    expected = numbers(train(precision, None, False, **{own: True}))
    assert flags == [True] * 3
    for config in (None, ms.Config(force_optimize=True)):
        flags.clear()
        model = train(precision, config, True, **{own: True})
        assert numbers(model) == expected
        assert flags == [config is None] * 3
        assert getattr(model, f"is_{own}")  # as the Trainer left it
