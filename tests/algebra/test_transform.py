"""The new tree of `transform`: what it shares with the model, and what belongs to it alone."""

import copy
import functools
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import checkpoint, policies
from tests.support.checks import bits, check_argument_untouched, check_trees_independent, gradients, make, side_effects
from tests.support.models import CONVNET, HUGGING_FACE, IDS, KINDS, ConvBlock, Tied, hugging_face, mlp, numbers

PLAN = {"": checkpoint(), "*": checkpoint()}


def transformed(make=mlp, plan=PLAN):
    model = make()
    return model, ms.transform(model, plan)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_same_classes_names_parameters_and_state(kind):
    model = make(kind)
    plan = dict.fromkeys(kind.regions, checkpoint())
    check_argument_untouched(model, plan)
    fit = ms.transform(model, plan)
    assert [(n, type(m)) for n, m in fit.named_modules()] == [(n, type(m)) for n, m in model.named_modules()]
    assert not {id(m) for m in fit.modules()} & {id(m) for m in model.modules()}
    assert repr(fit) == repr(model)
    assert isinstance(fit, type(model))
    for theirs, ours in [
        (model.named_parameters(remove_duplicate=False), fit.named_parameters(remove_duplicate=False)),
        (model.named_buffers(), fit.named_buffers()),
    ]:
        assert [(n, id(t)) for n, t in ours] == [(n, id(t)) for n, t in theirs]
    assert list(fit.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_model_keeps_its_parameters_while_functional_call_runs_the_new_tree(kind):
    check_trees_independent(kind, dict.fromkeys(kind.regions, checkpoint()))


def test_parameters_of_the_model_that_are_replaced_by_others_are_detected():
    model, fit = transformed()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fit.load_state_dict(state, assign=True)
    fit(numbers(2, 6))  # in the new tree it is taken as meant
    model.load_state_dict(state, assign=True)
    with pytest.raises(ms.TransformError, match=r"parameter '0\.weight'.*call transform\(model, plan\) again"):
        fit(numbers(2, 6))


@pytest.mark.parametrize("plan", [{"": checkpoint()}, {"*": checkpoint()}, PLAN])
def test_an_adapter_on_the_new_tree_trains_and_stays_there(plan):
    class Adapter(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear, self.low, self.high = linear, nn.Linear(6, 2, bias=False), nn.Linear(2, 12, bias=False)

        def forward(self, x):
            return self.linear(x) + self.high(self.low(x))

    model = mlp()
    before = repr(model)
    fit = ms.transform(model, plan)
    fit.requires_grad_(False)
    fit[0] = Adapter(fit[0])
    fit(numbers(3, 6)).sum().backward()
    assert repr(model) == before
    assert all((p.grad is not None) == p.requires_grad for p in fit.parameters())
    assert fit[0].low.weight.grad.abs().max() > 0
    reference = ms.transform(model, {})
    reference[0] = copy.deepcopy(fit[0])
    reference[0].linear = model[0]
    x = numbers(3, 6)
    assert torch.equal(fit(x), reference(x))


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: _through_torch_save(m)],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("make_model", [mlp, ConvBlock, Tied], ids=["mlp", "convnet", "tied"])
def test_copies_are_independent_and_still_transformed(duplicate, make_model):
    x = {ConvBlock: lambda: numbers(2, 4, 5, 5), Tied: lambda: numbers(3, 5)}.get(make_model, lambda: numbers(3, 6))()
    model, fit = transformed(make_model, {"": checkpoint()})
    fit(x).sum().backward()
    model.zero_grad()
    other = duplicate(fit)
    expected = duplicate(model)
    before = bits(model.state_dict())
    for one in (expected, other):
        one(x).sum().backward()
    assert gradients(other) == gradients(expected)
    assert bits(other.state_dict()) == bits(expected.state_dict())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert bits(model.state_dict()) == before
    kept = ms.saved_residuals(other, x)
    assert all(residual.source != "intermediate" for residual in kept)
    assert any(r.source == "intermediate" for r in ms.saved_residuals(expected, x))


def _through_torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_copy_of_the_model_and_the_tree_together_stay_linked():
    model, fit = copy.deepcopy(transformed())
    assert fit[0].weight is model[0].weight
    x = numbers(3, 6)
    assert torch.equal(fit(x), model(x))


def test_hooks_of_the_model_and_of_its_copy_are_apart():
    calls = []
    model = mlp()
    model[0].register_forward_hook(lambda module, *_: calls.append(module))
    fit = ms.transform(model, {"*": checkpoint()})
    fit[2].register_forward_hook(lambda module, *_: calls.append("late"))
    x = numbers(3, 6)
    fit(x)
    assert calls == [fit[0], "late"]
    model(x)
    assert calls == [fit[0], "late", model[0]]


class SelfReferring(nn.Module):
    """Holds bound methods, partials and lists of its own modules, as many real models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = self.activate
        self.table = {"run": [self.linear], "pair": (self.linear, None)}
        self.later = functools.partial(self.activate, scale=2.0)
        self.scale = 1.0

    def activate(self, x, scale=1.0):
        return torch.tanh(x) * scale * self.scale

    def forward(self, x):
        return self.later(self.act(self.table["run"][0](x)))


def test_references_to_modules_of_the_tree_lead_to_copies():
    model, fit = transformed(SelfReferring, {"": checkpoint()})
    assert fit.act.__self__ is fit
    assert fit.later.func.__self__ is fit
    assert fit.table["run"][0] is fit.table["pair"][0] is fit.linear
    x = numbers(2, 4)
    expected = model(x)
    fit.scale = 3.0
    assert torch.equal(model(x), expected)
    assert not torch.equal(fit(x), expected)


def test_transforming_a_transformed_module_composes():
    model, fit = transformed(plan={"": checkpoint(policy=policies.dots_saveable)})
    again = ms.transform(fit, {"": checkpoint()})
    x = numbers(3, 6)
    found = []
    for tree in (model, fit, again):
        tree.zero_grad()
        tree(x).sum().backward()
        found.append(gradients(tree))
    assert found[0] == found[1] == found[2]
    kept = [sum(r.source == "intermediate" for r in ms.saved_residuals(tree, x)) for tree in (model, fit, again)]
    assert kept == [2, 1, 0]


def test_the_new_tree_does_not_keep_the_model_alive():
    model, fit = transformed()
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    fit(numbers(2, 6)).sum().backward()


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models_generate(name):
    model = hugging_face(name).eval()
    fit = ms.transform(model, dict.fromkeys(HUGGING_FACE[name][3], checkpoint()))
    assert fit.config is model.config
    if not model.can_generate():
        assert bits(fit(IDS).logits) == bits(model(IDS).logits)
        return
    tokens = [m.generate(IDS, max_new_tokens=4, do_sample=False, use_cache=True) for m in (model, fit)]
    assert torch.equal(*tokens)
    fit.save_pretrained  # noqa: B018 (the whole class is there)


# ------------------------------------------------------------------------------------------------ torch.compile

COMPILED = {
    "checkpoint": {"*": checkpoint()},
    "everything": {"*": checkpoint(policy=policies.everything_saveable)},
    "dots": {"*": checkpoint(policy=policies.dots_saveable)},
    "root": {"": checkpoint()},
}


def trained(model, run, x):
    for _ in range(2):
        run(x).square().sum().backward()
    return {**gradients(model), **side_effects(model)}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, id=name, marks=[pytest.mark.deep] * (name not in ("dots", "root")))
        for name, plan in COMPILED.items()
    ],
)
def test_compiles_without_a_graph_break_to_equal_numbers(plan):
    model = nn.Sequential(mlp(), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    plain, fit = copy.deepcopy(model), ms.transform(model, plan)
    x = numbers(3, 6)
    compiled = torch.compile(fit, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), plain(x))
    assert trained(fit, compiled, x) == trained(plain, plain, x)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compiled_side_effects_happen_once():
    model = make(CONVNET)
    plain, fit = copy.deepcopy(model), ms.transform(model, {"*": checkpoint()})
    x = numbers(2, 4, 5, 5)
    assert trained(fit, torch.compile(fit, backend="aot_eager"), x) == trained(plain, plain, x)
    assert fit[0].calls == 2


class Averages(nn.Module):
    def __init__(self, *, moves):
        super().__init__()
        self.linear, self.moves = nn.Linear(6, 6), moves
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        y = self.linear(x)
        if self.moves:
            self.mean.lerp_(y.detach().mean(0), 0.5)
        return (y - self.mean).tanh()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("moves", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_a_compiled_region_is_not_recomputed_from_the_buffer_that_it_has_changed(moves):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    plain = nn.Sequential(Averages(moves=moves))
    fit, x = ms.transform(copy.deepcopy(plain), {"*": checkpoint()}), numbers(3, 6)
    assert trained(fit, torch.compile(fit, backend=backend), x) == trained(plain, plain, x)
    assert len(graphs) == (0 if moves else 1)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        return x + self.down(torch.sin(self.up(x)))


def compiled_in_place(model):
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def compiled_around(model):
    return nn.Sequential(*(torch.compile(block, backend="aot_eager", fullgraph=True) for block in model))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore:The .grad attribute")  # the compiler's own
@pytest.mark.parametrize(
    ("compiled", "path"),
    [
        (compiled_in_place, "*"),
        pytest.param(compiled_around, "*", marks=pytest.mark.deep),
        (compiled_around, "*._orig_mod"),
    ],
)
def test_modules_that_were_compiled_before_run_their_copies(compiled, path):
    """With the settings that they were compiled with, and no longer the original's own code without the plan."""
    model, x = compiled(nn.Sequential(Wide(), Wide())), torch.randn(5, 8)
    fit = ms.transform(model, {path: checkpoint()})

    def kept_and_gradients(module):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t):
            out = module(x).square().sum()
        return kept, torch.autograd.grad(out, list(module.parameters()))

    (as_it_is, expected), (kept, found) = kept_and_gradients(model), kept_and_gradients(fit)
    assert (5, 24) in as_it_is
    assert (5, 24) not in kept
    assert all(map(torch.equal, expected, found))
    assert not {id(m) for m in fit.modules()} & {id(m) for m in model.modules()}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("fullgraph", [True, pytest.param(False, marks=pytest.mark.deep)])
def test_a_compiled_step_notices_a_parameter_that_was_replaced(fullgraph):
    model = mlp()
    fit = ms.transform(model, {"*": checkpoint()})
    graphs = []
    compiled = torch.compile(fit, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=fullgraph)
    x = numbers(2, 6)
    compiled(x)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(compiled(x), model(x))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    error = torch._dynamo.exc.Unsupported if fullgraph else ms.TransformError
    with pytest.raises(error, match=r"parameter '0\.weight' of the model was replaced"):
        compiled(x)
    # One trace; the parameters are those of modules, whose sizes a compiler may rely on, and no inputs besides.
    first = [node.name for node in graphs[0].graph.nodes if node.op == "placeholder"]
    assert len(first) == 1 + len(list(model.parameters()))
    assert len(graphs) == 1 or not fullgraph


def test_a_module_of_torch_fx_keeps_its_forward():
    """The class of each graph module makes another class when it is asked for a new object."""
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    x = torch.ones(3, 2)
    for pattern in ("", "0"):
        fit = ms.transform(model, {pattern: ms.checkpoint()})
        assert type(fit) is type(model)
        assert torch.equal(fit(x), model(x))


def test_a_lazy_module_is_refused_until_it_has_shapes():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that lazy modules are new
        model = nn.Sequential(nn.LazyLinear(2), nn.Tanh())
    with pytest.raises(ms.TransformError, match=r"'0\.weight' has no shape yet.*run a batch through the model first"):
        ms.transform(model, {"*": ms.checkpoint()})
    model(torch.ones(1, 3))
    ms.transform(model, {"*": ms.checkpoint()})(torch.ones(1, 3)).sum().backward()
    assert model[0].weight.grad.shape == (2, 3)


def test_training_mode_belongs_to_each_tree():
    model, fit = transformed(ConvBlock)
    fit.eval()
    assert model.training
    assert model.norm.training
    assert not fit.norm.training
    before = bits(fit.norm.running_mean)
    fit(numbers(2, 4, 5, 5))
    assert bits(fit.norm.running_mean) == before
    model(numbers(2, 4, 5, 5))
    assert bits(fit.norm.running_mean) != before, "buffers are shared"


# ---------------------------------------------------------- `functional`: the module itself is as it was after a call


class TwoPaths(nn.Module):
    """Its norm and its embedding have two names each, and the head has the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(4, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.again = nn.ModuleList([self.embed, self.norm])

    def forward(self, ids):
        return self.head(self.again[1](self.embed(ids)) + self.again[0](ids)).square().sum()


def held(model):
    return {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("how", ["call", "grad", "compiled"])
def test_a_module_with_two_paths_holds_afterwards_what_it_held(how):
    """PyTorch's own functional_call leaves the values of the call in it, and so unties its weights."""
    model, ids = TwoPaths(), torch.tensor([0, 1, 3])
    before, values = held(model), bits(model.state_dict())
    model.train(how != "grad")  # where PyTorch refuses to count batches
    fn, state = ms.functional(model)
    other = {name: 2 * tensor.detach() for name, tensor in state.items()}
    if how == "grad":
        learned = {name: other[name] for name, _ in model.named_parameters()}
        grads = torch.func.grad(lambda learned: fn({**other, **learned}, ids))(learned)
        assert grads["embed.weight"].count_nonzero() > 0
    else:
        call = torch.compile(fn, backend="eager", fullgraph=True) if how == "compiled" else fn
        call(other, ids)
        assert int(other["norm.num_batches_tracked"]) == 1  # a buffer that is changed in place is that of the state
    assert held(model) == before
    assert bits(model.state_dict()) == values
