"""The order of a double backward as on a card, for which autograd works in a thread of its own.

Of the ready nodes autograd runs the node with the highest sequence number, and each thread counts for itself. On a card
the nodes of a backward's graph (``create_graph=True``) have numbers of the card's thread. That thread has mostly
counted less than the caller's, so these nodes run after the forward's; on a CPU one thread makes all nodes, and they
run first.

Source: ``Node`` in torch/csrc/autograd/function.h, ``CompareNodeTaskTime`` in torch/csrc/autograd/engine.h.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memscale.simulation.dispatch.step_recorder import StepRecorder
from memscale.simulation.process.process_state import patched


class BackwardThread:
    """Numbers the nodes that backward makes as a card's thread would.

    Args:
        recorder: receives the numbers that the nodes were made with, and whether the next step may run in another
            order.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._ahead = 0  # the count of the card's thread, relative to the caller's
        self._began = _next()
        self._made = 0  # nodes made by backward in this step
        self.begin_step()

    def begin_step(self) -> None:
        """Begins the next step, which is assumed to make about as many nodes as this one."""
        self._to_be_made = self._made
        self._ahead += 2 * self._made - (_next() - self._began)
        self._recorder.made_as.clear()
        self._began = _next()
        self._made = 0
        # Each run of nodes of the caller's thread: the number of the caller's nodes before the run, and its first
        # number.
        self._runs = [(0, self._began)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Patches autograd so that every backward in the body numbers its nodes like a card's thread."""
        run = self._numbering(torch.autograd.graph._engine_run_backward)
        with (
            patched(torch.autograd.graph, "_engine_run_backward", run),
            patched(torch.autograd, "_engine_run_backward", run),
        ):
            yield

    def _numbering(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        def run(outputs: Any, gradients: Any, retain_graph: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # a backward inside another runs in the card's thread
                return engine(outputs, gradients, retain_graph, create_graph, *args, **kwargs)
            first = _next()
            found = engine(outputs, gradients, retain_graph, create_graph, *args, **kwargs)
            if create_graph:
                leaves = [getattr(node, "variable", None) for node in _below(outputs, 0)]
                self._number([*(found or ()), *(leaf.grad for leaf in leaves if leaf is not None)], first)
            self._made += _next() - first
            self._runs.append((_next() - self._began - self._made, _next()))
            return found

        return run

    def _number(self, found: Iterable[torch.Tensor | None], first: int) -> None:
        following = _next()
        callers = first - self._began - self._made
        later = max(0, self._to_be_made - self._made - (following - first))
        for node in _below(found, first):
            made = node._sequence_nr()
            if made < following:  # AccumulateGrad nodes have the highest numbers
                number = self._made + made - first
                place = number + self._ahead
                if 0 <= place < callers:
                    before, begin = self._runs[bisect_right(self._runs, (place, following)) - 1]
                    number = begin + place - before
                elif place >= callers:
                    number = following + place - callers + later
                node._set_sequence_nr(number)
                self._recorder.made_as[number] = made
                self._recorder.settled = False


def _next() -> int:
    """Returns the sequence number of the next node that this thread makes."""
    return torch._C._autograd._get_sequence_nr()


def _below(tensors: Iterable[torch.Tensor | None], first: int) -> list[Any]:
    """Returns the nodes of the graphs of `tensors` with sequence number `first` or later."""
    rest = [each.node if hasattr(each, "node") else each.grad_fn for each in tensors if each is not None]
    found: dict[Any, None] = {}
    while rest:
        node = rest.pop()
        if node is not None and node not in found and node._sequence_nr() >= first:
            found[node] = None
            rest += [following for following, _ in node.next_functions]
    return list(found)
