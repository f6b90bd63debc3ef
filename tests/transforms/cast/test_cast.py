"""cast: values and gradients of the explicit program, what stays in its own precision, and nothing left behind."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memscale as ms
from memscale.core.errors import ConfigError, TransformError
from memscale.transforms import cast
from memscale.transforms.cast.precision import keeps_by_structure

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Net(nn.Module):
    """Projections around a normalisation."""

    def __init__(self, width=8):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


def explicit(model, x, dtype=BF16):
    """What cast()(Net) means, written out."""
    up, norm, down = model.up, model.norm, model.down
    x = x.to(dtype)
    hidden = F.linear(x, up.weight.to(dtype), up.bias.to(dtype))
    hidden = F.layer_norm(hidden.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps).to(dtype)
    return (x + F.linear(torch.tanh(hidden), down.weight.to(dtype), down.bias.to(dtype))).float()


def gradients(model, output):
    return torch.autograd.grad(output.square().sum(), list(model.parameters()))


def same(ones, others):
    return all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(ones, others, strict=True))


def state_of(model):
    """Everything that a call must leave: identities of all that the modules hold, and of what their containers hold."""
    return [
        (
            {key: id(value) for key, value in module.__dict__.items()},
            [
                (key, type(value), [id(item) for item in (value.values() if isinstance(value, dict) else value)])
                for key, value in module.__dict__.items()
                if isinstance(value, (dict, list))
            ],
        )
        for module in model.modules()
    ]


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.casts = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.casts += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [BF16, FP16, FP64])
def test_values_and_gradients_are_those_of_the_program_written_out(dtype):
    model, x = Net(), torch.randn(4, 8)
    fit = ms.transform(model, {"": cast(compute=dtype)})
    assert torch.equal(fit(x), explicit(model, x, dtype))
    assert not torch.equal(fit(x), model(x))
    assert same(gradients(model, fit(x)), gradients(model, explicit(model, x, dtype)))


def test_with_nothing_kept_it_is_the_model_in_the_other_dtype():
    model, x = Net(), torch.randn(4, 8)
    other = copy.deepcopy(model).to(BF16)
    fit = ms.transform(model, {"": cast(keep=())})
    expected = other(x.to(BF16)).float()
    assert torch.equal(fit(x), expected)
    theirs = [gradient.float() for gradient in gradients(other, expected)]
    assert same(gradients(model, fit(x)), theirs)


def test_arguments_and_results_at_any_depth():
    seen = []

    def fn(x, *, more):
        seen.extend([x.dtype, more["a"][0].dtype, more["count"].dtype, more["mask"].dtype])
        return {"y": (x * more["a"][0],), "count": more["count"], "text": "same", "none": None}

    x, other = torch.randn(3), torch.randn(3)
    given_ = {"a": (other,), "count": torch.arange(3), "mask": torch.ones(3, dtype=torch.bool)}
    out = cast()(fn)(x, more=given_)
    assert seen == [BF16, BF16, torch.int64, torch.bool]
    assert out["y"][0].dtype == FP32
    assert torch.equal(out["y"][0], (x.to(BF16) * other.to(BF16)).float())
    assert out["count"] is given_["count"]
    assert (out["text"], out["none"]) == ("same", None)
    assert x.dtype == FP32


@pytest.mark.parametrize(
    ("given_dtypes", "output", "expected"),
    [((FP32,), None, FP32), ((BF16,), None, BF16), ((BF16, FP32), None, FP32), ((FP32,), FP64, FP64), ((), None, FP64)],
)
def test_results_come_back_in_the_dtype_of_the_untransformed_region(given_dtypes, output, expected):
    weight = nn.Parameter(torch.ones(2, dtype=FP64))
    out = cast(compute=FP16, output=output)(lambda *xs: sum(xs) * weight)(
        *[torch.ones(2, dtype=d) for d in given_dtypes]
    )
    assert out.dtype == expected


def test_params_may_have_another_dtype_than_the_arguments():
    weight = nn.Parameter(torch.ones(2))
    seen = []

    def fn(x):
        seen.append((x.dtype, weight.dtype))
        return x * weight

    cast(compute=BF16, params=FP64)(fn)(torch.ones(2))
    assert seen == [(BF16, FP64)]


def test_each_distinct_tensor_is_cast_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(self.table(tokens))

    model = Tied()
    fit = ms.transform(model, {"": cast()})
    with Counting() as count:
        out = fit(torch.arange(8))
    assert count.casts == 2  # the one weight, and the result
    out.sum().backward()
    assert model.head.weight.grad.dtype == FP32


# --------------------------------------------------------------------------------------------------------- keep


class RMS(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.gain * x * x.square().mean(-1, keepdim=True).rsqrt()


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.variance_epsilon = 1e-6

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


class Rotary(nn.Module):
    """A table and nothing to learn: cosines of positions times frequencies, which bfloat16 has not the bits for."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inverse_frequency", 1e-2 ** torch.linspace(0, 1, 4))

    def forward(self, x, positions):
        return x + torch.cos(positions[:, None] * self.inverse_frequency)


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: nn.LayerNorm(4), True),
        (lambda: nn.LayerNorm(4, elementwise_affine=False), True),
        (lambda: nn.RMSNorm(4, elementwise_affine=False), True),
        (lambda: nn.GroupNorm(2, 4), True),
        (lambda: nn.BatchNorm1d(4), True),
        (lambda: nn.BatchNorm1d(4, affine=False), True),
        (lambda: nn.InstanceNorm1d(4), True),
        (RMS, True),
        (Unit, True),
        (Rotary, True),
        (lambda: nn.Linear(4, 4), False),
        (lambda: nn.Embedding(4, 4), False),
        (lambda: nn.LSTM(4, 4), False),
        (lambda: nn.Sequential(nn.LayerNorm(4)), False),
        (nn.GELU, False),
        (nn.Dropout, False),
        (nn.Identity, False),
    ],
)
def test_what_stays_is_found_by_structure(make, kept):
    assert keeps_by_structure(make()) == kept


def dtypes_inside(model, region, *args):
    """For each leaf: the dtypes of its floating input, of its parameters, and of its output, during a call."""
    seen = {}

    def look(name):
        def hook(module, args, output):
            seen[name] = (args[0].dtype, {p.dtype for p in module.parameters()}, output.dtype)

        return hook

    handles = [
        module.register_forward_hook(look(name)) for name, module in model.named_modules() if not module._modules
    ]
    try:
        region(*args)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def test_a_kept_module_computes_in_its_own_dtype_and_the_others_do_not():
    model = Net()
    # Hooks see what flows between modules; what a kept one gets is inside of them.
    assert dtypes_inside(model, cast()(model), torch.randn(2, 8)) == {
        "up": (BF16, {BF16}, BF16),
        "norm": (BF16, {FP32}, BF16),
        "down": (BF16, {BF16}, BF16),
    }
    assert dtypes_inside(model, cast(keep=())(model), torch.randn(2, 8))["norm"] == (BF16, {BF16}, BF16)
    assert dtypes_inside(model, cast(keep=("down",))(model), torch.randn(2, 8)) == {
        "up": (BF16, {BF16}, BF16),
        "norm": (BF16, {BF16}, BF16),
        "down": (BF16, {FP32}, BF16),
    }


@pytest.mark.parametrize("keep", [("<norms>",), ()])
def test_batch_norm_updates_its_statistics_once_in_their_own_dtype(keep):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), torch.randn(8, 3, 6, 6)
    fit = ms.transform(model, {"": cast(keep=keep)})
    plain = copy.deepcopy(model)
    fit(x).sum().backward()
    plain(x)
    assert model[1].running_mean.dtype == FP32
    assert int(model[1].num_batches_tracked) == 1
    assert torch.allclose(model[1].running_mean, plain[1].running_mean, atol=1e-3)
    assert not torch.equal(model[1].running_mean, torch.zeros(4))


# ---------------------------------------------------------------------------------------------- nothing is left


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.randn(4))
        self.scale = torch.tensor(2.0)
        self.calls = 0
        self.aux = None

    def forward(self, x, fail=False):
        self.calls += 1
        y = self.norm(self.linear(x)) * self.scale + self.table
        if fail:
            raise ValueError("from inside")
        self.aux = y.detach().sum()
        return y


def test_what_the_region_stores_stays_and_all_else_is_as_before():
    model = Stateful()
    region = cast()(model)
    region(torch.randn(2, 4))
    assert (model.calls, model.aux.dtype) == (1, BF16)
    del model.aux
    model.aux = None
    before = state_of(model)
    with pytest.raises(ValueError, match="from inside"):
        region(torch.randn(2, 4), fail=True)
    model.calls -= 1
    assert state_of(model) == before


@pytest.mark.parametrize(
    "transform", [cast(), ms.compose(ms.checkpoint(), cast()), ms.compose(cast(), ms.checkpoint())]
)
def test_an_lstm_rebuilds_nothing_that_lasts(transform):
    lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True)
    fit = ms.transform(lstm, {"": transform})
    before = state_of(fit)
    out, (hidden, cell) = fit(torch.randn(2, 3, 4))
    out.sum().backward()
    assert {out.dtype, hidden.dtype, cell.dtype, lstm.weight_ih_l1.grad.dtype} == {FP32}
    assert state_of(fit) == before
    assert torch.equal(fit._flat_weights[0], lstm.weight_ih_l0)


@pytest.mark.parametrize("grad", [True, False])
def test_the_fused_encoder_is_not_taken_past_kept_norms(grad):
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    model.eval()
    fit, x = ms.transform(model, {"": cast()}), torch.randn(2, 5, 16)
    with torch.set_grad_enabled(grad):
        assert (fit(x) - model(x)).abs().max() < 0.05
    assert torch.backends.mha.get_fastpath_enabled()


# --------------------------------------------------------------------------------------------------- lost changes


class Average(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        if self.how == "in place":
            self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        elif self.how == "replace":
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        elif self.how == "parameter":
            with torch.no_grad():
                self.linear.bias.add_(1)
        elif self.how == "argument":
            x.add_(1)
        return y


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("in place", "buffer 'average' of Average"),
        ("replace", "buffer 'average' of Average"),
        ("parameter", "parameter 'linear.bias' of Average"),
        ("argument", r"its argument float32\[2, 4\]"),
    ],
)
def test_a_change_that_would_be_lost_is_an_error_that_names_it(how, names):
    model = Average(how)
    before = state_of(model), copy.deepcopy(model.state_dict())
    with pytest.raises(TransformError, match=f"the region changed {names}.*keep=.*<norms>"):
        cast()(model)(torch.randn(2, 4))
    assert state_of(model) == before[0]
    assert same(model.state_dict().values(), before[1].values())


# ------------------------------------------------------------------------------------------------- compositions


def stack(width=64):
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, width))


def test_a_cast_inside_wins_and_starts_from_the_parameters_themselves():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    fit = ms.transform(model, {"": cast(compute=BF16), "1": cast(compute=FP64)})
    hidden = F.linear(x.to(BF16), model[0].weight.to(BF16), model[0].bias.to(BF16))
    inner = F.linear(hidden.double(), model[1].weight.double(), model[1].bias.double()).to(BF16)
    assert torch.equal(fit(x), inner.float())


# ---------------------------------------------------------------------------------------------------- torch.func


def functional_case():
    model = stack(8)
    fn, state = ms.functional(ms.transform(model, {"": cast()}))
    return model, fn, {name: tensor.detach() for name, tensor in state.items()}, torch.randn(3, 8)


@pytest.mark.parametrize(
    "transform", [cast(), ms.compose(ms.checkpoint(), cast()), ms.compose(cast(), ms.checkpoint())]
)
def test_torch_func_has_the_gradients_of_autograd(transform):
    model, x = stack(8), torch.randn(3, 8)
    fit = ms.transform(model, {"": transform})
    fn, state = ms.functional(fit)
    state = {name: tensor.detach() for name, tensor in state.items()}

    def loss(state, x):
        return fn(state, x).square().sum()

    expected = gradients(model, fit(x))
    assert same(torch.func.grad(loss)(state, x).values(), expected)
    assert same(torch.func.vjp(loss, state, x)[1](torch.tensor(1.0))[0].values(), expected)
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(state, x)
    for index in range(3):
        one = torch.func.grad(loss)(state, x[index])
        for name, value in one.items():
            assert torch.allclose(per_sample[name][index], value, rtol=0.05, atol=0.05)
    assert torch.func.jacrev(lambda x: fn(state, x))(x).dtype == FP32


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, at its first use of jvp
def test_forward_mode_and_second_derivatives():
    _, fn, state, x = functional_case()
    assert torch.func.jvp(lambda x: fn(state, x), (x,), (x,))[1].dtype == FP32
    second = torch.func.grad(lambda x: torch.func.grad(lambda x: fn(state, x).sum())(x).square().sum())(x)
    assert second.dtype == FP32
    assert bool(second.any())


# ------------------------------------------------------------------------------------------------- torch.compile


def compiled(fn):
    torch._dynamo.reset()
    return torch.compile(fn, backend="aot_eager", fullgraph=True)


PLANS = {
    "root": {"": cast()},
    "layers": {"*": cast()},
    "nothing kept": {"": cast(keep=())},
    "in checkpoint": {"": ms.compose(ms.checkpoint(), cast())},
    "around checkpoint": {"": ms.compose(cast(), ms.checkpoint())},
    "around layers in checkpoint": {"": cast(), "*": ms.checkpoint()},
    "nested": {"": cast(compute=FP16), "0": cast()},
}


QUICK = ("nested",)  # the compiler takes a second for each; test_compiled.py has one around a checkpoint


@pytest.mark.usefixtures("cast_in_one_graph")
@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, id=name, marks=() if name in QUICK else pytest.mark.deep) for name, plan in PLANS.items()],
)
def test_compiles_to_one_graph_with_the_same_numbers(plan):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    other, x = copy.deepcopy(model), torch.randn(2, 3, 8, 8)
    eager, traced = ms.transform(model, plan), compiled(ms.transform(other, plan))
    one, two = eager(x), traced(x)
    assert torch.equal(one, two)
    assert same(gradients(model, one), gradients(other, two))
    assert torch.equal(model[1].running_var, other[1].running_var)
    assert int(other[1].num_batches_tracked) == 1
    assert all(type(parameter) is nn.Parameter for parameter in other.parameters())


def test_what_the_compiler_cannot_see_is_left_to_python():
    x = torch.randn(2, 4)
    for captured in (torch.randn(4), nn.Linear(4, 4)):
        torch._dynamo.reset()
        region = over(captured)
        assert torch.equal(torch.compile(region, backend="aot_eager")(x), region(x))
    fit = ms.transform(Average("in place"), {"": cast()})
    with pytest.raises(TransformError, match="buffer 'average'"):
        torch.compile(fit, backend="aot_eager")(x)


def over(captured):
    return cast()(lambda x: captured(x) if isinstance(captured, nn.Module) else x * captured)


@pytest.mark.usefixtures("cast_in_one_graph")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: over(torch.ones(4)), "a function that captures modules or tensors"),
        (lambda: over(nn.Linear(4, 4)), "a function that captures modules or tensors"),
        (lambda: ms.transform(Average("in place"), {"": cast()}), "call it once in training mode before"),
    ],
)
def test_in_one_graph_it_is_refused(make, message):
    region = make()
    with pytest.raises(Exception, match="Observed exception") as caught:
        compiled(region)(torch.randn(2, 4))
    assert message in str(caught.value) or message in str(caught.value.__cause__)


# ------------------------------------------------------------------------------------------------- real models


def test_hugging_face_models_are_cast_within_bfloat16():
    transformers = pytest.importorskip("transformers", reason="the models come from transformers")
    tokens = torch.randint(0, 64, (2, 16))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    for config in (
        transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0),
        transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes),
        transformers.BertConfig(vocab_size=64, is_decoder=True, **sizes),
    ):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        fit = ms.transform(model, {"": cast()})
        ours, plain = fit(input_ids=tokens, labels=tokens), model(input_ids=tokens, labels=tokens)
        assert ours.logits.dtype == ours.loss.dtype == FP32
        assert abs(ours.loss - plain.loss) < 0.02
        ours.loss.backward()
        assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {FP32}
        blocks = (
            "transformer.h.*"
            if config.model_type == "gpt2"
            else "**.layers.*"
            if config.model_type == "llama"
            else "**.layer.*"
        )
        by_block = ms.transform(model, {blocks: ms.compose(ms.checkpoint(), cast())})
        assert abs(by_block(input_ids=tokens, labels=tokens).loss - plain.loss) < 0.02


# ------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compute": torch.int8}, "compute=.*floating dtype of at least 16 bits.*torch.int8"),
        ({"compute": "bfloat"}, "got 'bfloat'"),
        ({"output": "float8_e4m3fn"}, "8-bit floats compute only with their scales"),
        ({"params": 16}, "params=.*got 16"),
        ({"keep": "head"}, r"write keep=\('head',\)"),
        ({"keep": 3}, "takes a tuple of path patterns, got 3"),
        ({"keep": ("a..b", "x**")}, "empty segment.*whole segment"),
    ],
)
def test_bad_arguments_of_cast_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        cast(**arguments)


def test_a_pattern_of_keep_that_matches_nothing_is_refused_where_it_is_applied():
    with pytest.raises(TransformError, match=r"'head' in keep matches no submodule.*'up', 'norm', 'down'"):
        ms.transform(Net(), {"": cast(keep=("head",))})
    with pytest.raises(TransformError, match="no submodules"):
        cast(keep=("head",))(torch.tanh)


def test_an_embedding_with_sparse_gradients_is_named_before_backward_would_fail():
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(ms.TransformError, match=r"Embedding at '0' has sparse.* write keep=\('<norms>', '0'\), or"):
        ms.transform(model, {"": ms.cast()})
    fit = ms.transform(model, {"": ms.cast(keep=("<norms>", "0"))})
    fit(torch.tensor([1, 2])).sum().backward()
    assert model[0].weight.grad.is_sparse


class WithPositions(nn.Module):
    """Adds a table that it makes itself, in float32 whatever it computes in."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.down(self.up(x) + torch.arange(4.0).sin())


def test_a_table_that_a_region_makes_is_named_and_not_the_batch():
    model, x = nn.Sequential(WithPositions()), torch.ones(2, 4)
    for keep in (("<norms>",), ()):
        message = (
            r"Linear '0\.down' was given bfloat16 and float32 together.*makes or converts itself.*\.to\(x\.dtype\)"
        )
        with pytest.raises(TransformError, match=message) as refused:
            ms.transform(model, {"": cast(keep=keep)})(x)
        assert f"keep={(*keep, '0.down')!r}" in str(refused.value)
        assert ms.transform(model, {"": cast(keep=(*keep, "0.down"))})(x).dtype is FP32
    with pytest.raises(TransformError, match="makes or converts itself"):
        ms.profile(model, x, plan={"": cast()}, loss=lambda y, _: y.sum())


class Checkpointing(nn.Module):
    """A model that calls `torch.utils.checkpoint` on its blocks, and on a function without weights."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_cast_around_torch_utils_checkpoint_is_refused_in_the_forward_and_its_remedy_works(reentrant):
    torch.manual_seed(0)
    model, x = Checkpointing(reentrant), torch.randn(4, 6, requires_grad=True)
    fit = ms.transform(model, {"": cast()})
    if not reentrant:  # the reentrant one warns of a call that needs no gradient
        with torch.no_grad():
            fit(x)
    for _ in range(2):
        with pytest.raises(TransformError, match=r"Sequential 'blocks\.0' runs inside torch\.utils\.checkpoint.*; use"):
            fit(x)
    fit = ms.transform(model, {"blocks.*": cast()})
    fit(x).square().sum().backward()
    assert all(parameter.grad.dtype is FP32 for parameter in model.parameters())
    around = ms.transform(model.blocks, {"*": cast()})
    torch.utils.checkpoint.checkpoint(around[0], x, use_reentrant=reentrant).sum().backward()
    alone = ms.transform(nn.ModuleList([Checkpointing(reentrant)]), {"0": cast()})[0]
    alone.blocks = nn.ModuleList()
    alone(x).sum().backward()


def test_an_error_of_the_region_itself_stays_what_it_is():
    def fails(x):
        raise RuntimeError("a float of its own")

    with pytest.raises(RuntimeError, match="of its own") as error:
        cast()(fails)(torch.ones(1))
    assert type(error.value) is RuntimeError


@pytest.mark.parametrize("inner", ["first", "second"])
def test_a_module_in_a_nested_cast_and_outside_of_it_is_cast_in_both(inner):
    """Whichever of the two places comes first."""
    torch.manual_seed(0)
    tied, x = nn.Linear(6, 6), torch.randn(4, 6)
    model = nn.Sequential(OrderedDict(first=nn.Sequential(tied), second=nn.Sequential(tied)))
    fit = ms.transform(model, {inner: cast(compute=torch.float64), "": cast(compute=torch.float64)})
    output, expected = fit(x), copy.deepcopy(model).double()(x.double())
    assert torch.equal(output, expected.float())
    output.sum().backward()
    assert tied.weight.grad is not None


def test_a_captured_tensor_gets_its_gradient_in_its_own_dtype():
    weight = torch.randn(4, 4, requires_grad=True)
    linear = nn.Linear(4, 4)
    cast()(lambda x: linear(x @ weight))(torch.randn(2, 4)).sum().backward()
    assert (weight.dtype, weight.grad.dtype, linear.weight.grad.dtype) == (FP32, FP32, FP32)


def test_a_norm_inside_a_kept_module_and_one_without_parameters():
    seen = []

    class Probe(Unit):
        def forward(self, x):
            seen.append(x.dtype)
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), Probe(), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    fit = ms.transform(model, {"": cast(keep=("<norms>", "2"))})
    assert fit(torch.randn(2, 4)).dtype == FP32
    assert seen == [FP32]


def test_a_region_that_is_a_norm_keeps_its_precision():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(3, 4)
    fit = ms.transform(model, {"*": cast()})
    assert torch.equal(fit(x), model[1](F.linear(x.to(BF16), model[0].weight.to(BF16), model[0].bias.to(BF16)).float()))


def test_what_keep_names_may_change():
    model = nn.Sequential(nn.Linear(4, 4), Average("in place"))
    cast(keep=("1",))(model)(torch.randn(2, 4))
    assert model[1].average.dtype == FP32
    assert not torch.equal(model[1].average, torch.zeros(4))


def test_a_cast_around_a_cast_of_the_same_function():
    model, x = nn.Linear(8, 8), torch.randn(2, 8)
    expected = F.linear(x.to(BF16).double(), model.weight.double(), model.bias.double()).to(BF16).float()
    for fit in (
        ms.transform(model, {"": ms.compose(cast(compute=BF16), cast(compute=FP64))}),
        ms.transform(ms.transform(model, {"": cast(compute=FP64)}), {"": cast(compute=BF16)}),
    ):
        assert torch.equal(fit(x), expected)


def test_functional_call_uses_the_weights_that_it_is_given():
    model, fn, state, x = functional_case()
    other = {name: torch.randn_like(tensor) for name, tensor in state.items()}
    expected = copy.deepcopy(model)
    expected.load_state_dict(other)
    assert torch.equal(fn(other, x), ms.transform(expected, {"": cast()})(x))
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


@pytest.mark.deep
@pytest.mark.usefixtures("cast_in_one_graph")
def test_compiles_functions_of_arguments_and_modules_that_are_called():
    linear, x, w = nn.Linear(4, 4), torch.randn(2, 4), torch.randn(4, 4)
    for region, args in ((cast()(lambda x, w: torch.tanh(x @ w)), (x, w)), (cast()(linear), (x,))):
        assert torch.equal(compiled(region)(*args), region(*args))
    assert type(linear.weight) is nn.Parameter


@pytest.mark.usefixtures("cast_in_one_graph")
def test_compiled_regions_have_their_side_effects():
    model = Stateful()
    fit, x = ms.transform(model, {"": cast()}), torch.randn(2, 4)
    expected = fit(x)  # shows that the table is not changed
    traced = compiled(fit)
    assert torch.equal(traced(x), expected)
    assert torch.equal(traced(x), expected)
    assert (fit.calls, fit.aux.dtype, fit.scale.dtype, fit.table.dtype) == (3, BF16, FP32, FP32)
