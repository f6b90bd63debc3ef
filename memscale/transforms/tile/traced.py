"""The watch of a region under `torch.compile`: the graph of the first piece runs again, on fake tensors.

No dispatch mode sees the operators while Dynamo traces. `watch` runs inside the compiler, where the graph of the first
piece is complete, and the same `RowwiseWatch` as in a call outside of a compiler sees its operators.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from memscale.core import TransformError, internals
from memscale.transforms.tile.rowwise import RowwiseWatch


def watch(how: Any, rows: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Makes Dynamo, which traces the call, refuse the piece that made `outputs` of `rows` if it is no piece.

    Args:
        how: the `Tile`.
        rows: the pieces of tensors, each made by `narrow`.
        outputs: the tensors in the result of the region.

    `_refuse` reads the arguments from the frame of this call, where they are variables of the compiler.
    """
    torch._dynamo.comptime.comptime(_refuse)


def _refuse(context: Any) -> None:
    output = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    how = context.get_local("how")._i_will_not_complain_if_bc_breaks_VariableTracker().value
    rows, outputs = ([each.node for each in context.get_local(name).as_proxy()] for name in ("rows", "outputs"))
    nodes = list(rows[0].graph.nodes)
    begin = max(map(nodes.index, rows)) + 1
    try:
        with output.shape_env.suppress_guards(), internals.FakeTensorMode():
            values = {node: _static(node.meta.get("example_value")) for node in nodes[:begin]}
            dims = {values[node]: int(values.get(node.args[1], node.args[1])) for node in rows}
            shared = [(0, node.name, values[node]) for node in nodes[:begin] if node.op == "placeholder"]
            captures: Any = SimpleNamespace(tensors=[each for each in shared if isinstance(each[2], torch.Tensor)])
            again = _Again(torch.nn.Module(), graph=torch.fx.Graph())
            again.env = values
            with torch.no_grad(), RowwiseWatch(captures, [], dims, repr(how)) as watching:
                for node in nodes[begin:]:
                    values[node] = output.nn_modules[node.target] if node.op == "get_attr" else again.run_node(node)
            if how.reduce is None:
                watching.refuse_over_rows([values[node] for node in outputs])
    except TransformError as error:
        raise torch._dynamo.exc.Unsupported(str(error)) from error
    except Exception as error:
        raise torch._dynamo.exc.Unsupported(f"{how!r}: its first piece cannot be watched here ({error})") from error


def _static(value: Any) -> Any:
    """Returns a tensor of the sizes of `value` at this call, which the compiler may keep open; or that number."""
    if isinstance(value, torch.Tensor):
        sizes, strides = ([int(each) for each in of] for of in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    return int(value) if isinstance(value, torch.SymInt) else value


class _Again(torch.fx.Interpreter):
    """Runs the graph of a checkpointed region as a part of the graph around it."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            inner = _Again(args[0])
            inner.extra_traceback = False  # it would change the message of the error
            return inner.run(*args[1:])
        return super().call_function(target, args, kwargs)
