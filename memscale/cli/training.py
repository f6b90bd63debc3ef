"""The training of ``memscale demo``: a GPT-2-shaped model on the source text of the standard library."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import optree
import torch
from torch import nn

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

    @property
    def state_bytes(self) -> int:
        """The bytes of weights, gradients and AdamW's two moments, in float32."""
        weights = self.layers * (12 * self.width + 13) * self.width + (256 + self.seq) * self.width
        return 4 * 4 * weights

    @property
    def activation_bytes(self) -> int:
        """An estimate of the bytes that the baseline saves for backward, only exact enough to refuse a job."""
        heads = self.width // HEAD_WIDTH
        return 4 * self.layers * self.batch * self.seq * (20 * self.width + 3 * heads * self.seq)


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


class Training:
    """The training of one model through a job, step by step.

    Several trainings can alternate, so that disturbances of the machine affect all of them alike. Each has its own
    random state, and its measured memory excludes the others.

    Args:
        job: the training job.
        text: the bytes to train on, uint8 of shape (bytes,).
        change: maps the new model to the one that trains.
    """

    def __init__(self, job: Job, text: torch.Tensor, change: Callable[[nn.Module], nn.Module]) -> None:
        self._job, self._text = job, text
        self._model = change(gpt2(job))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=_LEARNING_RATE)
        self._starts = torch.Generator().manual_seed(_SEED)
        # From here on only dropout draws random numbers; a recompute that disturbs them would change all later losses.
        torch.manual_seed(_SEED)
        self._random_states = _random_states(job.device)
        self._gradients = hashlib.sha256()
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._trace: AllocatorTrace | None = None

    def step(self) -> None:
        """Trains one step. The last step of the job is measured, the others are timed."""
        job = self._job
        rows = torch.randint(len(self._text) - job.seq, (job.batch,), generator=self._starts).tolist()
        batch = torch.stack([self._text[row : row + job.seq] for row in rows]).long().to(job.device)
        losses: list[torch.Tensor] = []

        def step() -> None:
            loss = self._model(input_ids=batch, labels=batch).loss
            loss.backward()
            self._optimizer.step()
            losses.append(loss.detach())

        _set_random_states(job.device, self._random_states)
        if len(self._losses) == job.steps - 1:
            from memscale.simulation.measured import measure, training_roles

            roles = training_roles(self._model, self._optimizer, batch)
            self._trace = _without_other_models(measure(step, device=job.device, roles=roles))
        else:
            _wait_for(job.device)
            began = time.perf_counter()
            step()
            _wait_for(job.device)
            self._seconds.append(time.perf_counter() - began)
        self._random_states = _random_states(job.device)
        self._losses.append(losses[0].item())
        for _, parameter in self._model.named_parameters():
            assert parameter.grad is not None
            _add_bytes(self._gradients, parameter.grad)
        # Before the step, so that its measured memory starts without the previous gradients.
        self._optimizer.zero_grad(set_to_none=True)

    def result(self) -> TrainingRun:
        """Returns the results of the job, after its last step."""
        assert self._trace is not None
        digests = {
            "losses": repr([loss.hex() for loss in self._losses]),
            "gradients": self._gradients.hexdigest(),
            "parameters": _digest(dict(self._model.named_parameters()).values()),
            "optimizer state": _digest(optree.tree_leaves(self._optimizer.state_dict()["state"])),
            "random state": _digest(self._random_states),
        }
        return TrainingRun(self._losses, statistics.median(self._seconds[1:]), self._trace, digests)


def train(
    job: Job, text: torch.Tensor, changes: Sequence[Callable[[nn.Module], nn.Module]], on_step: Callable[[], None]
) -> list[TrainingRun]:
    """Trains one model for each of `changes`, alternating between them, and returns the results of each.

    Args:
        job: the training job.
        text: the bytes to train on, uint8 of shape (bytes,).
        changes: each maps a new model to the one that trains.
        on_step: called after every step of every model.
    """
    trainings = [Training(job, text, change) for change in changes]
    for _ in range(job.steps):
        for training in trainings:
            training.step()
            on_step()
    return [training.result() for training in trainings]


def _without_other_models(trace: AllocatorTrace) -> AllocatorTrace:
    """Removes from the trace the memory of other models on CUDA: allocations from before the step without a role."""
    others = trace.timeline.live_bytes["other"]
    others_bytes = int(others[0])
    live_bytes = {**trace.timeline.live_bytes, "other": others - others_bytes}
    return dataclasses.replace(
        trace,
        start_bytes=trace.start_bytes - others_bytes,
        peak_bytes=trace.peak_bytes - others_bytes,
        end_bytes=trace.end_bytes - others_bytes,
        timeline=dataclasses.replace(trace.timeline, live_bytes=live_bytes),
    )


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _random_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _set_random_states(device: torch.device, states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        _add_bytes(digest, tensor)
    return digest.hexdigest()


def _add_bytes(digest: hashlib._Hash, tensor: torch.Tensor) -> None:
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
