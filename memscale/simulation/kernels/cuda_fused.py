"""Functions that PyTorch runs otherwise on a CUDA device than on a CPU, where it composes them of several operators.

RMS norms and the cells of recurrences are one operator each there, as is a softmax that widens; a batch norm that cuDNN
does copies its input first.
Source: aten/src/ATen/native/layer_norm.cpp, RNN.cpp, Normalization.cpp, and cuda/RNN.cu of PyTorch 2.13.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from memscale.simulation.kernels.cuda_reductions import reduced
from memscale.simulation.kernels.programs import RESULTS, Capability, Program, Result, briefly, copied, taken
from memscale.simulation.sandbox.process_state import patched

aten = torch.ops.aten

RMS_NORM = aten._fused_rms_norm.default
RMS_NORM_BACKWARD = aten._fused_rms_norm_backward.default
_LSTM_CELL = aten._thnn_fused_lstm_cell.default
_LSTM_CELL_BACKWARD = aten._thnn_fused_lstm_cell_backward_impl.default
_GRU_CELL = aten._thnn_fused_gru_cell.default
_GRU_CELL_BACKWARD = aten._thnn_fused_gru_cell_backward.default
_GRU_KEEPS, _GRU_GATES = 5, 3  # numbers for each unit

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
    if torch._C._dispatch_has_kernel_for_dispatch_key(RMS_NORM.name(), "IPU"):  # around a simulation in another one
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl(RMS_NORM, _no_kernel, "IPU")
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
    normed: torch.Tensor = RMS_NORM.redispatch(_AS_ON_CUDA, input, normalized_shape, weight, eps)[0]
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


def normalises_by_cudnn(image: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether cuDNN normalises a batch: ``_batch_norm_impl_index`` in Normalization.cpp."""
    if not torch.backends.cudnn.enabled or image.dim() < 3 or torch.bfloat16 in (image.dtype, weight.dtype):
        return False
    return image.dtype != torch.float16 or weight.dtype == torch.float32


# What the operators return: some have no fake kernel, or one that computes as a CPU does.


def _normed(x: torch.Tensor, normalized_shape: Sequence[int], weight: Any, eps: Any) -> tuple[torch.Tensor, ...]:
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows = [*x.shape[: x.dim() - len(normalized_shape)], *[1] * len(normalized_shape)]
    return x.new_empty(x.shape), x.new_empty(rows, dtype=wide)


def _norm_gradients(
    grad: torch.Tensor, x: torch.Tensor, shape: Any, rstd: Any, weight: Any, wanted: Sequence[bool]
) -> tuple[Any, ...]:
    of_weight = weight.new_empty(weight.shape) if weight is not None and wanted[1] else None
    return x.new_empty(x.shape) if wanted[0] else None, of_weight


def _lstm_state(gates: torch.Tensor, hidden_gates: Any, cx: torch.Tensor, *biases: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(gates)


def _lstm_gradients(
    hy: Any, cy: Any, cx: torch.Tensor, new_cx: Any, gates: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    if hy is None and cy is None:
        return None, None, None
    return torch.empty_like(gates), torch.empty_like(cx), gates.new_empty(gates.size(1)) if has_bias else None


def _gru_state(gates: Any, hidden_gates: Any, hx: torch.Tensor, *biases: Any) -> tuple[torch.Tensor, ...]:
    return torch.empty_like(hx), hx.new_empty(hx.size(0), hx.size(1) * _GRU_KEEPS)


def _gru_gradients(hy: torch.Tensor, kept: torch.Tensor, has_bias: bool) -> tuple[torch.Tensor | None, ...]:
    rows, width = kept.size(0), kept.size(1) // _GRU_KEEPS * _GRU_GATES
    biases = [kept.new_empty(width) if has_bias else None for _ in range(2)]
    return kept.new_empty(rows, width), kept.new_empty(rows, width), torch.empty_like(hy), *biases


def _histogram(input: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
    """``torch.histc``, by which experts' tokens are counted: CUDA has one of integers, and a CPU has not."""
    counted: torch.Tensor = aten.histc.default(input.float(), *options, **named)
    return counted.to(input.dtype)


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(0)  # a buffer is for CPUs


def _bags(
    weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, scales: bool = False, mode: int = 0, *rest: Any
) -> tuple[torch.Tensor, ...]:
    """The bag of each index, for all modes, and the largest of each bag for one (``_embedding_bag_cuda``)."""
    ends_with_offset = len(rest) > 2 and rest[2]
    bags = offsets.size(0) - bool(ends_with_offset)
    largest = (bags, weight.size(1)) if mode == 2 else (0,)
    return weight.new_empty(bags, weight.size(1)), *map(indices.new_empty, (indices.shape, offsets.shape, largest))


def _margin_loss(
    x: torch.Tensor, target: torch.Tensor, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1
) -> torch.Tensor:
    return x.new_empty(()) if reduction or x.dim() < 2 else x.new_empty(x.size(0))


def _margin_gradient(grad: torch.Tensor, x: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


#: What computes the values of an operator that a CPU has for other dtypes only.
COMPUTED: Mapping[OpOverload, Callable[..., Any]] = {aten.histc.default: _histogram}
RESULTS_OF_FUSED: Mapping[OpOverload, Callable[..., Any]] = {
    RMS_NORM: _normed,
    RMS_NORM_BACKWARD: _norm_gradients,
    _LSTM_CELL: _lstm_state,
    _LSTM_CELL_BACKWARD: _lstm_gradients,
    _GRU_CELL: _gru_state,
    _GRU_CELL_BACKWARD: _gru_gradients,
    aten.log_sigmoid_forward.default: _log_sigmoid,
    aten._embedding_bag.default: _bags,
    aten.multi_margin_loss.default: _margin_loss,
    aten.multi_margin_loss_backward.default: _margin_gradient,
    **COMPUTED,
}


# What they take.


def partial_gradients(
    rows: int, columns: int, parameters: Sequence[torch.Tensor], multiprocessors: int
) -> tuple[int, ...]:
    """Partial gradients of a norm's parameters, where the rows are many and short.

    Source: ``LaunchGammaBetaBackwardCUDAKernel`` in aten/src/ATen/native/cuda/layer_norm_kernel.cu.
    """
    if rows <= 64 * 1024 or columns // 32 >= multiprocessors // 2:
        return ()
    blocks = min(32 * 1024 // math.ceil(columns / 32), math.ceil(rows / 32))
    return tuple(blocks * columns * parameter.itemsize for parameter in parameters)


def _norm_program(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    return *taken(copied(args[0])), RESULTS


def _norm_backward_program(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    grad, x, shape, _, weight, wanted = args[:6]
    columns = math.prod(shape)
    parameters = [weight] if weight is not None and wanted[1] else []
    partials = partial_gradients(x.numel() // columns if columns else 0, columns, parameters, multiprocessors)
    return *taken(copied(x)), RESULTS, *taken(copied(grad)), *partials


def _gates_summed(gates: torch.Tensor, capability: Capability, multiprocessors: int) -> tuple[int, ...]:
    bias = gates.new_empty(gates.size(1), device="meta")
    return reduced("aten.sum.dim_IntList", (gates, [0], False), bias, capability, multiprocessors)


def _lstm_backward_program(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    summed = _gates_summed(args[4], capability, multiprocessors) if args[5] else ()
    return Result(0), Result(1), RESULTS, *summed


def _gru_backward_program(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    rows, width = args[1].size(0), args[1].size(1) // _GRU_KEEPS * _GRU_GATES
    gates = torch.empty(rows, width, dtype=args[1].dtype, device="meta")
    summed = _gates_summed(gates, capability, multiprocessors) if args[2] else ()
    before: Program = (Result(0), Result(1), Result(2), *([Result(3), *briefly(*summed)] if summed else ()))
    return *before, RESULTS, *summed


#: By ``str(OpOverload)``.
FUSED_PROGRAMS: Mapping[str, Callable[[Sequence[Any], Capability, int], Program]] = {
    str(RMS_NORM): _norm_program,
    str(RMS_NORM_BACKWARD): _norm_backward_program,
    str(_LSTM_CELL_BACKWARD): _lstm_backward_program,
    str(_GRU_CELL_BACKWARD): _gru_backward_program,
}
FUSED_ORDER: Mapping[str, tuple[int, ...]] = {str(_LSTM_CELL): (2, 0, 1), str(_GRU_CELL): (1, 0)}
