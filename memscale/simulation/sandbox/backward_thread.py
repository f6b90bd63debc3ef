"""The order of a backward through a backward, as of a card, for which autograd works in a thread of its own.

Autograd runs of what is ready the node that was made last, by a number that each thread counts for itself. Beside a
card the nodes of a graph that a backward makes (``create_graph=True``) have the numbers of the card's thread, which has
mostly made fewer than the caller's, so that they come after the forward's; on a CPU one thread makes all, and they come
first.

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
    """Numbers what backward makes as the thread of a card would.

    Args:
        recorder: is told which numbers these nodes were made with, and that the next step may go another way.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._ahead = 0  # by how much the card's thread has counted further
        self._began = _next()
        self._made = 0  # by backward, in this step
        self.begin_step()

    def begin_step(self) -> None:
        """The next step begins, which makes about as many nodes as this one."""
        self._to_be_made = self._made
        self._ahead += 2 * self._made - (_next() - self._began)
        self._recorder.made_as.clear()
        self._began = _next()
        self._made = 0
        # Each run of nodes that the caller's thread made: how many of the step were before it, and its first number.
        self._runs = [(0, self._began)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Lets every backward of the body make its nodes so."""
        run = self._beside(torch.autograd.graph._engine_run_backward)
        with (
            patched(torch.autograd.graph, "_engine_run_backward", run),
            patched(torch.autograd, "_engine_run_backward", run),
        ):
            yield

    def _beside(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        def run(outputs: Any, gradients: Any, retain_graph: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # inside of another, which is in the card's thread
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
            if made < following:  # what adds to a gradient comes before all
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
    """The number of the next node that this thread makes."""
    return torch._C._autograd._get_sequence_nr()


def _below(tensors: Iterable[torch.Tensor | None], first: int) -> list[Any]:
    """The nodes of the graphs of `tensors` that were made with number `first` or later."""
    rest = [each.node if hasattr(each, "node") else each.grad_fn for each in tensors if each is not None]
    found: dict[Any, None] = {}
    while rest:
        node = rest.pop()
        if node is not None and node not in found and node._sequence_nr() >= first:
            found[node] = None
            rest += [following for following, _ in node.next_functions]
    return list(found)
