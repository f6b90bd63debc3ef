"""The autograd graphs of a simulated step, released node by node instead of by recursion."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any


class _Root:
    """An object that lives as long as its node, since nodes have no weak references."""


class Graphs:
    """Holds the nodes that ran while their graph exists, and then releases them in the order they ran in.

    Since torch 2.13 a node that Python has seen releases the next node inside its own destructor: a chain of ten
    thousand nodes, of a recurrence over a long sequence, would overflow the stack.
    """

    def __init__(self) -> None:
        # By backward: the root of the first node, which holds the others, and the nodes after it.
        self._ran: dict[int, tuple[weakref.ref[_Root], deque[Any]]] = {}
        self.gone: list[weakref.ref[_Root]] = []  # the roots of graphs that the step has released

    def runs(self, node: Any, backward: int) -> None:
        """Notes that `node`, another than the last one, runs in backward number `backward`."""
        if (ran := self._ran.get(backward)) is not None:
            ran[1].append(node)
            return
        node.metadata[_Root] = root = _Root()
        self._ran[backward] = weakref.ref(root, self.gone.append), deque()

    def let_go(self) -> None:
        """Releases the nodes of graphs that the step has released."""
        if not self.gone:
            return
        self.gone.clear()
        for backward, (root, _) in [*self._ran.items()]:
            if root() is None:
                self._drop(backward)

    def end(self) -> None:
        """Releases all nodes: a failed step released none, and left_behind would search all they hold."""
        for backward in [*self._ran]:
            self._drop(backward)

    def _drop(self, backward: int) -> None:
        _, after = self._ran.pop(backward)
        while after:
            after.popleft()
