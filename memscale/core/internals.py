"""The private names of PyTorch that memscale uses, the purpose of each, and what happens without it.

PyTorch gives no guarantee for these names, and any release may drop one. If a name is missing, the parts of memscale
that need it raise an error on their first use, before anything runs (`needs`). Everything else works, including
importing memscale (`named`). `tests/core/test_internals.py` checks the list against the source: add new names here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Iterable
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
_AS_WRITTEN = "a compiled module is simulated as written"
_COMPILED = "transforms/cast transforms/checkpoint transforms/tile"
_NO_REFUSAL = "a compiled `cast`, `checkpoint` or `tile` is an AttributeError"
_IN_A_GROUP = "a transformed model is refused in a process group"
_PARALLEL = "`parallel=...` is refused"

INTERNALS = tuple(
    Internal(*row)
    for row in (
        # Backward and the graph that it goes through.
        (f"{_C}_current_graph_task_id", "which backward runs here", f"runtime optimizers {_S} {_T}checkpoint legacy"),
        (f"{_A}_get_current_graph_task_keep_graph", "whether a backward keeps its graph", f"{_T}checkpoint {_T}tile"),
        (f"{_C}_get_graph_executor_optimize", "whether TorchScript optimizes", f"{_T}checkpoint"),
        (f"{_C}_set_graph_executor_optimize", "TorchScript without its optimizer in a region", f"{_T}checkpoint"),
        (f"{_C}_current_autograd_node", "the autograd node whose backward calls an operator", _S),
        (f"{_A}_get_sequence_nr", "the order in which autograd nodes were made", _S),
        ("torch.autograd.graph._engine_run_backward", "the order of a double backward on a card", _S),
        (
            "torch.autograd.Variable._execution_engine",
            "a callback at the end of backward",
            f"runtime optimizers {_S} {_T}checkpoint",
        ),
        (f"{_A}_push_saved_tensors_default_hooks", "saved-tensor hooks", f"{_S} {_T}checkpoint {_T}offload"),
        (f"{_A}_pop_saved_tensors_default_hooks", "saved-tensor hooks", f"{_S} {_T}checkpoint {_T}offload"),
        (f"{_A}_top_saved_tensors_default_hooks", "the caller's saved-tensor hooks", f"{_R} {_S}"),
        (f"{_A}_unsafe_set_version_counter", "the version counter of a restored tensor", f"{_R} runtime"),
        ("torch.Tensor._base", "the base of a view", f"runtime {_S} {_T}offload"),
        ("torch.Tensor._post_accumulate_grad_hooks", "hooks of tensors, and what they refer to", f"optimizers {_S}"),
        ("torch.Tensor._backward_hooks", "hooks of tensors, and what they refer to", f"{_S} {_T}tile"),
        ("torch.Tensor._indices", "the indices of a sparse tensor that is not coalesced", _S),
        # Memory.
        (f"{_C}_storage_Use_Count", "the number of references to a storage", "runtime"),
        ("torch.Tensor._use_count", "the number of references to a gradient", "runtime"),
        (
            "torch.UntypedStorage._cdata",
            "which tensors share memory; where a generator of the CPU keeps its state",
            f"hardware inspection legacy {_R} runtime {_S} {_T}checkpoint",
        ),
        (f"{_C}_swap_tensor_impl", "swapping the contents of tensors during a profile", _S),
        ("torch._neg_view", "the negative bit of a view", "runtime"),
        (
            f"{_C}_cuda_getCurrentRawStream",
            "the current CUDA stream",
            f"{_R} runtime",
            "a card is refused at once",
        ),
        # Operators, and who sees them.
        (
            "torch.ops.aten.add.Tensor._schema",
            "the arguments of an operator",
            f"hardware inspection policies {_R} {_S} {_T}checkpoint {_T}tile",
        ),
        (f"{_D}TorchDispatchMode", "a dispatch mode", f"hardware {_R} {_S} {_T}tile"),
        (f"{_D}_get_current_dispatch_mode_stack", "the active modes", _R),
        ("torch.overrides._get_current_function_mode_stack", "the active modes", _R),
        (f"{_D}_push_mode", "the modes of the forward, in a recompute", _R),
        (f"{_D}_pop_mode", "the modes of the forward, in a recompute", _R),
        (f"{_C}_push_on_torch_function_stack", "the modes of the forward, in a recompute", _R),
        (f"{_C}_pop_torch_function_stack", "the modes of the forward, in a recompute", _R),
        (f"{_D}_disable_current_modes", "running operators outside of all modes", f"core {_S} {_T}tile"),
        (f"{_D}is_traceable_wrapper_subclass", "wrapper subclasses of tensors", f"runtime {_S}"),
        (f"{_C}DisableTorchFunctionSubclass", "running operators on memscale's tensor subclasses", f"{_S} {_T}tile"),
        ("torch.Tensor._make_wrapper_subclass", "tensors without memory", f"optimizers {_T}tile"),
        (f"{_FAKE}FakeTensor", "recognising PyTorch's fake tensors", f"{_R} runtime {_S} {_T}offload {_T}tile"),
        (f"{_FAKE}FakeTensorMode", "the layouts of an operator's results", f"{_S} {_T}tile"),
        (f"{_FAKE}DataDependentOutputException", "the error for results that depend on values", _S),
        (f"{_FAKE}DynamicOutputShapeException", "the error for results that depend on values", _S),
        ("torch._prims_common.suggest_memory_format", "the layout of a result", _S),
        # Trees of what a model takes and returns.
        ("torch.utils._pytree.TreeSpec", "trees under torch.compile", "core"),
        ("torch.utils._pytree.tree_flatten", "trees under torch.compile", "core"),
        ("torch.utils._pytree.tree_unflatten", "trees under torch.compile", "core"),
        # Modules.
        (
            "torch.nn.Module._buffers",
            "a module's buffers",
            f"algebra {_R} {_S} {_T}cast {_T}checkpoint",
        ),
        ("torch.nn.Module._apply", "`.to()` of a model with streamed parameters", "algebra"),
        ("torch.nn.modules.batchnorm._NormBase", "running statistics", f"{_R} {_T}cast {_T}checkpoint"),
        ("torch.nn.modules.module._global_forward_hooks", "hooks of all modules", _R),
        ("torch.nn.modules.module._global_forward_hooks_with_kwargs", "hooks of all modules", _R),
        ("torch.nn.modules.module._global_forward_pre_hooks", "hooks of all modules", _R),
        ("torch.nn.utils.parametrize._cache", "parametrizations that are cached", _R),
        ("torch.nn.utils.parametrize._cache_enabled", "parametrizations that are cached", _R),
        # What an operator's result depends on.
        (f"{_C}_get_fp32_precision_getter", "the flags of the forward, in a recompute", _R, "the older flags are used"),
        (f"{_C}_set_fp32_precision_setter", "the flags of the forward, in a recompute", _R, "the older flags are used"),
        ("torch._fused_sdp_choice", "the order of attention's kernels", _R),
        ("torch.autograd.forward_ad._current_level", "whether tensors carry tangents", _R),
        # torch.compile.
        (f"{_C}_dynamo.eval_frame.get_eval_frame_callback", "whether torch.compile traces", _R),
        (f"{_C}_dynamo.eval_frame.set_code_exec_strategy", "running hooks uncompiled", _R, "hooks may be compiled"),
        (f"{_C}_dynamo.eval_frame._FrameExecStrategy", "running hooks uncompiled", _R, "hooks may be compiled"),
        (f"{_C}_dynamo.eval_frame._FrameAction", "running hooks uncompiled", _R, "hooks may be compiled"),
        # Compiled modules in a simulated step.
        ("torch.nn.Module._call_impl", "the call that a compiled module wraps", _S),
        ("torch.nn.utils.stateless._reparametrize_module", "a module as a function", _S, _AS_WRITTEN),
        ("torch._inductor.decomposition.select_decomp_table", "the compiler's decompositions", _S, _AS_WRITTEN),
        ("torch._dynamo.graph_break", "graph breaks around regions", _R, "regions cannot be compiled: AttributeError"),
        ("torch._guards.TracingContext", "whether a compiler describes a parameter", "optimizers"),
        ("torch._dynamo.config", "constant floats", _R, "dynamic=True fails around tile()"),
        ("torch._dynamo.decorators.DynamoConfigPatchProxy", "constant floats", _R, "dynamic=True fails around tile()"),
        ("torch._dynamo.comptime.comptime", "errors of torch.compile", _COMPILED, _NO_REFUSAL),
        ("torch._dynamo.exc.Unsupported", "errors of torch.compile", _COMPILED, _NO_REFUSAL),
        (
            "torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer",
            "tracing how a cast exchanges the state of modules",
            f"{_T}cast",
            "regions of `cast` run uncompiled",
        ),
        (
            "torch.nn.modules.module._WrappedHook",
            "state-dict hooks of a copy",
            "algebra",
            "the hooks get the original's modules",
        ),
        # torch.func.
        (f"{_F}get_interpreter_stack", "the running transforms of torch.func", f"{_R} {_T}checkpoint"),
        (f"{_F}TransformType", "the running transforms of torch.func", _R),
        (f"{_F}is_functorch_wrapped_tensor", "torch.func's tensors", f"runtime {_S} {_T}checkpoint {_T}tile"),
        (f"{_F}is_legacy_batchedtensor", "torch.func's tensors", f"runtime {_T}tile"),
        (f"{_F}maybe_get_level", "the transform of torch.func that a tensor belongs to", f"{_T}checkpoint"),
        (f"{_F}unwrap_if_dead", "a tensor of a transform of torch.func that has ended", f"{_T}checkpoint"),
        (f"{_C}_ForceDispatchKeyGuard", "running operators without some dispatch keys", f"{_R} {_S} {_T}checkpoint"),
        (f"{_C}_dispatch_tls_local_exclude_set", "likewise", f"{_R} {_S} {_T}checkpoint"),
        (f"{_C}_dispatch_tls_local_include_set", "likewise", f"{_R} {_S} {_T}checkpoint"),
        (f"{_F}get_unwrapped", "the tensor inside a torch.func wrapper", f"{_S} {_T}checkpoint {_T}tile"),
        # Simulated devices.
        (f"{_C}DispatchKey", "dispatch keys, for a card's autocast on the host", f"{_R} {_S}"),
        (f"{_C}DispatchKeySet", "a card's autocast on the host", f"{_R} {_S}"),
        (f"{_C}_dispatch_key_parse", "random numbers in a recompute under `is_grads_batched`", _R),
        (f"{_C}_dispatch_tls_set_dispatch_key_included", "a card's autocast on the host", _S),
        (f"{_C}_dispatch_tls_set_dispatch_key_excluded", "a card's autocast on the host", _S),
        (f"{_C}_ensureCUDADeviceGuardSet", "a CUDA device where there is none", _S),
        (f"{_C}_stash_obj_in_tls", "marking the threads of a simulation", "core"),
        (
            f"{_C}_remove_obj_from_tls",
            "unmarking a thread of a simulation",
            "core",
            "a thread of a pool stays marked until the simulation ends",
            "2.13",
        ),
        (f"{_C}_is_key_in_tls", "marking the threads of a simulation", "core"),
        ("torch.utils._device._device_constructors", "the functions with a `device` argument", _S),
        (f"{_C}_get_sdp_priority_order", "attention's kernel", _S),
        # Several GPUs.
        ("torch.testing._internal.distributed.fake_pg", "a fake process group", _S, _PARALLEL),
        ("torch.distributed._register_comm_hook", "DDP's communication hooks", _S, _PARALLEL),
        (f"{_C10D}_world", "a process group of the simulation alone", _S, _PARALLEL),
        (f"{_C10D}_resolve_process_group", "the process group of a functional collective", _S, _PARALLEL),
        (f"{_C10D}_get_default_store", "comparing the plans of processes", "algebra", _IN_A_GROUP),
        (f"{_DDP}_active_ddp_module", "the process group of a DDP model", "algebra", _IN_A_GROUP),
        (f"{_ATEN}mm.default._op_dk", "running FSDP2's operators as their parts", _S),
        # Measuring.
        ("torch.cuda.memory._snapshot", "a memory snapshot", "crashes", "the report lacks the snapshot"),
        (f"{_C}_profiler._ExperimentalConfig", "the scratch memory of a kernel", _S),
        ("torch.autograd._enable_profiler_legacy", "the scratch memory of a kernel", _S),
        ("torch.autograd._disable_profiler_legacy", "the scratch memory of a kernel", _S),
        (f"{_A}_profiler_enabled", "a profiler of the caller", _S),
        ("torch._int_mm", "a card's speed with integers", "hardware"),
        ("torch._scaled_mm", "a card's speed with float8", "hardware"),
        ("torch._foreach_norm", "norms as clip_grad_norm_ takes them", "optimizers"),
        ("torch._amp_foreach_non_finite_check_and_unscale_", "scaled losses", "optimizers"),
        # Operators that are not in the documentation.
        (f"{_ATEN}_safe_softmax", "attention's kernel", _S),
        (f"{_ATEN}_softmax", "CUDA's softmax", _S),
        (f"{_ATEN}_log_softmax", "CUDA's softmax", _S),
        (f"{_ATEN}_fused_rms_norm", "CUDA's RMS norm", _S),
        (f"{_C}_dispatch_has_kernel_for_dispatch_key", "whether an operator is a composition of others", f"{_R} {_S}"),
        (f"{_ATEN}_thnn_fused_gru_cell", "CUDA's recurrences", _S),
        (f"{_ATEN}_thnn_fused_lstm_cell", "CUDA's recurrences", _S),
        (f"{_ATEN}_cudnn_init_dropout_state", "CUDA's recurrences", _S),
        (f"{_ATEN}_cudnn_rnn", "CUDA's recurrences", _S),
        (f"{_ATEN}_cudnn_rnn_backward", "CUDA's recurrences", _S),
        ("torch._VF", "CUDA's recurrences", _S),
        (f"{_ATEN}_scaled_dot_product_cudnn_attention", "recognising this operator", _S),
        (f"{_ATEN}_scaled_dot_product_efficient_attention", "recognising this operator", _S),
        (f"{_ATEN}_scaled_dot_product_flash_attention", "recognising this operator", _S),
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
    _refuse_without(part, (each for each in INTERNALS if not each.without and folders & set(each.folders.split())))


def needs_parallel() -> None:
    """Checks that the installed PyTorch has the private names of a simulated process group.

    Raises:
        RuntimeUnavailable: names are missing; the message lists all of them with their purpose.
    """
    _refuse_without("parallel=...", (each for each in INTERNALS if each.without == _PARALLEL))


def _refuse_without(what: str, needed: Iterable[Internal]) -> None:
    lacking = [f"{each.name} ({each.purpose})" for each in needed if not has(each.name)]
    if lacking:
        raise RuntimeUnavailable(
            f"memscale {_own_version()} cannot do this with torch {torch.__version__} ({what}): this torch has no "
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
    with contextlib.suppress(AttributeError):
        _found(name)
        return True
    with contextlib.suppress(AttributeError):
        # The class of a module only annotates attributes that its instances set.
        return last in getattr(_found(holder), "__annotations__", ())
    return False


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
    from torch.nn.modules.batchnorm import _NormBase
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

    autograd, functorch = _autograd, _functorch
    pytree = _pytree
    NormBase = _NormBase
else:
    autograd = named("torch._C._autograd")
    functorch = named("torch._C._functorch")
    pytree = named("torch.utils._pytree")
    OpOverload = type(torch.ops.aten.add.Tensor)
    FakeTensor = named("torch._subclasses.fake_tensor.FakeTensor")
    FakeTensorMode = named("torch._subclasses.fake_tensor.FakeTensorMode")
    NormBase = named("torch.nn.modules.batchnorm._NormBase")
    TorchDispatchMode = named("torch.utils._python_dispatch.TorchDispatchMode")

disable_current_modes = named("torch.utils._python_dispatch._disable_current_modes")
