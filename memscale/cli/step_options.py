"""Reads a training step from a command line: a model, its batch, its optimizer and its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import nn
from typer import Option

from memscale.cli.adapters import AdapterOptions, adapted, compute_dtype, note_of
from memscale.cli.options import Options, choice, number
from memscale.cli.subject import DTYPES, Subject, explained, read_subject
from memscale.core import ConfigError

if TYPE_CHECKING:
    from memscale.hardware import Hardware

# These need more than a plain loop has: a closure that runs the step, or sparse gradients.
_NOT_OPTIMIZERS = ("optimizer", "lbfgs", "sparseadam")
_WIDTHS = "fp32|bf16|fp16"
_AMP = ("bf16", "bfloat16", "fp16", "float16")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    """The options of a training loop, as typed."""

    batch: Annotated[int, number("Rows of a batch.", least=1)] = 1
    seq: Annotated[int | None, number("Tokens of a row; by default 1024 or all positions.", least=1)] = None
    optimizer: Annotated[
        str, Option(help="An optimizer of torch.optim, also as adamw-fused or adamw-foreach; or none.")
    ] = "adamw"
    gpu: Annotated[
        str | None, Option(metavar="NAME", help="A card such as h100, or cpu; by default the device at hand.")
    ] = None
    dtype: Annotated[
        str | None,
        choice("Dtype of the weights; by default fp32 for a config, as made by a factory.", *DTYPES, metavar=_WIDTHS),
    ] = None
    amp: Annotated[
        str | None,
        choice("Train under autocast, as a Trainer's bf16=True; weights keep their dtype.", *_AMP, metavar="bf16|fp16"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class StepOptions(TrainingOptions, AdapterOptions):
    """The options of a training step, as typed."""

    hf: Annotated[
        str,
        Option(
            metavar="CONFIG|MODULE:FACTORY",
            help="A transformers config.json or its folder, or a function that returns a model, (model, batch_fn) or "
            "(model, batch_fn, loss); batch_fn(batch, seq) makes a batch.",
        ),
    ]
    accumulate: Annotated[int, number("Batches for each optimizer step.", least=1)] = 1
    keeps_output: Annotated[
        bool,
        Option(
            "--keeps-output/--no-keeps-output",
            help="The loop keeps the output in a variable, output = model(x); or not, as loss(model(x)) and Trainers.",
        ),
    ] = True

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the options of the loop as keyword arguments of the library."""
        return {"accumulate": self.accumulate, "keeps_output": self.keeps_output}


@dataclass(frozen=True, kw_only=True)
class RankOptions(StepOptions):
    """The options of a step that may be one of several parallel processes, as typed."""

    parallel: Annotated[
        str | None, choice("Train on several processes; the batch is that of one.", "fsdp2", "ddp", metavar="fsdp2|ddp")
    ] = None
    world: Annotated[int | None, Option(metavar="N", help="How many processes, with --parallel.")] = None
    shard: Annotated[
        list[str] | None,
        Option(metavar="PATTERN", help="Modules that fsdp2 shards, by default the repeated blocks. Repeatable."),
    ] = None
    tensor: Annotated[
        int | None, Option(metavar="M", help="The number of processes of tensor parallelism, with fsdp2.")
    ] = None

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns the options of the loop and of the processes as keyword arguments of the library."""
        shard = tuple(self.shard) if self.shard else None
        processes = {"parallel": self.parallel, "world": self.world, "shard": shard, "tensor": self.tensor}
        return {**super().arguments, **processes}


@dataclass(frozen=True)
class Step:
    """The training step of the options.

    Args:
        subject: the model, its batches and its loss.
        seq: the sequence length.
        optimizer: an optimizer of the model's parameters; `None` for a step without one.
        hardware: the device of the step.
        precision: notes about narrow weights, autocast and adapters; empty without any of them.
    """

    subject: Subject
    seq: int
    optimizer: torch.optim.Optimizer | None
    hardware: Hardware
    precision: str = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The optimizer, the loss and the hardware as keyword arguments of the library."""
        return {"optimizer": self.optimizer, "loss": self.subject.loss, "hardware": self.hardware}

    def line(self, batch: int) -> str:
        """Returns a line that describes the simulated step, including the defaults of options."""
        dtypes = dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in self.subject.model.parameters())
        optimizer = "no optimizer" if self.optimizer is None else type(self.optimizer).__name__
        return f"the step: --batch {batch} --seq {self.seq}, {' and '.join(dtypes) or 'no'} weights, {optimizer}"


def read_step(options: StepOptions) -> Step:
    """Returns the step of these options, without its batch.

    Raises:
        ConfigError: an option is wrong.
        RuntimeUnavailable: a package is missing.
    """
    from memscale.simulation import as_hardware

    hardware = as_hardware(options.gpu, "meta")
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    compute = compute_dtype(options.amp or options.dtype, hardware)
    if dtype is None and options.quant is not None:
        dtype = compute  # as in a checkpoint, whose weights are then quantized
    subject = adapted(read_subject(options.hf, dtype), options, options.hf, dtype or torch.float32, compute)
    optimizer, precision = _optimizer(options.optimizer, subject.model), ""
    if options.amp is not None:
        from memscale.integrations import MixedPrecisionForward

        model = subject.model
        model.forward = MixedPrecisionForward(model, model.__dict__.get("forward"), DTYPES[options.amp])
        precision = (
            f"note: --amp {options.amp} is autocast around unchanged weights, with outputs in float32, as a Trainer's"
        )
    elif options.dtype is not None and DTYPES[options.dtype] is not torch.float32:
        other = f"a Trainer's {options.dtype}=True is --amp {options.dtype}"
        precision = f"note: --dtype {options.dtype} converts the weights; {other}"
    notes = "\n".join(filter(None, (precision, note_of(subject.model, options, compute))))
    return Step(subject, subject.seq(options.seq), optimizer, hardware, notes)


def batch_of(subject: Subject, batch: int, seq: int) -> Any:
    """Returns the subject's batch of this size.

    Raises:
        ConfigError: the user's batch_fn raises.
    """
    with explained(f"batch_fn({batch}, {seq}) fails"):
        return subject.batch(batch, seq)


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer | None:
    if name.lower() == "none":
        return None
    known: dict[str, Any] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and key.lower() not in _NOT_OPTIMIZERS
    }
    kind, _, loop = name.lower().partition("-")
    if kind not in known or loop not in ("", "fused", "foreach"):
        raise ConfigError(
            f"--optimizer must be none or one of {', '.join(known)}, also with -fused or -foreach, got {name!r}"
        )
    trained = [each for each in model.parameters() if each.requires_grad]
    if not trained:
        raise ConfigError(
            f"--optimizer {name}: no parameter of this {type(model).__name__} requires a gradient; call "
            "requires_grad_() on what trains, or add --lora r=16"
        )
    try:
        made: torch.optim.Optimizer = known[kind](trained, **({loop: True} if loop else {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--optimizer {name}: {error}") from error
    return made
