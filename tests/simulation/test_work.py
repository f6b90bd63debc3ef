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


def traffic(op, *args, **kwargs):
    return traffic_of(op, args, kwargs, op(*args, **kwargs))


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_products_written_into_out_of_batches_and_of_int8():
    a, b, out = meta(2, 3), meta(3, 5), meta(2, 5)
    assert flops_of(aten.mm.out, (a, b), {"out": out}, out) == 2 * 2 * 3 * 5
    assert flops(aten.addbmm.default, meta(2, 5), meta(7, 2, 3), meta(7, 3, 5)) == 7 * 2 * 2 * 3 * 5
    a, b = torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)
    assert work_of(aten._int_mm.default, (a, b), {}, torch._int_mm(a, b)).flops == 2 * 32 * 16 * 8
    assert work_of(aten._int_mm.default, (a, b), {}, torch._int_mm(a, b)).dtype == "int8"


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


@pytest.mark.parametrize("transposed", [False, True])
def test_the_backward_of_a_grouped_convolution_costs_twice_its_forward(transposed):
    make = nn.ConvTranspose1d if transposed else nn.Conv1d
    layer = make(6, 12, 3, groups=3, bias=False)
    x = torch.randn(2, 6, 10, requires_grad=True)
    with Works() as works:
        layer(x).sum().backward()
    # Each of 10 (transposed) or 8 places meets 6 channels with 4 each over 3 taps.
    forward = 2 * 2 * (10 if transposed else 8) * 6 * 4 * 3
    assert works.flops("convolution") == forward
    assert works.flops("convolution_backward") == 2 * forward
    with Works() as works:
        layer(x.detach()).sum().backward()
    assert works.flops("convolution_backward") == forward


@pytest.mark.parametrize("directions", [1, 2])
def test_a_recurrence_meets_its_matrices_at_every_step(directions):
    lstm = nn.LSTM(5, 7, num_layers=2, bidirectional=directions == 2)
    with Works() as works:
        lstm(torch.randn(11, 3, 5))[0].sum().backward()
    matrices = directions * (4 * 7 * (5 + 7) + 4 * 7 * (7 * directions + 7))
    assert works.flops("mkldnn_rnn_layer") == 2 * 11 * 3 * matrices
    # The gradients of the input and of the weights, and none of what fed the first layer is left out.
    assert works.flops("mkldnn_rnn_layer_backward") == 2 * works.flops("mkldnn_rnn_layer")


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


# -- memory traffic ----------------------------------------------------------------------------------------------------

X = torch.ones(4, 8)
ROW = torch.ones(8)
IDS = torch.tensor([1, 1, 0])
X_BYTES, ROW_BYTES, IDS_BYTES = 128, 32, 24

MOVES = {
    "views": (0, [(aten.t.default, X), (aten.view.default, X, [8, 4]), (aten.expand.default, ROW, [9, 8]),
                  (aten.select.int, X, 0, 1), (aten.split.Tensor, X, 2), (aten.detach.default, X),
                  (aten.as_strided.default, X, [2], [1])]),
    "views whose schemas do not say so": (0, [(aten._unsafe_view.default, X, [32]), (aten.unsafe_split.Tensor, X, 2)]),
    "new shapes in place": (0, [(aten.transpose_.default, torch.ones(4, 8), 0, 1),
                                (aten.resize_.default, torch.ones(4, 8), [2, 2])]),
    "facts": (0, [(torch.ops.prim.device.default, X), (aten.sym_size.int, X, 0), (aten.is_same_size.default, X, X)]),
    "memory with nothing in it": (0, [(aten.empty.memory_format, [9]), (aten.empty_like.default, X),
                                      (aten.new_empty.default, X, [9])]),
    "nothing to move": (0, [(aten.add.Tensor, torch.ones(0, 3), torch.ones(0, 3))]),
    "new values": (X_BYTES, [(aten.zeros.default, [4, 8]), (aten.zeros_like.default, X), (aten.rand_like.default, X),
                             (aten.new_zeros.default, ROW, [4, 8]), (aten.full.default, [4, 8], 1.0)]),
    "a read and a write": (2 * X_BYTES, [(aten.clone.default, X), (aten.relu.default, X)]),
    "two reads and a write": (3 * X_BYTES, [(aten.add.Tensor, X, X.clone())]),
    "a list is read": (4 * X_BYTES, [(aten.cat.default, [X, X.clone()])]),
    "a smaller result": (X_BYTES + 4, [(aten.sum.default, X)]),
    "another dtype": (X_BYTES + X_BYTES // 2, [(aten._to_copy.default, X)]),
    "in place": (2 * X_BYTES, [(aten.relu_.default, X.clone()), (aten.mul_.Scalar, X.clone(), 2.0)]),
    "in place with another": (3 * X_BYTES, [(aten.add_.Tensor, X.clone(), X)]),
    "overwritten": (X_BYTES, [(aten.fill_.Scalar, X.clone(), 1.0), (aten.zero_.default, X.clone()),
                              (aten.normal_.default, X.clone())]),
    "overwritten with another": (2 * X_BYTES, [(aten.copy_.default, X.clone(), X)]),
    "expanded": (2 * X_BYTES + ROW_BYTES, [(aten.add.Tensor, X, ROW), (aten.add.Tensor, X, ROW.expand(4, 8)),
                                             (aten.add.Tensor, X, torch.ones(999)[:8].expand(4, 8))]),
    "strided": (2 * X_BYTES, [(aten.relu.default, X.t()), (aten.clone.default, torch.ones(4, 16)[:, ::2])]),
    "windows that overlap": (ROW_BYTES + 5 * 4 * 4, [(aten.relu.default, ROW.unfold(0, 4, 1))]),
    "rows of a large table": (IDS_BYTES + 2 * 3 * ROW_BYTES, [
        (aten.embedding.default, torch.ones(100, 8), IDS), (aten.index_select.default, torch.ones(100, 8), 0, IDS),
        (aten.index.Tensor, torch.ones(100, 8), [IDS])]),
    "rows of a small table": (IDS_BYTES + 2 * ROW_BYTES + 3 * ROW_BYTES, [
        (aten.embedding.default, torch.ones(2, 8), IDS)]),
    "a few rows changed": (IDS_BYTES + 3 * ROW_BYTES + 2 * (IDS_BYTES + 3 * ROW_BYTES), [
        (aten.index_add_.default, torch.ones(100, 8), 0, IDS, torch.ones(3, 8)),
        (aten.index_put_.default, torch.ones(100, 8), [IDS], torch.ones(3, 8), True)]),
    "all rows changed": (IDS_BYTES + 3 * ROW_BYTES + 2 * 2 * ROW_BYTES, [
        (aten.index_add_.default, torch.ones(2, 8), 0, IDS, torch.ones(3, 8))]),
    "what comes twice is read once": (3 * X_BYTES, [(aten.addcmul_.default, X.clone(), X, X)]),
    "lists": (3 * (X_BYTES + ROW_BYTES), [(aten._foreach_add.List, [X, ROW], [X.clone(), ROW.clone()]),
                                          (aten._foreach_add_.List, [X.clone(), ROW.clone()], [X, ROW])]),
    "lists overwritten": (2 * (X_BYTES + ROW_BYTES), [
        (aten._foreach_copy_.default, [X.clone(), ROW.clone()], [X, ROW])]),
    "a number is read": (4, [(aten._local_scalar_dense.default, torch.ones(()))]),
}  # fmt: skip


@pytest.mark.parametrize("case", MOVES)
def test_an_operator_moves_what_it_reads_and_writes(case):
    expected, calls = MOVES[case]
    for op, *args in calls:
        kwargs = {"dtype": torch.bfloat16} if op is aten._to_copy.default else {}
        assert traffic(op, *args, **kwargs) == expected, op


def test_a_fused_optimizer_reads_gradients_and_updates_the_rest():
    parameters = [torch.nn.Parameter(torch.ones(100)), torch.nn.Parameter(torch.ones(28))]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with Works() as works:
        optimizer.step()
    (nbytes,) = [work.nbytes for name, work in works.calls if name == "_fused_adamw_"]
    assert nbytes == (3 * 2 + 1) * 4 * 128 + 2 * 4  # parameters and two moments, gradients, two step counts


# -- both --------------------------------------------------------------------------------------------------------------


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
