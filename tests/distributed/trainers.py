"""The Trainer of transformers over two processes, by DDP, with passes that are not averaged."""

from __future__ import annotations

import os
from typing import Any

import torch

import memscale as ms
from tests.support.coverings import DEEP

# Whether unused parameters are looked for: as the Trainer chooses, which does for a model like this one, or not.
CASES = {"looks for unused": None, **({"looks for none": False} if DEEP else {})}


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 61, (16,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": tokens, "labels": tokens}


def numbers(wraps: bool, looks: bool | None, folder: str) -> tuple[Any, ...]:
    """Losses, parameters, states of the optimizer, and the random state, of a run."""
    import transformers

    transformers.set_seed(0)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 61, "n_positions": 16}
    arguments = transformers.TrainingArguments(
        folder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=looks,
    )
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)),
        arguments,
        train_dataset=Tokens(),
    )
    if wraps:
        ms.wrap(trainer, ms.Config(force_optimize=True, enable_logging=False))
        assert len(trainer.model._memscale_executor.regions) == 2
    trainer.train()
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    losses = [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]
    states = trainer.optimizer.state_dict()["state"]
    return losses, [each.detach() for each in trainer.model.parameters()], states, torch.get_rng_state()


def run(rank: int, folder: str) -> dict[str, Any]:
    """What each case gives without and with memscale."""
    os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # which accelerate looks for
    return {case: [numbers(wraps, looks, folder) for wraps in (False, True)] for case, looks in CASES.items()}
