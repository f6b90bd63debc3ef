"""Functions of CUDA on CPU tensors that stand for tensors of a CUDA device: fused operators, and autocast.

On CUDA, RMS norms, the cells of recurrences, and a softmax from float16 to float32 are one operator each, and a
composition of several on a CPU; a batch norm by cuDNN copies its input first. Dropout is one operator, with a mask.
Source: aten/src/ATen/native/layer_norm.cpp, RNN.cpp, Normalization.cpp, and cuda/RNN.cu of PyTorch 2.13.

NOTE: PyTorch's kernels for the dispatch key of CUDA's autocast do not cast CPU tensors, and CPU autocast has other
lists (on CUDA, powers, layer norms and losses run in float32). The kernels here have CUDA's lists and CUDA's cache,
which keeps the narrow copy of a weight until autocast ends. They are registered for the autocast key of a device that
no build of PyTorch has, and only the simulating thread turns this key on: other threads that train on a real card keep
PyTorch's autocast.

Source: aten/src/ATen/autocast_mode.h and autocast_mode.cpp of PyTorch 2.12 to 2.14; the header comes with PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._prims_common import suggest_memory_format

from memscale.core import OpOverload, pytrees
from memscale.simulation.process.process_state import all_patched
from memscale.simulation.rules.norms import RMS_NORM, normalises_by_cudnn
from memscale.simulation.rules.registry import RULES, rule_of
from memscale.simulation.rules.rule import AUTOCAST, without_autocast

aten = torch.ops.aten


@contextmanager
def _known_to_autograd() -> Iterator[None]:
    """Makes autograd find the derivative of the fused RMS norm, which needs a kernel of some device for the operator.

    The kernel is registered for the IPU, a device that no build of PyTorch has: CPU builds lack CUDA, and no tensor of
    another thread can be on an IPU.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(RMS_NORM.name(), "IPU"):  # an outer simulation registered it
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl(RMS_NORM, _no_kernel, "IPU")
    try:
        yield
    finally:
        library._destroy()


def _no_kernel(*args: Any) -> Any:
    raise NotImplementedError("the derivative alone is wanted")


def _outside_autocast(original: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        # Under autocast the original dispatches to `CudaAutocast`, which casts first and then calls `below`.
        if torch.is_autocast_enabled("cuda") or not args or is_functorch_wrapped_tensor(args[0]) or "out" in kwargs:
            return original(*args, **kwargs)
        return run(*args, **kwargs)

    return choose


_BATCH_NORM, _DROPOUT_OF_MODULE, _DROPOUT = torch.batch_norm, F.dropout, torch.dropout


def _batch_norm(input: torch.Tensor, weight: Any, bias: Any, *options: Any, **named: Any) -> torch.Tensor:
    if weight is not None and bias is not None and normalises_by_cudnn(input, weight):
        input = input.contiguous(memory_format=suggest_memory_format(input))
    return _BATCH_NORM(input, weight, bias, *options, **named)


def _has_mask(input: torch.Tensor, p: float, training: bool) -> bool:
    """Whether a card drops by one operator; in evaluation, in place, and for p of 0 or 1 as a CPU does.

    Source: ``is_fused_kernel_acceptable`` in aten/src/ATen/native/Dropout.cpp.
    """
    return training and 0 < p < 1 and input.numel() > 0


def _dropout_of_module(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if inplace or not _has_mask(input, p, training):
        return _DROPOUT_OF_MODULE(input, p, training, inplace)
    return cast(torch.Tensor, aten.native_dropout.default(input, p, True)[0])


def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    return _dropout_of_module(input, p) if _has_mask(input, p, train) else _DROPOUT(input, p, train)


_RUNS = {op.split(".")[1]: rule.fused for op, rule in RULES.items() if rule.fused is not None}
_PATCHES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    *(
        (holder, name, _outside_autocast(getattr(torch, name), run))
        for name, run in _RUNS.items()
        for holder in ((torch.Tensor, torch) if hasattr(torch.Tensor, name) else (torch, torch._VF))
    ),
    (torch, "batch_norm", _batch_norm),
    (F, "dropout", _dropout_of_module),
    (torch, "dropout", _dropout),
)


@contextmanager
def cuda_fused() -> Iterator[None]:
    """Makes dropout, batch norm and the operators with a `fused` kernel run CUDA's operators on CPU tensors.

    On CUDA dropout saves a bool mask for backward (1 byte an element); on a CPU noise of the input's dtype.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> kept = []
    >>> keep = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes), lambda t: t)
    >>> with FakeTensorMode(), cuda_fused(), keep:
    ...     y = torch.nn.RMSNorm(8)(F.dropout(torch.empty(4, 8, requires_grad=True)))
    >>> y.grad_fn.name(), kept[0]
    ('FusedRmsNormBackward0', 32)
    """
    with _known_to_autograd(), all_patched(_PATCHES):
        yield


_KEY = AUTOCAST.name
LOWER = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
"""
FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
_upsample_bicubic2d_aa
"""
FLOAT32_RESULT = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
prod.dim_Dimname softmax.Dimname log_softmax.Dimname cumprod.dimname cumsum.dimname sum.dim_DimnameList
"""  # the last line before torch 2.13
WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
REFUSED = "binary_cross_entropy"
_ON_CPU = (
    'torch.autocast("cpu") is on in the step: simulated as on the CPU, though it casts no tensor of a CUDA device; '
    'write torch.autocast("cuda") or torch.autocast(x.device.type)'
)
_NORMS = {"norm.Scalar": "ScalarOpt_dtype", "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}


class CudaAutocast:
    """The kernels of CUDA's autocast, for CPU tensors that stand for device tensors.

    Args:
        eligible: whether a tensor stands for one of the device.
        notes: receives a note if the step turns the CPU's autocast on.
    """

    def __init__(self, eligible: Callable[[torch.Tensor], bool], notes: dict[str, None]) -> None:
        self._eligible = eligible
        self._notes = notes
        self._narrow: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id(leaf) -> (leaf, its narrow copy)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Makes CUDA's autocast cast the eligible tensors during the body."""
        library, others = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
        enable, clear = torch.set_autocast_enabled, torch.clear_autocast_cache
        registered = False

        def enabled(*args: Any) -> None:
            nonlocal registered
            if not registered and args[0] == "cuda" and args[-1]:
                registered = True  # on first use: registration takes milliseconds, and most steps have no autocast
                others.fallback(torch.library.fallthrough_kernel, _KEY)
                self._register(library)
            enable(*args)
            if args[0] == "cuda":
                _turn(on=bool(args[-1]))
            elif args[0] == "cpu" and args[-1]:
                self._notes[_ON_CPU] = None

        def cleared() -> None:
            self._narrow.clear()
            clear()

        try:
            if torch.is_autocast_enabled("cuda"):  # the caller has turned autocast on around the simulation
                enabled("cuda", True)
            with all_patched([(torch, "set_autocast_enabled", enabled), (torch, "clear_autocast_cache", cleared)]):
                yield
        finally:
            _turn(on=False)
            library._destroy()
            others._destroy()
            self._narrow.clear()

    def cast(self, tensor: Any) -> Any:
        """Returns `tensor` in autocast's narrow dtype, as an operator of the `LOWER` list receives it."""
        return self._to(torch.get_autocast_dtype("cuda"), tensor)

    def _register(self, library: torch.library.Library) -> None:
        policies = ((LOWER, self._lower), (FLOAT32, self._wide), (FLOAT32_RESULT, self._wide_result))
        for names, policy in (*policies, (WIDEST, self._widest), (" ".join(_NORMS), self._norm), (REFUSED, _refused)):
            for op in filter(None, map(_overload, names.split())):
                library.impl(op, policy(op), _KEY)

    def _lower(self, op: OpOverload) -> Callable[..., Any]:
        return lambda *args, **kwargs: below(op, *_from_the_last(self.cast, args, kwargs))

    def _wide(self, op: OpOverload) -> Callable[..., Any]:
        def widen(value: Any) -> Any:
            return self._to(torch.float32, value)

        return lambda *args, **kwargs: below(op, *_from_the_last(widen, args, kwargs))

    def _wide_result(self, op: OpOverload) -> Callable[..., Any]:
        at = next(index for index, each in enumerate(op._schema.arguments) if each.name == "dtype")

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._casts(args[0]) and kwargs.get("dtype") is None and (len(args) <= at or args[at] is None):
                args, kwargs = args[:at], {**kwargs, "dtype": torch.float32}
            return below(op, args, kwargs)

        return run

    def _norm(self, op: OpOverload) -> Callable[..., Any]:
        wide = getattr(torch.ops.aten.norm, _NORMS[op.__name__])

        # The overload with a dtype takes these arguments by name, and the dispatcher passes no arguments at defaults.
        defaults = [(each.name, each.default_value) for each in op._schema.arguments]

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._casts(args[0]):
                return below(op, args, kwargs)
            given = {name: value for name, value in defaults[len(args) :] if name not in kwargs}
            return below(wide, args, {**given, **kwargs, "dtype": torch.float32})

        return run

    def _widest(self, op: OpOverload) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            dtypes = {tensor.dtype for tensor in pytrees.tensors((args, kwargs)) if self._casts(tensor)}
            to = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cuda")
            return below(op, *_from_the_last(lambda value: self._to(to, value), args, kwargs))

        return run

    def _casts(self, value: Any) -> bool:
        """Whether autocast casts `value`: ``is_autocast_eligible`` and not float64."""
        return (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.dtype != torch.float64
            and self._eligible(value)
        )

    def _to(self, dtype: torch.dtype, value: Any) -> Any:
        """Returns `value` in `dtype`, as ``cached_cast``: a trained float32 leaf is cast once until autocast ends."""
        if not self._casts(value) or value.dtype == dtype:
            return value
        cached = (
            dtype == torch.get_autocast_dtype("cuda") and value.dtype == torch.float32 and value.requires_grad
        ) and (value.is_leaf and value._base is None and torch.is_autocast_cache_enabled())
        if not cached:
            return value.to(dtype)
        if id(value) not in self._narrow:
            with torch.enable_grad():  # the first use may be under no_grad, and a later one needs the graph
                self._narrow[id(value)] = value, value.to(dtype)
        return self._narrow[id(value)][1]


def _from_the_last(cast: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments, cast from the last to the first: the C++ evaluation order in PyTorch's builds."""
    named = {name: pytrees.map_only(torch.Tensor, cast, value) for name, value in reversed(kwargs.items())}
    return [pytrees.map_only(torch.Tensor, cast, value) for value in reversed(args)][::-1], {
        name: named[name] for name in kwargs
    }


def below(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Returns the result of `op` on the cast arguments, below autocast, by its `fused` kernel if it has one."""
    with without_autocast():
        return (rule_of(op).fused or op)(*args, **kwargs)


def _refused(op: OpOverload) -> Callable[..., Any]:
    """Returns PyTorch's own autocast kernel of `op`, which raises the error that tells the user the remedy."""
    return lambda *args, **kwargs: op._op_dk(torch._C.DispatchKey.AutocastCUDA, *args, **kwargs)


def _turn(*, on: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_excluded(AUTOCAST, not on)
    torch._C._dispatch_tls_set_dispatch_key_included(AUTOCAST, on)


def _overload(name: str) -> OpOverload | None:
    """Returns the overload called `name`; None if this PyTorch's CUDA autocast does not cast it."""
    packet, _, overload = name.partition(".")
    found: OpOverload | None = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return found if found is not None and has_kernel(found.name(), "AutocastCUDA") else None
