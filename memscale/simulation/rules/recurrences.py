"""The rules of cuDNN's ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, and of PyTorch's cells on a card.

Source of the allocations around cuDNN's kernels: aten/src/ATen/native/cudnn/RNN.cpp of PyTorch 2.11; of cells:
cuda/RNN.cu of 2.13. cuDNN's reserve space (to the byte) and workspace were measured on one H100 with cuDNN 9.19.
Assumptions without a fit: an LSTM with projections has the workspace of the same LSTM without them (peaks of 24 are
within 5 %), and evaluation has the workspace of training.

A CUDA device holds all weights of an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` in one flat storage, for cuDNN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from memscale.hardware import Work
from memscale.simulation.rules.layouts import ResultLayout
from memscale.simulation.rules.reductions import SUM, reduced
from memscale.simulation.rules.rule import (
    RESULTS,
    Arguments,
    CardTraits,
    OpRule,
    Program,
    Result,
    Time,
    briefly,
    copied,
    taken,
)

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
GATES = (1, 1, 4, 3)
# The dtypes whose weights a module flattens (torch/backends/cudnn/__init__.py); bfloat16 is never flattened.
FLATTENED = (torch.float16, torch.float32, torch.float64)


def halved_together(
    weights: Sequence[torch.Tensor], mode: int, hidden: int, directions: int
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Returns one flat float16 tensor for all weights, and each weight's copy as a view of it.

    Source: ``_cudnn_rnn_cast_reflatten`` in aten/src/ATen/cudnn/AutocastRNN.cpp, where autograd sees the copies.
    """
    if any(weight.dtype is torch.float64 for weight in weights) or weights[0].dtype is torch.float16:
        return stand_in(weights), weights
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    flat = weights[0].new_empty(matrices + directions * 2 * GATES[mode] * hidden, dtype=torch.float16)
    parts = flat[: sum(weight.numel() for weight in weights)].split([weight.numel() for weight in weights])
    return flat, [
        _Reflatten.apply(weight, part.view_as(weight))  # type: ignore[no-untyped-call]
        for weight, part in zip(weights, parts, strict=True)
    ]


class _Reflatten(torch.autograd.Function):
    """The differentiable copy of a weight into its view of the flat tensor; backward casts to the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        part.copy_(weight)
        return part.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.dtype), None


def are_flattened(weights: Sequence[torch.Tensor]) -> bool:
    """Whether a module on the card has `weights` in one flat storage: distinct parameters of a flattened dtype.

    Tensors in place of parameters (casts, streamed copies, a parametrization) are separate; cuDNN's operator copies
    them into a flat buffer at each call, and saves the buffer for backward.
    """
    own = all(isinstance(weight, nn.Parameter) and weight.dtype in FLATTENED for weight in weights)
    return own and len({id(weight) for weight in weights}) == len(weights)


def flattened_bytes(module: nn.Module) -> int:
    """Returns the bytes of the flat storage that ``Module.to`` makes for `module` on a card; 0 without a flat storage.

    Source: ``flatten_parameters`` in torch/nn/modules/rnn.py, ``copy_weights_to_flat_buf_views`` in cudnn/RNN.cpp.
    """
    if not isinstance(module, nn.RNNBase) or not torch.backends.cudnn.enabled:
        return 0
    weights = weights_of(module)
    if not are_flattened(weights) or len({weight.untyped_storage()._cdata for weight in weights}) < len(weights):
        return 0
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    biases = module.num_layers * (1 + module.bidirectional) * 2 * GATES[MODES[module.mode.lower()]] * module.hidden_size
    return int((matrices + biases) * weights[0].itemsize)


def weights_of(module: nn.RNNBase) -> list[torch.Tensor]:
    """Returns the weights of a recurrence, in the order in which cuDNN takes them."""
    return [weight for weights in module.all_weights for weight in weights]


def stand_in(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a tensor in place of the flat storage of all weights: the first weight's data, without new memory."""
    return weights[0].data


def halved(tensor: Any) -> Any:
    """Returns `tensor` in float16, as autocast casts for cuDNN's RNNs whatever its own dtype; float64 and None stay."""
    return tensor if tensor is None or tensor.dtype is torch.float64 else tensor.to(torch.float16)


RNN = torch.ops.aten._cudnn_rnn.default
RNN_BACKWARD = torch.ops.aten._cudnn_rnn_backward.default
DROPOUT = torch.ops.aten._cudnn_init_dropout_state.default

LSTM = MODES["lstm"]
_KEPT = (1, 1, 5, 6)  # numbers for each unit and position in the reserve space, by mode
_MIB = 1 << 20
_GRU_KEEPS, _GRU_GATES = 5, 3  # numbers for each unit
_RESULTS_AT = 10  # arguments 10.. of the backward operator are arguments 6.. of the forward operator


@dataclass(frozen=True)
class Recurrence:
    """A call of ``_cudnn_rnn``, or of its backward pass."""

    input: torch.Tensor
    weights: Sequence[torch.Tensor]
    stride: int  # the number of weights for each layer and direction
    weight_buf: torch.Tensor | None
    hx: torch.Tensor
    cx: torch.Tensor | None
    mode: int
    hidden: int
    projection: int  # the width of a projected state; 0 without projections
    layers: int
    batch_first: bool
    dropout: float
    trains: bool
    bidirectional: bool
    batch_sizes: Sequence[int]

    @classmethod
    def of(cls, args: Sequence[Any], *, backward: bool = False) -> Recurrence:
        """Returns the call with the positional arguments `args` of the operator."""
        at = _RESULTS_AT if backward else 6
        mode, *widths, layers, batch_first, dropout, trains, bidirectional, batch_sizes, _ = args[at : at + 10]
        data, weights, stride, buffer, hx, cx = args[:6]
        options = mode, *widths, layers, batch_first, dropout, trains, bidirectional, batch_sizes
        return cls(data, weights, stride, buffer, hx, cx, *options)

    @property
    def directions(self) -> int:
        return 1 + self.bidirectional

    @property
    def steps(self) -> int:
        return len(self.batch_sizes) or self.input.size(1 if self.batch_first else 0)

    @property
    def positions(self) -> int:
        """Returns the number of positions of all sequences together."""
        return self.input.numel() // max(1, self.input.size(-1))

    @property
    def batch(self) -> int:
        return self.hx.size(1)

    @property
    def matrices(self) -> int:
        """Returns the number of elements in the weight matrices."""
        return sum(weight.numel() for weight in self.weights if weight.dim() == 2)

    @property
    def flat_weights(self) -> int:
        """Returns the number of elements in the flat weight buffer, which always has room for two biases."""
        biases = 2 * GATES[self.mode] * self.hidden
        return self.matrices + self.layers * self.directions * biases

    @property
    def output_shape(self) -> tuple[int, ...]:
        width = (self.projection or self.hidden) * self.directions
        return (self.positions, width) if self.batch_sizes else (self.steps, self.batch, width)

    @property
    def transposed(self) -> torch.Tensor:
        """Returns the input with steps as its first dimension."""
        return self.input.transpose(0, 1) if self.batch_first and not self.batch_sizes else self.input

    def in_user_order(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1) if self.batch_first and not self.batch_sizes else tensor


def reserve_bytes(call: Recurrence) -> int:
    """Return the bytes of cuDNN's reserve space for backward: every gate of every unit, and the inputs of later layers.

    The formula is exact for 72 measured networks of all modes, of one to three layers, one and two directions and three
    dtypes, and for 24 LSTMs with projections, which save the state before its projection and after it.
    """
    if not call.trains:
        return 0
    units = (_KEPT[call.mode] * call.layers + call.layers - 1) * call.hidden
    if call.projection:
        units += call.layers * (call.hidden + call.projection)
    return 256 + units * call.positions * call.directions * call.input.itemsize


def workspace_bytes(call: Recurrence, *, backward: bool = False) -> int:
    """Returns the bytes of cuDNN's workspace: 8 MiB a layer and direction, the weights, and arrays over all positions.

    The formula is fitted to the peaks of 24 networks in three dtypes, forward and backward
    (benchmarks/results/cudnn-rnns.json): exact for 72 of the 144, 33 kB above to 1 MB below for the others, within
    2.3 %. Two layers of unequal widths were measured with two directions only, and the persistent kernel once.
    """
    places, state = call.positions, call.batch * call.hidden
    width, hidden, layers = call.input.size(-1), call.hidden, call.layers
    is_lstm = call.mode == LSTM
    if call.bidirectional:
        numbers = places * hidden * (15 if is_lstm else 13) + state * (20 if is_lstm else 14 * layers)
    elif is_lstm:
        numbers = places * (5 * hidden + (width if layers == 1 else hidden)) + state * 10 * layers
    elif layers == 1:
        numbers = places * (4 * hidden + 2 * width) + state * 5
    else:
        numbers = places * 5 * hidden + state * 34
    if _persists(call):
        numbers += places * hidden * 16
    elif _is_small(call, backward=backward):
        numbers += places * hidden * (7 + 2 * GATES[call.mode])
    directions = layers * call.directions
    return 512 + 8 * _MIB * directions + (call.matrices + numbers) * call.input.itemsize


def _is_small(call: Recurrence, *, backward: bool) -> bool:
    """Source: ``use_rnn_persist_small_h``. Measured: bfloat16 takes the memory of the standard algorithm."""
    if call.batch_sizes or call.input.dtype not in (torch.float16, torch.float32):
        return False
    largest = 384 if GATES[call.mode] == 1 else 192
    return call.hidden <= (largest * 2 // 3 if backward else largest)


def _persists(call: Recurrence) -> bool:
    """Source: ``use_persist_common_heuristics`` and ``use_persist_device_heuristics``, for large cards since Ampere."""
    if call.batch_sizes or call.projection or call.input.dtype is not torch.float16 or _is_small(call, backward=False):
        return False
    fits = call.layers == 1 == call.directions and call.hidden <= 1024
    is_mode = call.mode == LSTM or (GATES[call.mode] == 1 and (call.batch < 96 or call.hidden < 896))
    whole = call.hidden % 128 == call.input.size(-1) % 128 == call.batch % 8 == 0
    return fits and is_mode and whole and call.batch <= 128


#: The names of the workspaces.
DROPOUT_STATES = "cuDNN dropout"


def dropout_states_bytes(multiprocessors: int) -> int:
    """The states of cuDNN's random generators, which stay allocated from the first dropout on.

    Measured on an H100: 6.5 to 7.1 MB after the first steps of three networks.
    """
    return multiprocessors * 1024 * 48


# The results of the operators.


def _forward(*args: Any) -> tuple[torch.Tensor, ...]:
    call = Recurrence.of(args)
    output = call.input.new_empty(call.output_shape)
    hy = call.hx.new_empty(call.hx.shape)
    cy = call.hx.new_empty(0) if call.cx is None else call.cx.new_empty(call.cx.shape)
    reserve = call.input.new_empty(reserve_bytes(call), dtype=torch.uint8)
    weights = call.input.new_empty(call.flat_weights) if call.weight_buf is None else call.weight_buf
    return call.in_user_order(output), hy, cy, reserve, weights


def _backward(*args: Any) -> tuple[Any, ...]:
    call = Recurrence.of(args, backward=True)
    if all(grad is None for grad in args[7:10]):
        return None, None, None, [None] * len(call.weights)
    rows = call.transposed
    dx = call.in_user_order(rows.new_empty(rows.shape))
    dhx, dcx = call.hx.new_empty(call.hx.shape), None if call.cx is None else call.cx.new_empty(call.cx.shape)
    if not args[-1][3]:
        return dx, dhx, dcx, []
    if not _has_biases(call):
        return dx, dhx, dcx, [weight.new_empty(weight.shape) for weight in call.weights]
    # Matrices of all layers come first; each is a view of one buffer, so their order has no influence.
    flat = call.input.new_empty(call.flat_weights)
    parts = flat[: sum(weight.numel() for weight in call.weights)].split([weight.numel() for weight in call.weights])
    return dx, dhx, dcx, [part.view(weight.shape) for part, weight in zip(parts, call.weights, strict=True)]


def _dropout(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)  # cuDNN's states count as a workspace instead


def _has_biases(call: Recurrence) -> bool:
    return call.stride >= 4


# The programs of the operators.


def _forward_program(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    call = Recurrence.of(args)
    # Results and states, the copied weights, and the reserve space last.
    results = Result(0), Result(1), Result(2), Result(4)
    return *taken(copied(call.transposed)), *results, workspace_bytes(call), RESULTS


def _backward_program(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of the backward: gradients of input and states, then of the weights, which read the input
    again.

    Source: ``_cudnn_rnn_backward`` in aten/src/ATen/native/cudnn/RNN.cpp.
    """
    call = Recurrence.of(args, backward=True)
    grads = args[7:10]
    if all(grad is None for grad in grads):
        return (RESULTS,)
    states = [state.nbytes for state in (call.hx, call.cx) if state is not None]
    zeros = [args[6].nbytes] if grads[0] is None else []
    zeros += [nbytes for grad, nbytes in zip(grads[1:], states, strict=False) if grad is None]
    rows = copied(call.transposed)
    gradient = 0 if grads[0] is None else copied(call.in_user_order(grads[0]))
    workspace = workspace_bytes(call, backward=True)
    if not args[-1][3]:
        return *taken(*zeros, rows, gradient), RESULTS, workspace
    results = Result(0), Result(1), Result(2)
    flat = 0 if _has_biases(call) else call.flat_weights * call.input.itemsize
    given_back = (-nbytes for nbytes in taken(gradient, rows))
    of_input: Program = *taken(rows, gradient), *results, *briefly(workspace), *given_back
    return *taken(*zeros), *of_input, *taken(rows), RESULTS, *taken(flat), workspace


def _flops(given: Arguments, results: Any) -> int:
    """Returns the FLOPs of every row of every step times every weight matrix."""
    weights = [value for name, value in given.items() if name.startswith("weight")]
    parts = [part for value in weights for part in (value if isinstance(value, (list, tuple)) else [value])]
    matrices = [part for part in parts if isinstance(part, torch.Tensor) and part.dim() == 2]
    return int(2 * prod(given["input"].shape[:-1]) * sum(prod(matrix.shape) for matrix in matrices))


def _flops_backward(given: Arguments, results: Any) -> int:
    return 2 * _flops(given, results)


def _launches(*, backward: bool) -> Time:
    """Returns the time with the launches after the first kernel, each of which takes at least the least of a kernel.

    Measured: 4 kernels of 5.5 µs for each step, layer and direction of the standard algorithm (14 to 34 µs in nine of
    ten of 59 networks forward), and a quarter of that where one kernel does all steps.
    """

    def time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
        call = Recurrence.of(args, backward=backward)
        each = 1 if _is_small(call, backward=backward) else 4
        return work._replace(launches=each * call.steps * call.layers * call.directions - 1)

    return time


# Recurrent cells, for recurrences without cuDNN.

_LSTM_CELL = torch.ops.aten._thnn_fused_lstm_cell.default
_GRU_CELL = torch.ops.aten._thnn_fused_gru_cell.default


def _lstm_cell(
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


def _gru_cell(
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


def _gates_summed(gates: torch.Tensor, card: CardTraits) -> tuple[int, ...]:
    bias = gates.new_empty(gates.size(1), device="meta")
    return reduced(SUM, (gates, [0], False), bias, card)


def _lstm_backward_program(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    summed = _gates_summed(args[4], card) if args[5] else ()
    return Result(0), Result(1), RESULTS, *summed


def _gru_backward_program(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    rows, width = args[1].size(0), args[1].size(1) // _GRU_KEEPS * _GRU_GATES
    gates = torch.empty(rows, width, dtype=args[1].dtype, device="meta")
    summed = _gates_summed(gates, card) if args[2] else ()
    before: Program = (Result(0), Result(1), Result(2), *([Result(3), *briefly(*summed)] if summed else ()))
    return *before, RESULTS, *summed


def _two_bias_gradients(layout: ResultLayout, args: Sequence[Any], card: CardTraits | None) -> ResultLayout:
    """Returns the layout with a storage for each bias gradient; the fake kernel returns one tensor for both."""
    gradients = list(layout.outputs)
    gradients[4] = replace(gradients[3], storage=len(layout.storage_bytes))
    return replace(
        layout,
        outputs=tuple(gradients),
        storage_bytes=(*layout.storage_bytes, layout.storage_bytes[gradients[3].storage]),
    )


RULES = {
    "aten._cudnn_rnn": OpRule(program=_forward_program, results=_forward, flops=_flops, time=_launches(backward=False)),
    "aten._cudnn_rnn_backward": OpRule(
        program=_backward_program, results=_backward, flops=_flops_backward, time=_launches(backward=True)
    ),
    "aten.miopen_rnn": OpRule(flops=_flops),
    "aten.miopen_rnn_backward": OpRule(flops=_flops_backward),
    "aten._cudnn_init_dropout_state": OpRule(results=_dropout),
    "aten.lstm_cell.default": OpRule(fused=_lstm_cell),
    "aten._thnn_fused_lstm_cell": OpRule(order=(2, 0, 1), results=_lstm_state),
    "aten._thnn_fused_lstm_cell_backward_impl": OpRule(program=_lstm_backward_program, results=_lstm_gradients),
    "aten.gru_cell.default": OpRule(fused=_gru_cell),
    "aten._thnn_fused_gru_cell": OpRule(order=(1, 0), results=_gru_state),
    "aten._thnn_fused_gru_cell_backward": OpRule(program=_gru_backward_program, results=_gru_gradients),
    # Only oneDNN's kernel knows the size of the workspace that it keeps for backward; the fake kernel's is empty.
    "aten.mkldnn_rnn_layer": OpRule(runs=True, flops=_flops),
    "aten.mkldnn_rnn_layer_backward": OpRule(layout=_two_bias_gradients, flops=_flops_backward),
}
