"""What a CUDA device does differently from CPU tensors: attention kernels and dropout masks."""

import dataclasses
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.core.errors import ConfigError
from memscale.simulation.kernels.attention_choice import AttentionCall, AttentionFlags, attention_kernel, cuda_attention
from memscale.simulation.kernels.cuda_fused import cuda_fused

T4, A100, A10, L4, H100, B200, RTX5090 = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)
FLAGS = AttentionFlags()
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def tensors(shape, dtype=BF16, *, key=None, value=None, requires_grad=False):
    shapes = (shape, key or shape, value or key or shape)
    return [torch.empty(s, dtype=dtype, device="meta", requires_grad=requires_grad) for s in shapes]


def choose(shape=(2, 8, 256, 64), dtype=BF16, capability=A100, *, key=None, value=None, requires_grad=False, **options):
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "enable_gqa": False, "flags": FLAGS} | options
    allowed = options.pop("flags")
    call = AttentionCall(*tensors(shape, dtype, key=key, value=value, requires_grad=requires_grad), **options)
    return attention_kernel(call, capability, allowed)


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
    "priority_order: not with 9.15.0": ({"capability": H100, "flags": flags(cudnn_version=91500)}, "flash"),
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


FIRST = ("cudnn", "math")
OLD = torch.__version__ < "2.12"
MORE_CHOICES = [
    # Training with wide heads.
    *[
        ({"capability": cc, "shape": (2, 8, 256, 224), "requires_grad": True}, "efficient")
        for cc in (L4, RTX5090, (12, 1))
    ],
    *[({"capability": cc, "shape": (2, 8, 256, 192), "requires_grad": True}, "flash") for cc in (A10, L4, RTX5090)],
    ({"capability": A10, "shape": (2, 8, 256, 225), "requires_grad": True}, "flash"),
    ({"capability": A10, "shape": (2, 8, 256, 225), "requires_grad": True, "dropout_p": 0.1}, "math"),
    # Nothing to attend to.
    ({"key": (2, 8, 0, 64)}, "math"),
    # cuDNN by its version.
    *[
        ({"flags": flags(order=FIRST, cudnn_version=version), "capability": cc, "shape": shape, "value": value}, kernel)
        for version, cc, shape, value, kernel in (
            (89700, A100, (2, 8, 256, 64), None, "math"),
            (91000, H100, (2, 8, 256, 256), None, "cudnn"),
            (91000, H100, (2, 8, 256, 264), None, "math"),
            (91099, B200, (2, 8, 256, 192), (2, 8, 256, 128), "math"),
        )
    ],
    ({"flags": flags(order=FIRST, cudnn_version=91200), "dropout_p": 0.125}, "math"),
    ({"flags": flags(order=FIRST), "dtype": F32}, "math"),
    ({"flags": flags(order=FIRST), "key": (2, 2, 256, 64)}, "math"),
    # Its kernels round the probability to sixteenths, from PyTorch 2.12 on only where that changes nothing.
    *(
        ({"flags": flags(order=FIRST), "dropout_p": p}, "cudnn" if p * 16 == int(p * 16) or OLD else "math")
        for p in (0.1, 0.25)
    ),
    *[
        ({"flags": flags(order=FIRST), "attn_mask": mask(*shape)}, kernel)
        for shape, kernel in (
            ((256, 256), "cudnn"),
            ((1, 1, 256, 256), "cudnn"),
            ((1, 4, 256, 256), "math"),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "kernel"), MORE_CHOICES, ids=str)
def test_the_ends_of_the_rules(arguments, kernel):
    assert choose(**arguments) == kernel


def test_the_last_dimension_has_to_be_dense():
    q = torch.empty(2, 8, 64, 256, dtype=BF16, device="meta").transpose(2, 3)
    assert attention_kernel(AttentionCall(q, q, q, None, 0.0, False, False), A100, FLAGS) == "math"
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
@pytest.mark.parametrize(
    ("release", "version"),
    [("2.10.0+cpu", 91002), ("2.14.1", 92400), ("2.99.0", 92400)],
)
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
    with cuda_attention(capability, flags), saved.context:
        out = F.scaled_dot_product_attention(*inputs, **options)
    kept = saved.sizes(*inputs)
    out.sum().backward()
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]
    assert [x.grad.dtype for x in inputs] == [dtype] * 3
    return inputs, out, kept


B, H, L, D = 2, 4, 100, 64


OUT, ROW = B * H * L * D, B * H * L * 4  # numbers of the output, and bytes of one float a row
# Card, dtype, what differs from a plain call, the last dimension of the output, and the bytes of what is kept beside
# the inputs and, where the kernel pads heads, of padded copies of them.
KEPT = {
    "flash: the output and one float a row": (A100, BF16, {"is_causal": True}, D, [2 * OUT, ROW]),
    "flash: heads padded to eight": (A100, BF16, {"shape": (B, H, L, 60)}, 60, [2 * OUT] * 4 + [ROW]),
    "flash: shared keys and values uncopied": (
        A100, BF16, {"key": (B, 2, L, D), "enable_gqa": True}, D, [2 * OUT, ROW],
    ),
    "efficient: row sums aligned to 32": (A100, F32, {}, D, [4 * OUT, B * H * 128 * 4]),
    **{
        f"efficient: a mask of {keys} keys as an additive one in rows of 104": (
            A100, BF16, {"key": (B, H, keys, D), "attn_mask": (L, keys)}, D, [2 * OUT, B * H * 128 * 4, L * 104 * 2],
        )
        for keys in (104, 100, 97)
    },
    "cudnn: the output and one float a row": (H100, BF16, {"is_causal": True}, D, [2 * OUT, ROW]),
    "cudnn: values of another size, and a mask": (
        B200, BF16, {"shape": (B, H, L, 192), "value": (B, H, L, 128), "attn_mask": (L, L)}, 128,
        [2 * B * H * L * 128, ROW, L * L * 2],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("card", "dtype", "call", "head", "kept_bytes"), KEPT.values(), ids=KEPT)
def test_a_kernel_keeps_for_backward_what_it_keeps_on_the_card(fakes, card, dtype, call, head, kept_bytes):
    call = {"shape": (B, H, L, D), **call}
    if "attn_mask" in call:
        call["attn_mask"] = torch.empty(call["attn_mask"], dtype=torch.bool)
    _, out, kept = run(card, call.pop("shape"), dtype, **call)
    assert out.shape == (B, H, L, head)
    assert dtype is not F32 or out.transpose(1, 2).is_contiguous(), "efficient's own layout"
    assert kept == sorted(kept_bytes)


def test_math_keeps_the_whole_matrix(fakes):
    _, out, kept = run(A100, (B, H, L, D), F64)
    assert out.shape == (B, H, L, D)
    assert B * H * L * L * 8 in kept


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.3},
        {"attn_mask": torch.arange(48).view(6, 8) % 5 > 0, "scale": -0.5},
        {"attn_mask": torch.linspace(-1, 1, 48).view(6, 8)},
        {"enable_gqa": True},
        {"dtype": BF16},
    ],
    ids=str,
)
def test_math_written_out_is_pytorchs(options):
    options = dict(options)
    torch.manual_seed(0)
    heads = 2 if options.get("enable_gqa") else 4
    query, key, value = (
        torch.randn(2, h, n, 16, dtype=options.get("dtype", F32)) for h, n in ((4, 6), (heads, 8), (heads, 8))
    )
    options.pop("dtype", None)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(query, key, value, **options)
        with cuda_attention(A100):
            assert torch.equal(F.scaled_dot_product_attention(query, key, value, **options), expected)


def test_the_flags_are_read_at_each_call(fakes):
    q = torch.empty(B, H, L, D, dtype=BF16, requires_grad=True)
    for kernel, matrix in ((SDPBackend.FLASH_ATTENTION, False), (SDPBackend.MATH, True)):
        saved = Saved()
        with cuda_attention(A100), saved.context, sdpa_kernel(kernel):
            F.scaled_dot_product_attention(q, q, q)
        assert (B * H * L * L * 4 in saved.sizes(q)) == matrix


def test_empty_inputs_take_no_kernel(fakes):
    q = torch.empty(B, H, 0, D, dtype=BF16, requires_grad=True)
    saved, full = Saved(), torch.empty(B, H, L, D, dtype=BF16)
    plain = Saved()
    for device, keeps in ((cuda_attention(A100, FLAGS), saved), (nullcontext(), plain)):
        with device, keeps.context:
            assert F.scaled_dot_product_attention(q, q, q).shape == (B, H, 0, D)
            assert F.scaled_dot_product_attention(full, q, q).shape == (B, H, L, D)
            assert F.scaled_dot_product_attention(q, full, full).shape == (B, H, 0, D)
    assert saved.sizes() == plain.sizes()  # nothing, but before torch 2.12 what it is composed of


def test_gradients_of_torch_func_take_the_kernel_too(fakes):
    q = torch.empty(B, H, L, D, dtype=BF16)
    called = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    with cuda_attention(A100, FLAGS), Record():
        grad = torch.func.grad(lambda x: F.scaled_dot_product_attention(x, q, q).sum())(q)
    assert grad.shape == q.shape
    assert "aten._scaled_dot_product_flash_attention_backward.default" in called


# Whether the device is a card, a call, and the bytes kept for each element of a float32 tensor of 6400.
DROPOUTS = {
    "one byte for each": (True, lambda x: F.dropout(x, 0.1), 1),
    "of a module": (True, lambda x: nn.Dropout(0.1)(x), 1),
    "of torch": (True, lambda x: torch.dropout(x, 0.1, train=True), 1),
    "in place, the noise": (True, lambda x: F.dropout(x * 2, 0.1, inplace=True), 4),
    "on a CPU, the noise": (False, lambda x: F.dropout(x, 0.1), 4),
    "none in evaluation": (True, lambda x: F.dropout(x, 0.1, training=False), 0),
    "none of torch": (True, lambda x: torch.dropout(x, 0.1, False), 0),
    "none where it drops nothing": (True, lambda x: F.dropout(x, 0.0), 0),
}


@pytest.mark.parametrize(("on_card", "call", "each"), DROPOUTS.values(), ids=DROPOUTS)
def test_dropout_keeps_what_it_keeps_on_the_device(fakes, on_card, call, each):
    x, saved = torch.empty(100, 64, requires_grad=True), Saved()
    with cuda_fused() if on_card else nullcontext(), saved.context:
        out = call(x)
        F.dropout(torch.empty(0, 4), 0.1)
    assert saved.sizes(x) == [6400 * each] * (each > 0)
    assert out.shape == x.shape
    out.sum().backward()
