"""The autograd graphs that a simulated step runs through, which go node by node and not by recursion."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any


class _Root:
    """Goes with the node that has it: nodes have no weak references of their own."""


class Graphs:
    """Keeps the nodes that ran while their graph is there, and then lets them go in the order they ran in.

    From torch 2.13 on a node that Python has seen takes the next one with it from inside its own destructor: a chain
    of some ten thousand, of a recurrence over a long sequence, overflows the stack of the process.
    """

    def __init__(self) -> None:
        # Of each backward: of the node that ran first, which has all others; and these.
        self._ran: dict[int, tuple[weakref.ref[_Root], deque[Any]]] = {}
        self.gone: list[weakref.ref[_Root]] = []  # the first nodes of graphs that the step has let go of

    def runs(self, node: Any, backward: int) -> None:
        """`node` runs, another than the last one, in the backward of this number."""
        if (ran := self._ran.get(backward)) is not None:
            ran[1].append(node)
            return
        node.metadata[_Root] = root = _Root()
        self._ran[backward] = weakref.ref(root, self.gone.append), deque()

    def let_go(self) -> None:
        """Lets go of the graphs that the step has let go of."""
        if not self.gone:
            return
        self.gone.clear()
        for backward, (root, _) in [*self._ran.items()]:
            if root() is None:
                self._drop(backward)

    def end(self) -> None:
        """Lets go of all: a step that failed has let go of none, and what hangs on them would be searched for."""
        for backward in [*self._ran]:
            self._drop(backward)

    def _drop(self, backward: int) -> None:
        _, after = self._ran.pop(backward)
        while after:
            after.popleft()
