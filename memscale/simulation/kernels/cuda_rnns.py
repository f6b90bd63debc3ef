"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as a CUDA device runs them: by cuDNN, whole sequences in one operator.

What happens around cuDNN's kernels is that of aten/src/ATen/native/cudnn/RNN.cpp and ATen/cudnn/AutocastRNN.cpp of
PyTorch 2.11. What cuDNN alone knows was measured, on one H100 with cuDNN 9.19: its reserve space, to the byte, and its
workspace. Not fitted: what LSTMs with projections take while they run, which is taken to be that of the same LSTM
without (peaks of 24 are within 5 %), and evaluation, which is taken to have the workspace of training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverload

from memscale.simulation.kernels.programs import AUTOCAST, RESULTS, Capability, Program, Result, briefly, copied, taken
from memscale.simulation.kernels.rnn_weights import (
    FLATTENED,
    GATES,
    MODES,
    are_flattened,
    halved,
    halved_together,
    stand_in,
)
from memscale.simulation.kernels.rnns_by_cells import by_cells
from memscale.simulation.sandbox.process_state import patched

RNN = torch.ops.aten._cudnn_rnn.default
RNN_BACKWARD = torch.ops.aten._cudnn_rnn_backward.default
DROPOUT = torch.ops.aten._cudnn_init_dropout_state.default

_LSTM = MODES["lstm"]
_KEPT = (1, 1, 5, 6)  # numbers for each unit and position, for backward
_MIB = 1 << 20
_RESULTS_AT = 10  # where the arguments of the backward pass go on as those of the forward from its seventh


@dataclass(frozen=True)
class Recurrence:
    """A call of ``_cudnn_rnn``, or of its backward pass."""

    input: torch.Tensor
    weights: Sequence[torch.Tensor]
    stride: int  # weights for each layer and direction
    weight_buf: torch.Tensor | None
    hx: torch.Tensor
    cx: torch.Tensor | None
    mode: int
    hidden: int
    projection: int  # the numbers that a state has, if fewer than `hidden`; 0 without
    layers: int
    batch_first: bool
    dropout: float
    trains: bool
    bidirectional: bool
    batch_sizes: Sequence[int]

    @classmethod
    def of(cls, args: Sequence[Any], *, backward: bool = False) -> Recurrence:
        """That of the positional arguments of the operator."""
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
        """Of all sequences."""
        return self.input.numel() // max(1, self.input.size(-1))

    @property
    def batch(self) -> int:
        return self.hx.size(1)

    @property
    def matrices(self) -> int:
        """Numbers in the weight matrices."""
        return sum(weight.numel() for weight in self.weights if weight.dim() == 2)

    @property
    def flat_weights(self) -> int:
        """Numbers in the one buffer of all weights, which has room for two biases wherever there are none, too."""
        biases = 2 * GATES[self.mode] * self.hidden
        return self.matrices + self.layers * self.directions * biases

    @property
    def output_shape(self) -> tuple[int, ...]:
        width = (self.projection or self.hidden) * self.directions
        return (self.positions, width) if self.batch_sizes else (self.steps, self.batch, width)

    @property
    def transposed(self) -> torch.Tensor:
        """The input, steps first."""
        return self.input.transpose(0, 1) if self.batch_first and not self.batch_sizes else self.input

    def in_user_order(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1) if self.batch_first and not self.batch_sizes else tensor


def reserve_bytes(call: Recurrence) -> int:
    """What cuDNN keeps for the backward pass: every gate of every unit, and what goes from layer to layer.

    Measured: to the byte for 72 networks of all modes, of one to three layers, both ways, in three dtypes, and for 24
    LSTMs with projections, which keep the state before its projection and after it.
    """
    if not call.trains:
        return 0
    units = (_KEPT[call.mode] * call.layers + call.layers - 1) * call.hidden
    if call.projection:
        units += call.layers * (call.hidden + call.projection)
    return 256 + units * call.positions * call.directions * call.input.itemsize


def workspace_bytes(call: Recurrence, *, backward: bool = False) -> int:
    """What cuDNN takes while it runs: 8 MiB for each layer and direction, the weights, and arrays over all positions.

    Fitted to the peaks of 24 networks in three dtypes, forward and backward (benchmarks/results/cudnn-rnns.json): 72 of
    the 144 to the byte, the rest 33 kB above to 1 MB below, where the allocator leaves blocks of up to 1 MB more whole;
    at worst 2.3 %, of two layers of an RNN that one kernel does at once. Two layers of unequal widths were measured in
    both directions only, and the persistent kernel once.
    """
    places, state = call.positions, call.batch * call.hidden
    width, hidden, layers = call.input.size(-1), call.hidden, call.layers
    is_lstm = call.mode == _LSTM
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
    """``use_rnn_persist_small_h``. bfloat16 was measured to take what the standard algorithm takes."""
    if call.batch_sizes or call.input.dtype not in (torch.float16, torch.float32):
        return False
    largest = 384 if GATES[call.mode] == 1 else 192
    return call.hidden <= (largest * 2 // 3 if backward else largest)


def _persists(call: Recurrence) -> bool:
    """``use_persist_common_heuristics`` and ``use_persist_device_heuristics``, of large cards since Ampere."""
    if call.batch_sizes or call.projection or call.input.dtype is not torch.float16 or _is_small(call, backward=False):
        return False
    fits = call.layers == 1 == call.directions and call.hidden <= 1024
    is_mode = call.mode == _LSTM or (GATES[call.mode] == 1 and (call.batch < 96 or call.hidden < 896))
    whole = call.hidden % 128 == call.input.size(-1) % 128 == call.batch % 8 == 0
    return fits and is_mode and whole and call.batch <= 128


#: What they are called among the workspaces.
DROPOUT_STATES = "cuDNN dropout"


def dropout_states_bytes(multiprocessors: int) -> int:
    """The states of cuDNN's random generators, which stay from the first dropout on.

    Measured: an H100 takes 6.5 to 7.1 MB, by what the first steps of three networks leave.
    """
    return multiprocessors * 1024 * 48


# What the operators return.


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
    # Matrices of all layers come first. Which part is whose does not matter: they are parts of one.
    flat = call.input.new_empty(call.flat_weights)
    parts = flat[: sum(weight.numel() for weight in call.weights)].split([weight.numel() for weight in call.weights])
    return dx, dhx, dcx, [part.view(weight.shape) for part, weight in zip(parts, call.weights, strict=True)]


def _dropout(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)  # what it returns is kept beside tensors, as a workspace


def _has_biases(call: Recurrence) -> bool:
    return call.stride >= 4


#: The operators' results, by the arguments, for which PyTorch has no fake kernel or one that leaves the reserve out.
RESULTS_OF_RNNS: Mapping[OpOverload, Callable[..., Any]] = {
    RNN: _forward,
    RNN_BACKWARD: _backward,
    DROPOUT: _dropout,
}


# What they take.


def _forward_program(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    call = Recurrence.of(args)
    # Output and states, the weights where they are copied together, and the reserve space last.
    results = Result(0), Result(1), Result(2), Result(4)
    return *taken(copied(call.transposed)), *results, workspace_bytes(call), RESULTS


def _backward_program(args: Sequence[Any], capability: Capability, multiprocessors: int) -> Program:
    """First the gradients of input and states, then those of the weights, which need the input in order again.

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


#: By ``str(OpOverload)``.
RNNS: Mapping[str, Callable[[Sequence[Any], Capability, int], Program]] = {
    str(RNN): _forward_program,
    str(RNN_BACKWARD): _backward_program,
}


_AUTOCAST = torch._C.DispatchKeySet(AUTOCAST)


@contextmanager
def cuda_rnns(capability: Capability) -> Iterator[None]:
    """Run ``torch.lstm`` and its like on CPU tensors as a CUDA device would, by cuDNN's operator.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> kept = []
    >>> with FakeTensorMode(), cuda_rnns((9, 0)):
    ...     lstm, x = nn.LSTM(8, 16), torch.empty(10, 4, 8)
    ...     with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.dtype), lambda t: t):
    ...         output, (hidden, cell) = lstm(x)
    >>> torch.uint8 in kept, output.grad_fn.name()  # cuDNN's reserve space
    (True, 'CudnnRnnBackward0')

    Args:
        capability: the device's compute capability, (major, minor).
    """
    with ExitStack() as stack:
        for name, mode in MODES.items():
            run = _by_cudnn(getattr(torch, name), mode, capability)
            stack.enter_context(patched(torch._VF, name, run))
            stack.enter_context(patched(torch, name, run))
        yield


def _by_cudnn(original: Callable[..., Any], mode: int, capability: Capability) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # input, hx, params, has_biases, ...; of a packed sequence: data, batch_sizes, hx, params, has_biases, ...
        if kwargs or len(args) != 9:
            return original(*args, **kwargs)
        packed = not isinstance(args[3], bool)
        data, batch_sizes = args[0], args[1].tolist() if packed else []
        hx, weights, has_biases, layers, dropout, trains, bidirectional = args[1 + packed : 8 + packed]
        states = list(hx) if mode == _LSTM else [hx, None]
        batch_first = False if packed else args[8]
        if is_functorch_wrapped_tensor(data) or states[0] is None:
            return original(*args)
        if not data.numel() or not _takes(data.dtype, capability):
            return by_cells(
                data,
                batch_sizes,
                states if mode == _LSTM else states[:1],
                weights,
                mode=mode,
                has_biases=has_biases,
                dropout=dropout if trains else 0.0,
                bidirectional=bidirectional,
                batch_first=batch_first,
            )
        options = (layers, batch_first, dropout, trains, bidirectional, batch_sizes, None)
        if trains and dropout:  # asked for each time, made once; before autocast's copies of the weights
            DROPOUT(dropout, True, 0, dtype=torch.uint8)
        # As `_cudnn_impl` tells an LSTM with projections, whose layers have a matrix more.
        hidden, state = (states[1] if mode == _LSTM else states[0]).size(2), states[0].size(2)
        projection = 0 if state == hidden else state
        stride = (4 if has_biases else 2) + bool(projection)
        if torch.is_autocast_enabled("cuda"):
            together, weights = halved_together(weights, mode, hidden, layers * (1 + bidirectional))
            states = [halved(value) for value in reversed(states)][::-1]
            data = halved(data)
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
                found = RNN(data, weights, stride, together, *states, mode, hidden, projection, *options)
        else:
            flat = stand_in(weights) if are_flattened(weights) else None
            found = RNN(data, weights, stride, flat, *states, mode, hidden, projection, *options)
        return found[:3] if mode == _LSTM else found[:2]

    return run


def _takes(dtype: torch.dtype, capability: Capability) -> bool:
    """``use_cudnn`` in aten/src/ATen/native/RNN.cpp."""
    has_dtype = dtype in FLATTENED or (dtype is torch.bfloat16 and capability >= (8, 0))
    return bool(torch.backends.cudnn.enabled) and has_dtype


def launches(op: OpOverload, args: Sequence[Any]) -> int:
    """How many kernels `op` launches one after the other, each of which takes the least time of a kernel or more.

    Measured: 4 times 5.5 µs for each step, layer and direction of the standard algorithm, 14 to 34 µs in nine of ten of
    59 networks forward, and a quarter of that where one kernel does all steps.
    """
    if op not in (RNN, RNN_BACKWARD):
        return 1
    backward = op is RNN_BACKWARD
    call = Recurrence.of(args, backward=backward)
    each = 1 if _is_small(call, backward=backward) else 4
    return each * call.steps * call.layers * call.directions


def recurrence_notes(modules: Iterable[nn.Module], capability: Capability) -> list[str]:
    """What is not known for sure of these modules on a card: of those that cuDNN runs."""
    recurrent = (module for module in modules if isinstance(module, nn.RNNBase))
    found = [module for module in recurrent if _takes(next(module.parameters()).dtype, capability)]
    names = ", ".join(sorted({type(module).__name__ for module in found}))
    notes = []
    if found:
        notes.append(
            f"{names}: on CUDA cuDNN runs it, and only cuDNN knows what it keeps for backward and its "
            "workspace: both are by measurement on one card, an H100 with cuDNN 9.19; of other releases they may differ"
        )
    if any(module.proj_size for module in found):
        notes.append("an LSTM with projections is taken to work in what one without does: within 5 % for 24 on an H100")
    return notes
