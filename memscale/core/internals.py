"""The private names of PyTorch that memscale uses, the purpose of each, and what happens without it.

PyTorch gives no guarantee for these names, and any release may drop one. If a name is missing, the parts of memscale
that need it raise an error on their first use, before anything runs (`needs`). Everything else works, including
importing memscale (`named`). `tests/core/test_internals.py` checks the list against the source: add new names here.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memscale.core.errors import RuntimeUnavailable

# The oldest and the newest release that the test suite was run with; docs/compatibility.md has the results.
OLDEST_TESTED, NEWEST_TESTED = (2, 10), (2, 15)
# The installed release, (major, minor), for differences between releases that cannot be detected otherwise.
TORCH_VERSION: tuple[int, int] = tuple(int(part) for part in torch.__version__.split(".")[:2])  # type: ignore[assignment]


class Internal(NamedTuple):
    """A private name with its purpose, the folders that use it, and the first supported release that has it.

    If PyTorch lacks the name, these folders raise an error, unless `without` describes what they do instead.
    """

    name: str
    purpose: str
    folders: str
    without: str = ""
    since: str = "2.10"


_T, _S, _R = "transforms/", "simulation", "regions"
_ATEN, _C, _F = "torch.ops.aten.", "torch._C.", "torch._C._functorch."
_A, _D, _FAKE = "torch._C._autograd.", "torch.utils._python_dispatch.", "torch._subclasses.fake_tensor."
_C10D, _DDP = "torch.distributed.distributed_c10d.", "torch.nn.parallel.distributed.DistributedDataParallel."
_CUDA = "not asked for in a build of PyTorch without CUDA"
_AS_WRITTEN = "a compiled module is simulated as written written"

INTERNALS = tuple(
    Internal(*row)
    for row in (
        # Backward and the graph that it goes through.
        (f"{_C}_current_graph_task_id", "which backward runs here", f"runtime optimizers {_S} {_T}checkpoint legacy"),
        (f"{_A}_get_current_graph_task_keep_graph", "whether it keeps the graph", f"{_T}checkpoint {_T}tile"),
        (f"{_C}_current_autograd_node", "whose backward an operator is part of", _S),
        (f"{_A}_get_sequence_nr", "which module's forward made a node, and where backward did", _S),
        ("torch.autograd.graph._engine_run_backward", "the order of a backward through a backward, on a card", _S),
        (
            "torch.autograd.Variable._execution_engine",
            "to be called when it ends",
            f"runtime optimizers {_S} {_T}checkpoint",
        ),
        (f"{_A}_push_saved_tensors_default_hooks", "what backward keeps", f"{_S} {_T}checkpoint {_T}offload"),
        (f"{_A}_pop_saved_tensors_default_hooks", "what backward keeps", f"{_S} {_T}checkpoint {_T}offload"),
        (f"{_A}_top_saved_tensors_default_hooks", "whether the caller has such hooks", f"{_R} {_S}"),
        (f"{_A}_unsafe_set_version_counter", "a tensor put back is not one changed", f"{_R} runtime"),
        ("torch.Tensor._base", "what a view is a view of", f"{_R} runtime {_S} {_T}offload"),
        ("torch.Tensor._is_view", "whether a tensor is a view", f"{_R} {_S}"),
        ("torch.Tensor._post_accumulate_grad_hooks", "what a step reaches by hooks", f"optimizers {_S}"),
        ("torch.Tensor._backward_hooks", "what a step reaches by hooks", f"{_S} {_T}tile"),
        ("torch.Tensor._indices", "the indices of a sparse tensor that is not coalesced", _S),
        # Memory.
        (f"{_C}_storage_Use_Count", "that nobody else keeps a moved storage", "runtime"),
        ("torch.Tensor._use_count", "that nobody else keeps a gradient", "runtime"),
        (
            "torch.UntypedStorage._cdata",
            "which tensors share memory",
            f"hardware inspection legacy planning {_R} runtime {_S} {_T}checkpoint {_T}tile",
        ),
        (f"{_C}_swap_tensor_impl", "a model stands in for itself during a profile", _S),
        ("torch._neg_view", "to make a moved view again", "runtime"),
        (f"{_C}_cuda_getCurrentRawStream", "which stream copies wait for", f"{_R} runtime", _CUDA),
        (f"{_C}_cuda_getDevice", "whether the device of a copy is the current one", "runtime", _CUDA),
        # Operators, and who sees them.
        ("torch._ops.OpOverload", "an operator's type", f"hardware policies {_R} {_S} {_T}checkpoint"),
        (
            "torch.ops.aten.add.Tensor._schema",
            "what an operator takes",
            f"hardware inspection policies {_R} {_S} {_T}checkpoint {_T}tile",
        ),
        ("torch.ops.aten.add.Tensor._opname", "an operator's name", f"hardware {_S}"),
        ("torch.ops.aten.add.Tensor._overloadname", "an operator's name", _S),
        (f"{_D}TorchDispatchMode", "to see every operator", f"hardware {_R} {_S} {_T}tile"),
        (f"{_D}BaseTorchDispatchMode", "a mode that does nothing", _R),
        (f"{_D}_push_mode", "modes as they were in the forward", _R),
        (f"{_D}_pop_mode", "modes as they were in the forward", _R),
        (f"{_C}_len_torch_dispatch_stack", "which modes are on", f"legacy {_R} {_S}"),
        (f"{_C}_get_dispatch_stack_at", "which modes are on", _R),
        (f"{_C}_len_torch_function_stack", "which modes are on", _R),
        (f"{_C}_get_function_stack_at", "which modes are on", _R),
        (f"{_C}_push_on_torch_function_stack", "modes as they were in the forward", _R),
        (f"{_C}_pop_torch_function_stack", "modes as they were in the forward", _R),
        (f"{_D}_disable_current_modes", "work of ours that no mode sees", f"core {_S} {_T}tile"),
        (f"{_D}is_traceable_wrapper_subclass", "tensors made of tensors", f"runtime {_S}"),
        (f"{_C}DisableTorchFunctionSubclass", "operators on a tensor of ours", f"{_S} {_T}tile"),
        (f"{_C}_disabled_torch_function_impl", "a tensor that defers to nobody", "optimizers"),
        (f"{_C}_disabled_torch_dispatch_impl", "whether a class has operators of its own", _S),
        ("torch.Tensor._make_wrapper_subclass", "tensors without memory", f"optimizers {_T}tile"),
        (f"{_FAKE}FakeTensor", "tensors that somebody else simulates", f"{_R} runtime {_S} {_T}offload {_T}tile"),
        (f"{_FAKE}FakeTensorMode", "the layout that an operator gives", f"{_S} {_T}tile"),
        (f"{_FAKE}DataDependentOutputException", "what needs values to go on", _S),
        (f"{_FAKE}DynamicOutputShapeException", "what needs values to go on", _S),
        ("torch._prims_common.suggest_memory_format", "the layout of a result", _S),
        # Trees of what a model takes and returns.
        ("torch.utils._pytree.TreeSpec", "trees under torch.compile", "core"),
        ("torch.utils._pytree.tree_flatten", "trees under torch.compile", f"core {_S}"),
        ("torch.utils._pytree.tree_unflatten", "trees under torch.compile", f"core {_S}"),
        ("torch.utils._pytree.tree_leaves", "an operator's tensors", f"{_S} {_T}tile"),
        ("torch.utils._pytree.tree_map", "an operator's tensors", _S),
        ("torch.utils._pytree.tree_map_only", "an operator's tensors", f"{_T}tile"),
        # Modules.
        (
            "torch.nn.Module._buffers",
            "a module's buffers",
            f"algebra planning {_R} {_S} {_T}cast {_T}checkpoint {_T}tile",
        ),
        ("torch.nn.Module._apply", "moves that leave streamed parameters where they are", "algebra"),
        ("torch.nn.modules.batchnorm._NormBase", "running statistics", f"{_R} {_T}cast {_T}checkpoint"),
        ("torch.nn.modules.batchnorm._BatchNorm", "what couples rows", f"{_T}tile"),
        ("torch.nn.modules.module._global_forward_hooks", "hooks of all modules", _R),
        ("torch.nn.modules.module._global_forward_hooks_with_kwargs", "hooks of all modules", _R),
        ("torch.nn.modules.module._global_forward_pre_hooks", "hooks of all modules", _R),
        ("torch.nn.utils.parametrize._cache", "parametrizations that are cached", _R),
        ("torch.nn.utils.parametrize._cache_enabled", "parametrizations that are cached", _R),
        (f"{_C}_get_tracing_state", "whether torch.jit traces the model", "legacy"),
        # What an operator's result depends on.
        (f"{_C}_get_deterministic_algorithms", "that flag, as in the forward", _R),
        (f"{_C}_get_deterministic_algorithms_warn_only", "that flag, as in the forward", _R),
        (f"{_C}_set_deterministic_algorithms", "that flag, as in the forward", _R),
        (f"{_C}_get_fp32_precision_getter", "that flag, as in the forward", _R, "the older flags say it"),
        (f"{_C}_set_fp32_precision_setter", "that flag, as in the forward", _R, "the older flags say it"),
        ("torch._fused_sdp_choice", "attention's kernels in their order", _R),
        ("torch.mps._get_default_mps_generator", "random numbers on a Mac", _R, "regions on `mps` are refused"),
        ("torch.autograd.forward_ad._current_level", "whether tensors carry tangents", _R),
        # torch.compile.
        (f"{_C}_dynamo.eval_frame.get_eval_frame_callback", "whether a compiler is at work", _R),
        (f"{_C}_dynamo.eval_frame.set_code_exec_strategy", "hooks that stay uncompiled", _R, "it may compile them"),
        (f"{_C}_dynamo.eval_frame._FrameExecStrategy", "hooks that stay uncompiled", _R, "it may compile them"),
        (f"{_C}_dynamo.eval_frame._FrameAction", "hooks that stay uncompiled", _R, "it may compile them"),
        # Compiled modules in a simulated step.
        ("torch.nn.Module._call_impl", "what a compiled module compiles", _S, _AS_WRITTEN),
        ("torch.nn.utils.stateless._reparametrize_module", "a module as a function", _S, _AS_WRITTEN),
        ("torch._inductor.decomposition.select_decomp_table", "operators as the compiler has them", _S, _AS_WRITTEN),
        ("torch._dynamo.graph_break", "regions between two graphs", _R, "asked for under torch.compile only"),
        ("torch._guards.TracingContext", "whether a compiler describes a parameter", "optimizers"),
        ("torch._dynamo.config", "floats that are constants", _R, "dynamic=True around tile() is an AssertionError"),
        (
            "torch._dynamo.decorators.DynamoConfigPatchProxy",
            "floats that are constants",
            _R,
            "dynamic=True around tile() is an AssertionError",
        ),
        ("torch._dynamo.comptime.comptime", "a refusal while it traces", f"{_T}cast", "under torch.compile only"),
        ("torch._dynamo.exc.Unsupported", "a refusal while it traces", f"{_T}cast", "under torch.compile only"),
        (
            "torch._dynamo.variables.dicts.DunderDictVariable",
            "that it traces what attributes a module has",
            f"{_T}cast",
            "regions of `cast` are left to Python",
            "2.12",
        ),
        (
            "torch.nn.modules.module._WrappedHook",
            "state-dict hooks of a copy",
            "algebra",
            "they are given the modules of the original",
        ),
        # torch.func.
        (f"{_F}peek_interpreter_stack", "whether a transform of torch.func runs", f"{_R} {_T}checkpoint"),
        (f"{_F}get_interpreter_stack", "which do", _R),
        (f"{_F}TransformType", "which do", _R),
        (f"{_F}is_functorch_wrapped_tensor", "their tensors", f"runtime {_S} {_T}checkpoint {_T}tile"),
        (f"{_F}is_legacy_batchedtensor", "their tensors", f"runtime {_T}tile"),
        (f"{_F}maybe_get_level", "whose a tensor is", f"{_T}checkpoint"),
        (f"{_C}_ForceDispatchKeyGuard", "work outside of dispatch keys", f"{_R} {_T}checkpoint"),
        (f"{_C}_dispatch_tls_local_exclude_set", "likewise", f"{_R} {_T}checkpoint"),
        (f"{_C}_dispatch_tls_local_include_set", "likewise", f"{_R} {_T}checkpoint"),
        (f"{_F}get_unwrapped", "where a tensor is, on a card", _S),
        # Simulated devices.
        (f"{_C}DispatchKey", "autocast of a card, on the host; a few operators seen", f"{_R} {_S}"),
        (f"{_C}DispatchKeySet", "autocast of a card, on the host", f"{_R} {_S}"),
        (f"{_C}_ExcludeDispatchKeyGuard", "autocast of a card, on the host", _S),
        (f"{_C}_dispatch_tls_set_dispatch_key_included", "autocast of a card, on the host", _S),
        (f"{_C}_dispatch_tls_set_dispatch_key_excluded", "autocast of a card, on the host", _S),
        (f"{_C}TensorBase", "a tensor's own device", _S),
        (f"{_C}_ensureCUDADeviceGuardSet", "a card's device, without the card", _S, _CUDA),
        (f"{_C}_stash_obj_in_tls", "which threads are the simulation's", "core"),
        (
            f"{_C}_remove_obj_from_tls",
            "which threads are the simulation's no longer",
            "core",
            "a thread that a step hands work to is the simulation's until that ends",
            "2.13",
        ),
        (f"{_C}_is_key_in_tls", "which threads are the simulation's", "core"),
        (f"{_C}_set_grad_enabled", "a recompute; what a profile puts back", f"{_S} transforms/checkpoint"),
        (f"{_C}_is_multithreading_enabled", "the caller's settings, put back after a profile", _S),
        (f"{_C}_set_multithreading_enabled", "the caller's settings, put back after a profile", _S),
        (f"{_C}_is_view_replay_enabled", "the caller's settings, put back after a profile", _S),
        (f"{_C}_set_view_replay_enabled", "the caller's settings, put back after a profile", _S),
        ("torch.utils._device._device_constructors", "what takes a device", _S),
        (f"{_C}_get_math_sdp_allow_fp16_bf16_reduction", "attention's kernel", _S),
        (f"{_C}_get_sdp_priority_order", "attention's kernel", _S),
        # Several GPUs.
        (
            "torch.testing._internal.distributed.fake_pg",
            "collectives that move nothing",
            _S,
            "asked for with parallel=... only",
        ),
        ("torch.distributed._register_comm_hook", "a DDP's own hook", _S, "likewise"),
        (f"{_C10D}_world", "a group that other threads are not told of", _S, "likewise"),
        (f"{_C10D}_resolve_process_group", "whom a functional collective is among", _S, "likewise"),
        (
            f"{_C10D}_get_default_store",
            "whether processes have one plan",
            "algebra",
            "asked for in a process group only",
        ),
        (f"{_DDP}_active_ddp_module", "which processes train one model", "algebra", "likewise"),
        (f"{_ATEN}mm.default._op_dk", "FSDP2's own operators, as their parts", _S),
        # Measuring.
        ("torch.cuda.memory._snapshot", "who holds a card's memory", "crashes", "the report says that it has none"),
        (f"{_C}_profiler._ExperimentalConfig", "the memory that a kernel takes meanwhile", _S),
        (f"{_C}_profiler._ExtraFields_Allocation", "the memory of a step", _S),
        ("torch.autograd._enable_profiler_legacy", "the memory that a kernel takes meanwhile", _S),
        ("torch.autograd._disable_profiler_legacy", "the memory that a kernel takes meanwhile", _S),
        ("torch._int_mm", "a card's speed with integers", "hardware"),
        ("torch._scaled_mm", "a card's speed with float8", "hardware"),
        ("torch._foreach_norm", "norms as clip_grad_norm_ takes them", "optimizers"),
        ("torch._amp_foreach_non_finite_check_and_unscale_", "scaled losses", "optimizers"),
        # Operators that are not in the documentation.
        (f"{_ATEN}_to_copy", "to know it", f"{_S} {_T}checkpoint"),
        (f"{_ATEN}_unsafe_view", "to know it", f"{_T}checkpoint"),
        (f"{_ATEN}_safe_softmax", "to know it", _S),
        (f"{_ATEN}_softmax", "a softmax on a card", _S),
        (f"{_ATEN}_log_softmax", "a softmax on a card", _S),
        (f"{_ATEN}_fused_rms_norm", "a norm on a card", _S),
        (f"{_C}_dispatch_has_kernel_for_dispatch_key", "what an operator is made of", f"{_R} {_S}"),
        (f"{_ATEN}_thnn_fused_gru_cell", "a recurrence on a card", _S),
        (f"{_ATEN}_thnn_fused_lstm_cell", "a recurrence on a card", _S),
        (f"{_ATEN}_cudnn_init_dropout_state", "a recurrence on a card", _S),
        (f"{_ATEN}_cudnn_rnn", "a recurrence on a card", _S),
        (f"{_ATEN}_cudnn_rnn_backward", "a recurrence on a card", _S),
        ("torch._VF", "a recurrence on a card", _S),
        (f"{_ATEN}_scaled_dot_product_cudnn_attention", "to know it", _S),
        (f"{_ATEN}_scaled_dot_product_efficient_attention", "to know it", _S),
        (f"{_ATEN}_scaled_dot_product_flash_attention", "to know it", _S),
    )
)

_EVERYWHERE = "core algebra regions policies"
_TRANSFORMS = f"{_EVERYWHERE} runtime transforms/checkpoint transforms/offload transforms/tile transforms/cast"
_SIMULATING = f"{_TRANSFORMS} optimizers hardware simulation"

#: The folders that each part of memscale needs.
PARTS = {
    "checkpoint": f"{_EVERYWHERE} runtime transforms/checkpoint",
    "offload": f"{_EVERYWHERE} runtime transforms/offload",
    "tile": f"{_EVERYWHERE} runtime transforms/checkpoint transforms/tile",
    "cast": f"{_EVERYWHERE} transforms/cast",
    "optimizers": f"{_EVERYWHERE} runtime optimizers",
    "hardware": f"{_EVERYWHERE} runtime hardware",
    "simulation": _SIMULATING,
    "planning": f"{_SIMULATING} planning reports",
    "verbs": f"{_SIMULATING} planning reports",
    "inspection": f"{_SIMULATING} inspection",
    "legacy": f"{_SIMULATING} planning reports inspection legacy",
}


@functools.cache
def needs(part: str) -> None:
    """Checks that the installed PyTorch has every private name that `part` of memscale needs.

    >>> needs("checkpoint")

    Raises:
        RuntimeUnavailable: names are missing; the message lists all of them with their purpose.
    """
    _say_if_newer()
    folders = set(PARTS[part].split())
    lacking = [
        f"{each.name} ({each.purpose})"
        for each in INTERNALS
        if not each.without and folders & set(each.folders.split()) and not has(each.name)
    ]
    if lacking:
        raise RuntimeUnavailable(
            f"memscale {_own_version()} cannot do this with torch {torch.__version__} ({part}): this torch has no "
            f"{', '.join(lacking)}. Install a torch from {_release(OLDEST_TESTED)} to {_release(NEWEST_TESTED)}, or "
            "a newer memscale-transforms"
        )


def named(name: str) -> Any:
    """Returns the object that PyTorch calls `name`, or, if there is none, a class that raises on any use.

    >>> named("torch._ops.OpOverload").__name__
    'OpOverload'
    """
    try:
        return _found(name)
    except (AttributeError, ImportError):
        return _Missing(name, (), {"__doc__": f"{name}, which this PyTorch does not have."})


class _Missing(type):
    """The metaclass of placeholders for missing names. A placeholder can be subclassed, as files do when they load."""

    def _refuse(cls, *_: Any, **__: Any) -> Any:
        for missing in cls.__mro__:
            if missing.__name__.startswith("torch."):
                break
        raise RuntimeUnavailable(
            f"memscale {_own_version()} needs {missing.__name__}, which torch {torch.__version__} does not have"
        )

    __call__ = __instancecheck__ = __subclasscheck__ = _refuse

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python itself reads these while it makes a class
            raise AttributeError(name)
        return cls._refuse()


def _found(name: str) -> Any:
    _, *rest = name.split(".")
    found, path = torch, "torch"
    for part in rest:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            if not isinstance(found, type(torch)):
                raise
            try:
                found = importlib.import_module(path)
            except ModuleNotFoundError:
                raise AttributeError(name) from None
    return found


def has(name: str) -> bool:
    """Whether the installed PyTorch has an object called `name`.

    >>> has("torch._ops.OpOverload"), has("torch._ops.Nothing")
    (True, False)
    """
    holder, _, last = name.rpartition(".")
    try:
        found = _found(holder)
    except AttributeError:
        return False
    # The class of a module only annotates attributes that its instances set.
    return hasattr(found, last) or last in getattr(found, "__annotations__", ())


@functools.cache
def _say_if_newer() -> None:
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release > NEWEST_TESTED:
        logging.getLogger("memscale").warning(
            "torch %s is newer than any that memscale %s was tested with (up to %s); compare a few steps with "
            "memscale.verify before you rely on it",
            torch.__version__,
            _own_version(),
            _release(NEWEST_TESTED),
        )


def _own_version() -> str:
    return str(sys.modules["memscale"].__dict__.get("__version__"))


def _release(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


# Names that other files need while they load; placeholders let them load without these.
if TYPE_CHECKING:
    from torch._C import _autograd, _functorch
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
    from torch.utils import _pytree
    from torch.utils._python_dispatch import BaseTorchDispatchMode as BaseTorchDispatchMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    autograd, functorch = _autograd, _functorch
    pytree = _pytree
    BatchNorm = _BatchNorm
    NormBase = _NormBase
else:
    autograd = named("torch._C._autograd")
    functorch = named("torch._C._functorch")
    pytree = named("torch.utils._pytree")
    OpOverload = named("torch._ops.OpOverload")
    FakeTensor = named("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = named("torch._subclasses.fake_tensor.FakeTensorMode")
    BatchNorm = named("torch.nn.modules.batchnorm._BatchNorm")
    NormBase = named("torch.nn.modules.batchnorm._NormBase")
    BaseTorchDispatchMode = named("torch.utils._python_dispatch.BaseTorchDispatchMode")
    TorchDispatchMode = named("torch.utils._python_dispatch.TorchDispatchMode")

disable_current_modes = named("torch.utils._python_dispatch._disable_current_modes")
