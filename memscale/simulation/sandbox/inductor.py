"""What `torch.compile` makes of a graph for a card that need not be there: allocations, library calls and frees.

PyTorch's compiler decides on a machine without CUDA and Triton as it does on one with them: it asks for the card's
properties, fuses, plans the reuse of buffers, and writes a Python function that allocates each buffer, calls kernels
and lets go of buffers at their last use. Kernels of Triton are not built: they allocate nothing.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from memscale.hardware import Hardware
from memscale.simulation.rules.rule import CHANNELS_LAST, has_channels_last
from memscale.simulation.sandbox.process_state import patched

_CARD = torch.device("cuda", 0)
_LIBRARY = torch.library.Library("memscale", "FRAGMENT")
_LIBRARY.define("fused(Tensor[] read, *, Tensor(a!)[] out) -> ()")
_LIBRARY.impl("fused", lambda read, *, out: None, "CompositeExplicitAutograd")

Run = Callable[[Sequence[Any]], Any]


class Inductor:
    """PyTorch's compiler for `hardware`; what it compiled once it knows for all simulations of a process."""

    def __init__(self, hardware: Hardware, capability: tuple[int, int]) -> None:
        self._hardware = hardware
        self._capability = capability
        self._compiled: dict[tuple[Any, ...], tuple[Run, list[Any]]] = {}

    def compiled(self, graph: GraphModule, inputs: Sequence[Any], config: dict[str, Any], *, backward: bool) -> Run:
        """The function that is run in place of `graph`, whose tensors are fakes of a CPU, for `inputs`."""
        key = (graph.code, tuple(map(_layout, inputs)), backward, repr(config))
        told: list[Any] | None = getattr(TracingContext.try_get(), "output_strides", None)
        if key not in self._compiled:
            run = self._compile(graph, inputs, config, backward=backward)
            # How what it returns lies, which the graph of backward is told of: rows may be padded.
            self._compiled[key] = run, list(told or ())
        elif told is not None:
            told += self._compiled[key][1]
        return self._compiled[key][0]

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """What the compiler makes of operators before it divides a graph, told that the tensors are the card's."""
        from torch._inductor.decomposition import select_decomp_table

        return {op: partial(_told, function) for op, function in select_decomp_table().items()}

    def partition(
        self, joint: GraphModule, inputs: Any, *, fixed: int, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        """The graphs of forward and backward: what is kept between them, and what backward computes again."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor import compile_fx
        from torch._inductor.virtualized import V

        _move(joint, "cuda", torch.device("cpu"))  # what decompositions make
        with V.set_fake_mode(_fake_mode(joint)):
            joint = compile_fx._recursive_joint_graph_passes(joint) or joint
        options["static_lifetime_input_indices"] = list(range(fixed))
        forward, backward = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **options)
        forward.graph.output_node().meta["user_visible_output_idxs"] = list(range(options["num_fwd_outputs"]))
        backward.graph.output_node().meta["user_visible_output_idxs"] = []
        return forward, backward

    def _compile(self, graph: GraphModule, inputs: Sequence[Any], config: dict[str, Any], *, backward: bool) -> Run:
        from torch._inductor import compile_fx
        from torch._inductor import config as settings
        from torch._inductor.virtualized import V

        _move(graph, "cpu", _CARD)
        inputs = [_moved(each, "cpu", _CARD) for each in inputs]
        present = settings.get_config_copy()
        given = {name: value for name, value in config.items() if name in present and present[name] != value}
        with _set(settings, {**given, **_SETTINGS}), self._on_card(), V.set_fake_mode(_fake_mode(graph)):
            made: Any = compile_fx.compile_fx_inner(graph, inputs, is_backward=backward)
        return cast(Run, made.current_callable)

    @contextmanager
    def _on_card(self) -> Iterator[None]:
        """Answer what the compiler asks of CUDA, of Triton and of the card's properties."""
        properties = SimpleNamespace(
            name=self._hardware.name,
            major=self._capability[0],
            minor=self._capability[1],
            multi_processor_count=self._hardware.multiprocessors,
            warp_size=32,
            max_threads_per_block=1024,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=1 << 16,
            total_memory=self._hardware.memory_bytes,
        )
        interface = importlib.import_module("torch._dynamo.device_interface").CudaInterface
        seeds = importlib.import_module("torch._inductor.inductor_prims").lookup_seed
        major, minor = self._capability
        answers: list[tuple[Any, str, Any]] = [
            (torch.cuda, "is_available", lambda: True),
            (torch.version, "cuda", torch.version.cuda or "13.0"),  # which tells it from a ROCm build
            (torch.cuda, "is_initialized", lambda: True),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda device=None: self._capability),
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.cuda, "get_rng_state", lambda *device: torch.zeros(16, dtype=torch.uint8)),
            (torch.cuda, "set_rng_state", lambda *state: None),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "_exchange_device", lambda index: 0),
            (torch.cuda, "_maybe_exchange_device", lambda index: 0),
            (interface, "is_available", staticmethod(lambda: True)),
            (interface, "get_device_properties", staticmethod(lambda device=None: properties)),
            (interface, "get_compute_capability", staticmethod(lambda device=None: 10 * major + minor)),
            (interface, "current_device", staticmethod(lambda: 0)),
            (interface.Worker, "get_device_properties", staticmethod(lambda device=None: properties)),
            (interface.Worker, "current_device", staticmethod(lambda: 0)),
            # Without CUDA these two methods of tensors, indexing and this, do not know the device of a card's fakes.
            (torch.Tensor, "copy_", lambda tensor, *source: torch.ops.aten.copy_.default(tensor, *source)),
            (seeds, "prim_meta_impl", lambda seeds, index: _number(seeds)),
            # Without cuDNN results would lie as those of convolutions that run without it.
            (torch._C, "_conv_determine_backend_memory_format", _format_of_convolution),
            (importlib.import_module("torch.utils._triton"), "triton_hash_with_backend", lambda: ""),
            (
                importlib.import_module("torch._inductor.codecache").PyCodeCache,
                "write",
                lambda code, *_, **__: (code, os.devnull),
            ),
            (importlib.import_module("torch._inductor.codecache").PyCodeCache, "load_by_key_path", _loaded),
        ]
        asking = ("torch.utils._triton", "torch._inductor.scheduler", "torch._inductor.compile_fx")
        answers += [(importlib.import_module(module), "has_triton", lambda: True) for module in asking]
        known = importlib.import_module("torch._inductor.runtime.hints").DeviceProperties
        answers.append((known, "create", staticmethod(partial(known.create.__func__.__wrapped__, known))))
        with ExitStack() as stack:
            for answer in answers:
                stack.enter_context(patched(*answer))
            yield


@contextmanager
def _set(settings: Any, values: dict[str, Any]) -> Iterator[None]:
    """Settings of the compiler, for this thread."""
    kind: Any = type(settings)
    read = kind.__getattr__

    def found(config: Any, name: str) -> Any:
        return values[name] if config is settings and name in values else read(config, name)

    with patched(kind, "__getattr__", found):
        yield


_SETTINGS = {
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    "triton.cudagraphs": False,
    "cpp_wrapper": False,
    "max_autotune": False,  # which times kernels to choose among them, as the next two do
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
}


class _Kernel:
    """A kernel of Triton's: the operator `fused`, which computes nothing and takes the time of its traffic."""

    def __init__(self, name: str, source: str) -> None:
        found = re.search(r"def triton_\w+\(([^)]*)\)", source)
        self._parameters = found[1].split(", ") if found else []

    def run(self, *args: Any, **kwargs: Any) -> None:
        named = [(name, arg) for name, arg in zip(self._parameters, args, strict=False) if torch.is_tensor(arg)]
        read = [arg for name, arg in named if name.startswith("in_")]
        torch.ops.memscale.fused(read, out=[arg for name, arg in named if "out_ptr" in name])


class _Kernels:
    """In place of the compiler's pool of processes, which would build them."""

    def triton(self, name: str, source: str, **options: Any) -> _Kernel:
        return _Kernel(name, source)

    def wait(self, scope: Any) -> None:
        pass


def _loaded(key: str, path: str, linemap: Any = None, attrs: dict[str, Any] | None = None) -> Any:
    """The module that the compiler wrote, which is `key`; what it takes of a machine with CUDA is the simulation's."""
    lines = [line for line in key.splitlines() if not line.startswith(("import triton", "from torch._C import _cuda"))]
    code = "\n".join(lines).replace("torch._C._dynamo.guards._empty_strided_cuda", "_empty")
    code = code.replace("= AsyncCompile()", "= _kernels").replace("torch.cuda._DeviceGuard(0)", "_device_guard")
    code = code.replace("torch.cuda.set_device(0)", "pass")
    module = SimpleNamespace(__file__="")
    names = {
        "__name__": "compiled for a card",
        "_empty": lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        "_kernels": _Kernels(),
        "_device_guard": nullcontext(),
        "get_raw_stream": lambda index: 0,
        **(attrs or {}),
    }
    exec(compile(code, "compiled for a card", "exec"), names)
    module.__dict__.update(names)
    return module


def _told(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a decomposition on fakes of a CPU, which say that they are the card's, and make ones of a CPU.

    Below autograd, which asks for no device there and could not go through tensors of a card without CUDA.
    """
    device, new = vars(FakeTensor)["device"], FakeTensor.__new__

    def read(tensor: FakeTensor) -> torch.device:
        found = device.fget(tensor)
        return _CARD if found.type == "cpu" else found

    def made(cls: Any, mode: Any, meta: torch.Tensor, of: torch.device, *rest: Any, **named: Any) -> Any:
        return new(cls, mode, meta, torch.device("cpu") if of.type == "cuda" else of, *rest, **named)

    with patched(FakeTensor, "device", property(read)), patched(FakeTensor, "__new__", staticmethod(made)):
        return function(*args, **kwargs)


def _format_of_convolution(image: torch.Tensor, kernel: torch.Tensor, backend: object) -> torch.memory_format:
    """``determine_backend_memory_format`` in aten/src/ATen/native/Convolution.cpp, of cuDNN."""
    if has_channels_last(image) or has_channels_last(kernel):
        return CHANNELS_LAST[image.dim()]
    return torch.contiguous_format


def _number(seeds: torch.Tensor) -> Any:
    from torch._prims import TensorMeta

    return TensorMeta(shape=(), strides=(), dtype=seeds.dtype, device=seeds.device)


def _layout(value: Any) -> Any:
    return (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value


def _fake_mode(graph: GraphModule) -> Any:
    values = (node.meta.get("val") for node in graph.graph.nodes)
    return next(value.fake_mode for value in values if isinstance(value, FakeTensor))


def _move(graph: GraphModule, of: str, to: torch.device) -> None:
    """Make a graph of fakes of a CPU one of the card's.

    Without CUDA autograd cannot go through tensors of a card, so that a graph is traced, and divided, on the CPU.
    """

    move = partial(_moved, of=of, to=to)
    for node in graph.graph.nodes:
        node.meta = {name: move(value) for name, value in node.meta.items() if name != "tensor_meta"}
        node.args = tuple(map(move, node.args))
        node.kwargs = {name: move(value) for name, value in node.kwargs.items()}
    graph.recompile()


def _moved(value: Any, of: str, to: torch.device) -> Any:
    if isinstance(value, FakeTensor) and value.device.type == of:
        with _disable_current_modes():
            meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return FakeTensor(value.fake_mode, meta, to)
    if isinstance(value, torch.device):
        return to if value.type == of else value
    if isinstance(value, list | tuple):
        return type(value)(_moved(each, of, to) for each in value)
    return value
