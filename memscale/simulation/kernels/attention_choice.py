"""The choice of the kernel of ``F.scaled_dot_product_attention`` on a CUDA device, and the kernel on fake CPU tensors.

Source of the rules: PyTorch 2.10 to 2.14, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and
sdp_utils_cpp.h for the choice, aten/src/ATen/native/transformers/attention.cpp for the operators around a kernel.
Nested tensors and float8 are left out.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F

from memscale.core import ConfigError, internals
from memscale.regions import dispatch_modes
from memscale.simulation.process.process_state import patched
from memscale.simulation.rules.rule import is_deterministic, without_autocast

Kernel = Literal["flash", "efficient", "cudnn", "math"]
Capability = tuple[int, int]

_SDPA = F.scaled_dot_product_attention
_HALVES = (torch.float16, torch.bfloat16)
_NEWEST: Capability = (12, 1)  # the newest architecture that the fused kernels accept
_DEFAULT_ORDER: tuple[Kernel, ...] = ("flash", "efficient", "math", "cudnn")
_NAMES: Mapping[int, Kernel] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}  # aten/src/ATen/SDPBackend.h
# The cuDNN version of each torch wheel on PyPI, in cuDNN's numbering: nvidia-cudnn-cu12 or -cu13 in the requirements
# of torch 2.10.0 to 2.14.1. A newer PyTorch is assumed to have the newest version listed here.
_BUNDLED_CUDNN = {"2.10": 91002, "2.11": 91900, "2.12": 92000, "2.13": 92000, "2.14": 92400}


@dataclass(frozen=True)
class AttentionFlags:
    """The settings of a process that decide between the attention kernels.

    Args:
        flash, efficient, cudnn, math: whether the user allows the kernel, as
            ``torch.backends.cuda.flash_sdp_enabled()`` and its siblings return.
        order: the kernels from the most to the least preferred.
        deterministic: ``torch.use_deterministic_algorithms(True)``, without ``warn_only``.
        cudnn_version: the version of the loaded cuDNN, such as 91900 for 9.19.0; 0 without cuDNN.
        prefer_cudnn: false where the environment variable ``TORCH_CUDNN_SDPA_DEPRIORITIZED`` is 1.

    >>> with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
    ...     AttentionFlags.current().flash
    False
    """

    flash: bool = True
    efficient: bool = True
    cudnn: bool = True
    math: bool = True
    order: tuple[Kernel, ...] = _DEFAULT_ORDER
    deterministic: bool = False
    cudnn_version: int = _BUNDLED_CUDNN["2.13"]
    prefer_cudnn: bool = True

    @classmethod
    def current(cls) -> AttentionFlags:
        """Returns the flags of this process; without CUDA, with the cuDNN version of this PyTorch's wheel on PyPI."""
        release = ".".join(torch.__version__.split(".")[:2])
        bundled = _BUNDLED_CUDNN.get(release, max(_BUNDLED_CUDNN.values()))
        return cls(
            flash=torch.backends.cuda.flash_sdp_enabled(),
            efficient=torch.backends.cuda.mem_efficient_sdp_enabled(),
            cudnn=torch.backends.cuda.cudnn_sdp_enabled(),
            math=torch.backends.cuda.math_sdp_enabled(),
            order=tuple(_NAMES[kernel] for kernel in torch._C._get_sdp_priority_order() if kernel in _NAMES),
            deterministic=is_deterministic(),
            cudnn_version=torch.backends.cudnn.version() or bundled,
            prefer_cudnn=os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1",
        )

    def ordered(self, capability: Capability) -> tuple[Kernel, ...]:
        """Returns the kernels in the order in which PyTorch tries them on a device of `capability`."""
        # check_prefer_cudnn_attention: cuDNN comes first on Hopper and data-center Blackwell, from cuDNN 9.15.1 on.
        # PyTorch replaces the default order only; an order that a user has set stays.
        fast = capability[0] in (9, 10) and capability[1] in (0, 3) and self.cudnn_version > 91500
        if self.prefer_cudnn and fast and self.order == _DEFAULT_ORDER:
            return ("cudnn", "flash", "efficient", "math")
        return self.order


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call, as ``sdp_params`` in PyTorch's C++.

    Attributes:
        query, key, value: tensors of shape (batch, heads, length, head size).
        attn_mask: a bool or an additive mask, or None.
        dropout_p, is_causal, enable_gqa: the arguments of ``F.scaled_dot_product_attention``.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.query, self.key, self.value))

    def has_dtypes(self, allowed: tuple[torch.dtype, ...]) -> bool:
        return self.query.dtype == self.key.dtype == self.value.dtype and self.query.dtype in allowed

    def has_shapes(self, *, shared_heads: bool, unequal_heads: bool = False) -> bool:
        """Whether the inputs have four dimensions, one batch size, a length above 0 and compatible numbers of heads."""
        if not self.query.dim() == self.key.dim() == self.value.dim() == 4:
            return False
        if not self.query.size(0) == self.key.size(0) == self.value.size(0):
            return False
        if self.query.size(2) == 0 or self.key.size(2) == 0:
            return False
        heads, key_heads, value_heads = self.query.size(1), self.key.size(1), self.value.size(1)
        if not (self.enable_gqa and shared_heads):
            return heads == key_heads == value_heads
        if key_heads != value_heads and not unequal_heads:
            return False
        return heads % key_heads == 0 and heads % value_heads == 0

    def has_unit_strides(self, *, ignore_singleton: bool) -> bool:
        inputs = self.query.stride(-1) == self.key.stride(-1) == self.value.stride(-1) == 1
        inputs = inputs or (ignore_singleton and self.query.size(-1) == 1)
        return inputs and (self.attn_mask is None or self.attn_mask.stride(-1) == 1)


def attention_kernel(call: AttentionCall, capability: Capability, flags: AttentionFlags) -> Kernel:
    """Returns the kernel that ``F.scaled_dot_product_attention`` runs for these arguments on a CUDA device.

    >>> q = torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16, device="meta")
    >>> call = AttentionCall(q, q, q, None, 0.0, is_causal=True, enable_gqa=False)
    >>> [attention_kernel(call, capability, AttentionFlags()) for capability in ((7, 5), (8, 0), (9, 0))]
    ['math', 'flash', 'cudnn']

    Args:
        call: the arguments; values of tensors are never read.
        capability: the device's compute capability, (major, minor).
        flags: the kernels that the process allows and prefers, see :meth:`AttentionFlags.current`.

    Raises:
        ConfigError: no kernel that the flags allow takes these arguments; PyTorch raises in this case too.

    Source: ``select_sdp_backend`` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    for kernel in flags.ordered(capability):
        if getattr(flags, kernel) and _RULES[kernel](call, capability, flags):
            return kernel
    allowed = [kernel for kernel in flags.ordered(capability) if getattr(flags, kernel)]
    raise ConfigError(
        f"a device of capability {capability} has no attention kernel among {allowed} for a query of shape "
        f"{tuple(call.query.shape)} and dtype {call.query.dtype}; allow another one, such as SDPBackend.MATH"
    )


def _takes_flash(call: AttentionCall, capability: Capability, flags: AttentionFlags) -> bool:
    """Whether the flash kernel takes `call`: ``can_use_flash_attention``."""
    head = call.query.size(-1)
    return (
        (8, 0) <= capability <= _NEWEST
        and call.attn_mask is None
        and call.has_shapes(shared_heads=True)
        and head == call.key.size(-1) == call.value.size(-1)
        and head <= 256
        and call.has_dtypes(_HALVES)
        and not (call.is_causal and call.query.size(-2) != call.key.size(-2))
        and call.has_unit_strides(ignore_singleton=True)
        and not (
            call.trains
            and ((8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1))
            and (192 < head <= 224 or (head > 224 and call.dropout_p > 0))
        )
    )


def _takes_efficient(call: AttentionCall, capability: Capability, flags: AttentionFlags) -> bool:
    """Whether the memory-efficient kernel takes `call`: ``can_use_mem_efficient_attention``.

    The kernel takes no shared heads (``enable_gqa``), as before PyTorch 2.14.
    """
    half = call.query.dtype in _HALVES
    # minimum_gemm_alignment: 16 bytes where the kernel uses tensor cores.
    alignment = 1
    if capability >= (8, 0) or (half and capability >= (7, 0)):
        alignment = 8 if half else 4
    heads = call.query.size(-1), call.value.size(-1)
    return (
        (5, 0) <= capability <= _NEWEST
        and call.has_dtypes((*_HALVES, torch.float32) if capability >= (8, 0) else (torch.float16, torch.float32))
        and call.has_shapes(shared_heads=False)
        and call.query.size(-1) == call.key.size(-1)
        and all(head > 0 and head % alignment == 0 for head in heads)
        and call.has_unit_strides(ignore_singleton=False)
    )


def _takes_cudnn(call: AttentionCall, capability: Capability, flags: AttentionFlags) -> bool:
    """Whether cuDNN's kernel takes `call`: ``can_use_cudnn_attention`` for cuDNN 9.0 and later."""
    if flags.cudnn_version < 90000 or (call.dropout_p > 0 and 91100 < flags.cudnn_version < 91400):
        return False
    if flags.deterministic or not (8, 0) <= capability <= _NEWEST or not call.has_dtypes(_HALVES):
        return False
    if not call.has_shapes(shared_heads=True, unequal_heads=True) or not call.has_unit_strides(ignore_singleton=True):
        return False
    # check_cudnn_dropout: cuDNN rounds the probability to sixteenths, so PyTorch accepts only multiples of 1/16
    # (pytorch/pytorch#174245, first released with 2.12).
    if internals.TORCH_VERSION >= (2, 12) and call.dropout_p * 16 % 1:
        return False
    queries, keys = call.query.size(2), call.key.size(2)
    head, value_head = call.query.size(3), call.value.size(3)
    largest = 128
    if capability == (9, 0) and flags.cudnn_version >= 91000:
        largest = 256
    if capability[0] == 10 and flags.cudnn_version >= 91100 and (head, value_head) == (192, 128):
        largest = 192
    return (
        max(head, value_head) <= largest
        and head % 8 == value_head % 8 == 0
        and keys > 1
        and not (queries == 1 and call.dropout_p > 0)
        and _mask_broadcasts(call)
    )


def _mask_broadcasts(call: AttentionCall) -> bool:
    """Whether cuDNN accepts the mask of `call`: ``check_attn_mask_shape``."""
    mask = call.attn_mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    full = (*call.query.shape[:3], call.key.size(2))
    return all(size in (1, wanted) for size, wanted in zip(reversed(mask.shape), reversed(full), strict=False))


def _takes_math(call: AttentionCall, capability: Capability, flags: AttentionFlags) -> bool:
    return True


_RULES: Mapping[Kernel, Callable[[AttentionCall, Capability, AttentionFlags], bool]] = {
    "flash": _takes_flash,
    "efficient": _takes_efficient,
    "cudnn": _takes_cudnn,
    "math": _takes_math,
}


@contextmanager
def cuda_attention(
    capability: Capability, flags: AttentionFlags | None = None, unfused: set[torch.dtype] | None = None
) -> Iterator[None]:
    """Makes ``F.scaled_dot_product_attention`` on CPU tensors run the operator of the CUDA device's kernel.

    The operator saves for backward the tensors that it saves on the device (padded inputs, the log-sum-exp, the mask
    in the kernel's layout), and its gradients come from the kernel's backward operator.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> kept = []
    >>> with FakeTensorMode(), cuda_attention((8, 0)):
    ...     q = torch.empty(1, 2, 1024, 64, dtype=torch.bfloat16, requires_grad=True)
    ...     with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)), lambda t: t):
    ...         out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> (1, 2, 1024) in kept  # the log-sum-exp, and no 1024 by 1024 matrix
    True

    Args:
        capability: the device's compute capability, (major, minor).
        flags: the settings of the process; None reads these at each call.
        unfused: receives the dtypes of calls without a fused kernel on this device that have one on capability 8.0.

    The seed and offset of a kernel's dropout (16 and 8 bytes a call) are left out: their fake tensors have no device.
    """

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        is_cast = torch.is_autocast_enabled("cuda")
        if is_cast:  # autocast casts for the public function, not for the kernels' operators
            attn_mask, value, key, query = map(_autocast, (attn_mask, value, key, query))
        # Autocast is off inside the function, as on the device.
        with without_autocast() if is_cast else contextlib.nullcontext():
            if not (query.numel() and key.numel() and value.numel()):
                # PyTorch runs no attention kernel for empty tensors.
                return _SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            allowed = flags or AttentionFlags.current()
            call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
            kernel = attention_kernel(call, capability, allowed)
            if unfused is not None and kernel == "math" and attention_kernel(call, (8, 0), allowed) != "math":
                unfused.add(query.dtype)
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                # convert_boolean_attn_mask: minus infinity where the mask is false, in the query's dtype.
                additive = torch.full((), -math.inf, dtype=query.dtype, device=query.device)
                attn_mask = torch.where(attn_mask, torch.zeros_like(additive), additive)
            return _RUNS[kernel](call, attn_mask, scale)

    with patched(F, "scaled_dot_product_attention", attend):
        yield


def _autocast(tensor: Any) -> Any:
    narrowed = tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(torch.get_autocast_dtype("cuda")) if narrowed else tensor


def _run_flash(call: AttentionCall, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    head = call.query.size(-1)
    padding = -head % 8
    inputs = [F.pad(x, (0, padding)) if padding else x for x in (call.query, call.key, call.value)]
    # The default scale follows from the head size before padding.
    out = torch.ops.aten._scaled_dot_product_flash_attention.default(
        *inputs, call.dropout_p, call.is_causal, scale=1 / math.sqrt(head) if scale is None else scale
    )[0]
    return cast(torch.Tensor, out[..., :head] if padding else out)


def _run_efficient(call: AttentionCall, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    if mask is not None:
        # pad_bias: rows of the mask have to begin at multiples of 8 elements, so PyTorch copies to longer rows.
        if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
            keys = mask.size(-1)
            mask = F.pad(mask, (0, 8 - keys % 8))[..., :keys]
        mask = mask.expand(*call.query.shape[:3], call.key.size(2))
    out = torch.ops.aten._scaled_dot_product_efficient_attention.default(
        call.query, call.key, call.value, mask, call.trains, call.dropout_p, call.is_causal, scale=scale
    )[0]
    return cast(torch.Tensor, out)


def _run_cudnn(call: AttentionCall, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    out = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        call.query, call.key, call.value, mask, call.trains, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return cast(torch.Tensor, out)


def _run_math(call: AttentionCall, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
    """Returns the result of ``_scaled_dot_product_attention_math``, with CUDA's dropout operator.

    On CPU tensors PyTorch's own function would run the CPU's dropout, which saves other tensors.
    """
    query, key, value = call.query, call.key, call.value
    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16) and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(1 / math.sqrt(query.size(-1)) if scale is None else abs(scale))
    scaled = query * (-factor if scale is not None and scale < 0 else factor)  # PyTorch keeps `query` alive besides
    if call.is_causal:
        seen = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        nothing = torch.scalar_tensor(-math.inf, dtype=query.dtype, device=query.device)
        mask = torch.where(seen, 0.0, nothing)
        del seen, nothing
    keys, values = key, value  # PyTorch keeps `key` and `value` alive besides
    if call.enable_gqa:
        keys, values = (x.repeat_interleave(query.size(-3) // x.size(-3), -3) for x in (key, value))
    weights = scaled @ (keys.transpose(-2, -1) * factor)
    if mask is not None:
        # PyTorch adds the mask in place unless a tensor subclass or a mode is active (`areAnyTensorSubclassLike`);
        # one mode is the simulation's own.
        watched = len(dispatch_modes()) > 1
        weights = weights + mask if watched else weights.add_(mask)
    weights = torch.ops.aten._safe_softmax.default(weights, -1)
    dropped = F.dropout(weights, call.dropout_p) if call.dropout_p > 0 else weights
    _unused = weights.to(dtype)  # the second result of PyTorch's function, allocated before the first
    return (dropped @ values).to(dtype)


_RUNS: Mapping[Kernel, Callable[[AttentionCall, torch.Tensor | None, float | None], torch.Tensor]] = {
    "flash": _run_flash,
    "efficient": _run_efficient,
    "cudnn": _run_cudnn,
    "math": _run_math,
}
