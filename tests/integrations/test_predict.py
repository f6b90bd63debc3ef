"""What a Trainer's step takes, and how large its batches can be, before it runs (cases F2, F3)."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memscale as ms

transformers = pytest.importorskip("transformers", reason="the Trainer is of transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

from memscale.integrations.hf import find_batch_size, predict  # noqa: E402
from memscale.integrations.trainer_step import step_of  # noqa: E402
from tests.support.coverings import DEEP  # noqa: E402
from tests.support.models import own_checkpointing  # noqa: E402

LENGTHS = (9, 64, 12, 64, 7, 64, 64, 30)


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, lengths: tuple[int, ...] = (64,) * 48) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(1, 61, (self.lengths[at],), generator=torch.Generator().manual_seed(at))
        return {"input_ids": tokens, "labels": tokens}


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return map(Rows().__getitem__, range(16))


def trainer(folder: Path, data: Any = None, *, collate: Any = None, layers: int = 1, **given: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": 64, "n_head": 2, "vocab_size": 61, "n_positions": 64}
    settings = {"max_steps": 2, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    settings = {"output_dir": str(folder), "per_device_train_batch_size": 4, **settings, **given}
    return transformers.Trainer(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)),
        transformers.TrainingArguments(**settings),
        train_dataset=data if data is not None else Rows(),
        data_collator=collate,
    )


def padded(rows: Any) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    cells = torch.stack([torch.nn.functional.pad(row["input_ids"], (0, width - len(row["input_ids"]))) for row in rows])
    return {"input_ids": cells, "labels": cells.clone()}


def real_peak_bytes(run: Any) -> int:
    held = (*run.model.parameters(), *run.model.buffers())  # GPT-2 of transformers 4.50 has a mask for each layer
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in held}
    with contextlib.redirect_stdout(io.StringIO()):
        return ms.measure(run.train).growth_bytes + sum(storage.nbytes() for storage in storages.values())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed, accumulated, smoothed": {"bf16": True, "gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1},
    "another optimizer, and recomputing itself": {"optim": "adafactor", own_checkpointing(): True},
}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_a_prediction_is_what_the_run_takes(given: dict[str, Any], tmp_path: Path) -> None:
    run = trainer(tmp_path, **given)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    before = [dict(module.__dict__) for module in run.model.modules()]
    found = predict(run, recommend=False)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    for module, attributes in zip(run.model.modules(), before, strict=True):
        added = module.__dict__.keys() - attributes.keys()
        assert all("gradient_checkpointing" in name or "_require_grads_hook" in name for name in added)
    assert run.optimizer is None
    # What is not in it is the one batch that accelerate reads ahead; before transformers 5 a Trainer has one more.
    more = 0 if own_checkpointing().startswith("activation") else run.args.train_batch_size * 64 * 2 * 8
    assert 0 <= (real_peak_bytes(run) - more) / found.peak_bytes - 1 < 0.005
    assert any("evaluation" in note for note in found.notes)


def test_the_longest_rows_count(tmp_path: Path) -> None:
    mixed = trainer(tmp_path, Rows(LENGTHS), collate=padded)
    assert predict(mixed, recommend=False).peak_bytes == predict(trainer(tmp_path), recommend=False).peak_bytes
    short = padded([Rows(LENGTHS)[at] for at in (0, 2, 4)])
    assert predict(mixed, batch=short, recommend=False).peak_bytes < predict(mixed, recommend=False).peak_bytes


@pytest.mark.deep
def test_a_plan_that_is_recommended_fits_the_trainers_model(tmp_path: Path) -> None:
    run = trainer(tmp_path, layers=2, bf16=True)
    found = predict(run, budget="4MiB")
    plan = next(each.plan for each in found.recommendations if each.plan is not None)
    assert not found.fits
    ms.transform(run.model, plan)


def test_the_batch_size_fits_and_one_more_row_does_not(tmp_path: Path) -> None:
    run = trainer(tmp_path, gradient_accumulation_steps=6)
    found = find_batch_size(run, budget="5MiB", apply=True)
    assert found.per_device * found.accumulation == 24
    assert found.largest.peak_bytes <= 5 * 2**20 < found.largest.next_peak_bytes
    assert (run.args.per_device_train_batch_size, run.args.gradient_accumulation_steps) == (
        found.per_device,
        found.accumulation,
    )
    assert real_peak_bytes(run) <= 5 * 2**20 * 1.005
    whole = find_batch_size(run, budget="1GiB")
    assert (whole.per_device, whole.accumulation) == (24, 1)
    if DEEP:
        free = find_batch_size(run, budget="6MiB", keep_global_batch=False)
        assert free.per_device == free.largest.n
        assert free.largest.peak_bytes <= 6 * 2**20 < free.largest.next_peak_bytes


def test_a_model_in_place_of_a_trainer_is_told_of_the_predictor() -> None:
    for verb in (predict, find_batch_size):
        with pytest.raises(ms.ConfigError, match=r"takes a Trainer of transformers, got Linear; .*OOMPredictor\(model"):
            verb(torch.nn.Linear(2, 2))


def test_what_cannot_be_asked_says_why(tmp_path: Path) -> None:
    streamed = predict(trainer(tmp_path, Stream()), recommend=False)
    assert any("first 4 rows" in note for note in streamed.notes)
    with pytest.raises(ms.BudgetError, match=r"does not fit|not even"):
        find_batch_size(trainer(tmp_path), budget="1MiB")
    empty = trainer(tmp_path)
    empty.train_dataset = None
    with pytest.raises(ms.ConfigError, match="no train_dataset"):
        predict(empty)
    with pytest.raises(ms.ConfigError, match=r"keep_global_batch=1"):
        find_batch_size(trainer(tmp_path), keep_global_batch=1)  # type: ignore[arg-type]

    class Twice(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> torch.Tensor:
            return model(**inputs).loss + model(**inputs).loss

    twice = trainer(tmp_path)
    twice.__class__ = Twice
    with pytest.raises(ms.MemscaleError, match=r"calls its model 2 times"):
        predict(twice)


def test_lengths_in_the_order_of_training_are_replayed(tmp_path):
    given = {"per_device_train_batch_size": 2, "seed": 3, "layers": 2}
    made = trainer(tmp_path, Rows((9, 64, 12, 40, 7, 33, 64, 30) * 4), collate=padded, **given)
    one, over = predict(made, hardware="t4"), predict(made, hardware="t4", steps=4)
    assert over.profile.peak_bytes == one.profile.peak_bytes  # of the longest rows
    assert over.peak_bytes >= one.peak_bytes
    assert "over 5 steps the allocator reserves" in "".join(over.notes)
    # What is simulated is what training begins with: the same batches, in the same order.
    seen = []
    made.model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].shape), with_kwargs=True)
    with step_of(made) as step:
        expected = [batch["input_ids"].shape for batch in step.batches(2)]
    made.train()
    assert seen == expected
    assert len({shape[1] for shape in seen}) > 1


def test_steps_of_a_stream(tmp_path):
    assert predict(trainer(tmp_path, Stream()), hardware="t4", steps=3).notes


@pytest.mark.parametrize(
    ("given", "message"), [({"steps": 0}, "at least 1"), ({"steps": 2, "batch": {}}, "one of the two")]
)
def test_unusable_steps_are_refused(tmp_path, given, message):
    with pytest.raises(ms.ConfigError, match=message):
        predict(trainer(tmp_path), **given)
