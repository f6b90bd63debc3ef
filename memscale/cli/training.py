"""What ``memscale demo`` trains: a GPT-2-shaped model, on the standard library's own source text."""

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
    """One training job; the same job gives the same batches, weights and dropout every time.

    Args:
        steps: optimizer steps. The first warms up, the last is measured, those between are timed.
        layers: transformer blocks.
        width: hidden size, a multiple of :data:`HEAD_WIDTH`.
        batch: rows of text in a step.
        seq: bytes of text in a row.
        device: where it trains.
    """

    steps: int
    layers: int
    width: int
    batch: int
    seq: int
    device: torch.device

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and AdamW's two moments, in float32."""
        weights = self.layers * (12 * self.width + 13) * self.width + (256 + self.seq) * self.width
        return 4 * 4 * weights

    @property
    def activation_bytes(self) -> int:
        """About what the baseline keeps for backward, in float32; only good enough to refuse by."""
        heads = self.width // HEAD_WIDTH
        return 4 * self.layers * self.batch * self.seq * (20 * self.width + 3 * heads * self.seq)


@dataclass(frozen=True, eq=False)
class Run:
    """What came of one job.

    Args:
        losses: the loss of every step.
        step_seconds: median wall time of the steps that are neither the first nor the last.
        trace: the last step's memory.
        digests: what must be the same bit for bit, by name: a hash of the bytes.
    """

    losses: list[float]
    step_seconds: float
    trace: AllocatorTrace
    digests: dict[str, str]


def read_text() -> torch.Tensor:
    """Return the standard library's own source as one uint8 tensor of bytes, in the order of file names.

    Raises:
        RuntimeUnavailable: this Python came without its sources, as a frozen one does.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) <= MAX_SEQ:
        raise RuntimeUnavailable(f"no Python source files in {folder} to train on; use a full Python install")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def gpt2(job: Job) -> nn.Module:
    """Return a freshly initialised GPT-2 of the job's shape over bytes, dropout on, in training mode."""
    # Slow to import, and not needed to refuse a bad option.
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_positions=job.seq,
        n_embd=job.width,
        n_layer=job.layers,
        n_head=job.width // HEAD_WIDTH,
        # Byte 0 does not occur in source text; GPT-2's own ids lie outside this vocabulary.
        bos_token_id=0,
        eos_token_id=0,
        # Keys and values are kept for generating, never for training.
        use_cache=False,
    )
    torch.manual_seed(_SEED)
    model = GPT2LMHeadModel(config)
    # What it falls back to anyway, but with a warning about a missing name.
    model.loss_type = "ForCausalLM"
    model.train()
    placed: nn.Module = nn.Module.to(model, job.device)
    return placed


class Training:
    """One model on its way through a job, a step at a time.

    Several can take turns, so that whatever else slows the machine slows each of them: every one has its
    own random state, and its measured memory leaves out the others.

    Args:
        job: what to train and where.
        text: the bytes to train on, uint8 of shape (bytes,).
        change: maps the new model to the one that trains.
    """

    def __init__(self, job: Job, text: torch.Tensor, change: Callable[[nn.Module], nn.Module]) -> None:
        self._job, self._text = job, text
        self._model = change(gpt2(job))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=_LEARNING_RATE)
        self._starts = torch.Generator().manual_seed(_SEED)
        # From here on the only draws are dropout's; a recompute that disturbs them changes every later loss.
        torch.manual_seed(_SEED)
        self._random_states = _random_states(job.device)
        self._gradients = hashlib.sha256()
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._trace: AllocatorTrace | None = None

    def step(self) -> None:
        """Train one step: measured when it is the job's last, timed otherwise."""
        job = self._job
        rows = torch.randint(len(self._text) - job.seq, (job.batch,), generator=self._starts).tolist()
        batch = torch.stack([self._text[row : row + job.seq] for row in rows]).long().to(job.device)
        step = _Step(self._model, self._optimizer, batch)
        _set_random_states(job.device, self._random_states)
        if len(self._losses) == job.steps - 1:
            from memscale.simulation.measured import measure, training_roles

            roles = training_roles(self._model, self._optimizer, batch)
            self._trace = _without_strangers(measure(step, device=job.device, roles=roles))
        else:
            _wait_for(job.device)
            began = time.perf_counter()
            step()
            _wait_for(job.device)
            self._seconds.append(time.perf_counter() - began)
        self._random_states = _random_states(job.device)
        assert step.loss is not None
        self._losses.append(step.loss.item())
        for _, parameter in self._model.named_parameters():
            assert parameter.grad is not None
            _add_bytes(self._gradients, parameter.grad)
        # Here and not in the step, whose memory then starts without the previous gradients.
        self._optimizer.zero_grad(set_to_none=True)

    def result(self) -> Run:
        """What came of the job, after its last step."""
        assert self._trace is not None
        digests = {
            "losses": repr([loss.hex() for loss in self._losses]),
            "gradients": self._gradients.hexdigest(),
            "parameters": _digest(dict(self._model.named_parameters()).values()),
            "optimizer state": _digest(optree.tree_leaves(self._optimizer.state_dict()["state"])),
            "random state": _digest(self._random_states),
        }
        return Run(self._losses, statistics.median(self._seconds[1:]), self._trace, digests)


def train(
    job: Job, text: torch.Tensor, changes: Sequence[Callable[[nn.Module], nn.Module]], on_step: Callable[[], None]
) -> list[Run]:
    """Train one model for each of ``changes``, taking turns, and return what came of each.

    Args:
        job: what to train and where.
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


class _Step:
    """One training step as a function of nothing; ``loss`` is its result."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.loss: torch.Tensor | None = None

    def __call__(self) -> None:
        loss = self.model(input_ids=self.batch, labels=self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()


def _without_strangers(trace: AllocatorTrace) -> AllocatorTrace:
    """The trace less what lived before the step without a role: on CUDA, the models that wait their turn."""
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
