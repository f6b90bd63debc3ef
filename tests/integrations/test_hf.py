"""The Trainer of transformers with memscale: the same numbers, and the model wrapped whenever it trains."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import memscale as ms
from tests.support.checks import bits, generators

transformers = pytest.importorskip("transformers", reason="the Trainer is of transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

from memscale.integrations.hf import MemScaleCallback  # noqa: E402

FORCE = ms.Config(force_optimize=True)


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 61, (16,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": tokens, "labels": tokens}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 61, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))


def arguments(folder: Path, **given: Any) -> Any:
    settings = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **{**settings, **given})


def trainer(folder: Path, *, model: Any = None, **given: Any) -> Any:
    callbacks = given.pop("callbacks", None)
    model_init = given.pop("model_init", None)
    return transformers.Trainer(
        model=None if model_init else model or gpt2(),
        model_init=model_init,
        args=arguments(folder, **given),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=callbacks,
    )


def numbers(trained: Any) -> Any:
    """What was logged, parameters and the optimizer's states bit for bit, and the random states."""
    logged = [(each["loss"], each["grad_norm"]) for each in trained.state.log_history if "loss" in each]
    states = trained.optimizer.state_dict()["state"]
    return logged, bits([each.detach() for each in trained.model.parameters()]), bits(states), generators()


def same(a: Any, b: Any) -> bool:
    return len(a[0]) > 0 and a == b


def blocks_that_are_regions(model: nn.Module) -> int:
    return sum("forward" in block.__dict__ for block in model.transformer.h)  # type: ignore[union-attr, attr-defined]


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("how", ["callback", "wrap"])
def test_a_run_gives_the_same_numbers(how: str, accumulate: int, tmp_path: Path) -> None:
    plain = trainer(tmp_path, gradient_accumulation_steps=accumulate)
    plain.train()
    plain.evaluate()
    expected = numbers(plain)
    wrapped = trainer(tmp_path, gradient_accumulation_steps=accumulate, callbacks=[MemScaleCallback(FORCE)])
    if how == "wrap":
        wrapped = ms.wrap(trainer(tmp_path, gradient_accumulation_steps=accumulate), FORCE)
    assert blocks_that_are_regions(wrapped.model) == 2
    wrapped.train()
    wrapped.evaluate()
    assert same(numbers(wrapped), expected)
    assert blocks_that_are_regions(wrapped.model) == 0
    if how == "callback":  # else the Trainer has set it before
        assert wrapped.model.config.use_cache is True


def test_arguments_of_wrap_overrule_the_environment_for_a_trainer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMSCALE_ASYNC_OFFLOAD", "1")
    for asked in (False, None):
        run = ms.wrap(trainer(tmp_path), FORCE, async_offload=asked)
        assert (ms.Executor.of(run.model).runtime is None) is (asked is False)
        ms.detach(run)


def test_accumulated_gradients_count(tmp_path: Path) -> None:
    """They are in memory in the forward of the second pass; at the first call the Trainer's arguments decide."""
    found: list[int] = []

    class Look(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            executor = ms.Executor.of(model)
            assert executor is not None
            found.append(executor.step_bytes)

    for before, after in ((1, 1), (3, 3), (1, 3)):
        run = trainer(tmp_path, max_steps=1, gradient_accumulation_steps=before, callbacks=[Look()])
        ms.wrap(run)
        run.args.gradient_accumulation_steps = after
        run.train()
    once, twice, changed = found
    batch = {name: torch.stack([row[name] for row in (Tokens()[0], Tokens()[1])]) for name in Tokens()[0]}
    more = [
        ms.profile(model := gpt2(), batch, optimizer=torch.optim.AdamW(model.parameters()), **loop).taken_bytes
        for loop in ({"accumulate": 2, "keeps_output": False}, {"keeps_output": False})
    ]
    assert twice - once == more[0] - more[1] > 0
    assert changed == twice


def test_the_model_that_model_init_makes_is_wrapped(tmp_path: Path) -> None:
    made: list[weakref.ref[nn.Module]] = []
    regions: list[int] = []

    def fresh() -> nn.Module:
        model = gpt2()
        made.append(weakref.ref(model))
        return model

    class Look(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
            regions.append(blocks_that_are_regions(model))

    run = trainer(tmp_path, model_init=fresh, max_steps=1, callbacks=[Look()])
    ms.wrap(run, FORCE)
    run.train()
    run.train()
    assert regions == [2, 2]
    gc.collect()
    assert [model() is None for model in made[:-1]] == [True] * (len(made) - 1)


def test_the_plan_is_in_the_state_and_a_resumed_run_tells_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2}
    unbroken = trainer(tmp_path / "plain")
    unbroken.train()
    first = trainer(tmp_path, callbacks=[MemScaleCallback(plan={"transformer.h.*": ms.checkpoint()})], **saves)
    first.train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    kept = state["stateful_callbacks"]["MemScaleCallback"]["attributes"]["plan"]
    assert ms.Plan.from_json(kept) == ms.Plan({"transformer.h.*": ms.checkpoint()})
    assert json.loads((tmp_path / "checkpoint-2" / "config.json").read_text())["use_cache"] is True
    for restores in (False, True):
        settings = {**saves, "restore_callback_states_from_checkpoint": restores}
        again = trainer(tmp_path, callbacks=[MemScaleCallback(plan={"transformer.h.0": ms.checkpoint()})], **settings)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="memscale"):
            again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert all(map(torch.equal, again.model.parameters(), unbroken.model.parameters()))
        assert ("the run that is resumed had another plan" in caplog.text) is not restores
        assert ("of unknown size\npath             numbers  transform\ntransformer.h.*" in caplog.text) is restores


def test_the_logs_have_the_memory_before_those_that_report(tmp_path: Path) -> None:
    reported: list[dict[str, float]] = []

    class Report(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **_: Any) -> None:
            reported.append(dict(logs))

    batch = {key: torch.stack([each[key] for each in map(Tokens().__getitem__, (0, 1))]) for key in Tokens()[0]}
    run = ms.wrap(trainer(tmp_path, max_steps=1, callbacks=[Report()]), ms.Config(), sample_input=batch)
    run.train()
    assert reported[0]["memory/predicted_gib"] > 0


def test_data_parallel_is_refused_and_detach_undoes_wrap(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.args._n_gpu = 2
    with pytest.raises(ms.RuntimeUnavailable, match=r"2 GPUs in one process.*torchrun"):
        ms.wrap(run, FORCE)
    run.args._n_gpu = 0
    before = [dict(module.__dict__) for module in run.model.modules()]
    ms.detach(ms.wrap(run, FORCE))
    assert [dict(module.__dict__) for module in run.model.modules()] == before
    assert not any(isinstance(each, MemScaleCallback) for each in run.callback_handler.callbacks)


@pytest.mark.parametrize("place", ["forward", "recompute", "optimizer"])
def test_a_batch_finder_sees_what_runs_out(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def fails(where: str, rows: int) -> None:
        if where == place and rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    class Model(type(gpt2())):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **rest: Any) -> Any:
            sizes.append(len(input_ids))
            fails("forward", len(input_ids))
            return super().forward(input_ids=input_ids, labels=labels, **rest)

    model = gpt2()
    model.__class__ = Model

    def again(module: nn.Module, args: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # in backward
            fails("recompute", sizes[-1])

    model.transformer.h[0].mlp.register_forward_pre_hook(again)
    run = trainer(tmp_path, model=model, auto_find_batch_size=True, max_steps=1, per_device_train_batch_size=4)
    step = torch.optim.AdamW.step

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        fails("optimizer", sizes[-1])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", stepped)
    ms.wrap(run, FORCE)
    run.train()
    assert run._train_batch_size == 1
    assert (sizes[0], sizes[-1]) == (4, 1)
    assert blocks_that_are_regions(run.model) == 0


class Unscaled(nn.Module):
    """A model that takes no keywords beside its own: the Trainer divides its loss by the passes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = gpt2()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("how", ["kwargs", "none", "function"])
def test_the_loss_is_scaled_as_without(how: str, tmp_path: Path) -> None:
    def mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        return outputs.logits.square().sum() / num_items_in_batch

    found = []
    for wraps in (False, True):
        run = trainer(
            tmp_path, model=Unscaled() if how == "none" else gpt2(), gradient_accumulation_steps=3, max_steps=2
        )
        run.compute_loss_func = mean if how == "function" else None
        if wraps:
            plan = {"**.h.*" if how == "none" else "transformer.h.*": ms.checkpoint()}
            run.add_callback(MemScaleCallback(plan=plan))
            assert run.model_accepts_loss_kwargs is (how != "none")
        run.train()
        found.append(numbers(run))
    assert same(*found)


def test_the_optimizer_of_a_trainer_is_in_8_bits_while_it_trains_and_resumes_to_the_same_numbers(
    tmp_path: Path,
) -> None:
    class Seen(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        types: ClassVar[set[torch.dtype]] = set()

        def on_step_end(self, *_: Any, model: Any = None, optimizer: Any = None, **__: Any) -> None:
            self.types.add(optimizer.state[model.transformer.h[0].mlp.c_fc.weight]["exp_avg"].dtype)

    def run(resume: str | None) -> Any:
        made = trainer(tmp_path, save_strategy="steps", save_steps=2, callbacks=[Seen()])
        ms.wrap(made, ms.Config(force_optimize=True, use_8bit_optimizer=True, enable_logging=False))
        made.train(resume_from_checkpoint=resume)
        return made

    whole = run(None)
    assert Seen.types == {torch.uint8}
    assert type(whole.optimizer.optimizer) is torch.optim.AdamW
    kept = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
    for states in (kept.values(), whole.optimizer.state.values()):
        assert {each["exp_avg"].dtype for each in states} == {torch.float32}
    assert same(numbers(run(str(tmp_path / "checkpoint-2"))), numbers(whole))
