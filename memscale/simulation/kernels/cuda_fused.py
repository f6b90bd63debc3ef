"""Functions that are one fused operator on a CUDA device, and a composition of several operators on a CPU.

On CUDA, RMS norms, the cells of recurrences, and a softmax from float16 to float32 are one operator each; a batch norm
by cuDNN copies its input first.
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
# The dispatch keys of a device tensor under a Python mode. Before torch 2.12 the mode needs PythonTLSSnapshot too.
_AS_ON_CUDA = functools.reduce(
    torch._C.DispatchKeySet.__or__,
    map(torch._C.DispatchKeySet, (_key.PythonTLSSnapshot, _key.AutogradIPU, _key.Python, _key.CPU)),
)


@contextmanager
def _known_to_autograd() -> Iterator[None]:
    """Makes autograd find the derivative of the fused RMS norm, which needs a kernel of some device for the operator.

    The kernel is registered for the IPU, a device that no build of PyTorch has: CPU builds lack CUDA, and no tensor of
    another thread can be on an IPU.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(_RMS_NORM.name(), "IPU"):  # an outer simulation registered it
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
    """Returns ``torch.lstm_cell`` of these arguments, by CUDA's fused operator."""
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
    """Returns ``torch.gru_cell`` of these arguments, by CUDA's fused operator."""
    hy: torch.Tensor = _GRU_CELL(torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t()), hx, b_ih, b_hh)[0]
    return hy


def _softmax(of: OpOverload, kernel: OpOverload) -> Callable[..., torch.Tensor]:
    """Returns a softmax that reads float16 and writes float32 in one CUDA kernel; a CPU casts its input first.

    Source: ``softmax`` and ``log_softmax`` in aten/src/ATen/native/SoftMax.cpp; bfloat16 is cast first on CUDA too.
    """

    def run(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        widens = dtype is torch.float32 and input.dtype is torch.float16
        found: torch.Tensor = kernel(input, dim, True) if widens else of(input, dim, dtype)
        return found

    return run


#: Maps a composite operator to the function that runs its fused kernel on the device.
FUSED: Mapping[OpOverload, Callable[..., Any]] = {
    aten.softmax.int: _softmax(aten.softmax.int, aten._softmax.default),
    aten.log_softmax.int: _softmax(aten.log_softmax.int, aten._log_softmax.default),
    aten.rms_norm.default: _rms_norm,
    aten.lstm_cell.default: lstm_cell,
    aten.gru_cell.default: gru_cell,
}


@contextmanager
def cuda_fused() -> Iterator[None]:
    """Makes the functions of `FUSED`, and batch norm, run CUDA's operators on CPU tensors.

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
        # Under autocast the original dispatches to `CudaAutocast`, which casts first and then calls `FUSED`.
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
