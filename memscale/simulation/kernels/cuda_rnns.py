"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as on a CUDA device: cuDNN runs whole sequences in one operator.

Where cuDNN is turned off, and in bfloat16 before Ampere, PyTorch runs cell after cell, which is refused.

Source: aten/src/ATen/native/RNN.cpp, cudnn/RNN.cpp and ATen/cudnn/AutocastRNN.cpp of PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from memscale.core import ConfigError, simulated
from memscale.simulation.rules.recurrences import (
    DROPOUT,
    FLATTENED,
    LSTM,
    MODES,
    RNN,
    are_flattened,
    halved,
    halved_together,
    stand_in,
)
from memscale.simulation.rules.rule import Capability, without_autocast


def _by_cudnn(original: Callable[..., Any], mode: int) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Arguments: input, hx, params, has_biases, ...; for a packed sequence: data, batch_sizes, hx, params, ...
        if kwargs or len(args) != 9:
            return original(*args, **kwargs)
        packed = not isinstance(args[3], bool)
        data, batch_sizes = args[0], args[1].tolist() if packed else []
        hx, weights, has_biases, layers, dropout, trains, bidirectional = args[1 + packed : 8 + packed]
        states = list(hx) if mode == LSTM else [hx, None]
        batch_first = False if packed else args[8]
        if is_functorch_wrapped_tensor(data) or states[0] is None or not data.numel():
            return original(*args)
        here = simulated()
        if here is not None and not _takes(data.dtype, here.capability or (0, 0)):
            name = original.__name__.partition("_")[0].upper()
            dtype = str(data.dtype).removeprefix("torch.")
            raise ConfigError(
                f"without cuDNN a card runs this {name} in {dtype} cell after cell, which is not simulated: train in "
                "float32 or float16 (cuDNN has bfloat16 since Ampere), with torch.backends.cudnn.enabled"
            )
        options = (layers, batch_first, dropout, trains, bidirectional, batch_sizes, None)
        if trains and dropout:  # PyTorch makes the dropout state at the first call, before autocast copies the weights
            DROPOUT(dropout, True, 0, dtype=torch.uint8)
        # `_cudnn_impl` detects projections by these two sizes; a layer with a projection has one more weight.
        hidden, state = (states[1] if mode == LSTM else states[0]).size(2), states[0].size(2)
        projection = 0 if state == hidden else state
        stride = (4 if has_biases else 2) + bool(projection)
        if torch.is_autocast_enabled("cuda"):
            together, weights = halved_together(weights, mode, hidden, layers * (1 + bidirectional))
            states = [halved(value) for value in reversed(states)][::-1]
            data = halved(data)
            with without_autocast():
                found = RNN(data, weights, stride, together, *states, mode, hidden, projection, *options)
        else:
            flat = stand_in(weights) if are_flattened(weights) else None
            found = RNN(data, weights, stride, flat, *states, mode, hidden, projection, *options)
        return found[:3] if mode == LSTM else found[:2]

    return run


#: Patches that make ``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu`` on CPU tensors run cuDNN's operator.
RNNS = tuple(
    (owner, name, _by_cudnn(getattr(torch, name), mode)) for name, mode in MODES.items() for owner in (torch._VF, torch)
)


def _takes(dtype: torch.dtype, capability: Capability) -> bool:
    """Whether cuDNN runs a recurrence of `dtype`: ``use_cudnn`` in aten/src/ATen/native/RNN.cpp."""
    has_dtype = dtype in FLATTENED or (dtype is torch.bfloat16 and capability >= (8, 0))
    return bool(torch.backends.cudnn.enabled) and has_dtype


def recurrence_notes(modules: Iterable[nn.Module], capability: Capability) -> list[str]:
    """Returns notes on the uncertain byte counts of those `modules` that cuDNN runs on a card."""
    recurrent = (module for module in modules if isinstance(module, nn.RNNBase))
    found = [module for module in recurrent if _takes(next(module.parameters()).dtype, capability)]
    names = ", ".join(sorted({type(module).__name__ for module in found}))
    notes = []
    if found:
        notes.append(
            f"{names}: cuDNN's reserve space and workspace follow measurements on one H100 with cuDNN 9.19, where "
            "peaks of six other steps were off by 1.8 % in the median and 5.6 % at most; other releases may differ"
        )
    if any(module.proj_size for module in found):
        notes.append("an LSTM with projections is assumed to have the workspace of one without: 24 differed by 5 %")
    return notes
