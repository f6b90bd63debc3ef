"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as on a CUDA device without cuDNN: PyTorch runs cell after cell.

PyTorch does so where cuDNN is turned off, and in bfloat16 before Ampere. The operators, and the lifetime of each
result, follow aten/src/ATen/native/RNN.cpp of PyTorch 2.13; on a CPU, PyTorch multiplies the inputs of all steps at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from memscale.simulation.kernels.cuda_fused import gru_cell, lstm_cell
from memscale.simulation.rules.rnn_weights import MODES

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
