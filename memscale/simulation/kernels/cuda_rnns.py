"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as on a CUDA device: cuDNN runs whole sequences in one operator.

Where cuDNN is turned off, and in bfloat16 before Ampere, PyTorch runs cell after cell (`by_cells`): the operators, and
the lifetime of each result, follow RNN.cpp. On a CPU, PyTorch multiplies the inputs of all steps at once.

Source: aten/src/ATen/native/RNN.cpp, cudnn/RNN.cpp and ATen/cudnn/AutocastRNN.cpp of PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from memscale.simulation.kernels.cuda_fused import gru_cell, lstm_cell
from memscale.simulation.process.process_state import all_patched
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


@contextmanager
def cuda_rnns(capability: Capability) -> Iterator[None]:
    """Makes ``torch.lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu`` on CPU tensors run cuDNN's operator.

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
    runs = {name: _by_cudnn(getattr(torch, name), mode, capability) for name, mode in MODES.items()}
    with all_patched((owner, name, run) for name, run in runs.items() for owner in (torch._VF, torch)):
        yield


def _by_cudnn(original: Callable[..., Any], mode: int, capability: Capability) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        # Arguments: input, hx, params, has_biases, ...; for a packed sequence: data, batch_sizes, hx, params, ...
        if kwargs or len(args) != 9:
            return original(*args, **kwargs)
        packed = not isinstance(args[3], bool)
        data, batch_sizes = args[0], args[1].tolist() if packed else []
        hx, weights, has_biases, layers, dropout, trains, bidirectional = args[1 + packed : 8 + packed]
        states = list(hx) if mode == LSTM else [hx, None]
        batch_first = False if packed else args[8]
        if is_functorch_wrapped_tensor(data) or states[0] is None:
            return original(*args)
        if not data.numel() or not _takes(data.dtype, capability):
            return by_cells(
                data,
                batch_sizes,
                states if mode == LSTM else states[:1],
                weights,
                mode=mode,
                has_biases=has_biases,
                dropout=dropout if trains else 0.0,
                bidirectional=bidirectional,
                batch_first=batch_first,
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


State = tuple[torch.Tensor, ...]  # (hidden, cell) for an LSTM, (hidden,) for the others


@dataclass(frozen=True)
class Weights:
    """The weights of one layer in one direction."""

    of_input: torch.Tensor
    of_hidden: torch.Tensor
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    projection: torch.Tensor | None


Cell = Callable[[torch.Tensor, State, Weights], State]


def by_cells(
    data: torch.Tensor,
    batch_sizes: Sequence[int],
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    *,
    mode: int,
    has_biases: bool,
    dropout: float,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """Returns the output and the last states of ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``.

    >>> lstm, x = torch.nn.LSTM(8, 16, 2, device="meta"), torch.ones(10, 4, 8, device="meta")
    >>> h = torch.zeros(2, 4, 16, device="meta")
    >>> options = {"has_biases": True, "dropout": 0.0, "bidirectional": False, "batch_first": False}
    >>> output, hy, cy = by_cells(x, [], [h, h], lstm._flat_weights, mode=MODES["lstm"], **options)
    >>> output.shape, hy.shape
    (torch.Size([10, 4, 16]), torch.Size([2, 4, 16]))

    Args:
        data: (steps, batch, width), or the rows of a packed sequence.
        batch_sizes: the number of rows of each step of a packed sequence; empty for other data.
        states: the initial states, each for all layers and directions.
        weights: the weights of each layer and direction, in the order of ``nn.LSTM``.
        mode: a value of `MODES`.
        has_biases, bidirectional, batch_first: the options of ``nn.LSTM``.
        dropout: the probability between layers; 0 in evaluation.
    """
    directions = 1 + bidirectional
    packed = bool(batch_sizes)
    transposed = batch_first and not packed
    x = data.transpose(0, 1) if transposed else data
    cell, layers = (
        _CELLS[mode],
        _layers(weights, has_biases, len(states) > 1 and states[0].size(2) != states[1].size(2)),
    )
    first = list(zip(*(state.unbind(0) for state in states), strict=True))
    last: list[State] = []
    for at in range(0, len(layers), directions):
        outputs = []
        steps = list(x.unbind(0)) if not packed else []
        for direction in range(directions):
            here, state = layers[at + direction], first[at + direction]
            if packed:
                output, state = (_packed_back if direction else _packed)(cell, x, batch_sizes, state, here)
            else:
                output, state = _whole(cell, steps, state, here, back=bool(direction))
            outputs.append(output)
            last.append(state)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        del outputs, output, steps
        if dropout and at + directions < len(layers):
            x = torch.dropout(x, dropout, True)
    ends = (torch.stack(each, 0) for each in zip(*last, strict=True))
    return x.transpose(0, 1) if transposed else x, *ends


def _layers(weights: Sequence[torch.Tensor], has_biases: bool, projects: bool) -> list[Weights]:
    each = (4 if has_biases else 2) + projects
    found = []
    for at in range(0, len(weights), each):
        of_input, of_hidden, *rest = weights[at : at + each]
        biases = (rest[0], rest[1]) if has_biases else (None, None)
        found.append(Weights(of_input, of_hidden, biases, rest[-1] if projects else None))
    return found


def _lstm(x: torch.Tensor, state: State, weights: Weights) -> State:
    hy, cy = lstm_cell(x, state, weights.of_input, weights.of_hidden, *weights.biases)
    return hy if weights.projection is None else torch.matmul(hy, weights.projection.t()), cy


def _gru(x: torch.Tensor, state: State, weights: Weights) -> State:
    return (gru_cell(x, state[0], weights.of_input, weights.of_hidden, *weights.biases),)


def _simple(nonlinearity: Callable[[torch.Tensor], torch.Tensor]) -> Cell:
    def run(x: torch.Tensor, state: State, weights: Weights) -> State:
        of_input, of_hidden = weights.biases
        gates = F.linear(state[0], weights.of_hidden, of_hidden)
        return (nonlinearity(gates.add_(F.linear(x, weights.of_input, of_input))),)

    return run


_CELLS: dict[int, Cell] = {
    MODES["rnn_relu"]: _simple(torch.relu),
    MODES["rnn_tanh"]: _simple(torch.tanh),
    MODES["lstm"]: _lstm,
    MODES["gru"]: _gru,
}


def _whole(
    cell: Cell, steps: list[torch.Tensor], state: State, weights: Weights, *, back: bool
) -> tuple[torch.Tensor, State]:
    outputs = []
    for x in reversed(steps) if back else steps:
        state = cell(x, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if back else outputs, 0), state


def _packed(
    cell: Cell, rows: torch.Tensor, batch_sizes: Sequence[int], state: State, weights: Weights
) -> tuple[torch.Tensor, State]:
    """Returns the outputs and last states of a packed sequence, forward: rows leave the batch as sequences end."""
    outputs: list[torch.Tensor] = []
    ended: list[State] = []
    begin, before = 0, batch_sizes[0]
    for size in batch_sizes:
        x = rows.narrow(0, begin, size)
        begin += size
        if size < before:
            ended.append(tuple(part.narrow(0, size, before - size) for part in state))
            state = tuple(part.narrow(0, 0, size) for part in state)
        before = size
        state = cell(x, state, weights)
        outputs.append(state[0])
    ended.append(state)
    return torch.cat(outputs, 0), tuple(torch.cat(parts, 0) for parts in zip(*ended[::-1], strict=True))


def _packed_back(
    cell: Cell, rows: torch.Tensor, batch_sizes: Sequence[int], first: State, weights: Weights
) -> tuple[torch.Tensor, State]:
    """Returns the outputs and last states of a packed sequence, backward: rows join the batch at their ends."""
    outputs: list[torch.Tensor] = []
    end, before = rows.size(0), batch_sizes[-1]
    state = tuple(part.narrow(0, 0, before) for part in first)
    for size in reversed(batch_sizes):
        if size > before:
            more = (part.narrow(0, before, size - before) for part in first)
            state = tuple(torch.cat(parts, 0) for parts in zip(state, more, strict=True))
        x = rows.narrow(0, end - size, size)
        end, before = end - size, size
        state = cell(x, state, weights)
        outputs.append(state[0])
    return torch.cat(outputs[::-1], 0), state
