"""Runs compiled modules as the graphs that AOTAutograd hands to a compiler, by fused kernels.

PyTorch itself chooses which tensors a graph keeps for backward: `functorch.compile` traces forward and backward
together, and partitions them as for inductor. `FusedGraph` runs the two graphs.

NOTE: the rules for buffers of a fused graph, by torch/_inductor (lowering.py, ir.py, scheduler.py) of PyTorch 2.13.

    operator of a library (product, convolution, attention, sort)   runs as in eager mode
    view                                                            runs where a library or the caller needs the view
    reduction, concatenation                                        a fused kernel makes a buffer
    element-wise operator                                           a buffer where a library or the caller reads the
                                                                    result; else a value inside a fused kernel

Operators that read a common buffer, or each other's results, are one kernel. A buffer is freed after its
last reader.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from memscale.algebra import is_transformed
from memscale.core import OpOverload, internals, pytrees
from memscale.simulation.dispatch.step_recorder import StepRecorder, place_of
from memscale.simulation.kernels.shapes import Kind, kind_of, tensors_in
from memscale.simulation.process.process_state import all_patched, patched
from memscale.simulation.rules import reductions
from memscale.simulation.rules.registry import rule_of

_CPU = torch.device("cpu")
_TENSOR = object()


def compiled_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the modules that `torch.compile` or `Module.compile` has compiled."""
    return [
        each for each in modules if "_orig_mod" in each._modules or vars(each).get("_compiled_call_impl") is not None
    ]


class CompiledModules:
    """Runs modules that `torch.compile` compiled as the graphs that their compiler receives.

    Args:
        recorder: the recorder of the step.
        programs: the graphs of modules without a transform, shared with their copies; new graphs are added.

    Attributes:
        followed: the ids of the modules that ran as graphs.
        reasons: the reasons why other modules ran as written, each once.
    """

    def __init__(self, recorder: StepRecorder, programs: dict[Any, Any]) -> None:
        self.followed: set[int] = set()
        self.reasons: dict[str, None] = {}
        self._recorder = recorder
        self._shared: dict[Any, tuple[_Program | str, _Same]] = programs
        self._programs: dict[Any, _Program | str] = {}
        self._same: dict[int, _Same] = {}

    @contextmanager
    def installed(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Patches the modules to run as graphs in the body."""
        patches: list[tuple[nn.Module, str, Any]] = []
        for module in modules:
            if (compiled := vars(module).get("_compiled_call_impl")) is not None:
                run = partial(self._run, module, module._call_impl, compiled)
                patches.append((module, "_compiled_call_impl", run))
            elif isinstance(below := module._modules.get("_orig_mod"), nn.Module):
                patches.append((module, "forward", partial(self._run, below, below.__call__, module)))
        with all_patched(patches):
            yield

    def _run(self, module: nn.Module, call: Callable[..., Any], compiled: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytrees.flatten((args, kwargs))
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        tensors = [*state.values(), *filter(torch.is_tensor, leaves)]
        key = (
            id(module),
            tuple(part.training for part in module.modules()),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
            tuple(map(_layout, tensors)),
            spec,
            repr([leaf for leaf in leaves if not torch.is_tensor(leaf)]),
        )
        if key not in self._programs:
            same = self._same.get(id(module)) or self._same.setdefault(id(module), _Same(module))
            known = self._shared.get((same.key, *key[1:]))
            if known is None or is_transformed(module):
                known = self._traced(module, call, compiled, list(state), leaves, spec), same
                if not is_transformed(module):
                    self._shared[(same.key, *key[1:])] = known
            self._programs[key] = known[0]
        found = self._programs[key]
        if isinstance(found, str):
            self.reasons[found] = None
            return call(*args, **kwargs)
        self.followed.add(id(module))
        return found(tensors)

    def _traced(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        compiled: Any,
        names: list[str],
        leaves: list[Any],
        spec: Any,
    ) -> _Program | str:
        """Returns the graphs of a module, or the reason why it has none."""
        try:
            with _disable_current_modes(), _traced_by(self._recorder), _without_hooks(), _quiet():
                _check_compiler(module, compiled)
                return _Program(module, call, names, leaves, spec)
        except Exception as error:
            # After any error of the compiler or of the module, the module runs as written.
            return as_text(error)


def as_text(error: Exception) -> str:
    """Returns the class of an error, the first line of its message, and its place; for `AsWritten` the line alone."""
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, AsWritten) else f"{type(error).__name__}: {first}{place_of(error)}"


class _Same:
    """The key of a module and of all its copies by `transform`; every other module has another key.

    Copies share their dictionaries of buffers, whose addresses are part of the key. This object keeps the dictionaries
    alive, so that their addresses stay unique.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables = [part._buffers for part in module.modules()]
        self.key = tuple((type(part), id(part._buffers), _plain(part)) for part in module.modules())


def _plain(module: nn.Module) -> str:
    """Returns the module's attributes that are plain values, and the identities of its functions, to detect changes."""
    return repr(
        [
            (name, value if isinstance(value, (bool, int, float, str)) else id(getattr(value, "__func__", value)))
            for name, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, types.FunctionType, types.MethodType))
        ]
    )


class AsWritten(Exception):
    """The reason why a module runs as written instead of as a graph."""


class _Program:
    """The graphs of a module, for arguments of certain layouts."""

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        names: list[str],
        leaves: list[Any],
        spec: Any,
    ) -> None:
        from functorch.compile import (  # type: ignore[import-untyped]  # 2 s
            aot_function,
            min_cut_rematerialization_partition,
        )
        from torch._inductor.decomposition import select_decomp_table
        from torch.nn.utils.stateless import _reparametrize_module

        state = dict(module.named_parameters()) | dict(module.named_buffers())
        passed = [leaf for leaf in leaves if torch.is_tensor(leaf)]
        # Marks in place of the tensors, which the program would keep alive.
        rest = [_TENSOR if torch.is_tensor(leaf) else leaf for leaf in leaves]

        def flat(*given: torch.Tensor) -> tuple[Any, ...]:
            args, kwargs = pytrees.unflatten(spec, _filled(rest, given[len(names) :]))
            with _reparametrize_module(module, dict(zip(names, given, strict=False))), _OnCpu():
                results, self._spec = pytrees.flatten(call(*args, **kwargs))
            self._results = [_TENSOR if torch.is_tensor(result) else result for result in results]
            return tuple(result for result in results if torch.is_tensor(result))

        self._function = aot_function(
            flat,
            fw_compiler=_runs_fused,
            bw_compiler=_runs_fused,
            partition_fn=partial(
                min_cut_rematerialization_partition, static_lifetime_input_indices=list(range(len(names)))
            ),
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )
        with FakeTensorMode():
            self._function(*map(_fake, (*state.values(), *passed)))

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        return pytrees.unflatten(self._spec, _filled(self._results, self._function(*tensors)))


def _check_compiler(module: nn.Module, compiled: Any) -> None:
    """Raises `AsWritten` where `torch.compile` compiles nothing, or uses another backend than inductor."""
    if compiled.get_compiler_config() is None:
        raise AsWritten("another backend than inductor compiles")
    if not isinstance(compiled, nn.Module) and type(module).forward.__module__.startswith("torch.nn."):
        raise AsWritten(f"compile() of PyTorch's own {type(module).__name__} leaves its forward to Python")


def _runs_fused(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
    """Returns a function that runs `graph` by fused kernels; while AOTAutograd traces, it only makes the results."""
    made = [_like(node) for node in cast(list[Any], graph.graph.output_node().args[0])]
    run = FusedGraph(graph)

    def either(args: list[Any]) -> Any:
        return [make() for make in made] if any(isinstance(arg, FakeTensor) for arg in args) else run(args)

    either._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd hands over its only reference
    return either


@contextmanager
def _traced_by(recorder: StepRecorder) -> Iterator[None]:
    recorder.traces = True
    try:
        yield
    finally:
        recorder.traces = False


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences, in the body, the compiler's warnings about its imports and about slow kernels."""
    with patched(warnings, "warn", _ignore), patched(warnings, "warn_explicit", _ignore):
        yield


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Hides saved-tensor hooks while a module is traced, and refuses new hooks: the compiler chooses what to save."""
    hooks, push = [], internals.autograd._push_saved_tensors_default_hooks
    while (top := internals.autograd._top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        internals.autograd._pop_saved_tensors_default_hooks()

    def refuse(*hooks: Any) -> None:
        raise AsWritten("a region inside the compiled module recomputes or moves its saved tensors")

    try:
        with patched(internals.autograd, "_push_saved_tensors_default_hooks", refuse):
            yield
    finally:
        for pack, unpack in reversed(hooks):
            push(pack, unpack)


class _OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU where a traced module asks for CUDA, since the fake tensors of the trace are there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytrees.map_only(object, _on_cpu, (args, kwargs or {}))
        return function(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    return _CPU if isinstance(value, torch.device | str) and str(value).startswith("cuda") else value


def _like(node: Any) -> Callable[[], Any]:
    value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
    if not isinstance(value, torch.Tensor):
        return lambda: value
    return partial(torch.empty_strided, value.shape, value.stride(), dtype=value.dtype)


def _filled(leaves: list[Any], tensors: Iterable[torch.Tensor]) -> list[Any]:
    following = iter(tensors)
    return [next(following) if leaf is _TENSOR else leaf for leaf in leaves]


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.requires_grad_(tensor.requires_grad)


def _layout(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


_LIBRARY = torch.library.Library("memscale", "FRAGMENT")
_LIBRARY.define("fused(Tensor[] read, *, Tensor(a!)[] out) -> ()")
_LIBRARY.impl("fused", lambda read, *, out: None, "CompositeExplicitAutograd")


@dataclass(frozen=True, eq=False)
class _Step:
    """A step of a compiled graph: one operator, or one fused kernel.

    Attributes:
        nodes: the nodes that the step computes: one node for an operator, all nodes with buffers for a fused kernel.
        reads: the nodes whose buffers a fused kernel reads; None for an operator or a view.
        last: the nodes whose values are freed after this step.
    """

    nodes: tuple[Node, ...]
    reads: tuple[Node, ...] | None
    last: tuple[Node, ...]


class FusedGraph:
    """Runs `graph`, made of ATen operators, as fused kernels; a call empties its list of arguments."""

    def __init__(self, graph: GraphModule) -> None:
        nodes = list(graph.graph.nodes)
        self._graph = graph  # the attributes that its nodes name
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._output = nodes[-1]
        self._steps = _scheduled(nodes)

    def __call__(self, args: list[Any]) -> list[Any]:
        """Returns the graph's results."""
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
    """Runs one fused kernel, which reads the buffers of `reads` and makes the buffers of `step`."""
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
    """Returns the steps that run a graph, in order."""
    kinds = {node: _kind(node) for node in nodes}
    needed = _read_whole(nodes, kinds)
    steps: list[tuple[tuple[Node, ...], tuple[Node, ...] | None, tuple[Node, ...]]] = []
    sources: dict[Node, tuple[Node, ...]] = {}
    made_by: dict[Node, int] = {}  # the number of the step that makes a buffer
    for node in nodes:
        read = tuple(dict.fromkeys(each for arg in node.all_input_nodes for each in sources[arg]))
        has_buffer = kinds[node] != "view" and node in needed
        sources[node] = (node,) if has_buffer else read
        if node not in needed or node.op in ("placeholder", "output"):
            continue
        if kinds[node] not in ("place", "made"):
            steps.append(((node,), None, tuple(node.all_input_nodes)))
            made_by[node] = len(steps) - 1
            continue
        # One kernel with the last one that reads a common buffer, or makes one, if all that the node reads is there.
        earliest = max((made_by[each] for each in read if each in made_by), default=0)
        for at in reversed(range(earliest, len(steps))):
            made, before, _ = steps[at]
            if before is not None and not {*read}.isdisjoint({*made, *before}):
                reads = tuple(dict.fromkeys((*before, *(each for each in read if each not in made))))
                steps[at] = (*made, node), reads, reads
                break
        else:
            at = len(steps)
            steps.append(((node,), read, read))
        made_by[node] = at
    last = {each: at for at, (made, _, uses) in enumerate(steps) for each in (*uses, *made)}
    ends: dict[int, list[Node]] = {}
    for node, at in last.items():
        if node not in nodes[-1].all_input_nodes:
            ends.setdefault(at, []).append(node)
    return [_Step(made, reads, tuple(ends.get(at, ()))) for at, (made, reads, _) in enumerate(steps)]


def _kind(node: Node) -> str:
    """Returns ``"place"`` (element-wise), ``"made"`` (a reduction), ``"view"``, or ``"library"`` for all others."""
    op = node.target
    if not isinstance(op, OpOverload) or op._schema.is_mutable or not _is_of_tensors(node.meta.get("val")):
        return "library"
    if (kind_of(op) is Kind.RUN or op.overloadpacket.__name__ == "_unsafe_view") and node.all_input_nodes:
        return "view"
    if str(op) in reductions.RULES or op.overloadpacket.__name__ == "cat":  # older PyTorchs have no tag for reductions
        return "made"
    by_place = torch.Tag.pointwise in op.tags or op.namespace == "prims" or rule_of(op).by_place
    return "place" if by_place else "library"


def _is_of_tensors(value: Any) -> bool:
    return all(isinstance(each, torch.Tensor) for each in (value if isinstance(value, (list, tuple)) else [value]))


def _read_whole(nodes: list[Node], kinds: dict[Node, str]) -> set[Node]:
    """Returns the nodes that run: those with a buffer of their own, and those that a library or the caller reads."""
    found: set[Node] = set()
    for node in reversed(nodes):
        if kinds[node] in ("library", "made"):
            found.add(node)
        if node in found and kinds[node] in ("library", "view"):
            found.update(node.all_input_nodes)
    return found
