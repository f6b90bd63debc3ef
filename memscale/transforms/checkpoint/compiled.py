"""Regions that a graph of `torch.compile` would recompute to other numbers; they run uncompiled.

A compiled graph ends by writing the new value of an input (a buffer, a parameter, an argument) over the old value. Its
recompute in backward starts from the new value, so the gradient is wrong without an error, with
`torch.utils.checkpoint` as well. And a backend that runs Dynamo's graph as it is draws other random numbers in the
recompute. No code of memscale runs in a compiled region, so `_refuse_inexact` runs inside the compiler, when the
region's graph is complete.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

#: The backends of PyTorch that run the graph of Dynamo as it is. `aot_eager` and `inductor` make a backward graph.
_NO_BACKWARD_GRAPH = ("eager", "eager_noexcept", "eager_debug", "pre_dispatch_eager")


def checked(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns ``fn(*args, **kwargs)``, and makes Dynamo, which traces the call, refuse a region that is inexact."""
    result = fn(*args, **kwargs)
    torch._dynamo.comptime.comptime(_refuse_inexact)
    return result


def _refuse_inexact(context: Any) -> None:
    """Runs inside the compiler at the end of a region: raises the error by which Dynamo runs the region in Python."""
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    name = getattr(output.compiler_fn, "__name__", None)
    if name in _NO_BACKWARD_GRAPH:
        raise torch._dynamo.exc.Unsupported(
            f"checkpoint() under torch.compile: backend {name!r} makes no graph of backward, and its recompute would "
            "draw other random numbers; use backend='aot_eager', or compile without fullgraph=True"
        )
    if not hasattr(output.current_tracer, "_input_versions_at_beginning"):
        raise torch._dynamo.exc.Unsupported("checkpoint(): this torch.compile does not tell what a region changes")
    inputs = {_memory(node) for node in output.root_tracer.graph.nodes if node.op in ("placeholder", "get_attr")}
    for node in _changed(output.current_tracer):
        if _memory(node) in inputs and _is_read(node, output.nn_modules):
            raise torch._dynamo.exc.Unsupported(
                f"checkpoint() under torch.compile: the region changes {node.name} in place and reads it, and the "
                "recompute would lack the old value; compile without fullgraph=True, and the region runs uncompiled"
            )


def _changed(tracer: Any) -> Iterator[Any]:
    """Yields the inputs of a region, whose graph `tracer` has made, that the region may change in place."""
    found: dict[int | None, set[int]] = {}  # the versions at the end: two, if the region has written to `x.data`
    for node in tracer.graph.nodes:
        if (memory := _memory(node)) is not None:
            found.setdefault(memory, {0}).add(node.meta["example_value"]._version)
    versions = iter(tracer._input_versions_at_beginning)
    for node in tracer.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("example_value"), torch.Tensor):
            moved = found.get(_memory(node), set()) - {0, next(versions)}
            # Versions miss the statistics of norms and `torch._foreach_mul_`, which the names of the calls show.
            if moved or any(node in _arguments(user)[0] for user in node.users):
                yield node


def _is_read(node: Any, graphs: Any) -> bool:
    """Whether the value of `node` affects more than the memory of `node`. `graphs` has the graphs of inner regions."""
    for user in node.users:
        if user.target is torch.ops.higher_order.tag_activation_checkpoint:
            inner = graphs[user.args[0].target].graph.find_nodes(op="placeholder")
            if any(_is_read(each, graphs) for each, outer in zip(inner, user.args[1:], strict=True) if outer is node):
                return True
            continue
        written, others = _arguments(user)
        if node in others or node not in written or (_memory(user) == _memory(node) and _is_read(user, graphs)):
            return True
    return False


def _arguments(call: Any) -> tuple[list[Any], list[Any]]:
    """Returns the arguments that `call` writes to, as its name tells, and the others: nodes of its graph."""
    written: Any = ()
    others: Any = (call.args, call.kwargs)
    name = call.target if isinstance(call.target, str) else getattr(call.target, "__name__", "")
    if call.target in (F.batch_norm, F.instance_norm):
        given = inspect.signature(call.target).bind(*call.args, **call.kwargs)
        given.apply_defaults()
        if given.arguments.get("training", given.arguments.get("use_input_stats")):
            written = [given.arguments.pop(each) for each in ("running_mean", "running_var")]
            others = tuple(given.arguments.values())
    elif "_norm" in name and name.startswith(("batch", "instance", "native_batch", "cudnn_batch", "miopen_batch")):
        written = others  # an operator, whose fake kernel does not say what it writes to
    elif re.search("[a-z0-9]_$", name):
        written, others = call.args[:1], (call.args[1:], call.kwargs)
    return _nodes(written), _nodes(others)


def _nodes(arguments: Any) -> list[Any]:
    found: list[Any] = []
    torch.fx.node.map_arg(arguments, found.append)
    return found


def _memory(node: Any) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and value.layout is torch.strided else None
