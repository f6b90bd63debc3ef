"""`tile` on rows: the values of the untiled function, the bytes of one piece, and a reason where it cannot be had."""

import dataclasses
import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memscale as ms
from memscale import checkpoint, compose, identity, tile
from memscale.simulation.measured.allocator_trace import measure
from tests.support.checks import bits
from tests.support.models import Polynomial, integers, mlp, numbers

# Kernels may add in another order for other shapes, and weight gradients add the pieces up. Both are sums of the same
# terms: the bound is in units in the last place of the largest number in the tensor, and the sums here are short.
ULPS = 16


def ulps(expected, actual):
    """The largest difference, in units in the last place of the largest expected magnitude."""
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    scale = expected.abs().max().item()
    unit = torch.finfo(expected.dtype).eps * 2.0 ** torch.tensor(max(scale, 1e-30)).log2().floor().item()
    return (expected.double() - actual.double()).abs().max().item() / unit


def gradients(fn, args, tensors, **kwargs):
    """The outputs of ``fn(*args)`` and the gradients of `tensors`, for a loss that weighs every element differently."""
    torch.manual_seed(5)
    outputs = [out for out in torch.utils._pytree.tree_leaves(fn(*args, **kwargs)) if isinstance(out, torch.Tensor)]
    loss = sum((out * torch.arange(out.numel()).reshape(out.shape).to(out.dtype)).sum() for out in outputs)
    return outputs, list(torch.autograd.grad(loss, tensors))


def check_bitwise(fn, how, args, tensors, **kwargs):
    assert bits(gradients(how(fn), args, tensors, **kwargs)) == bits(gradients(fn, args, tensors, **kwargs))


def check_close(fn, how, args, tensors, bound=ULPS, **kwargs):
    expected, actual = gradients(fn, args, tensors, **kwargs), gradients(how(fn), args, tensors, **kwargs)
    for before, after in zip(itertools.chain(*expected), itertools.chain(*actual), strict=True):
        assert ulps(before, after) <= bound


def exact_block():
    """Integer-valued float64: every sum is exact in whatever order it is taken, so all must be equal bit for bit."""
    torch.manual_seed(1)
    return nn.Sequential(Polynomial(), Polynomial())


# ------------------------------------------------------------------------------------------------------ the value

CONFIG_ERRORS = [
    ({}, r"exactly one of chunks and size, got chunks=None and size=None"),
    ({"chunks": 0}, r"tile\(chunks=\.\.\.\) must be an int of at least 1, got 0"),
    ({"size": -1}, r"tile\(size=\.\.\.\) must be an int of at least 1, got -1"),
    ({"chunks": 2.0}, r"tile\(chunks=\.\.\.\) must be an int of at least 1, got 2\.0"),
    ({"chunks": 2, "dim": "0"}, r"tile\(dim=\.\.\.\) must be an int, got '0'"),
    ({"chunks": 2, "reduce": "max"}, r"tile\(reduce=\.\.\.\) must be None, 'sum' or 'mean', got 'max'"),
    ({"chunks": 2, "recompute": 1}, r"tile\(recompute=\.\.\.\) must be True or False, got 1"),
    ({"chunks": 2, "in_dims": "x"}, r"tile\(in_dims=\.\.\.\) must be an int, None or a tuple of these, got 'x'"),
    ({"chunks": 2, "out_dims": (0, (True,))}, r"tile\(out_dims=\.\.\.\) must be an int, None or a tuple .* got True"),
]


@pytest.mark.parametrize(("arguments", "message"), CONFIG_ERRORS)
def test_the_factory_refuses_with_a_reason(arguments, message):
    with pytest.raises(ms.ConfigError, match=message):
        tile(**arguments)


@given(st.integers(1, 12), st.integers(0, 40))
def test_the_pieces_cover_the_rows_once_and_are_as_even_as_possible(count, total):
    for value in (tile(chunks=count), tile(size=count)):
        ranges = value.ranges(total)
        assert [row for start, length in ranges for row in range(start, start + length)] == list(range(total))
        lengths = [length for _, length in ranges]
        assert all(lengths)
        if value.chunks:
            assert len(ranges) == min(count, total)
            assert not lengths or max(lengths) - min(lengths) <= 1
        else:
            assert all(length == count for length in lengths[:-1])


# ------------------------------------------------------------------------------------------- exact, bit for bit

HOWS = {
    "chunks": tile(chunks=2),
    "size": tile(size=2),
    "uneven chunks": tile(chunks=3),
    "uneven size": tile(size=4),
    "one row": tile(size=1),
    "more pieces than rows": tile(chunks=100),
    "one piece": tile(chunks=1),
    "negative dim": tile(chunks=2, dim=-2),
    "kept": tile(chunks=3, recompute=False),
    "in checkpoint": compose(checkpoint(), tile(chunks=3)),
    "around checkpoint": compose(tile(chunks=3), checkpoint()),
    "in tile": compose(tile(chunks=2), tile(size=2)),
    "kept in checkpoint": compose(checkpoint(), tile(chunks=3, recompute=False)),
}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_where_sums_are_exact_everything_is_bitwise(how):
    model, x = exact_block(), integers(5, 3)
    check_bitwise(model, how, (x,), [x, *model.parameters()])
    check_bitwise(model, how, (x,), [model[0].weight])  # a partial gradient


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_a_tile_may_cut_every_dimension(dim):
    def fn(x):
        return x * x + 2 * x

    x = integers(5, 7, 4)
    check_bitwise(fn, tile(chunks=3, dim=dim), (x,), [x])


def test_an_empty_input_runs_whole():
    x = numbers(0, 6)
    model = mlp()
    assert tile(chunks=3)(model)(x).shape == (0, 6)


# --------------------------------------------------------------------------------------- arguments and outputs


@dataclasses.dataclass
class Record:
    rows: torch.Tensor
    note: str


def everything(x, pair, *, extra, table, mode, flag=None):
    hidden = x * pair[0] + extra["y"]
    return {"a": hidden @ table, "b": (hidden * 2, [pair[0] + 1]), "mode": mode, "flag": flag, "n": 3}


@pytest.mark.parametrize("recompute", [True, False])
def test_arguments_and_outputs_of_every_sort(recompute):
    x, y, z, table = integers(5, 4), integers(5, 4), integers(5, 1), integers(4, 4)
    arguments = {"extra": {"y": y}, "table": table, "mode": "text", "flag": None}
    how = tile(chunks=3, recompute=recompute)
    check_bitwise(everything, how, (x, [z, None]), [x, y, z, table], **arguments)
    out = how(everything)(x, [z, None], **arguments)
    assert (out["mode"], out["flag"], out["n"], type(out["b"])) == ("text", None, 3, tuple)


def test_model_outputs_and_dataclasses():
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="needs transformers")

    def fn(x):
        return outputs.BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x * x))

    x = integers(5, 3)
    out = tile(chunks=2)(fn)(x)
    assert type(out) is outputs.BaseModelOutput
    assert bits(dict(out)) == bits(dict(fn(x)))
    check_bitwise(lambda x: tuple(fn(x).to_tuple()), tile(chunks=2), (x,), [x])
    record = tile(chunks=2)(lambda x: Record(rows=x * 2, note="n"))(x)
    assert type(record) is Record
    assert bits((record.rows, record.note)) == bits((x * 2, "n"))


def test_the_first_tensor_decides_what_is_cut_and_a_coincidence_of_sizes_is_cut_too():
    def sizes(x, table):
        return torch.tensor([[len(x), len(table)]]).expand(len(x), 2)

    def cut(how, rows):
        return how(sizes)(torch.ones(6, 3), torch.ones(rows, 3)).tolist()

    assert cut(tile(size=1), 5) == [[1, 5]] * 6
    assert cut(tile(size=1), 6) == [[1, 1]] * 6, "documented: sizes cannot tell a table of 6 rows from 6 rows"
    assert cut(tile(size=1, in_dims=(0, None)), 6) == [[1, 6]] * 6


def test_in_dims_and_out_dims():
    x, y, w = integers(3, 6), integers(6, 2), integers(6, 6)

    def fn(x, y, w):
        return x.t() @ x * 0 + 1 if w is None else (x * 2, (y * 3, (x @ y) @ (y.t() @ y)))

    how = tile(chunks=3, in_dims=(1, 0, None), out_dims=(1, (0, None)), reduce="sum")
    # x @ y contracts the tiled dimension, so that output is a sum over pieces, as reduce says.
    outputs = how(lambda x, y, w: (x * 2, (y * 3, x @ y)))(x, y, w)
    assert bits(list(torch.utils._pytree.tree_leaves(outputs))) == bits([x * 2, y * 3, x @ y])
    check_bitwise(lambda x, y, w: (x * 2, (y * 3, x @ y)), how, (x, y, w), [x, y])
    nested = tile(chunks=2, in_dims=((1, None), 0), out_dims=1)
    check_bitwise(lambda pair, y: pair[0] * pair[1] + y.t()[:2].sum(0), nested, ((x, integers(3, 1)), y), [x, y])
    # One entry for all; keyword arguments follow it, and are whole beside a tuple.
    check_bitwise(lambda x, *, z: x * z, tile(chunks=2, in_dims=1, out_dims=1), (x,), [x], z=integers(3, 6))
    check_bitwise(lambda x, *, z: x * z.sum(), tile(chunks=2, in_dims=(1,), out_dims=1), (x,), [x], z=integers(3, 6))


def test_reduce_weighs_by_the_real_sizes_of_the_pieces():
    x, w = integers(5, 4), integers(4)

    def total(x):
        return {"rows": x * w, "sum": (x * w).sum()}

    check_bitwise(total, tile(size=2, reduce="sum"), (x,), [x, w])
    x = numbers(5, 4, dtype=torch.float64)

    def mean(x):
        return x, (x.sin() @ x.mT.new_ones(4)).mean()

    for how in (tile(size=2, reduce="mean"), tile(chunks=3, reduce="mean"), tile(size=4, reduce="mean")):
        check_close(mean, how, (x,), [x], bound=4)


# ------------------------------------------------------------------------------------------------------ refusals


def scalar(x):
    return x.sum()


REFUSALS = {
    "nothing to cut": (tile(chunks=2), lambda x: 1, ("text", 3), r"tile\(chunks=2\) found no tensor argument to cut"),
    "in_dims None": (tile(chunks=2, in_dims=None), scalar, 1, r"found no tensor argument to cut; give one a dimension"),
    "dim": (tile(chunks=2, dim=2), scalar, 1, r"tile\(dim=2\) is out of range for the first tensor argument, of shape"),
    "in_dims out of range": (tile(chunks=2, in_dims=5), scalar, 1, r"dimension 5 is out of range for shape \[6, 4\]"),
    "out_dims out of range": (
        tile(chunks=2, out_dims=5),
        torch.sin,
        1,
        r"dimension 5 is out of range for shape \[3, 4\]",
    ),
    "out_dims of a scalar": (tile(chunks=2, out_dims=0), scalar, 1, r"dimension 0 is out of range for shape \[\]"),
    "sizes": (tile(chunks=2, in_dims=(0, 1)), torch.add, 2, r"would cut tensors of sizes \[4, 6\] along"),
    "count": (tile(chunks=2, in_dims=(0,)), torch.add, 2, r"in_dims has 1 entries for 2 positional arguments"),
    "structure": (tile(chunks=2, in_dims=((0, 0),)), scalar, 1, r"dimensions \(0, 0\) do not match the structure"),
    "out structure": (tile(chunks=2, out_dims=(0, 0)), torch.sin, 1, r"do not match the structure of Tensor"),
    "scalar": (tile(chunks=2), scalar, 1, r"output 0 has shape \[\], which is not 3 long along dim 0.*give reduce="),
    "lost dim": (tile(chunks=2), lambda x: x.sum(0), 1, r"output 0 has shape \[4\], which is not 3 long"),
    "structures": (tile(size=4), lambda x: (x,) * len(x), 1, r"the pieces return different structures"),
    "values": (tile(size=4), lambda x: (x, len(x)), 1, r"an output of type int differs between pieces"),
}


@pytest.mark.parametrize(("how", "fn", "arguments", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_cut_or_joined_is_refused(how, fn, arguments, message):
    arguments = tuple(numbers(6, 4) for _ in range(arguments)) if isinstance(arguments, int) else arguments
    with pytest.raises(ms.TransformError, match=message):
        how(fn)(*arguments)


@pytest.mark.parametrize("how", [tile(chunks=2), tile(chunks=2, recompute=False)], ids=["recomputing", "kept"])
def test_batchnorm_in_training_is_refused_before_anything_changes(how):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fit = ms.transform(model, {"": how})
    before = bits(list(model.state_dict().values()))
    with pytest.raises(ms.TransformError, match=r"num_batches_tracked.*use checkpoint\(\) for this region"):
        fit(numbers(6, 4))
    assert bits(list(model.state_dict().values())) == before
    assert model[1].num_batches_tracked == 0
    without = how(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)))
    with pytest.raises(ms.TransformError, match=r"would cut the rows over which .* computes its statistics"):
        without(numbers(6, 4))
    with pytest.raises(ms.TransformError, match="computes its statistics"):
        how(nn.InstanceNorm1d(3))(numbers(6, 3, 4))  # documented: it runs on BatchNorm's kernel
    model.eval()
    x = numbers(6, 4)
    check_close(model, how, (x,), [x, *model.parameters()])


def test_a_region_that_changes_its_own_rows_in_place_is_refused_where_they_need_a_gradient():
    with pytest.raises(ms.TransformError, match=r"tile\(chunks=2\): the region changes an argument in place"):
        tile(chunks=2)(lambda x: x.mul_(2).relu())(numbers(6, 4) * 1)
    check_bitwise(lambda x: x.clone().mul_(2).relu_(), tile(chunks=2), (x := numbers(6, 4),), [x])


# ---------------------------------------------------------------------------------------- randomness and Python


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.linear(x).sigmoid()) * torch.rand(6)


def test_dropout_is_drawn_piece_by_piece_and_repeated_by_the_recompute():
    model, x = Noisy(), numbers(7, 6)
    tensors = [x, *model.parameters()]
    recomputed, again = (gradients(tile(chunks=3)(model), (x,), tensors) for _ in range(2))
    after = torch.get_rng_state()
    kept = gradients(tile(chunks=3, recompute=False)(model), (x,), tensors)
    assert bits(recomputed) == bits(again) == bits(kept)
    assert torch.equal(after, torch.get_rng_state()), "the recompute leaves no trace in the generator"

    def by_hand(x):
        return torch.cat([model(x[start:stop]) for start, stop in ((0, 2), (2, 4), (4, 7))])

    assert bits(gradients(by_hand, (x,), [x])[0]) == bits(kept[0]), "documented: piece by piece, in order"
    rows = tile(chunks=3)(nn.Dropout(0.5))(torch.ones(6, 64))
    assert len({bytes(row.numpy()) for row in rows}) == 6, "every row draws anew"


# ------------------------------------------------------------------------------------------------ every backward


def test_weight_gradients_arrive_once():
    model = ms.transform(nn.Sequential(mlp(), mlp()), {"*": tile(chunks=3)})
    fired = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    for _ in range(2):
        fired.clear()
        model(numbers(7, 6)).sum().backward()
        assert sorted(fired) == sorted(name for name, _ in model.named_parameters())


def test_a_tile_has_second_derivatives():
    model, x = exact_block(), integers(5, 3)

    def penalty(fn):
        (grad,) = torch.autograd.grad((fn(x) * torch.arange(15.0).reshape(5, 3)).sum(), x, create_graph=True)
        return torch.autograd.grad((grad * grad).sum(), [x, *model.parameters()])

    for how in (tile(chunks=2), tile(chunks=3, recompute=False), compose(tile(chunks=3), checkpoint())):
        assert bits(penalty(how(model))) == bits(penalty(model))


def test_retain_graph_accumulation_and_partial_gradients():
    model, x = exact_block(), integers(5, 3)
    found = []
    for fn in (model, tile(chunks=3)(model)):
        model.zero_grad()
        out = fn(x)
        out.sum().backward(retain_graph=True)
        (out * 2).sum().backward()
        fn(x).sum().backward()
        found.append(bits([p.grad for p in model.parameters()]))
        found.append(bits(torch.autograd.grad(fn(x)[2:3].sum(), [x, model[1].weight])))
        found.append(bits(torch.autograd.grad(fn(x).sum(), x)))
    assert found[:3] == found[3:]


@pytest.mark.parametrize("frozen", ["weights", "input", "both"])
def test_frozen_parts_of_a_tile_get_no_gradient(frozen):
    model = exact_block().requires_grad_(frozen == "input")
    x = integers(5, 3).detach().requires_grad_(frozen == "weights")
    out = tile(chunks=2)(model)(x)
    assert bits(out) == bits(model(x))
    assert out.requires_grad == (frozen != "both")
    with torch.no_grad():
        assert bits(tile(chunks=2)(model)(x)) == bits(model(x))


def test_a_parameter_changed_before_backward_raises():
    model = mlp()
    loss = tile(chunks=2)(model)(numbers(6, 6)).sum()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(ms.CorrectnessError, match="inplace operation"):
        loss.backward()


def test_asking_what_a_region_is_leaves_nothing_in_autocasts_cache():
    """The question runs it on fake tensors, and the casts of its weights are fake, too."""
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    x = torch.randn(6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = ms.transform(nn.Sequential(mlp), {"0": tile(chunks=2)})(x)
        assert type(out) is torch.Tensor
        assert bits(out) == bits(mlp(x))


def test_autocast_is_that_of_the_forward():
    model, x = mlp(16), numbers(6, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(x), tile(chunks=3)(model)(x)
    assert actual.dtype == torch.bfloat16
    assert ulps(expected, actual) <= 1
    weight = model[0].weight
    expected, actual = (torch.autograd.grad(out.float().sum(), weight)[0] for out in (expected, actual))
    assert ulps(expected.bfloat16(), actual.bfloat16()) <= 2


# -------------------------------------------------------------------------- torch.func, compile, copies, modules


def test_a_tile_under_torch_func_has_the_same_bits():
    model = exact_block()
    fn, state = ms.functional(model)
    tiled, _ = ms.functional(ms.transform(model, {"": tile(chunks=2)}))
    x = integers(5, 3).detach()

    def loss(call):
        return lambda state, x: (call(state, x) ** 2).sum()

    for how in (
        torch.func.grad,
        lambda f: torch.func.grad(f, argnums=1),
        lambda f: torch.func.vmap(torch.func.grad(f), in_dims=(None, 0)),
        lambda f: torch.func.jacrev(f),
        lambda f: torch.func.jacrev(torch.func.grad(f, argnums=1), argnums=1),
    ):
        batch = x[:, None].expand(5, 4, 3)
        assert bits(how(loss(tiled))(state, batch)) == bits(how(loss(fn))(state, batch))
    other = {name: tensor + 1 for name, tensor in state.items()}
    assert bits(tiled(other, x)) == bits(fn(other, x))
    leaves = [tensor.detach().requires_grad_() for tensor in other.values()]
    found = [torch.autograd.grad(call(dict(zip(other, leaves, strict=True)), x).sum(), leaves) for call in (fn, tiled)]
    assert bits(found[0]) == bits(found[1]), "functional_call's own weights, also in the recompute"


def test_a_row_of_checkpointed_tiles_under_vmap():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), numbers(2, 6, 4)
    fit = ms.transform(model, {"*": ms.compose(ms.checkpoint(), tile(chunks=2))})
    torch.testing.assert_close(torch.func.vmap(fit)(x), model(x))


# The compiler's own imports, at the first torch.compile of a process.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_torch_compile_without_a_graph_break(recompute):
    model, x = mlp(), numbers(7, 6)
    fit = ms.transform(model, {"": tile(chunks=3, recompute=recompute)})
    try:
        compiled = torch.compile(fit, backend="aot_eager", fullgraph=True)
        expected, actual = (gradients(fn, (x,), [x, *model.parameters()]) for fn in (fit, compiled))
    finally:
        torch._dynamo.reset()
    for before, after in zip(itertools.chain(*expected), itertools.chain(*actual), strict=True):
        assert ulps(before, after) <= ULPS


def test_an_operator_of_higher_order_is_refused():
    layer = nn.Linear(6, 6)

    def region(x):
        return torch.cond(x.sum() > 0, lambda x: layer(x), lambda x: layer(x).sin(), (x,))

    try:
        with pytest.raises(ms.TransformError, match="the region calls cond, an operator of higher order"):
            tile(chunks=2)(region)(torch.randn(4, 6))
    finally:
        torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------------- attention


def attention(q, k, v, mask):
    """Quadratic attention by hand: [batch, heads, queries, width]."""
    scores = (q @ k.mT) / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_hugging_face_blocks_over_the_batch_with_padding(architecture, kernel):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    small = {"vocab_size": 50, "attn_implementation": kernel}
    if architecture == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, **small
        )
    else:
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **small)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.config.use_cache = False
    ids = torch.randint(0, 50, (5, 9))
    padding = torch.ones(5, 9, dtype=torch.long)
    padding[1, :4] = padding[3, :2] = 0
    labels = ids.masked_fill(padding == 0, -100)
    path = "model.layers.*" if architecture == "llama" else "transformer.h.*"
    found = []
    for plan in ({path: identity}, {path: tile(chunks=2)}):
        model.zero_grad()
        out = ms.transform(model, plan)(input_ids=ids, attention_mask=padding, labels=labels)
        out.loss.backward()
        found.append([out.loss, out.logits, *(p.grad for p in model.parameters())])
    assert max(ulps(before, after) for before, after in zip(*found, strict=True)) <= 64


# ----------------------------------------------------------------------------------------------- bytes and FLOPs

ROWS, WIDTH, INNER = 1024, 32, 512
INNER_BYTES, ROW_BYTES = ROWS * INNER * 4, ROWS * WIDTH * 4


def wide():
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)).requires_grad_(False)


def growth_bytes(fn):
    x = numbers(ROWS, WIDTH)

    def step():
        fn(x).sum().backward()
        x.grad = None

    step()
    return measure(step).growth_bytes


def test_no_two_pieces_are_alive_together():
    """At most one piece's residuals and gradient (four tensors of the inner width), and five of the rows' size."""
    model, pieces = wide(), 8
    plain, tiled = growth_bytes(model), growth_bytes(tile(chunks=pieces)(model))
    assert plain >= 3 * INNER_BYTES
    assert tiled <= 4 * INNER_BYTES // pieces + 5 * ROW_BYTES
    assert tiled < 0.3 * plain
    assert growth_bytes(checkpoint()(model)) >= 2 * INNER_BYTES, "a checkpoint alone has the whole inner width alive"


def count(fn, x):
    with FlopCounterMode(display=False) as forward:
        out = fn(x)
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


# In units of one projection: forward, backward, and whether intermediate values are kept. Backward is 4 and what is
# repeated: the first projection (the recompute stops before the second); what is recomputed around a tile stops before
# the first piece, but where pieces keep their residuals after all of them but the last one's end.
TILE, KEPT = tile(chunks=4), tile(chunks=4, recompute=False)
PROJECTION = 2 * 24 * 6 * 12
EFFECTS = {
    "identity": (identity, 2, 4, True),
    "tile": (TILE, 2, 5, False),
    "tile kept": (KEPT, 2, 4, True),
    "checkpoint": (checkpoint(), 2, 5, False),
    "checkpoint of tile": (compose(checkpoint(), TILE), 2, 5, False),
    "tile of checkpoint": (compose(TILE, checkpoint()), 2, 5, False),
    "checkpoint of tile kept": (compose(checkpoint(), KEPT), 2, 4 + Fraction(3, 4) * 2 + Fraction(1, 4), False),
    "tile kept of checkpoint": (compose(KEPT, checkpoint()), 2, 5, False),
    "tile of tile": (compose(TILE, TILE), 2, 5, False),
}


@pytest.mark.parametrize(("how", "forward", "backward", "keeps"), EFFECTS.values(), ids=EFFECTS)
def test_flops_and_saved_bytes(how, forward, backward, keeps):
    model = mlp(6)
    x = numbers(24, 6)
    assert count(how(model), x) == (forward * PROJECTION, backward * PROJECTION)
    kept = sum(r.nbytes for r in ms.saved_residuals(how(model), x) if r.source == "intermediate")
    assert kept == (2 * 24 * 12 * 4 if keeps else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_other_dtypes(dtype):
    x = torch.randn(6, 4).to(dtype).requires_grad_()
    ids = torch.arange(6)
    check_bitwise(lambda x, ids: (x * ids[:, None], ids + 1, x > 0)[0], tile(chunks=4), (x, ids), [x])
    out = tile(chunks=4)(lambda x, ids: (x, ids + 1, x > 0))(x, ids)
    assert bits(out) == bits((x * 1, ids + 1, x > 0))


@pytest.mark.parametrize(
    "how",
    [
        tile(chunks=2, dim=1, in_dims=(1, 1, 1, None)),
        tile(chunks=3),
        tile(chunks=3, in_dims=(2, None, None, -2), out_dims=2),
    ],
    ids=["heads", "batch", "query rows"],
)
def test_attention_written_by_hand(how):
    q, k, v = numbers(3, 4, 7, 8), numbers(3, 4, 7, 8), numbers(3, 4, 7, 8)
    mask = torch.ones(7, 7).tril().bool()
    check_close(attention, how, (q, k, v, mask), [q, k, v])


@pytest.mark.parametrize(
    "around", [checkpoint(), compose(ms.offload(min_bytes=0), checkpoint()), ms.offload()], ids=repr
)
@pytest.mark.parametrize("inner", [None, tile(chunks=2, dim=1)], ids=["tile", "tile of tiles"])
def test_pieces_of_one_long_row_through_a_frozen_projection(around, inner):
    """A LoRA model at a long context: the pieces of one row are not contiguous along its dimension of size 1."""
    width = 8
    tiled = nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.SiLU()) for _ in range(2)))
    model = nn.Sequential(nn.Linear(width, width), tiled.requires_grad_(False))
    rules = [*([] if inner is None else [("1.*", inner)]), ("1", tile(chunks=2, dim=1)), ("", around)]
    x = numbers(1, 8, width)
    expected, actual = (
        gradients(each, (x,), [x, *model[0].parameters()]) for each in (model, ms.transform(model, rules))
    )
    for one, other in zip(expected[1], actual[1], strict=True):
        assert ulps(one, other) <= ULPS


# -------------------------------------------------------------------------------------------- several gradients at once


@pytest.mark.parametrize(("path", "dtype"), [("0", torch.float32), ("2", torch.float32), ("2", torch.bfloat16)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_backward_for_several_gradients_gives_those_of_one_after_the_other(path, dtype, reduction):
    """Of rows, of a loss head, and of one in 16 bits that goes by its classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 200)).to(dtype)
    x, target = torch.randn(20, 8).to(dtype).requires_grad_(), torch.arange(20)
    fit = ms.transform(model, {path: ms.tile(chunks=4)})
    loss = nn.functional.cross_entropy(fit(x), target, reduction=reduction)
    inputs, directions = [x, model[2].weight], torch.randn(3, *loss.shape).to(loss.dtype)
    several = torch.autograd.grad(loss, inputs, directions, is_grads_batched=True, retain_graph=True)
    one_by_one = zip(*(torch.autograd.grad(loss, inputs, each, retain_graph=True) for each in directions), strict=True)
    for found, expected in zip(several, map(torch.stack, one_by_one), strict=True):
        assert not found.requires_grad
        largest = expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=16 * torch.finfo(dtype).eps * largest)
