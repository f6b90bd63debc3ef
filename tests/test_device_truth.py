"""What a CUDA device does differently from CPU tensors: attention kernels, workspaces, scratch, dropout masks."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from memscale._errors import ConfigError
from memscale.profiling import _attention
from memscale.profiling._attention import AttentionFlags, CudaAttention, attention_kernel
from memscale.profiling._workspaces import (
    SCRATCH,
    CudaDropout,
    cublas_workspace_bytes,
    cublaslt_workspace_bytes,
    cuda_scratch_bytes,
)

MIB = 1 << 20
T4, A100, A10, L4, H100, B200, RTX5090 = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)
FLAGS = AttentionFlags()
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def tensors(shape, dtype=BF16, *, key=None, value=None, requires_grad=False):
    shapes = (shape, key or shape, value or key or shape)
    return [torch.empty(s, dtype=dtype, device="meta", requires_grad=requires_grad) for s in shapes]


def choose(shape=(2, 8, 256, 64), dtype=BF16, capability=A100, *, key=None, value=None, requires_grad=False, **options):
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False, "flags": FLAGS} | options
    return attention_kernel(
        *tensors(shape, dtype, key=key, value=value, requires_grad=requires_grad), capability=capability, **options
    )


def mask(*shape, dtype=torch.bool, requires_grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def flags(**fields):
    return dataclasses.replace(FLAGS, **fields)


# The rule after each colon is a function of sdp_utils.cpp or sdp_utils_cpp.h.
CHOICES = {
    "bf16 on Ampere": ({}, "flash"),
    "priority_order: cuDNN first on Hopper": ({"capability": H100}, "cudnn"),
    "priority_order: cuDNN first on Blackwell": ({"capability": B200}, "cudnn"),
    "priority_order: not on consumer Blackwell": ({"capability": RTX5090}, "flash"),
    "priority_order: not with 9.10.2": ({"capability": H100, "flags": flags(cudnn_version=91002)}, "flash"),
    "priority_order: not with 9.15.0": ({"capability": H100, "flags": flags(cudnn_version=91500)}, "flash"),
    "priority_order: deprioritized": ({"capability": H100, "flags": flags(prefer_cudnn=False)}, "flash"),
    "priority_order: the user's order stands": (
        {"capability": H100, "flags": flags(order=("efficient", "flash", "cudnn", "math"))},
        "efficient",
    ),
    "check_flash_attention_hardware_support: Turing": ({"dtype": F16, "capability": T4}, "efficient"),
    "check_sm_version: newer than sm121": ({"capability": (13, 0)}, "math"),
    "check_tensor_dtype: float32": ({"dtype": F32}, "efficient"),
    "check_tensor_dtype: float64": ({"dtype": F64}, "math"),
    "check_tensor_dtype: bf16 before sm80": ({"capability": T4}, "math"),
    "check_for_attn_mask: flash takes no mask": ({"attn_mask": mask(256, 256)}, "efficient"),
    "check_attn_mask_shape: cuDNN takes a mask": ({"capability": H100, "attn_mask": mask(2, 1, 256, 256)}, "cudnn"),
    "check_attn_mask_shape: of 2 or 4 dimensions": ({"capability": H100, "attn_mask": mask(8, 256, 256)}, "efficient"),
    "check_attn_mask_shape: that broadcasts": ({"capability": H100, "attn_mask": mask(2, 8, 256, 255)}, "efficient"),
    "check_attn_mask_shape: without a gradient": (
        {"capability": H100, "attn_mask": mask(256, 256, dtype=BF16, requires_grad=True)},
        "efficient",
    ),
    "check_head_dim_size_flash: 256": ({"shape": (2, 8, 256, 256)}, "flash"),
    "check_head_dim_size_flash: over 256": ({"shape": (2, 8, 256, 264)}, "efficient"),
    "check_head_dim_size_flash: one size for all": ({"value": (2, 8, 256, 128)}, "efficient"),
    "check_head_dim_size_mem_efficient: 8 halves": ({"shape": (2, 8, 256, 60), "attn_mask": mask(256, 256)}, "math"),
    "check_head_dim_size_mem_efficient: 4 floats": ({"shape": (2, 8, 256, 60), "dtype": F32}, "efficient"),
    "check_head_dim_size_mem_efficient: 3 floats": ({"shape": (2, 8, 256, 63), "dtype": F32}, "math"),
    "check_head_dim_size_mem_efficient: any floats on Turing": (
        {"shape": (2, 8, 256, 63), "dtype": F32, "capability": T4},
        "efficient",
    ),
    "pad_last_dim: flash pads heads": ({"shape": (2, 8, 256, 63)}, "flash"),
    "check_cudnn_tensor_shapes: multiples of 8": ({"shape": (2, 8, 256, 60), "capability": H100}, "flash"),
    "check_cudnn_tensor_shapes: 256 on Hopper": ({"shape": (2, 8, 256, 256), "capability": H100}, "cudnn"),
    "check_cudnn_tensor_shapes: 128 on Blackwell": ({"shape": (2, 8, 256, 256), "capability": B200}, "flash"),
    "check_cudnn_tensor_shapes: DeepSeek on Blackwell": (
        {"shape": (2, 8, 256, 192), "value": (2, 8, 256, 128), "capability": B200},
        "cudnn",
    ),
    "check_cudnn_tensor_shapes: one key": ({"key": (2, 8, 1, 64), "capability": H100}, "flash"),
    "check_cudnn_tensor_shapes: one query with dropout": (
        {"shape": (2, 8, 1, 64), "key": (2, 8, 9, 64), "dropout_p": 0.1, "capability": H100},
        "flash",
    ),
    "can_use_cudnn_attention: no dropout in 9.12": (
        {
            "capability": H100,
            "dropout_p": 0.1,
            "flags": flags(cudnn_version=91200, order=("cudnn", "flash", "math")),
        },
        "flash",
    ),
    "check_cudnn_deterministic": ({"capability": H100, "flags": flags(deterministic=True)}, "flash"),
    "192 < head <= 224 on sm86 in training": (
        {"shape": (2, 8, 256, 200), "capability": A10, "requires_grad": True},
        "efficient",
    ),
    "the same without a gradient": ({"shape": (2, 8, 256, 200), "capability": A10}, "flash"),
    "the same on sm80": ({"shape": (2, 8, 256, 200), "requires_grad": True}, "flash"),
    "head 256 on sm89": ({"shape": (2, 8, 256, 256), "capability": L4, "requires_grad": True}, "flash"),
    "head 256 on sm89 with dropout": (
        {"shape": (2, 8, 256, 256), "capability": L4, "requires_grad": True, "dropout_p": 0.1},
        "efficient",
    ),
    "head 256 on sm120 with dropout": (
        {"shape": (2, 8, 256, 256), "capability": RTX5090, "requires_grad": True, "dropout_p": 0.1},
        "efficient",
    ),
    "check_flash_causal_non_square_seqlens": ({"key": (2, 8, 128, 64), "is_causal": True}, "efficient"),
    "non-square without causal": ({"key": (2, 8, 128, 64)}, "flash"),
    "check_tensor_shapes: three dimensions": ({"shape": (8, 256, 64)}, "math"),
    "check_batch_size_and_num_heads_dense: batches": ({"key": (1, 8, 256, 64)}, "math"),
    "check_batch_size_and_num_heads_dense: heads": ({"key": (2, 2, 256, 64)}, "math"),
    "check_grouped_query_attention: flash shares heads": ({"key": (2, 2, 256, 64), "enable_gqa": True}, "flash"),
    "check_grouped_query_attention: heads that divide": ({"key": (2, 3, 256, 64), "enable_gqa": True}, "math"),
    "check_grouped_query_attention: efficient shares none": (
        {"key": (2, 2, 256, 64), "enable_gqa": True, "dtype": F32},
        "math",
    ),
    "check_grouped_query_attention: cuDNN takes unequal keys and values": (
        {"key": (2, 4, 256, 64), "value": (2, 2, 256, 64), "enable_gqa": True, "capability": H100},
        "cudnn",
    ),
    "check_grouped_query_attention: flash does not": (
        {"key": (2, 4, 256, 64), "value": (2, 2, 256, 64), "enable_gqa": True},
        "math",
    ),
    "check_runtime_disabled_flash": ({"flags": flags(flash=False)}, "efficient"),
    "check_runtime_disabled_mem_efficient": ({"flags": flags(flash=False, efficient=False)}, "math"),
    "no math: cuDNN is tried last": ({"flags": flags(flash=False, efficient=False, math=False)}, "cudnn"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_the_kernel_that_a_device_takes(name):
    arguments, kernel = CHOICES[name]
    assert choose(**arguments) == kernel


def test_the_last_dimension_has_to_be_dense():
    q = torch.empty(2, 8, 64, 256, dtype=BF16, device="meta").transpose(2, 3)
    assert attention_kernel(q, q, q, None, 0.0, False, False, A100, FLAGS) == "math"
    transposed = mask(256, 256, dtype=BF16).t()
    assert choose(attn_mask=transposed) == "math"


def test_no_kernel_at_all_is_an_error():
    with pytest.raises(ConfigError, match=r"capability \(7, 5\) has no attention kernel among \['flash'\]"):
        choose(capability=T4, flags=flags(efficient=False, cudnn=False, math=False))


def test_flags_of_the_process_are_read(monkeypatch):
    assert AttentionFlags.current().flash
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        now = AttentionFlags.current()
        assert (now.flash, now.cudnn, now.efficient, now.math) == (False, False, True, True)
        assert now.order[:2] == ("efficient", "math")
    assert AttentionFlags.current().order == ("flash", "efficient", "math", "cudnn")
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert not AttentionFlags.current().prefer_cudnn
    torch.use_deterministic_algorithms(True)
    try:
        assert AttentionFlags.current().deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert not AttentionFlags.current().deterministic
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(torch.backends.cudnn.is_available(), reason="says what happens without cuDNN")
@pytest.mark.parametrize(("release", "version"), [("2.10.0+cpu", 91002), ("2.11.1", 91900), ("2.99.0", 92000)])
def test_without_cudnn_the_bundled_version_counts(monkeypatch, release, version):
    monkeypatch.setattr(torch, "__version__", release)
    assert AttentionFlags.current().cudnn_version == version


@pytest.fixture
def fakes():
    with FakeTensorMode() as mode:
        yield mode


class Saved:
    """The tensors that autograd keeps, one for each storage."""

    def __init__(self):
        self.by_storage = {}
        self.context = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        self.by_storage.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    def sizes(self, *but):
        """Bytes of what is kept beside ``but``, without the seeds of dropout."""
        known = {tensor.untyped_storage()._cdata for tensor in but}
        kept = [t.untyped_storage().nbytes() for key, t in self.by_storage.items() if key not in known]
        return sorted(nbytes for nbytes in kept if nbytes > 16)


def run(capability, shape, dtype=BF16, *, key=None, value=None, flags=FLAGS, **options):
    """One attention on fake tensors: (inputs, output, what else is kept)."""
    inputs = [torch.empty(s, dtype=dtype, requires_grad=True) for s in (shape, key or shape, value or key or shape)]
    saved = Saved()
    with CudaAttention(capability, flags), saved.context:
        out = F.scaled_dot_product_attention(*inputs, **options)
    kept = saved.sizes(*inputs)
    out.sum().backward()
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]
    assert [x.grad.dtype for x in inputs] == [dtype] * 3
    return inputs, out, kept


B, H, L, D = 2, 4, 100, 64


def test_flash_keeps_the_output_and_one_float_a_row(fakes):
    _, out, kept = run(A100, (B, H, L, D), is_causal=True)
    assert out.shape == (B, H, L, D)
    assert kept == sorted([B * H * L * D * 2, B * H * L * 4])


def test_flash_pads_heads_to_eight(fakes):
    _, out, kept = run(A100, (B, H, L, 60))
    assert out.shape == (B, H, L, 60)
    # Query, key, value and output of 64, none of which is a tensor of the caller.
    assert kept == sorted([B * H * L * 64 * 2] * 4 + [B * H * L * 4])


def test_flash_scales_by_the_head_before_padding(fakes, monkeypatch):
    seen = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._scaled_dot_product_flash_attention.default:
                seen.append((args[0].shape[-1], kwargs["scale"]))
            return func(*args, **(kwargs or {}))

    q = torch.empty(B, H, L, 60, dtype=BF16)
    with CudaAttention(A100, FLAGS), Record():
        F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q, scale=0.5)
    assert seen == [(64, 1 / math.sqrt(60)), (64, 0.5)]


def test_flash_shares_keys_and_values_without_a_copy(fakes):
    (_, key, _), out, kept = run(A100, (B, H, L, D), key=(B, 2, L, D), enable_gqa=True)
    assert out.shape == (B, H, L, D)
    assert key.grad.shape == (B, 2, L, D)
    assert kept == sorted([B * H * L * D * 2, B * H * L * 4])


def test_efficient_aligns_its_row_sums_to_32(fakes):
    _, out, kept = run(A100, (B, H, L, D), F32)
    assert out.shape == (B, H, L, D)
    assert out.transpose(1, 2).is_contiguous()
    assert kept == sorted([B * H * L * D * 4, B * H * 128 * 4])


def test_efficient_keeps_no_row_sums_without_a_gradient(fakes):
    outputs = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._scaled_dot_product_efficient_attention.default:
                outputs.append(result[1].shape)
            return result

    q = torch.empty(B, H, L, D, requires_grad=True)
    with CudaAttention(A100, FLAGS), Record():
        with torch.no_grad():
            F.scaled_dot_product_attention(q, q, q)
        F.scaled_dot_product_attention(q, q, q)
    assert outputs == [(B, H, 0), (B, H, 128)]


@pytest.mark.parametrize(
    ("keys", "row"),
    [
        (104, 104),  # rows of a multiple of 8 are used as they are
        (100, 104),
        (97, 104),
    ],
)
def test_efficient_keeps_a_bool_mask_as_an_aligned_additive_one(fakes, keys, row):
    bias = torch.empty(L, keys, dtype=torch.bool)
    _, _, kept = run(A100, (B, H, L, D), key=(B, H, keys, D), attn_mask=bias)
    assert kept == sorted([B * H * L * D * 2, B * H * 128 * 4, L * row * 2])


def test_efficient_keeps_an_aligned_additive_mask_itself(fakes):
    bias = torch.empty(1, 1, 104, 104, dtype=BF16)
    saved = Saved()
    q = torch.empty(B, H, 104, D, dtype=BF16, requires_grad=True)
    with CudaAttention(A100, FLAGS), saved.context:
        F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    assert saved.sizes(q, bias) == sorted([B * H * 104 * D * 2, B * H * 128 * 4])


def test_a_mask_gets_its_gradient(fakes):
    bias = torch.empty(1, H, L, L, dtype=BF16, requires_grad=True)
    run(A100, (B, H, L, D), attn_mask=bias)
    assert bias.grad.shape == (1, H, L, L)


def test_cudnn_keeps_the_output_and_one_float_a_row(fakes):
    _, out, kept = run(H100, (B, H, L, D), is_causal=True)
    assert out.shape == (B, H, L, D)
    assert kept == sorted([B * H * L * D * 2, B * H * L * 4])


def test_cudnn_takes_values_of_another_size_and_a_mask(fakes):
    _, out, kept = run(
        B200, (B, H, L, 192), key=(B, H, L, 192), value=(B, H, L, 128), attn_mask=torch.empty(L, L, dtype=torch.bool)
    )
    assert out.shape == (B, H, L, 128)
    assert kept == sorted([B * H * L * 128 * 2, B * H * L * 4, L * L * 2])


def test_math_keeps_the_whole_matrix(fakes):
    _, out, kept = run(A100, (B, H, L, D), F64)
    assert out.shape == (B, H, L, D)
    assert B * H * L * L * 8 in kept


def test_math_on_half_computes_in_float(fakes):
    only_math = flags(flash=False, efficient=False, cudnn=False)
    _, out, kept = run(A100, (B, H, L, D), flags=only_math)
    assert out.dtype == BF16
    assert B * H * L * L * 4 in kept


def test_math_repeats_shared_keys(fakes):
    _, out, kept = run(A100, (B, H, L, D), F32, key=(B, 2, L, D), enable_gqa=True)
    assert out.shape == (B, H, L, D)
    assert B * H * L * L * 4 in kept


def test_the_flags_are_read_at_each_call(fakes):
    q = torch.empty(B, H, L, D, dtype=BF16, requires_grad=True)
    for kernel, matrix in ((SDPBackend.FLASH_ATTENTION, False), (SDPBackend.MATH, True)):
        saved = Saved()
        with CudaAttention(A100), saved.context, sdpa_kernel(kernel):
            F.scaled_dot_product_attention(q, q, q)
        assert (B * H * L * L * 4 in saved.sizes(q)) == matrix


def test_multi_head_attention_goes_through_the_same_kernels(fakes):
    layer = nn.MultiheadAttention(H * D, H, batch_first=True, dtype=BF16)
    x = torch.empty(B, L, H * D, dtype=BF16, requires_grad=True)
    before = F.scaled_dot_product_attention
    saved = Saved()
    with CudaAttention(A100, FLAGS), saved.context:
        layer(x, x, x, need_weights=False)[0].sum().backward()
    assert B * H * L * 4 in saved.sizes()
    assert F.scaled_dot_product_attention is before


def test_an_error_inside_multi_head_attention_leaves_nothing_behind(fakes):
    before = F.scaled_dot_product_attention
    layer = nn.MultiheadAttention(H * D, H, batch_first=True)
    with CudaAttention(A100, FLAGS), pytest.raises(AssertionError):
        layer(*[torch.empty(B, L, 7)] * 3)
    assert F.scaled_dot_product_attention is before


def test_empty_inputs_take_no_kernel(fakes):
    q = torch.empty(B, H, 0, D, dtype=BF16, requires_grad=True)
    saved = Saved()
    with CudaAttention(A100, FLAGS), saved.context:
        assert F.scaled_dot_product_attention(q, q, q).shape == (B, H, 0, D)
    assert saved.sizes() == []


def test_gradients_of_torch_func_take_the_kernel_too(fakes):
    q = torch.empty(B, H, L, D, dtype=BF16)
    called = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    with CudaAttention(A100, FLAGS), Record():
        grad = torch.func.grad(lambda x: F.scaled_dot_product_attention(x, q, q).sum())(q)
    assert grad.shape == q.shape
    assert "aten._scaled_dot_product_flash_attention_backward.default" in called


def test_real_tensors_are_not_touched_outside():
    assert F.scaled_dot_product_attention is _attention._SDPA


WORKSPACES = [
    ((7, 0), {}, (2, 13), 8519680),
    ((8, 0), {}, (2, 13), 8519680),
    ((8, 9), {}, (2, 13), 8519680),
    ((9, 0), {}, (2, 13), 32 * MIB),
    ((9, 0), {}, (2, 10), 32 * MIB),
    ((10, 0), {}, (2, 13), 32 * MIB),
    ((12, 0), {}, (2, 12), 32 * MIB),
    ((10, 0), {}, (2, 11), 8519680),
    ((12, 0), {}, (2, 10), 8519680),
    ((8, 0), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, (2, 13), 128 * 1024),
    ((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, (2, 13), 8519680),
    ((9, 0), {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, (2, 13), 0),
    ((8, 0), {"CUBLAS_WORKSPACE_CONFIG": "4096"}, (2, 13), 8519680),
]


@pytest.mark.parametrize(("capability", "environ", "version", "nbytes"), WORKSPACES)
def test_cublas_workspaces(capability, environ, version, nbytes):
    assert cublas_workspace_bytes(capability, environ=environ, torch_version=version) == nbytes


@pytest.mark.parametrize(
    ("environ", "version", "nbytes"),
    [
        ({}, (2, 13), 0),
        ({}, (2, 12), 0),
        ({}, (2, 11), MIB),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, (2, 10), 0),
        ({"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, (2, 13), MIB),
        ({"CUBLASLT_WORKSPACE_SIZE": "4096"}, (2, 13), 0),
        ({"CUBLASLT_WORKSPACE_SIZE": "4096"}, (2, 10), 4 * MIB),
        ({"CUBLASLT_WORKSPACE_SIZE": "65536"}, (2, 10), 8519680),
        ({"CUBLASLT_WORKSPACE_SIZE": "65536", "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, (2, 10), 64 * MIB),
        ({"CUBLASLT_WORKSPACE_SIZE": "much"}, (2, 10), MIB),
    ],
)
def test_cublaslt_workspaces(environ, version, nbytes):
    assert cublaslt_workspace_bytes(A100, environ=environ, torch_version=version) == nbytes


def test_workspaces_follow_the_environment_of_the_process(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:1")
    assert cublas_workspace_bytes(H100) == MIB


def meta(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype, device="meta")


def scratch(op, *args, capability=A100, **options):
    assert op in SCRATCH
    return cuda_scratch_bytes(op, args, None, capability, **options)


def test_ops_without_a_formula_take_nothing():
    assert cuda_scratch_bytes("aten.mm.default", (meta(8, 8), meta(8, 8)), None, A100) == 0


def test_every_op_with_a_formula_exists():
    for name in SCRATCH:
        _, packet, overload = name.split(".")
        assert str(getattr(getattr(torch.ops.aten, packet), overload)) == name


def embedding(tokens, vocabulary, width, *, dtype=F32, by_frequency=False, index=torch.int64):
    return scratch(
        "aten.embedding_dense_backward.default",
        meta(*tokens, width, dtype=dtype),
        meta(*tokens, dtype=index),
        vocabulary,
        -1,
        by_frequency,
    )


def test_embedding_backward_sums_up_to_ten_rows_at_a_time():
    assert embedding((3, 1024), 50304, 512) == 0
    assert embedding((1, 3073), 50304, 512) > 0
    # 4096 tokens: 4096 segments at most, and 409 + 4096 partial sums.
    partials = 409 + 4096
    small = 3 * 4096 * 8 + 2 * 4096 * 8 + 2 * 512 + 36352  # 4505 * 8 bytes rounded up
    assert embedding((4, 1024), 50304, 512) == small + partials * 512 * 4
    assert embedding((4, 1024), 50304, 512, dtype=BF16) == small + partials * 512 * 4
    # A small vocabulary has fewer segments.
    assert embedding((4, 1024), 1024, 512) == 3 * 32768 + 2 * 8192 + 1024 + 11776 + (409 + 1024) * 2048
    assert embedding((4, 1024), 50304, 512, by_frequency=True) - embedding((4, 1024), 50304, 512) == 4096 * 8
    assert embedding((1, 512), 50304, 512, by_frequency=True) > 0
    assert embedding((4, 1024), 50304, 512, index=torch.int32) < embedding((4, 1024), 50304, 512)


def test_embedding_backward_copies_a_gradient_that_is_not_contiguous():
    grad = meta(8, 16, 4).transpose(0, 1)
    assert scratch("aten.embedding_dense_backward.default", grad, meta(16, 8, dtype=torch.int64), 9, -1, False) == 2048


def test_index_put_sorts_only_to_accumulate():
    op = "aten.index_put_.default"
    target, rows, values = meta(1000, 64), meta(4096, dtype=torch.int64), meta(4096, 64)
    assert scratch(op, target, [rows], values) == 0
    assert scratch(op, target, [rows], values, False) == 0
    assert scratch(op, target, [rows], values, True) == 6 * 4096 * 8
    # One value for all is expanded first; two index tensors broadcast.
    assert scratch(op, target, [rows], meta(1), True) == 6 * 4096 * 8 + 4096 * 64 * 4
    pairs = [meta(64, 1, dtype=torch.int64), meta(64, dtype=torch.int64)]
    assert scratch(op, target, pairs, meta(64, 64), True) == 6 * 4096 * 8
    assert scratch(op, target, [None, rows], meta(1000, 4096), True) == 6 * 4096 * 8
    assert scratch(op, meta(64, 1000).t(), [rows], values, True) == 6 * 4096 * 8 + 64 * 1000 * 4
    assert scratch(op, target, [meta(1000, dtype=torch.bool)], meta(1), True) == 0


def layer_norm(rows, columns, mask=(True, True, True), *, bias=True, dtype=F32, multiprocessors=132):
    x, weight = meta(rows, columns, dtype=dtype), meta(columns, dtype=dtype)
    args = (x, x, [columns], meta(rows, 1), meta(rows, 1), weight, weight if bias else None, list(mask))
    return scratch("aten.native_layer_norm_backward.default", *args, multiprocessors=multiprocessors)


def test_layer_norm_backward_splits_many_short_rows():
    assert layer_norm(65536, 768) == 0
    # 24 blocks of 32 columns leave 32768 // 24 = 1365 blocks over the rows.
    assert layer_norm(65537, 768) == 2 * 1365 * 768 * 4
    assert layer_norm(65537, 768, bias=False) == 1365 * 768 * 4
    assert layer_norm(65537, 768, (True, False, True)) == 1365 * 768 * 4
    assert layer_norm(65537, 768, dtype=BF16) == 2 * 1365 * 768 * 2
    # 16 columns: one block wide, so as many as 32 rows each need.
    assert layer_norm(70000, 16) == 2 * 140288  # 2188 * 16 * 4 bytes rounded up
    assert layer_norm(65537, 66 * 32) == 0
    assert layer_norm(65537, 66 * 32, multiprocessors=148) > 0


def flash_backward(shape, *, key=None, dtype=BF16, grad=None, **options):
    q, k = meta(*shape, dtype=dtype), meta(*(key or shape), dtype=dtype)
    # The kernel's own layout is (batch, length, heads, head size).
    out = meta(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)
    args = (out if grad is None else grad, q, k, k, out)
    return scratch("aten._scaled_dot_product_flash_attention_backward.default", *args, **options)


def test_flash_backward_accumulates_in_float():
    assert flash_backward((2, 4, 128, 64)) == 2 * 4 * 128 * 4 + 2 * 128 * 4 * 64 * 4
    # Rows round up to 128 and heads to 32; above 192 there is a kernel for 256 only.
    assert flash_backward((2, 4, 100, 40)) == 2 * 4 * 128 * 4 + 2 * 128 * 4 * 64 * 4
    assert flash_backward((2, 4, 128, 200)) == 2 * 4 * 128 * 4 + 2 * 128 * 4 * 256 * 4
    shared = 2 * 128 * 4 * 64 * 2
    assert flash_backward((2, 4, 128, 64), key=(2, 2, 128, 64)) == flash_backward((2, 4, 128, 64)) + 2 * shared
    copied = flash_backward((2, 4, 128, 64), grad=meta(2, 4, 128, 64, dtype=BF16))
    assert copied == flash_backward((2, 4, 128, 64)) + 2 * 4 * 128 * 64 * 2


def test_flash_backward_is_deterministic_at_a_price():
    free = flash_backward((2, 4, 128, 64))
    torch.use_deterministic_algorithms(True)
    try:
        # 8 heads and 132 multiprocessors make 17 splits.
        assert flash_backward((2, 4, 128, 64)) == free + 16 * 2 * 128 * 4 * 64 * 4
        assert flash_backward((2, 4, 128, 64), multiprocessors=8) == free
    finally:
        torch.use_deterministic_algorithms(False)


def test_efficient_forward_needs_a_float_output_for_large_heads():
    op = "aten._scaled_dot_product_efficient_attention.default"

    def forward(head, dtype, value_head=None):
        key, value = meta(2, 4, 300, head, dtype=dtype), meta(2, 4, 300, value_head or head, dtype=dtype)
        return scratch(op, meta(2, 4, 128, head, dtype=dtype), key, value)

    assert forward(128, BF16) == 0
    assert forward(136, BF16) == 2 * 4 * 128 * 136 * 4
    assert forward(64, BF16, 136) == 2 * 4 * 128 * 136 * 4
    assert forward(136, BF16, 64) == 2 * 4 * 128 * 64 * 4
    assert forward(136, F32) == 0


def blocks(*sizes):
    return sum(-(-nbytes // 512) * 512 for nbytes in sizes)


def efficient_backward(shape, dtype=BF16, *, capability=A100, keys=None, value_head=None):
    batch, heads, length, head = shape
    q, k = meta(*shape, dtype=dtype), meta(batch, heads, keys or length, head, dtype=dtype)
    v = meta(batch, heads, keys or length, value_head or head, dtype=dtype)
    grad = meta(batch, length, heads, value_head or head, dtype=dtype).transpose(1, 2)
    op = "aten._scaled_dot_product_efficient_attention_backward.default"
    return scratch(op, grad, q, k, v, capability=capability)


def tile(rows, columns):
    """Bytes of one tile of float32, with its lock."""
    return rows * columns * 4 + 16


@pytest.mark.parametrize(
    ("capability", "dtype", "head", "rows", "columns", "spills"),
    [
        (A100, BF16, 64, 64, 64, False),
        (A100, BF16, 72, 128, 128, False),
        (A100, BF16, 128, 128, 128, False),
        (A100, BF16, 136, 128, 64, True),
        *[(capability, F16, 128, 128, 128, False) for capability in ((8, 7), H100, B200, (10, 3), (11, 0))],
        (A10, BF16, 96, 128, 64, False),
        (L4, BF16, 96, 128, 64, False),
        (L4, BF16, 104, 64, 64, True),
        (L4, BF16, 136, 64, 64, True),
        (RTX5090, BF16, 64, 64, 64, False),
        (RTX5090, BF16, 72, 64, 64, True),
        (T4, F16, 64, 64, 64, True),
    ],
)
def test_efficient_backward_accumulates_in_float_tiles(capability, dtype, head, rows, columns, spills):
    # Eight heads with 256 queries and 100 keys, which are two blocks of 64 or one of 128.
    row_sums = 8 * 256 * 4
    floats = math.ceil(256 / rows) * math.ceil(head / columns) * tile(rows, columns)
    if spills:
        floats += 2 * 2 * 64 * math.ceil(head / rows) * rows * 4
    assert efficient_backward((2, 4, 256, head), dtype, capability=capability, keys=100) == blocks(row_sums, 8 * floats)


def test_efficient_backward_goes_by_the_larger_head():
    floats = 2 * tile(128, 128)  # and not 4 * tile(64, 64)
    assert efficient_backward((2, 4, 256, 64), value_head=72) == blocks(8 * 256 * 4, 8 * floats)


def test_efficient_backward_splits_the_keys_less_for_many_heads():
    spilled = 2 * 64 * 128 * 4
    # 25 heads leave at most 200 // 25 = 8 of the 16 blocks of keys, and 256 heads one.
    for batch, heads, keys, splits in ((5, 5, 1024, 8), (5, 5, 256, 4), (16, 16, 1024, 1), (16, 16, 128, 1)):
        floats = 4 * tile(64, 64) + splits * spilled
        found = efficient_backward((batch, heads, 128, 128), capability=RTX5090, keys=keys)
        assert found == blocks(batch * heads * 128 * 4, batch * heads * floats)
    torch.use_deterministic_algorithms(True)
    try:
        once = efficient_backward((2, 4, 128, 128), capability=RTX5090)
    finally:
        torch.use_deterministic_algorithms(False)
    assert once == blocks(8 * 128 * 4, 8 * (4 * tile(64, 64) + spilled))


@pytest.mark.parametrize(
    ("capability", "head", "rows"), [(A100, 64, 64), (A100, 72, 128), (L4, 72, 64), (T4, 64, 64), ((6, 1), 64, 64)]
)
def test_efficient_backward_multiplies_float32_outside_the_kernel(capability, head, rows):
    # First the product of gradient and output and its sums, then those sums in order and the tiles.
    row_sums = 8 * 256 * 4
    product = blocks(8 * 256 * head * 4, row_sums)
    # Before sm70 the gradient of the query is its own accumulator.
    tiles = math.ceil(256 / rows) * math.ceil(head / 64) * tile(rows, 64) if capability >= (7, 0) else 0
    found = efficient_backward((2, 4, 256, head), F32, capability=capability)
    assert found == blocks(row_sums) + max(product, blocks(8 * tiles))


def test_efficient_backward_keeps_the_larger_of_product_and_tiles():
    # 40 rows fill two thirds of their tiles, and 300 rows of 512 most of theirs.
    assert efficient_backward((2, 4, 40, 64), F32) == blocks(8 * 40 * 4, 8 * tile(64, 64))
    assert efficient_backward((2, 4, 256, 512), F32) == blocks(*[8 * 256 * 4] * 2, 8 * 256 * 512 * 4)


def test_efficient_backward_on_volta_casts_halves_first():
    row_sums = 256 * 128 * 4
    assert efficient_backward((16, 16, 128, 128), F16, capability=(7, 0)) == 3 * row_sums * 128 + 2 * row_sums
    assert efficient_backward((16, 16, 128, 128), F16, capability=(7, 2)) == 3 * row_sums * 128 + 2 * row_sums


def test_dropout_keeps_one_byte_an_element(fakes):
    x = torch.empty(100, 64, requires_grad=True)
    for call in (lambda: F.dropout(x, 0.1), lambda: nn.Dropout(0.1)(x), lambda: torch.dropout(x, 0.1, train=True)):
        saved = Saved()
        with CudaDropout(), saved.context:
            out = call()
        assert saved.sizes() == [6400]
        assert out.shape == x.shape
        out.sum().backward()


def test_dropout_on_cpu_keeps_the_noise_in_its_dtype(fakes):
    x = torch.empty(100, 64, requires_grad=True)
    saved = Saved()
    with saved.context:
        F.dropout(x, 0.1)
    assert saved.sizes() == [25600]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.dropout(x, 0.1, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: torch.dropout(x, 0.1, False),
        lambda x: F.dropout(torch.empty(0, 4), 0.1),
    ],
)
def test_dropout_that_drops_nothing_keeps_nothing(fakes, call):
    x = torch.empty(100, 64, requires_grad=True)
    saved = Saved()
    with CudaDropout(), saved.context:
        call(x)
    assert saved.sizes() == []


def test_dropout_in_place_keeps_the_noise_as_on_cuda(fakes):
    x = torch.empty(100, 64, requires_grad=True)
    saved = Saved()
    with CudaDropout(), saved.context:
        F.dropout(x * 2, 0.1, inplace=True)
    assert saved.sizes() == [25600]


def test_dropout_checks_its_arguments_as_ever():
    with CudaDropout(), pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        F.dropout(torch.ones(4), 1.5)


def test_dropout_inside_multi_head_attention(fakes):
    layer = nn.MultiheadAttention(H * D, H, dropout=0.1, batch_first=True)
    x = torch.empty(B, L, H * D, requires_grad=True)
    before, saved = F.dropout, Saved()
    with CudaDropout(), saved.context:
        layer(x, x, x, need_weights=True)
    assert B * H * L * L in saved.sizes()
    assert F.dropout is before
