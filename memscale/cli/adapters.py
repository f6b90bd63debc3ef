"""``--lora`` and ``--quant``: PEFT adapters, and base weights in 4 or 8 bits."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from typer import Option

from memscale.cli.options import Options, choice
from memscale.cli.subject import DTYPES, Subject, first_line, offline, word_of_dtype
from memscale.core import ConfigError, format_bytes, package

if TYPE_CHECKING:
    from memscale.hardware import Hardware

_EXAMPLE = "r=16,targets=all-linear"


def _number(kind: type, least: float) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        number = kind(text)
        if not least <= number < math.inf:
            raise ValueError
        return number

    return parse


def _names(text: str) -> Any:
    names = [name.strip() for name in text.split("+")]
    if not all(names):
        raise ValueError
    return text if names == ["all-linear"] else names


# For each setting of --lora: the argument of a LoraConfig, the parser of a value (raises KeyError or ValueError), and
# the rule for a value.
_SETTINGS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "r": ("r", _number(int, 1), "a whole number of at least 1"),
    "alpha": ("lora_alpha", _number(float, 0), "a number above 0"),
    "dropout": ("lora_dropout", _number(float, 0), "a share of at least 0, below 1"),
    "targets": ("target_modules", _names, "all-linear, or names of modules joined by +"),
    "save": ("modules_to_save", _names, "names of modules joined by +"),
    "dora": ("use_dora", lambda text: {"yes": True, "no": False}[text.lower()], "yes or no"),
}


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(Options):
    """The options for adapters and for quantized weights, as typed."""

    lora: Annotated[
        str | None,
        Option(
            metavar=_EXAMPLE,
            help="Train PEFT adapters: r, alpha, dropout, targets (all-linear, or names joined by +), save (modules "
            "to train in full), dora=yes.",
        ),
    ] = None
    quant: Annotated[
        str | None,
        choice(
            "Linear layers of bitsandbytes, whose weights are frozen.", "nf4", "fp4", "int8", metavar="nf4|fp4|int8"
        ),
    ] = None
    double_quant: Annotated[bool, Option("--double-quant", help="With nf4 and fp4: scales in 8 bits, too.")] = False
    kbit: Annotated[
        bool,
        Option(
            "--kbit/--no-kbit",
            help="With --quant, what PEFT's prepare_model_for_kbit_training does: the rest in float32.",
        ),
    ] = True

    def check(self) -> None:
        if self.double_quant and self.quant not in ("nf4", "fp4"):
            raise ConfigError("--double-quant is about weights in 4 bits; add --quant nf4 or fp4, or leave it out")
        if self.quant is not None and self.lora is None:
            raise ConfigError(f"--quant {self.quant} freezes the weights; name what is trained, as --lora {_EXAMPLE}")
        if self.lora is not None:
            settings_of(self.lora)


def compute_dtype(said: str | None, hardware: Hardware) -> torch.dtype:
    """Returns the dtype in which quantized layers multiply: that of ``--amp`` or ``--dtype``, else `hardware`'s."""
    if said is not None:
        return DTYPES[said]
    rates = hardware.flops_per_second
    return torch.bfloat16 if not rates or "bfloat16" in rates else torch.float16


def settings_of(text: str) -> dict[str, Any]:
    """Parses the value of ``--lora`` to the arguments of a ``LoraConfig``.

    >>> settings_of("r=16,alpha=32,targets=q_proj+v_proj")
    {'r': 16, 'lora_alpha': 32.0, 'target_modules': ['q_proj', 'v_proj']}

    Raises:
        ConfigError: a setting is unknown, is given twice, or has a wrong value.
    """
    found: dict[str, Any] = {}
    for word in text.split(","):
        key, _, value = (part.strip() for part in word.partition("="))
        if key not in _SETTINGS or not value:
            raise ConfigError(
                f"--lora {text!r}: {word.strip()!r} is none of {', '.join(f'{name}=...' for name in _SETTINGS)}; write "
                f"--lora {_EXAMPLE}"
            )
        name, parse, rule = _SETTINGS[key]
        if name in found:
            raise ConfigError(f"--lora {text!r}: {key} is given twice; name it once")
        try:
            found[name] = parse(value)
        except (KeyError, ValueError):
            raise ConfigError(f"--lora {text!r}: {key} must be {rule}, got {value!r}") from None
    return found if "target_modules" in found else {"r": 16, "target_modules": "all-linear", **found}


def adapted(
    subject: Subject, options: AdapterOptions, source: str, dtype: torch.dtype, compute: torch.dtype
) -> Subject:
    """Returns the subject with quantized layers and adapters; `subject` itself if the options ask for neither.

    Args:
        subject: the model and its batches. The model changes in place.
        options: the options as typed.
        source: the value of ``--hf``.
        dtype: the dtype of the weights before quantization.
        compute: the dtype in which layers in 4 bits multiply.

    Raises:
        ConfigError: the model cannot be quantized or adapted in this way.
        RuntimeUnavailable: a package is missing.
    """
    if options.lora is None:
        return subject
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with offline(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT uses deprecated names
        peft = package("peft", "--lora")
        model: Any = subject.model
        code = [subject.code, "import peft"]
        if options.quant is not None:
            code = [_packed_code(subject, options, source, dtype, compute), "import peft"]
            _pack(model, options, source, compute)
            if options.kbit:
                model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
                code.append("model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)")
        settings = settings_of(options.lora)
        try:
            model = peft.get_peft_model(model, peft.LoraConfig(**settings)).train()
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"--lora {options.lora!r}: PEFT refuses it: {first_line(error)}") from error
    words = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    code.append(f"model = peft.get_peft_model(model, peft.LoraConfig({words})).train()")
    return dataclasses.replace(subject, model=model, code="\n".join(code))


def note_of(model: torch.nn.Module, options: AdapterOptions, compute: torch.dtype) -> str:
    """Returns a line on what is trained and what is quantized; empty without adapters and quantization."""
    if options.lora is None:
        return ""
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    words = [f"note: --lora trains {trained:,} numbers"]
    if options.quant is not None:
        packed = sum(each.nbytes for each in model.parameters() if type(each) in _packed_kinds())
        rest = sum(each.nbytes for each in model.parameters()) - packed
        multiplies = "" if options.quant == "int8" else f", multiplied in {str(compute).partition('.')[2]}"
        words.append(
            f"--quant {options.quant} packs linear layers into {format_bytes(packed)}{multiplies}; the other weights "
            f"take {format_bytes(rest)}"
            + (" (in float32 by prepare_model_for_kbit_training, which --no-kbit leaves out)" if options.kbit else "")
        )
    return "; ".join(words)


def _packed_kinds() -> tuple[type, ...]:
    layers = package("bitsandbytes.nn", "--quant")
    return layers.Params4bit, layers.Int8Params


def _settings(options: AdapterOptions, compute: torch.dtype) -> dict[str, Any]:
    """Returns the arguments of a ``BitsAndBytesConfig``."""
    if options.quant == "int8":
        return {"load_in_8bit": True}
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": options.quant, "bnb_4bit_compute_dtype": compute}
    return {**settings, "bnb_4bit_use_double_quant": True} if options.double_quant else settings


def _pack(model: Any, options: AdapterOptions, source: str, compute: torch.dtype) -> None:
    """Replaces linear layers of `model`, which is on meta, by layers of bitsandbytes, as transformers does."""
    from memscale.simulation import pack_weights

    package("bitsandbytes.nn", "--quant")
    transformers = package("transformers", "--quant")
    if not isinstance(model, transformers.PreTrainedModel) or not all(each.is_meta for each in model.parameters()):
        raise ConfigError(
            f"--quant {options.quant} is for a model that transformers builds from a config; {source!r} returns a "
            "finished model, so let it return layers of bitsandbytes"
        )
    layers = importlib.import_module("transformers.integrations.bitsandbytes")
    quantizers = importlib.import_module("transformers.quantizers.base")
    if not hasattr(quantizers, "get_keys_to_not_convert"):  # before transformers 4.53
        quantizers = importlib.import_module("transformers.integrations")
    dtypes = {name: each.dtype for name, each in model.named_parameters()}
    left = [*quantizers.get_keys_to_not_convert(model), *(getattr(model, "_keep_in_fp32_modules", None) or ())]
    packing = transformers.BitsAndBytesConfig(**_settings(options, compute))
    layers.replace_with_bnb_linear(model, left, quantization_config=packing)
    for name, parameter in model.named_parameters():  # the new layers' parameters have the default dtype
        if parameter.dtype != dtypes[name]:
            parameter.data = parameter.data.to(dtypes[name])
    if not any(type(each) in _packed_kinds() for each in model.parameters()):
        raise ConfigError(f"--quant {options.quant}: {type(model).__name__} has no linear layers to pack")
    pack_weights(model)
    setattr(model, "is_loaded_in_8bit" if options.quant == "int8" else "is_loaded_in_4bit", True)


def _packed_code(
    subject: Subject, options: AdapterOptions, source: str, dtype: torch.dtype, compute: torch.dtype
) -> str:
    """Returns Python that loads the model quantized, from a checkpoint, since random weights cannot be quantized."""
    folder = Path(source) if Path(source).is_dir() else Path(source).parent
    words = ", ".join(f"{name}={value!r}" for name, value in _settings(options, compute).items())
    head = subject.code.rpartition("model = ")[0]
    return (
        f"{head}packing = transformers.BitsAndBytesConfig({words})\n"
        f"model = transformers.{type(subject.model).__name__}.from_pretrained(\n"
        f"    {str(folder)!r}, config=config, {word_of_dtype()}={dtype}, quantization_config=packing\n)"
    )
