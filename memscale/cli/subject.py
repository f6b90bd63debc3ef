"""`Subject`: the model of a command, from a transformers config or from a function, with its batches."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memscale.core import ConfigError, package

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}

_DEFAULT_SEQ = 1024
_CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
# The ends of the names of transformers' model classes, by the shape of their labels.
_LABELS_OF_TOKENS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "ForTokenClassification")
_LABELS_OF_ROWS = ("ForSequenceClassification", "ForImageClassification")
# Batches with at most this many integers get real values, which the simulation can read (masks, lengths).
_REAL_NUMBERS = 1 << 20


@dataclass(frozen=True)
class Subject:
    """A model with its batches and its loss.

    Args:
        model: the model, in training mode.
        batch: makes a batch from a batch size and a sequence length.
        loss: ``loss(output, batch)``; `None` for ``output.loss``.
        longest: the number of positions of the model; `None` if unknown.
        code: Python that builds the model, in a variable ``model``.
    """

    model: nn.Module
    batch: Callable[[int, int], Any]
    loss: Callable[[Any, Any], torch.Tensor] | None = None
    longest: int | None = None
    code: str = ""

    def seq(self, wanted: int | None) -> int:
        """Returns the sequence length: `wanted`, else 1024 or the model's positions if these are fewer.

        Raises:
            ConfigError: the model has fewer positions.
        """
        if wanted is None:
            return min(_DEFAULT_SEQ, self.longest or _DEFAULT_SEQ)
        if self.longest is not None and wanted > self.longest:
            raise ConfigError(f"--seq {wanted} is longer than the {self.longest} positions that the model has")
        return wanted


def read_subject(source: str, dtype: torch.dtype | None) -> Subject:
    """Builds the model that `source` names: a transformers ``config.json`` or its folder, or ``module:factory``.

    Raises:
        ConfigError: `source` names neither, or the model cannot be built.
        RuntimeUnavailable: `source` is a config and transformers is not installed.
    """
    path = Path(source) / _CONFIG if Path(source).is_dir() else Path(source)
    if path.is_file():
        return _from_config(path, dtype or torch.float32)
    if _FACTORY.fullmatch(source):
        return _from_factory(source, dtype)
    raise ConfigError(
        f"--hf {source!r} must be a transformers config.json that exists, or module:factory, a function that returns a "
        f"model or (model, batch_fn){_missing(source)}"
    )


def _missing(source: str) -> str:
    """Returns the remedy for a `source` that is neither a config nor a factory, as the end of an error message."""
    if Path(source).is_dir():
        return f"; there is no {_CONFIG} in this folder"
    if not _HUB_NAME.fullmatch(source) or source.endswith(".json"):
        return ""
    return (
        ". Nothing is fetched from the network; if this is a name on the Hugging Face hub, save its config where there "
        f'is one, python -c "from transformers import AutoConfig; AutoConfig.from_pretrained({source!r})'
        f'.save_pretrained({source!r})", and give that folder: --hf {source}'
    )


@contextmanager
def offline() -> Iterator[None]:
    """Imports transformers in the body with network access turned off, since a config is enough for a model.

    transformers reads the variable once, when it is imported. The variable is restored afterwards, because it is also a
    user's way to opt out of telemetry.
    """
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


@offline()
def _from_config(path: Path, dtype: torch.dtype) -> Subject:
    transformers = package("transformers", "--hf with a config.json", "hf")
    transformers.logging.set_verbosity_error()
    other = "a model of another library, diffusers or timm, comes from a function of yours, --hf module:factory"
    with explained(f"--hf {str(path)!r} is not a config of transformers", other):
        config = transformers.AutoConfig.from_pretrained(str(path))
    build = _architecture(transformers, config, path)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # the cache of keys and values is for generation only
    remedy = "correct the config, or write a function that builds it and give module:factory"
    with explained(f"--hf {str(path)!r}: transformers cannot build the model on meta", remedy), torch.device("meta"):
        model = build(config)
    name, folder = f"transformers.{type(model).__name__}", path.parent
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        made = f"{name}.from_pretrained({str(folder)!r}, config=config, {word_of_dtype()}={dtype}).train()"
    else:
        made = f"{name}(config).to({dtype}).train()  # random weights; {name}.from_pretrained(...) loads trained ones"
    code = (
        "import torch\nimport transformers\n\n"
        f"config = transformers.AutoConfig.from_pretrained({str(path)!r}, use_cache=False)\nmodel = {made}"
    )
    return dataclasses.replace(_of_transformers(model.to(dtype)), code=code)


def _architecture(transformers: Any, config: Any, path: Path) -> Callable[[Any], nn.Module]:
    """Returns the function that builds the model of `config`: the class it names, else the first fitting auto class."""
    for name in config.architectures or ():
        found: Callable[[Any], nn.Module] | None = getattr(transformers, name, None)
        if found is not None:
            return found
    for kind in ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification", "SequenceClassification"):
        auto = getattr(transformers, f"AutoModelFor{kind}")
        if type(config) in auto._model_mapping:
            build: Callable[[Any], nn.Module] = auto.from_config
            return build
    raise ConfigError(
        f"--hf {str(path)!r}: transformers has no model with a loss for {config.model_type!r}; name one of its "
        "classes in the config's 'architectures', or give module:factory"
    )


def word_of_dtype() -> str:
    """Returns the name of the argument for the weights' dtype in ``from_pretrained`` of the installed transformers."""
    import transformers
    from packaging.version import Version

    return "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


def _from_factory(source: str, dtype: torch.dtype | None) -> Subject:
    module_name, _, name = source.partition(":")
    if os.getcwd() not in sys.path:  # as with `python -m`; a console script lacks it
        sys.path.insert(0, os.getcwd())
    with explained(f"--hf {source!r} cannot be imported"):
        made: Any = importlib.import_module(module_name)
        for part in name.split("."):
            made = getattr(made, part)
    with explained(f"--hf {source!r} fails"):
        made = made()
    model, *rest = made if isinstance(made, tuple) else (made,)
    if not isinstance(model, nn.Module) or len(rest) > 2 or not all(map(callable, rest)):
        raise ConfigError(
            f"--hf {source!r} must return a torch.nn.Module, (model, batch_fn) or (model, batch_fn, loss), got "
            f"{_type_names(made)}"
        )
    if dtype is not None:
        model = model.to(dtype)
    torch_too, cast = ("", "") if dtype is None else ("import torch\n", f".to({dtype})")
    code = (
        f"{torch_too}from {module_name} import {name.partition('.')[0]}\n\n"
        f"made = {name}()\nmodel = (made[0] if isinstance(made, tuple) else made){cast}"
    )
    if rest:
        return dataclasses.replace(Subject(model, *rest), code=code)
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        return dataclasses.replace(_of_transformers(model), code=code)
    raise ConfigError(
        f"--hf {source!r} returns a {type(model).__name__} whose batches are not known; return (model, batch_fn), "
        "where batch_fn(batch, seq) makes what the model is called with"
    )


def _of_transformers(model: Any) -> Subject:
    """Returns the subject of a transformers model, with batches by the inputs that its class names."""
    config, name, takes = model.config, type(model).__name__, model.main_input_name
    model.train()
    if takes == "input_ids" and name.endswith((*_LABELS_OF_TOKENS, *_LABELS_OF_ROWS)):
        longest = getattr(config, "max_position_embeddings", None)

        def tokens(batch: int, seq: int) -> dict[str, torch.Tensor]:
            labels = (batch, seq) if name.endswith(_LABELS_OF_TOKENS) else (batch,)
            decoded = {"decoder_input_ids": _zeros(batch, seq)} if _needs_decoder_tokens(config) else {}
            return {"input_ids": _zeros(batch, seq), **decoded, "labels": _zeros(*labels)}

        return Subject(model, tokens, longest=longest if isinstance(longest, int) and longest > 0 else None)
    if takes == "pixel_values" and name.endswith(_LABELS_OF_ROWS):
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        dtype = next(model.parameters()).dtype

        def pictures(batch: int, _: int) -> dict[str, torch.Tensor]:
            pixels = torch.empty(batch, getattr(config, "num_channels", 3), height, width, dtype=dtype, device="meta")
            return {"pixel_values": pixels, "labels": _zeros(batch)}

        return Subject(model, pictures)
    raise ConfigError(
        f"the batches of {name}, which takes {takes}, are not known; write a function that returns (model, batch_fn), "
        "where batch_fn(batch, seq) makes what the model is called with, and give module:factory"
    )


def _needs_decoder_tokens(config: Any) -> bool:
    """Whether the batch needs decoder tokens: the config lacks the start or padding token for shifting the labels."""
    ends = (getattr(config, name, None) for name in ("decoder_start_token_id", "pad_token_id"))
    return bool(getattr(config, "is_encoder_decoder", False)) and None in ends


def _zeros(*shape: int) -> torch.Tensor:
    real = torch.Size(shape).numel() <= _REAL_NUMBERS
    return torch.zeros(shape, dtype=torch.long, device="cpu" if real else "meta")


@contextmanager
def explained(what: str, remedy: str = "") -> Iterator[None]:
    """Turns any error of the body, which runs code of the user or of a library, into a ConfigError about `what`."""
    try:
        yield
    except Exception as error:
        end = f"; {remedy}" if remedy else ""
        raise ConfigError(f"{what}: {type(error).__name__}: {first_line(error).rstrip('.')}{end}") from error


def first_line(error: Exception) -> str:
    """Returns the first line of `error`'s message, without the C++ frames that PyTorch may add."""
    return (str(error).strip().splitlines() or [""])[0]


def _type_names(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return type(made).__name__
