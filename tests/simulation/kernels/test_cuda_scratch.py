"""Memory that CUDA libraries and kernels take beside tensors: workspaces and scratch."""

import pytest
import torch

import memscale as ms
from memscale.simulation.kernels.kernels import (
    cublas_workspace_bytes,
    cublaslt_workspace_bytes,
)
from memscale.simulation.kernels.shapes import FakeKernels
from memscale.simulation.rules.registry import RULES
from memscale.simulation.rules.rule import RESULTS, CardTraits, Result, briefly, plain
from tests.support.kernels import cuda_program, rule_named, scratch_bytes

MIB = 1 << 20
T4, A100, A10, L4, H100, B200, RTX5090 = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


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
def test_the_workspace_of_cublas_follows_card_and_version(capability, environ, version, nbytes):
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
def test_the_workspace_of_cublaslt_follows_environment_and_version(environ, version, nbytes):
    assert cublaslt_workspace_bytes(A100, environ=environ, torch_version=version) == nbytes


def test_workspaces_follow_the_environment_of_the_process(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:1")
    assert cublas_workspace_bytes(H100) == MIB


def meta(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype, device="meta")


def scratch(op, *args, capability=A100, **options):
    assert rule_named(op).program is not plain
    return scratch_bytes(op, args, None, capability, **options)


def test_every_operator_with_a_rule_exists():
    pytest.importorskip("bitsandbytes.functional", reason="the operators in few bits are of bitsandbytes")
    for name in RULES:
        found = torch.ops
        for part in name.split("."):
            found = getattr(found, part)
        assert str(found) == name


IDS = meta(4096, dtype=torch.int64)
FLASH, EFFICIENT = (f"aten._scaled_dot_product_{kind}_attention_backward.default" for kind in ("flash", "efficient"))
LOOKUP = "aten.embedding_dense_backward.default"


def attention(length, keys, head, dtype, heads=4):
    """The arguments of a backward of attention: its gradient lies as the kernels lay out their outputs."""
    query, key = meta(2, 4, length, head, dtype=dtype), meta(2, heads, keys, head, dtype=dtype)
    output = meta(2, length, 4, head, dtype=dtype).transpose(1, 2)
    return output, query, key, key, output


def norm(rows, columns):
    x, weight, row = meta(rows, columns), meta(columns), meta(rows, 1)
    return x, x, [columns], row, row, weight, weight, [True] * 3


# What PyTorch's CUDA sources ask the allocator for, worked out by hand at the sizes where their rules turn.
TAKEN = [
    (
        "aten.embedding_dense_backward.default",
        (meta(3072, 512), meta(3072, dtype=torch.int64), 50304, -1, False),
        A100,
        0,
    ),
    (LOOKUP, (meta(4096, 512), IDS, 50304, -1, False), A100, 9_427_456),
    (LOOKUP, (meta(4096, 512), IDS, 1024, -1, False), A100, 3_062_272),
    ("aten.index_put_.default", (meta(1000, 64), [IDS], meta(4096, 64)), A100, 0),
    ("aten.index_put_.default", (meta(1000, 64), [IDS], meta(4096, 64), True), A100, 202_240),
    ("aten.native_layer_norm_backward.default", norm(65536, 768), A100, 0),
    ("aten.native_layer_norm_backward.default", norm(65537, 768), A100, 2 * 1365 * 768 * 4),
    (FLASH, attention(128, 128, 64, BF16), A100, 266_240),
    (FLASH, attention(100, 100, 40, BF16), A100, 266_240),
    (FLASH, attention(128, 128, 64, BF16, heads=2), A100, 528_384),
    (EFFICIENT, attention(256, 100, 64, BF16), A100, 532_992),
    (EFFICIENT, attention(256, 100, 136, BF16), A100, 3_679_232),
    (EFFICIENT, attention(256, 100, 96, BF16), L4, 1_057_280),
    (EFFICIENT, attention(256, 100, 72, BF16), RTX5090, 2_106_368),
    (EFFICIENT, attention(256, 100, 64, F16), T4, 532_992),
    (EFFICIENT, attention(256, 100, 160, F16), T4, 3_679_232),
]


@pytest.mark.parametrize(("op", "args", "capability", "nbytes"), TAKEN)
def test_a_backward_takes_what_its_kernel_asks_for(op, args, capability, nbytes):
    assert scratch(op, *args, capability=capability) == nbytes


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_on_cuda_is_noted(layer):
    def notes(device):
        model = torch.nn.Sequential(layer(8, 8))
        profile = ms.profile(model, torch.ones(3, 4, 8), loss=lambda y, _: y[0].mean(), hardware=device)
        return [note for note in profile.notes if "cuDNN" in note]

    (note,) = notes("h100")
    assert note.startswith(f"{layer.__name__}: cuDNN")
    assert "measurements on one H100 with cuDNN 9.19" in note
    assert "off by 1.8 % in the median and 5.6 %" in note
    assert notes("cpu") == []


def test_their_products_take_the_workspace_of_cublas():
    model = torch.nn.Conv1d(32, 32, 3, dtype=torch.bfloat16, device="meta")
    batch = torch.empty(2, 32, 64, dtype=torch.bfloat16, device="meta")
    on = {card: ms.profile(model, batch, loss=lambda y, _: y.sum(), hardware=card) for card in ("t4", "a100-80")}
    assert on["t4"].by_category["workspace"] >= 8_519_680 > on["a100-80"].by_category.get("workspace", 0)


# Batch, heads, those of keys and values, queries, keys, head; what backward took on the CUDA build of torch 2.13.
CUDNN_BACKWARD = [
    ((1, 32, 8, 2048, 2048, 128), 33816576),
    ((1, 32, 32, 2048, 2048, 128), 33816576),
    ((2, 16, 4, 1024, 512, 64), 8519680),
    ((1, 8, 2, 100, 100, 64), 208000),
]


@pytest.mark.parametrize(("shape", "nbytes"), CUDNN_BACKWARD)
def test_attention_of_cudnn_asks_for_no_more_where_heads_share_keys(shape, nbytes):
    batch, heads, shared, queries, keys, head = shape
    query = torch.empty(batch, heads, queries, head, dtype=torch.bfloat16, device="meta")
    key = torch.empty(batch, shared, keys, head, dtype=torch.bfloat16, device="meta")
    op = "aten._scaled_dot_product_cudnn_attention_backward.default"
    assert cuda_program(op, (query, query, key, key), None, (9, 0)) == (RESULTS, nbytes)


@pytest.mark.parametrize(
    ("shape", "parts"),
    [((2000, 192), (24576, 24)), ((100, 64), ()), ((60_000, 48), (98304, 8))],  # as the CUDA build takes them
)
def test_a_batch_norm_of_rows_puts_down_the_parts_of_its_sums(shape, parts):
    x, weight = torch.empty(shape, device="meta"), torch.empty(shape[1], device="meta")
    args = (x, weight, weight, weight, weight, True, 0.1, 1e-5)
    assert cuda_program("aten.native_batch_norm.default", args, None, (9, 0), 132) == (RESULTS, *briefly(*parts))
    given = (x, x, weight, weight, weight, weight, weight, True, 1e-5, [True, True, True])
    program = cuda_program("aten.native_batch_norm_backward.default", given, None, (9, 0), 132)
    halves = briefly(parts[0] // 2, parts[1]) if parts else ()
    assert program == (weight.nbytes, weight.nbytes, Result(1), Result(2), *halves, Result(0))


def test_a_gradient_in_another_order_than_the_image_is_copied_and_not_the_image():
    image = torch.empty(8, 64, 56, 56, device="meta")
    kernel = torch.empty(96, 64, 4, 4, device="meta")
    grad = torch.empty(8, 96, 14, 14, device="meta")
    last = torch.channels_last

    def copies(grad, image, kernel, wanted=(True, True, False)):
        args = (grad, image, kernel, None, [4, 4], [0, 0], [1, 1], False, [0, 0], 1, wanted)
        program = cuda_program("aten.convolution_backward.default", args, None, H100, 132)
        return program[: program.index(Result(0))]

    assert copies(grad, image, kernel) == ()
    assert copies(grad.to(memory_format=last), image, kernel) == (grad.nbytes,)
    assert copies(grad, image.to(memory_format=last), kernel) == (grad.nbytes,)
    assert copies(grad, image, kernel.to(memory_format=last)) == (image.nbytes, grad.nbytes)
    assert copies(grad, image, kernel.to(memory_format=last), (True, False, False)) == (grad.nbytes,)


def test_bags_of_a_card_know_the_bag_of_each_index():
    args = torch.empty(50, 16), torch.empty(200, dtype=torch.int64), torch.empty(10, dtype=torch.int64)
    for mode, offset_ends, shapes in (
        (0, False, [(10, 16), (200,), (10,), (0,)]),
        (1, True, [(9, 16), (200,), (10,), (0,)]),
        (2, False, [(10, 16), (200,), (10,), (10, 16)]),
    ):
        given = (*args, False, mode, False, None, offset_ends)
        layout = FakeKernels(CardTraits((9, 0))).layout(torch.ops.aten._embedding_bag.default, given, {}, args)
        assert [output.shape for output in layout.outputs] == shapes
