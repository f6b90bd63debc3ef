"""Functions that PyTorch runs otherwise on a CUDA device than on a CPU, where it composes them of several operators.

RMS norms and the cells of recurrences are one operator each there, as is a softmax that widens; a batch norm that cuDNN
does copies its input first.
Source: aten/src/ATen/native/layer_norm.cpp, RNN.cpp, Normalization.cpp, and cuda/RNN.cu of PyTorch 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from memscale.simulation.process.process_state import patched
from memscale.simulation.rules.norms import normalises_by_cudnn

aten = torch.ops.aten

_RMS_NORM = aten._fused_rms_norm.default
_LSTM_CELL = aten._thnn_fused_lstm_cell.default
_GRU_CELL = aten._thnn_fused_gru_cell.default

_key = torch._C.DispatchKey
# Of a tensor on the device, under a mode in Python. Before torch 2.12 such a mode has to find what was there on entry.
_AS_ON_CUDA = functools.reduce(
    torch._C.DispatchKeySet.__or__,
    map(torch._C.DispatchKeySet, (_key.PythonTLSSnapshot, _key.AutogradIPU, _key.Python, _key.CPU)),
)


# What takes the place of the functions.


@contextmanager
def _known_to_autograd() -> Iterator[None]:
    """Let autograd find the derivative of the RMS norm, which it has where a device has a kernel for the operator.

    A device that no build of PyTorch has, in place of CUDA, which a build without it has not: no tensor of whoever
    trains meanwhile can reach this one.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(_RMS_NORM.name(), "IPU"):  # around a simulation in another one
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl(_RMS_NORM, _no_kernel, "IPU")
    try:
        yield
    finally:
        library._destroy()


def _no_kernel(*args: Any) -> Any:
    raise NotImplementedError("the derivative alone is wanted")


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    other = weight is not None and weight.dtype != input.dtype
    if other or input.is_complex() or suggest_memory_format(input) is not torch.contiguous_format:
        composed: torch.Tensor = aten.rms_norm.default(input, normalized_shape, weight, eps)
        return composed
    normed: torch.Tensor = _RMS_NORM.redispatch(_AS_ON_CUDA, input, normalized_shape, weight, eps)[0]
    return normed


def lstm_cell(
    input: torch.Tensor,
    hx: Sequence[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch.lstm_cell``."""
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    hy, cy, _ = _LSTM_CELL(*gates, hx[1], b_ih, b_hh)
    return hy, cy


def gru_cell(
    input: torch.Tensor,
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.gru_cell``."""
    hy: torch.Tensor = _GRU_CELL(torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t()), hx, b_ih, b_hh)[0]
    return hy


def _softmax(of: OpOverload, kernel: OpOverload) -> Callable[..., torch.Tensor]:
    """A softmax of float16 that is to be in float32 reads what it is given, and a CPU casts that first.

    Source: ``softmax`` and ``log_softmax`` in aten/src/ATen/native/SoftMax.cpp; not so of bfloat16.
    """

    def run(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        widens = dtype is torch.float32 and input.dtype is torch.float16
        found: torch.Tensor = kernel(input, dim, True) if widens else of(input, dim, dtype)
        return found

    return run


#: What runs on the device in place of an operator that is composed of others.
FUSED: Mapping[OpOverload, Callable[..., Any]] = {
    aten.softmax.int: _softmax(aten.softmax.int, aten._softmax.default),
    aten.log_softmax.int: _softmax(aten.log_softmax.int, aten._log_softmax.default),
    aten.rms_norm.default: _rms_norm,
    aten.lstm_cell.default: lstm_cell,
    aten.gru_cell.default: gru_cell,
}


@contextmanager
def cuda_fused() -> Iterator[None]:
    """Run these functions on CPU tensors as a CUDA device would.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode(), cuda_fused():
    ...     y = torch.nn.RMSNorm(8)(torch.empty(4, 8))
    >>> y.grad_fn.name()
    'FusedRmsNormBackward0'
    """
    with ExitStack() as stack:
        stack.enter_context(_known_to_autograd())
        for op, run in FUSED.items():
            name = op._opname
            stands_in = _beside_autocast(getattr(torch, name), run)
            for holder in (torch.Tensor, torch) if hasattr(torch.Tensor, name) else (torch, torch._VF):
                stack.enter_context(patched(holder, name, stands_in))
        stack.enter_context(patched(torch, "batch_norm", _batch_norm(torch.batch_norm)))
        yield


def _beside_autocast(original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        # Autocast casts first, and then comes back to what is FUSED.
        if torch.is_autocast_enabled("cuda") or not args or is_functorch_wrapped_tensor(args[0]) or "out" in kwargs:
            return original(*args, **kwargs)
        return run(*args, **kwargs)

    return choose


def _batch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    def normalise(input: torch.Tensor, weight: Any, bias: Any, mean: Any, *options: Any, **named: Any) -> torch.Tensor:
        if weight is not None and bias is not None and normalises_by_cudnn(input, weight):
            input = input.contiguous(memory_format=suggest_memory_format(input))
        normalised: torch.Tensor = original(input, weight, bias, mean, *options, **named)
        return normalised

    return normalise
