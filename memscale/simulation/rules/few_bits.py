"""Layers of bitsandbytes with quantized weights: their packing on meta, as a move to a card packs them, and rules.

Source of the rules: bitsandbytes 0.50.2, ``backends/cuda/ops.py`` and ``backends/default/ops.py``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import nn

from memscale.algebra import copy_tree, walk
from memscale.core import ConfigError, RuntimeUnavailable, format_bytes
from memscale.simulation.rules.rule import RESULTS, Arguments, CardTraits, OpRule, Program

_OLDEST = "0.46"
_WORTH_A_WORD = 0.01


def pack_weights(model: nn.Module) -> None:
    """Pack, in place, the weight of each bitsandbytes layer in `model` that is on meta and not packed yet.

    Raises:
        ConfigError: a weight with data is not packed, so the layer cannot be called.
        RuntimeUnavailable: bitsandbytes is too old to pack without data.
    """
    for module in _unpacked(model):
        _pack(module)


def packed(model: nn.Module) -> nn.Module:
    """Returns `model` with its bitsandbytes layers packed: a copy that shares all other parameters.

    A model without layers to pack is returned itself.

    Raises:
        ConfigError, RuntimeUnavailable: as in `pack_weights`.
    """
    layers = _unpacked(model)
    if not layers:
        return model
    copies = copy_tree(walk(model))
    for layer in layers:
        _pack(copies[id(layer)])
    other: nn.Module = copies[id(model)]
    return other


def quantization_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the scales and tables with which a bitsandbytes layer unpacks its weight, by name in its state dict."""
    if not isinstance(module, _kinds()):
        return {}
    layer: Any = module
    if not _is_of_4_bits(layer):  # an 8-bit layer moves the scales from its weight to its state at the first call
        scales = layer.state.SCB if layer.state.SCB is not None else getattr(layer.weight, "SCB", None)
        return {} if scales is None else {"SCB": scales}
    state = getattr(layer.weight, "quant_state", None) or layer.quant_state
    if state is None:
        return {}
    found = {"absmax": state.absmax, "quant_map": state.code}
    if state.nested:
        nested = state.state2
        found |= {"offset": state.offset, "nested_absmax": nested.absmax, "nested_quant_map": nested.code}
    return {f"weight.{name}": tensor for name, tensor in found.items()}


def notes_of_few_bits(model: nn.Module | None, modules: Iterable[nn.Module]) -> list[str]:
    """Returns notes on the quantized layers among `modules`, which `model` reaches: outliers, and weights in full."""
    layers = [each for each in modules if isinstance(each, _kinds())]
    thresholds: set[float] = {getattr(getattr(each, "state", None), "threshold", 0.0) for each in layers}
    found = []
    if any(thresholds):
        found.append(
            f"of layers in 8 bits no input is assumed to have a number beyond their threshold ({max(thresholds):g}): "
            "columns with such outliers are multiplied in 16 bits besides, which takes a little more"
        )
    parameters = [] if model is None or not layers else [*model.named_parameters()]
    # Neither bitsandbytes nor transformers packs 3-D weights, such as fused experts, and neither warns about them.
    whole = [each for each in parameters if each[1].dim() == 3 and each[1].is_floating_point()]
    whole_bytes = sum(parameter.nbytes for _, parameter in whole)
    if whole and whole_bytes >= _WORTH_A_WORD * sum(parameter.nbytes for _, parameter in parameters):
        name, first = whole[0]
        found.append(
            f"{format_bytes(whole_bytes)} of the weights are not packed and stay in "
            f"{str(first.dtype).removeprefix('torch.')}, such as {name!r}: bitsandbytes packs linear layers only, not "
            "fused experts"
        )
    return found


def _kinds() -> tuple[type, ...]:
    """Returns the layer classes of bitsandbytes that pack their weights; none if bitsandbytes is not imported."""
    loaded = sys.modules.get("bitsandbytes.nn")
    return () if loaded is None else (loaded.Linear4bit, loaded.Linear8bitLt)


def _is_of_4_bits(layer: Any) -> bool:
    return hasattr(layer, "quant_state")


def _unpacked(model: nn.Module) -> list[Any]:
    """Returns the bitsandbytes layers whose weight is on meta and not packed.

    Raises:
        ConfigError: a weight with data is not packed.
    """
    if not (kinds := _kinds()):
        return []
    found: list[Any] = []
    layers: list[tuple[str, Any]] = [pair for pair in model.named_modules() if isinstance(pair[1], kinds)]
    for path, module in layers:
        if not _waits(module):
            continue
        if not module.weight.is_meta:
            device = module.weight.device.type
            raise ConfigError(
                f"the weight of {path!r} is not packed in few bits yet: bitsandbytes packs when a layer moves; call "
                f"model.to({device!r}) first"
            )
        found.append(module)
    return found


def _waits(module: Any) -> bool:
    weight = module.weight
    if _is_of_4_bits(module):
        return getattr(weight, "quant_state", None) is None and module.quant_state is None
    has_numbers = getattr(weight, "CB", None) is not None or module.state.CB is not None
    # An 8-bit layer with `has_fp16_weights` packs its weight at each call, and a layer with data at its first call.
    return not (module.state.has_fp16_weights or has_numbers) and weight.is_meta


def _pack(module: Any) -> None:
    weight = module.weight
    data = weight.data
    if not data.is_floating_point():  # transformers makes integer weights for a layer whose checkpoint is packed
        data = torch.empty_like(data, dtype=getattr(module, "compute_dtype", None) or torch.float16)
    if _is_of_4_bits(module):
        settings = {name: getattr(weight, name) for name in ("blocksize", "compress_statistics", "quant_type")}
        new = type(weight)(data, requires_grad=False, quant_storage=weight.quant_storage, module=module, **settings)
    else:
        new = type(weight)(data, requires_grad=False, has_fp16_weights=False)
    try:
        with _tables_kept():
            new._quantize("meta")
    except (NotImplementedError, RuntimeError, AttributeError) as error:
        raise RuntimeUnavailable(
            f"this bitsandbytes cannot pack a weight without data ({type(error).__name__}: {error}); weights in few "
            f"bits on meta need bitsandbytes>={_OLDEST}"
        ) from error
    if not _is_of_4_bits(module):  # the state after a first call, which moves CB and SCB from the weight to the state
        module.state = copy.copy(module.state)
        module.state.CB, module.state.SCB, new.CB, new.SCB = new.CB, new.SCB, None, None
    module.weight = new


@contextmanager
def _tables_kept() -> Iterator[None]:
    """Restore bitsandbytes' cache of code tables: it keeps the first table for all devices, and this one is on meta."""
    tables: dict[str, torch.Tensor] = sys.modules["bitsandbytes.functional"].name2qmap
    before = tables.copy()
    try:
        yield
    finally:
        tables.clear()
        tables.update(before)


def _rows_in_8_bits(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of magnitudes, the outliers among them, and a flag for outliers."""
    rows, threshold = args[0], args[1] if len(args) > 1 else 0.0
    if not threshold:
        return (RESULTS,)
    return RESULTS, rows.nbytes, rows.numel(), -rows.nbytes, 1, -1


def _sums_as_floats(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of a kernel that writes float16, which a cast converts to another dtype."""
    sums, dtype = args[0], args[3] if len(args) > 3 else None
    return (RESULTS,) if dtype in (None, torch.float16) else (2 * sums.numel(), RESULTS)


def _without_outliers(rows: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Returns the results of ``int8_vectorwise_quant`` for rows without outliers, whose number depends on values."""
    found = torch.empty(rows.shape, dtype=torch.int8, device="meta")
    scales = torch.empty(rows.numel() // rows.shape[-1], dtype=torch.float32, device="meta")
    return found, scales, torch.empty(0, dtype=torch.int64, device="meta") if threshold else None


def _flops(given: Arguments, results: Any) -> int:
    return int(2 * prod(results.shape) * given["A"].shape[-1])


# Compositions of other operators, each with its own rule. A card's 4-bit product kernel serves less than about 512
# rows, fewer than a training step has; for more rows the weight is unpacked for a product of PyTorch's.
_COMPOSED = OpRule(composed_on=("cpu", "cuda"))

RULES = {
    **{f"bitsandbytes.{name}": _COMPOSED for name in ("gemm_4bit", "int8_mixed_scaled_mm", "int8_scaled_mm")},
    "bitsandbytes.int8_vectorwise_quant": OpRule(
        program=_rows_in_8_bits, order=(1, 0), results=_without_outliers, results_on=("cpu", "cuda")
    ),
    "bitsandbytes.int8_linear_matmul": OpRule(flops=_flops),
    "bitsandbytes.int8_mm_dequant": OpRule(program=_sums_as_floats),
}
