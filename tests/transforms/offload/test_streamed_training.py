"""offload(what="params"): whatever trains a model must not tell a streamed one from another."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale import compose, tile
from tests.support.checks import bits
from tests.support.layers import (
    HOWS,
    LAYER,
    LAYERS,
    PARAMS,
    WIDTH,
    gradients,
    layers,
    loss_of,
    moved,
    names_on_host,
    rows,
    same,
    streamed,
)

# ---------------------------------------------------------------------------------------------------- optimizers


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9, nesterov=True),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW capturable order": lambda parameters: torch.optim.AdamW(list(parameters)[::-1], foreach=False),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_steps_as_on_parameters_that_stay(make, set_to_none):
    def train(model):
        optimizer = make(model.parameters())

        def closure():
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        return [optimizer.step(closure) for _ in range(3)]

    assert len(names_on_host(same(train))) == 2 * LAYERS


@pytest.mark.parametrize("depth", [0, 2])
def test_a_backward_inside_a_backward(depth):
    def train(model):
        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, gradient):
                with torch.enable_grad():
                    loss_of(model[2:]).backward()
                return gradient

        loss_of(lambda x: model[1:](Inner.apply(model[0](x)))).backward()

    same(train, depth=depth)


# ------------------------------------------------------------------------------------------------------- hooks


def test_hooks_of_a_parameter_see_its_complete_gradient():
    def train(model):
        seen, nodes = {}, []
        for name, parameter in model.named_parameters():
            seen[name] = []
            parameter.register_hook(lambda gradient, name=name: (seen[name].append(gradient.clone()), gradient * 2)[1])
            nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
            nodes[-1].register_prehook(lambda given, name=name: seen[name].append(given[0].clone()))
            nodes[-1].register_hook(lambda *_, name=name, p=parameter: seen[name].append(p.grad.clone()))
        for _ in range(2):
            loss_of(model).backward()
        return seen

    same(train)
    same(train, depth=0)


def test_an_optimizer_step_inside_backward():
    def train(model):
        for parameter in model.parameters():
            optimizer = torch.optim.AdamW([parameter], foreach=False)

            def step(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss_of(model).backward()

    fit = same(train)
    assert moved(fit[0].forward.fn.runtime)[2] == LAYERS * LAYER, "no gradient is left"


# ------------------------------------------------------------------------------------- what regions do with weights


class Keeps(nn.Module):
    """Returns its own weight, and stores it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(4)) / WIDTH)
        self.kept = None

    def forward(self, x):
        self.kept = self.weight
        return x @ self.weight, self.weight


class UsesKept(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Keeps(), Keeps()

    def forward(self, x):
        y, weight = self.first(x)
        z, other = self.second(y)
        return (z @ weight.t()) + other[: len(z)]


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_a_region_may_return_and_store_its_weight(how):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.first.kept is model.first.weight

    assert names_on_host(same(train, UsesKept, {"*": how})) == ["first.weight", "second.weight"]


class Words(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.project = nn.Embedding(10, WIDTH, **options), nn.Linear(WIDTH, 3)

    def forward(self, words):
        return self.project(self.words(words))


@pytest.mark.parametrize("how", [how for how in HOWS.values() if "checkpoint" not in repr(how)], ids=repr)
@pytest.mark.parametrize("path", ["*", ""])
def test_what_a_region_changes_in_its_weights_comes_back(path, how):
    words = torch.tensor([1, 2, 3, 1])

    def train(model):
        optimizer, found = torch.optim.SGD(model.parameters(), 10.0), []
        for _ in range(3):
            model(words).square().sum().backward()
            optimizer.step()
            found.append((model.words.weight.clone(), model.words.weight._version))
        with torch.no_grad():
            model(words)
        return found, model.words.weight._version

    fit = same(train, lambda: Words(max_norm=1.0), {path: how})
    assert float(fit.words.weight[1].detach().norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("how", [how for how in HOWS.values() if "checkpoint" in repr(how)], ids=repr)
def test_a_recompute_of_weights_that_the_region_has_changed_is_refused(how):
    fit, _ = streamed(how, model=nn.Sequential(Words(max_norm=1.0)))
    for _ in range(2):  # never as something that an earlier call had not done
        with pytest.raises(ms.CorrectnessError, match=r"words.weight' .* that offload\(what='params'\) moves"):
            fit(torch.tensor([1, 2, 3, 1]))
        with torch.no_grad():
            fit[0].words.weight.mul_(2)


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_a_change_in_place_that_pytorch_refuses_is_refused(how):
    class Doubles(nn.Linear):
        def forward(self, x):
            self.weight[0].mul_(2)
            return super().forward(x)

    fit, _ = streamed(how, model=nn.Sequential(Doubles(4, 4)))
    before = fit[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"in-place operation|in place while it ran"):
        fit(torch.ones(2, 4))
    assert bits(fit[0].weight.detach()) == bits(before)


def test_a_tile_whose_first_piece_places_the_parameters():
    x = rows()
    plain = layers(2)  # a weight that backward needs: the tile held it where it was until its second piece
    fit, _ = streamed(model=layers(2), plan={"": compose(tile(chunks=3), PARAMS)})
    fit(x).square().sum().backward()
    plain(x).square().sum().backward()
    for found, expected in zip(gradients(fit), gradients(plain), strict=True):
        torch.testing.assert_close(found, expected)
    assert names_on_host(fit) == ["0.weight", "0.bias", "1.weight", "1.bias"]
