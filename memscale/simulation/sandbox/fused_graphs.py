"""The buffers of a graph that a compiler runs by fused kernels, and their lifetimes.

NOTE: the rules, by torch/_inductor (lowering.py, ir.py, scheduler.py) of PyTorch 2.13.

    operator of a library (product, convolution, attention, sort)   runs as in eager mode
    view                                                            runs where a library or the caller needs it
    reduction, concatenation                                        a fused kernel makes a buffer
    element-wise operator                                           a buffer where a library or the caller reads it;

Neighbouring operators that read a common buffer, or each other, are one kernel. A buffer dies after its last reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from memscale.simulation.kernels.shapes import Kind, kind_of, tensors_in
from memscale.simulation.rules import reductions
from memscale.simulation.rules.registry import rule_of

_LIBRARY = torch.library.Library("memscale", "FRAGMENT")
_LIBRARY.define("fused(Tensor[] read, *, Tensor(a!)[] out) -> ()")
_LIBRARY.impl("fused", lambda read, *, out: None, "CompositeExplicitAutograd")


@dataclass(frozen=True, eq=False)
class _Step:
    """A step of a compiled graph: one operator, or one fused kernel.

    Attributes:
        nodes: the nodes that the step computes: one for an operator, those with buffers for a fused kernel.
        reads: the nodes whose buffers a fused kernel reads; None for an operator or a view.
        last: the nodes that no later step reads.
    """

    nodes: tuple[Node, ...]
    reads: tuple[Node, ...] | None
    last: tuple[Node, ...]


class FusedGraph:
    """Runs `graph`, of operators of ATen, as fused kernels; its argument is a list, which it empties."""

    def __init__(self, graph: GraphModule) -> None:
        nodes = list(graph.graph.nodes)
        self._graph = graph  # the attributes that its nodes name
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._output = nodes[-1]
        self._steps = _scheduled(nodes)

    def __call__(self, args: list[Any]) -> list[Any]:
        """The graph's results."""
        values: dict[Node, Any] = dict(zip(self._inputs, args, strict=True))
        args.clear()
        for step in self._steps:
            if step.reads is None:
                (node,) = step.nodes
                values[node] = getattr(self._graph, str(node.target)) if node.op == "get_attr" else _run(node, values)
            else:
                _fuse(step, step.reads, values)
            for each in step.last:
                del values[each]
        results: Any = map_arg(self._output.args[0], values.__getitem__)
        return list(results)


def _fuse(step: _Step, reads: tuple[Node, ...], values: dict[Node, Any]) -> None:
    """Lets one kernel read buffers and make those of `step`."""
    for node in step.nodes:
        made = node.meta["val"]
        values[node] = list(map(_buffer, made)) if isinstance(made, (list, tuple)) else _buffer(made)
    read = tensors_in([values[each] for each in reads], {})
    torch.ops.memscale.fused(read, out=tensors_in([values[each] for each in step.nodes], {}))


def _run(node: Node, values: dict[Node, Any]) -> Any:
    run: Any = node.target
    args: Any = map_arg(node.args, values.__getitem__)
    kwargs: Any = map_arg(node.kwargs, values.__getitem__)
    return run(*args, **kwargs)


def _buffer(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)


def _scheduled(nodes: list[Node]) -> list[_Step]:
    """The nodes of a graph that run, in order."""
    kinds = {node: _kind(node) for node in nodes}
    needed = _read_whole(nodes, kinds)
    steps: list[tuple[tuple[Node, ...], tuple[Node, ...] | None, tuple[Node, ...]]] = []
    sources: dict[Node, tuple[Node, ...]] = {}
    for node in nodes:
        read = tuple(dict.fromkeys(each for arg in node.all_input_nodes for each in sources[arg]))
        has_buffer = kinds[node] != "view" and node in needed
        sources[node] = (node,) if has_buffer else read
        if node not in needed or node.op in ("placeholder", "output"):
            continue
        if kinds[node] not in ("place", "made"):
            steps.append(((node,), None, tuple(node.all_input_nodes)))
        elif steps and steps[-1][1] is not None and not {*read}.isdisjoint({*steps[-1][0], *steps[-1][1]}):
            made, before, _ = steps.pop()  # one kernel with what reads the same, or is read by it
            reads = tuple(dict.fromkeys((*(before or ()), *(each for each in read if each not in made))))
            steps.append(((*made, node), reads, reads))
        else:
            steps.append(((node,), read, read))
    last = {each: at for at, (made, _, uses) in enumerate(steps) for each in (*uses, *made)}
    ends: dict[int, list[Node]] = {}
    for node, at in last.items():
        if node not in nodes[-1].all_input_nodes:
            ends.setdefault(at, []).append(node)
    return [_Step(made, reads, tuple(ends.get(at, ()))) for at, (made, reads, _) in enumerate(steps)]


def _kind(node: Node) -> str:
    """``"place"`` (element-wise), ``"made"`` (a reduction), ``"view"``, or ``"library"``: all that runs as it is."""
    op = node.target
    if not isinstance(op, OpOverload) or op._schema.is_mutable or not _is_of_tensors(node.meta.get("val")):
        return "library"
    if (kind_of(op) is Kind.RUN or op._opname == "_unsafe_view") and node.all_input_nodes:
        return "view"
    if str(op) in reductions.RULES or op._opname == "cat":  # older PyTorchs have no tag for reductions
        return "made"
    by_place = torch.Tag.pointwise in op.tags or op.namespace == "prims" or rule_of(op).by_place
    return "place" if by_place else "library"


def _is_of_tensors(value: Any) -> bool:
    return all(isinstance(each, torch.Tensor) for each in (value if isinstance(value, (list, tuple)) else [value]))


def _read_whole(nodes: list[Node], kinds: dict[Node, str]) -> set[Node]:
    """The nodes that a library or the caller reads, with the views on the way, and those that make a buffer anyway."""
    found: set[Node] = set()
    for node in reversed(nodes):
        if kinds[node] in ("library", "made"):
            found.add(node)
        if node in found and kinds[node] in ("library", "view"):
            found.update(node.all_input_nodes)
    return found
