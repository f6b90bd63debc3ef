"""What an operator does: every count is one that can be made by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from memscale.simulation.rules.traffic import traffic_of
from memscale.simulation.rules.work import flops_of, work_of

aten = torch.ops.aten


class Works(TorchDispatchMode):
    """Collects the work of every operator, by its name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        outputs = op(*args, **(kwargs or {}))
        self.calls.append((op._opname, work_of(op, args, kwargs or {}, outputs)))
        return outputs

    def flops(self, name=None):
        return sum(work.flops for called, work in self.calls if name in (None, called))


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def flops(op, *args, **kwargs):
    return flops_of(op, args, kwargs, op(*args, **kwargs))


def test_a_complex_product_is_four_real_ones():
    a, b = meta(2, 3, dtype=torch.complex64), meta(3, 5, dtype=torch.complex64)
    work = work_of(aten.mm.default, (a, b), {}, aten.mm(a, b))
    assert (work.flops, work.dtype) == (4 * 2 * 2 * 3 * 5, "float32")


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
CAUSAL = aten._scaled_dot_product_efficient_attention


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "pairs"),
    [(4, 4, False, 16), (4, 4, True, 10), (2, 5, True, 3), (5, 2, True, 9), (1, 7, True, 1)],
)
def test_attention_works_on_the_pairs_that_it_sees(queries, keys, causal, pairs):
    q, k, v = meta(2, 3, queries, 8), meta(2, 3, keys, 8), meta(2, 3, keys, 16)
    expected = 2 * 2 * 3 * pairs * (8 + 16)
    assert flops_of(ATTENTION.default, (q, k, v, 0.0, causal), {}, None) == expected
    assert flops_of(ATTENTION.default, (q, k, v), {"is_causal": causal}, None) == expected
    assert flops_of(CAUSAL.default, (q, k, v, None, True, 0.0, causal), {}, None) == expected
    backward = aten._scaled_dot_product_efficient_attention_backward.default
    args = (v, q, k, v, None, v, q, q, q, 0.0, [True, True, True, False], causal)
    assert flops_of(backward, args, {}, None) == 2 * 2 * 3 * pairs * (3 * 8 + 2 * 16)


def test_a_step_agrees_with_the_counter_of_pytorch():
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ConvTranspose2d(8, 4, 3), nn.Flatten(), nn.Linear(196, 9))
    x = torch.randn(2, 3, 12, 12, requires_grad=True)

    def step():
        hidden = conv(x).reshape(2, 3, 3)
        attended = F.scaled_dot_product_attention(hidden[:, None], hidden[:, None], hidden[:, None])
        (attended.sum() + (hidden @ hidden).sum()).backward()

    # Attention by matrix products on the CPU, which the counter knows.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            step()
        with Works() as works:
            step()
    assert works.flops() == counter.get_total_flops()
    assert works.flops("convolution_backward") == 2 * works.flops("convolution")


def test_a_formula_that_the_user_registers_is_used():
    library = torch.library.Library("memscale_test_roofline", "FRAGMENT")
    library.define("triple(Tensor x) -> Tensor")
    library.impl("triple", lambda x: 3 * x, "CompositeExplicitAutograd")
    packet = torch.ops.memscale_test_roofline.triple
    assert flops(packet.default, torch.ones(5)) == 0
    register_flop_formula(packet)(lambda shape, out_shape=None: 3 * shape[0] + 100 * out_shape[0])
    try:
        assert flops(packet.default, torch.ones(5)) == 515
    finally:
        del flop_registry[packet]


X, ROW = torch.ones(4, 8), torch.ones(8)
MOVES_NOTHING = {
    "views": [(aten.t.default, X), (aten.view.default, X, [8, 4]), (aten.expand.default, ROW, [9, 8]),
              (aten.select.int, X, 0, 1), (aten.split.Tensor, X, 2), (aten.as_strided.default, X, [2], [1])],
    "views whose schemas do not say so": [(aten._unsafe_view.default, X, [32]), (aten.unsafe_split.Tensor, X, 2)],
    "new shapes in place": [(aten.transpose_.default, torch.ones(4, 8), 0, 1)],
    "facts": [(torch.ops.prim.device.default, X), (aten.sym_size.int, X, 0), (aten.is_same_size.default, X, X)],
    "memory with nothing in it": [(aten.empty.memory_format, [9]), (aten.new_empty.default, X, [9])],
}  # fmt: skip


@pytest.mark.parametrize("calls", MOVES_NOTHING.values(), ids=MOVES_NOTHING)
def test_what_changes_no_bytes_takes_no_traffic(calls):
    for op, *args in calls:
        assert traffic_of(op, args, {}, op(*args)) == 0, op


def test_float32_may_be_tfloat32_where_the_settings_say_so():
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    a = meta(3, 3)
    image, kernel = meta(1, 2, 5, 5), meta(2, 2, 3, 3)
    convolution = (image, kernel, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    def dtypes():
        product = work_of(aten.mm.default, (a, a), {}, a).dtype
        return product, work_of(aten.convolution.default, convolution, {}, aten.convolution(*convolution)).dtype

    before = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision, conv.fp32_precision = "ieee", "tf32"
        assert dtypes() == ("float32", "tfloat32")
        matmul.fp32_precision, conv.fp32_precision = "tf32", "ieee"
        assert dtypes() == ("tfloat32", "float32")
        assert work_of(aten.add.Tensor, (torch.ones(3), torch.ones(3)), {}, torch.ones(3)).dtype == "float32"
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
