"""`Converted` and `substituted`: copies of tensors in another dtype, put in the places of the originals for a call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memscale.core import version
from memscale.regions import Captures, Content, copying_ahead, holds, read, storages, write
from memscale.transforms.cast.precision import is_castable


class Converted:
    """The copies that a call makes: one for each distinct tensor and dtype."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, torch.dtype], torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}
        self._versions: list[int] = []

    def of(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns `tensor` in `dtype`: a copy, or `tensor` itself if it has that dtype."""
        if tensor.dtype == dtype:
            return tensor
        # While compiling, tensors themselves are the keys: before torch 2.13 a compiler gives them no `id`.
        compiling = torch.compiler.is_compiling()
        key = (tensor if compiling else id(tensor)), dtype
        copy = self._made.get(key)
        if copy is None:
            copy = self._made[key] = tensor.to(dtype)
            if not compiling:  # a compiler does not see version counters
                self._originals[id(copy)] = tensor
                self._versions.append(version(copy))
        return copy

    def made(self) -> list[torch.Tensor]:
        """Returns every copy so far."""
        return list(self._made.values())

    def original(self, value: Any) -> Any:
        """Returns the original of a copy; any other value is returned itself."""
        return self._originals.get(id(value), value)

    def changed(self) -> list[torch.Tensor]:
        """Returns the originals of copies that were changed in place."""
        copies = list(self._made.values())
        pairs = zip(copies, self._versions, [version(tensor) for tensor in copies], strict=True)
        return [self._originals[id(copy)] for copy, before, now in pairs if now != before]

    def refuse_traced_changes(self, why: str) -> None:
        """At the end of a compiled region, makes the compiler refuse it with the message `why` if it changed a copy."""
        for copy in self._made.values():
            _look_at(copy, why)

    def mentioned_in(self, value: Any) -> bool:
        """Whether the list or dictionary `value` holds a copy, or a weak reference to one."""
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return any(id(item() if isinstance(item, weakref.ref) else item) in self._originals for item in items)


def _look_at(copy: torch.Tensor, why: str) -> None:
    torch._dynamo.comptime.comptime(_refuse_traced_change)


def _refuse_traced_change(context: Any) -> None:
    """Runs inside the compiler, for `_look_at`: its fake tensors have version counters, even those from ``.data``."""
    [storage] = storages([context.get_local("copy").as_fake()])
    inner = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.nn_modules.values()
    for graph in [context.graph(), *(part.graph for part in inner if isinstance(part, torch.fx.GraphModule))]:
        for node in graph.nodes:
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and version(value) > 0 and storages([value])[0] is storage:
                # Without `fullgraph` the region then runs in Python, where the error names the tensor.
                raise torch._dynamo.exc.Unsupported(context.get_local("why").as_python_constant())


@contextmanager
def substituted(captures: Captures, dtype: torch.dtype, copies: Converted, lost: list[torch.Tensor]) -> Iterator[None]:
    """Within the body, copies in `dtype` replace the tensors that the region captures.

    Values that the region stores in these places stay there. Buffers that it replaced are restored and appended to
    `lost`.
    """
    put: dict[int, Content] = {}
    with copying_ahead():
        for position, key, tensor in captures.tensors:
            if is_castable(tensor) and tensor.dtype != dtype:
                put.setdefault(position, captures.contents[position].copy())[key] = copies.of(tensor, dtype)
    buffers = {id(module._buffers) for module in captures.modules}
    try:
        for position, content in put.items():
            write(captures.slots[position], content)
        yield
    finally:
        for position, (slot, before) in enumerate(zip(captures.slots, captures.contents, strict=True)):
            if position not in put and holds(slot, before):
                continue
            now, during = read(slot), put.get(position, before)
            for key, value in list(now.items() if isinstance(now, dict) else enumerate(now)):
                now[key] = copies.original(value)
                if copies.mentioned_in(value) and isinstance(before, dict) and key in before:
                    now[key] = before[key]  # a list such as an LSTM rebuilds when it finds unknown weights
                elif id(slot) in buffers and key in before and during[key] is not before[key] is not now[key]:
                    lost.append(before[key])
                    now[key] = before[key]
            write(slot, now)


@contextmanager
def substituted_in_trace(
    captures: Any, dtype: torch.dtype, copies: Converted, lost: list[torch.Tensor]
) -> Iterator[None]:
    """`substituted` while a compiler traces the region. The compiled code writes nothing to the modules.

    Values that the region stores in attributes of modules stay there. Parameters and buffers that it replaced are
    appended to `lost`.
    """
    put = [(table, key, tensor, copies.of(tensor, dtype)) for table, key, tensor in captures.tensors]
    unchecked(_put, put)
    yield
    unchecked(_take_back, put, lost)


_Put = list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]  # table, key, original and copy


def _put(put: _Put) -> None:
    torch._dynamo.comptime.comptime(_ignore_writes)
    for table, key, _, copy in put:
        table[key] = copy
    torch._dynamo.comptime.comptime(_follow_writes)


def _take_back(put: _Put, lost: list[torch.Tensor]) -> None:
    torch._dynamo.comptime.comptime(_ignore_writes)
    for table, key, tensor, copy in put:
        if table.get(key) is copy:
            table[key] = tensor
        elif "_parameters" not in table:  # the table of parameters or of buffers, not a module's `__dict__`
            lost.append(tensor)
    torch._dynamo.comptime.comptime(_follow_writes)


def _ignore_writes(context: Any) -> None:
    """Runs inside the compiler, which would write the tables of modules again in every call, with what they held."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    for place in translator.symbolic_locals["put"].items:
        translator.output.side_effects.ignore_mutations_on(place.items[0].realize())


def _follow_writes(context: Any) -> None:
    """Runs inside the compiler, after the writes that it ignored."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    for place in translator.symbolic_locals["put"].items:
        translator.output.side_effects.stop_ignoring_mutations_on(place.items[0].realize())


def unchecked(write: Callable[..., None], *arguments: Any) -> None:
    """Calls `write`, whose writes are undone later. A compiler refuses other writes to modules inside a checkpoint."""
    if torch.compiler.is_compiling():
        torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(write, *arguments)
    else:
        write(*arguments)
