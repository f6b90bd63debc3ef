"""The training of ``memscale demo``: a GPT-2-shaped model on the source text of the standard library."""

from __future__ import annotations

import functools
import hashlib
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import optree
import torch
from torch import nn

import memscale as ms
from memscale.core import RuntimeUnavailable

if TYPE_CHECKING:
    from memscale.simulation.measured import AllocatorTrace

HEAD_WIDTH = 64  # as in GPT-2
MAX_SEQ = 1024  # as in GPT-2
_SEED = 20
_LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Job:
    """A training job. Equal jobs have equal batches, weights and dropout masks.

    Args:
        steps: optimizer steps. The first warms up, the last is measured, those between are timed.
        layers: transformer blocks.
        width: hidden size, a multiple of :data:`HEAD_WIDTH`.
        batch: rows of text in a step.
        seq: bytes of text in a row.
        device: the device of the training.
    """

    steps: int
    layers: int
    width: int
    batch: int
    seq: int
    device: torch.device


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """The results of one job.

    Args:
        losses: the loss of every step.
        step_seconds: median wall time of the steps except the first and the last.
        trace: the last step's memory.
        digests: hashes of the results that must be equal bit for bit, by name.
    """

    losses: list[float]
    step_seconds: float
    trace: AllocatorTrace
    digests: dict[str, str]


def read_text() -> torch.Tensor:
    """Returns the source of the standard library as one uint8 tensor of bytes, in the order of file names.

    Raises:
        RuntimeUnavailable: this Python has no sources, as a frozen one.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) <= MAX_SEQ:
        raise RuntimeUnavailable(f"no Python source files in {folder} to train on; use a full Python install")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def gpt2(job: Job) -> nn.Module:
    """Returns a newly initialised GPT-2 of the job's shape over bytes, with dropout, in training mode."""
    # Imported late: the import is slow, and checks of options do not need it.
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_positions=job.seq,
        n_embd=job.width,
        n_layer=job.layers,
        n_head=job.width // HEAD_WIDTH,
        # Byte 0 does not occur in source text; GPT-2's default ids are outside of this vocabulary.
        bos_token_id=0,
        eos_token_id=0,
        # The cache of keys and values is for generation only.
        use_cache=False,
    )
    torch.manual_seed(_SEED)
    model = GPT2LMHeadModel(config)
    # The default anyway, set to avoid a warning about a missing name.
    model.loss_type = "ForCausalLM"
    model.train()
    placed: nn.Module = nn.Module.to(model, job.device)
    return placed


def train(job: Job, text: torch.Tensor, plan: ms.Plan | None, on_step: Callable[[], None]) -> TrainingRun:
    """Trains a new model through the job and returns the results. The last step is measured, the others are timed.

    Args:
        job: the training job.
        text: the bytes to train on, uint8 of shape (bytes,).
        plan: the plan to train under; `None` trains the model as written.
        on_step: called after every step.
    """
    from memscale.simulation.measured import measure, training_roles

    model = gpt2(job) if plan is None else ms.transform(gpt2(job), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    starts = torch.Generator().manual_seed(_SEED)
    # From here on only dropout draws random numbers; a recompute that disturbs them would change all later losses.
    torch.manual_seed(_SEED)
    gradients = hashlib.sha256()
    losses: list[float] = []
    seconds: list[float] = []
    for number in range(job.steps):
        rows = torch.randint(len(text) - job.seq, (job.batch,), generator=starts).tolist()
        batch = torch.stack([text[row : row + job.seq] for row in rows]).long().to(job.device)
        step = functools.partial(_step, model, optimizer, batch, losses)
        if number == job.steps - 1:
            trace = measure(step, device=job.device, roles=training_roles(model, optimizer, batch))
        else:
            _wait_for(job.device)
            began = time.perf_counter()
            step()
            _wait_for(job.device)
            seconds.append(time.perf_counter() - began)
        for _, parameter in model.named_parameters():
            assert parameter.grad is not None
            _add_bytes(gradients, parameter.grad)
        # After the step, so that its measured memory starts without the previous gradients.
        optimizer.zero_grad(set_to_none=True)
        on_step()
    digests = {
        "losses": repr([loss.hex() for loss in losses]),
        "gradients": gradients.hexdigest(),
        "parameters": _digest(dict(model.named_parameters()).values()),
        "moments": _digest(optree.tree_leaves(optimizer.state_dict()["state"])),
        "random state": _digest([torch.get_rng_state()]),
    }
    if job.device.type == "cuda":
        digests["random state"] += _digest([torch.cuda.get_rng_state(job.device)])
    return TrainingRun(losses, statistics.median(seconds[1:]), trace, digests)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, losses: list[float]) -> None:
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        _add_bytes(digest, tensor)
    return digest.hexdigest()


def _add_bytes(digest: hashlib._Hash, tensor: torch.Tensor) -> None:
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
