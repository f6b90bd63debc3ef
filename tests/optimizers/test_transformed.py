"""What holds for every transform of an optimizer: the numbers, and that the result is an optimizer like any other."""

import copy
import pickle

import bitsandbytes
import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as HFAdafactor

import memscale as ms
from memscale.optimizers import on_host, quantized
from tests.support.checks import bits
from tests.support.coverings import in_turn, taking_turns
from tests.support.optimizers import OPTIMIZERS, batch, network, numbers, train, trained, twins

ADAMW = OPTIMIZERS["AdamW"]
TRANSFORMS = {
    "in backward": ms.step_in_backward(),
    "in groups": ms.step_in_groups(group_bytes=256),
    "offloaded": ms.offload_states(),
    "on disk": ms.offload_states(tier="disk"),
    "on disk in backward": ms.compose(ms.step_in_backward(), ms.offload_states(tier="disk")),
    "all": ms.compose(ms.step_in_backward(), ms.step_in_groups(group_bytes=256), ms.offload_states()),
}
every_transform = pytest.mark.parametrize("how", TRANSFORMS.values(), ids=TRANSFORMS)
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
in_turns = taking_turns(make=OPTIMIZERS, how=TRANSFORMS)


@pytest.fixture(autouse=True)
def _small_states_move_too(monkeypatch):
    monkeypatch.setattr(on_host, "_LEAST_BYTES", 16)  # not the counts of steps
    monkeypatch.setattr(quantized, "_LEAST", 1)
    monkeypatch.setattr(quantized, "_LEAST_BYTES", 1)


@every_transform
@every_optimizer
def test_it_trains_to_the_same_bits_from_the_middle_of_training_on(make, how):
    (plain, expected), (model, optimizer) = twins(make, how)
    for each in ((plain, expected), (model, optimizer)):
        train(*each, range(2, 5))
    assert numbers(model, optimizer) == numbers(plain, expected)
    assert isinstance(optimizer, type(expected))


@in_turns
def test_the_original_keeps_its_states_its_options_and_its_hooks(make, how):
    model, original = trained(make, 2)
    original.register_step_post_hook(lambda *_: called.append("post"))
    called, before, groups = [], bits(original.state_dict()), original.param_groups
    optimizer = how(original)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    train(model, optimizer, range(2, 4))
    assert called == ["pre", "post"] * 2
    assert bits(original.state_dict()) == before
    assert original.param_groups is groups
    assert not original._optimizer_step_pre_hooks


@in_turns
def test_a_state_dict_goes_both_ways(make, how):
    (plain, expected), (model, optimizer) = twins(make, how)
    train(model, optimizer, [2])
    train(plain, expected, [2])
    onward, back = how(make(model.parameters())), make(plain.parameters())
    onward.load_state_dict(copy.deepcopy(expected.state_dict()))
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    del optimizer
    train(model, onward, [3])
    train(plain, back, [3])
    assert numbers(model, onward) == numbers(plain, back)


@every_transform
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_is_independent(how, copied):
    (plain, expected), (model, optimizer) = twins(ADAMW, how)
    before = numbers(model, optimizer)
    other_model, other = copied((model, optimizer))
    train(other_model, other, [2])
    train(plain, expected, [2])
    assert numbers(other_model, other) == numbers(plain, expected)
    assert numbers(model, optimizer) == before
    assert repr(other) == repr(optimizer)


@every_transform
def test_groups_schedulers_and_hooks(how):
    def run(transform):
        model, new = network(), nn.Parameter(torch.ones(2))
        optimizer = transform(torch.optim.AdamW([{"params": model[0].parameters()}, {"params": [model[3].weight]}]))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        for number in range(4):
            if number == 2:
                optimizer.add_param_group({"params": [new, model[5].bias], "lr": 0.5})
            (model(batch(number)) * new).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
            new.grad = None if number < 2 else new.grad
            scheduler.step()
        return seen, bits(new), numbers(model, optimizer), scheduler.state_dict()

    assert run(how) == run(ms.identity)


@every_transform
def test_frozen_and_unused_parameters_stay_and_one_that_thaws_trains(how):
    def run(transform):
        model = network()
        model.unused = nn.Parameter(torch.ones(3))
        model[0].requires_grad_(False)
        optimizer = transform(torch.optim.AdamW(model.parameters()))
        forward = nn.Sequential(*[model[index] for index in range(6)])
        for number in range(4):
            model[0].requires_grad_(number >= 2)
            forward(batch(number)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return numbers(model, optimizer)

    assert run(how) == run(ms.identity)


LATE = {title: how for title, how in TRANSFORMS.items() if "step_in_backward" not in repr(how)}


@pytest.mark.parametrize("how", LATE.values(), ids=LATE)
def test_closures_clipping_and_a_scaler_that_the_kernel_knows(how):
    def run(transform):
        model, losses = network(), []
        optimizer = transform(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05), fused=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)

        def closure():
            optimizer.zero_grad()
            loss = model(batch(0)).square().sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        for number in range(4):
            losses.append(optimizer.step(closure).item())
            x = batch(number)
            x[0, 0] = float("inf") if number == 2 else x[0, 0]  # which skips that step
            optimizer.zero_grad()
            scaler.scale(model(x).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return losses, scaler.get_scale(), numbers(model, optimizer)

    assert run(how) == run(ms.identity)


@every_transform
def test_a_state_dict_of_another_model_is_refused_and_changes_nothing(how):
    model, original = trained(ADAMW, 1)
    other = nn.Sequential(*[nn.Linear(2, 2), nn.LayerNorm(3), nn.Linear(3, 3), nn.Linear(4, 4)])
    wrong = ADAMW(other.parameters())
    for parameter in other.parameters():
        parameter.grad = torch.ones_like(parameter)
    wrong.step()
    for optimizer in (how(original), how(ADAMW(model.parameters()))):  # with states, and without
        before = numbers(model, optimizer)
        with pytest.raises(ms.TransformError, match=r"'exp_avg' of parameter 0 of group 0 \[8, 6\] has shape \[2, 2\]"):
            optimizer.load_state_dict(wrong.state_dict())
        assert numbers(model, optimizer) == before


IN_8_BITS = ms.quantize_states()
ROUNDING = {
    "in 8 bits": (IN_8_BITS, torch.float32),
    "in 8 bits, bfloat16": (IN_8_BITS, torch.bfloat16),
    "in 8 bits, float16": (IN_8_BITS, torch.float16),
    "compensated": (ms.compensate_rounding(), torch.bfloat16),
    "stochastic": (ms.round_stochastically(seed=3), torch.bfloat16),
}


@taking_turns(make=OPTIMIZERS, rounds=ROUNDING, around=TRANSFORMS | {"alone": ms.identity})
def test_what_rounds_goes_on_from_a_state_dict_a_copy_and_a_pickle_as_it_would(make, rounds, around):
    how, dtype = rounds
    how, model = ms.compose(around, how), network().to(dtype)
    optimizer = how(make(model.parameters()))
    train(model, optimizer, range(2))
    loaded = copy.deepcopy(model)
    again = how(make(loaded.parameters()))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    others = [(loaded, again), copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    plain = make(copy.deepcopy(model).parameters())
    plain.load_state_dict(optimizer.state_dict())
    plain.step()
    train(model, optimizer, range(2, 4))
    for other in others:
        train(*other, range(2, 4))
        assert numbers(*other) == numbers(model, optimizer)


@pytest.mark.parametrize(("rounds", "other"), in_turn(ROUNDING, 2 * [*TRANSFORMS]))
def test_what_rounds_has_the_numbers_that_it_has_alone_with_others_around_and_inside(rounds, other):
    def run(how):
        model = network().to(dtype)
        optimizer = how(torch.optim.AdamW(model.parameters(), lr=0.01))
        train(model, optimizer, range(3))
        return numbers(model, optimizer)

    how, dtype = ROUNDING[rounds]
    other = TRANSFORMS[other]
    expected = run(how)
    assert run(ms.compose(other, how)) == expected
    if how == IN_8_BITS and "tier='disk'" in repr(other):
        with pytest.raises(ms.TransformError, match=r"moments on disk, .* compose\(offload_states\(tier='disk'"):
            run(ms.compose(how, other))
    else:
        assert run(ms.compose(how, other)) == expected


class Averages(torch.optim.AdamW):
    """It has methods of its own over its states, as schedule-free optimizers do."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p.detach(), 0.5)

    @torch.no_grad()
    def swap(self):
        for p, states in self.state.items():
            if "average" in states:
                now = p.clone()
                p.copy_(states["average"])
                states["average"].copy_(now)

    def forget(self):
        for p, states in self.state.items():
            states["average"] = torch.zeros_like(p)


@every_transform
def test_methods_of_the_class_have_all_states_and_may_change_them(how):
    (plain, expected), (model, optimizer) = twins(lambda p: Averages(p, lr=0.05), how)
    for net, each in ((plain, expected), (model, optimizer)):
        train(net, each, [2])
        each.swap()
        each.forget()
        train(net, each, [3, 4])
    assert numbers(model, optimizer) == numbers(plain, expected)


class SharesOneNorm(torch.optim.SGD):
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad / norm, alpha=-group["lr"])


class Draws(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(torch.randn_like(p), alpha=-group["lr"])


class HasAStateOfNoParameter(torch.optim.SGD):
    def step(self, closure=None):
        self.state["steps"] = self.state["steps"] or 1
        super().step()


class KeepsItsParameters(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.kept = self.param_groups[0]["params"]

    def step(self, closure=None):
        for p in self.kept:
            if p.grad is not None:
                p.data.sub_(p.grad)


class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)


NOT_ALONE = {
    "LBFGS": (torch.optim.LBFGS, "missing 1 required positional argument: 'closure'"),
    "SparseAdam": (lambda p: torch.optim.SparseAdam(list(p)), "does not support dense gradients"),
    "a norm": (lambda p: SharesOneNorm(p, lr=0.1), "SharesOneNorm does not treat each parameter alone"),
    "random": (lambda p: Draws(p, lr=0.1), "Draws does not treat each parameter alone"),
    "a state": (lambda p: HasAStateOfNoParameter(p, lr=0.1), r"keeps states that belong to no parameter \('steps'\)"),
    "a list": (KeepsItsParameters, r"moved none of the small parameters of a trial at lr=0\.03125"),
    "around": (lambda p: Around(ADAMW(p)), "has the parameters of another optimizer; transform that one"),
    "differentiable": (lambda p: torch.optim.SGD(p, differentiable=True), "is differentiable"),
}


@every_transform
@pytest.mark.parametrize(("make", "message"), NOT_ALONE.values(), ids=NOT_ALONE)
def test_an_optimizer_that_does_not_treat_each_parameter_alone_is_refused(how, make, message):
    model = network()
    optimizer = make(model.parameters())
    before = bits(dict(model.state_dict())), torch.get_rng_state().tolist()
    with pytest.raises(ms.TransformError, match=message):
        how(optimizer)
    assert (bits(dict(model.state_dict())), torch.get_rng_state().tolist()) == before


RATES = {
    "AdamW": torch.optim.AdamW,
    "AdamW, a huge decay": lambda p, lr: torch.optim.AdamW(p, lr=lr, weight_decay=1e5),
    "AdamW, maximize, foreach": lambda p, lr: torch.optim.AdamW(p, lr=lr, maximize=True, foreach=True),
    "Adam, a tensor": lambda p, lr: torch.optim.Adam(p, lr=torch.tensor(lr), fused=True),
    "SGD": torch.optim.SGD,
    "Adadelta": torch.optim.Adadelta,
    "Muon": lambda p, lr: torch.optim.Muon([each for each in p if each.dim() == 2], lr=lr),
    "transformers' Adafactor": lambda p, lr: HFAdafactor(p, lr=lr, relative_step=False, scale_parameter=False),
    "transformers' Adafactor, warming up": lambda p, lr: HFAdafactor(p, relative_step=True, warmup_init=True),
    "bitsandbytes' AdamW8bit": lambda p, lr: bitsandbytes.optim.AdamW8bit(p, lr=lr),
    "bitsandbytes' Lion": lambda p, lr: bitsandbytes.optim.Lion(p, lr=lr),
}
SIX = [
    *(ms.step_in_backward(), ms.step_in_groups(group_bytes=256), ms.offload_states(), ms.quantize_states()),
    *(ms.compensate_rounding(), ms.round_stochastically()),
]


RATED = in_turn(RATES, (torch.bfloat16, torch.float16, torch.float32), (5e-5, 1e-8, 0.0, 5e-5))


@pytest.mark.parametrize(("name", "dtype", "rate"), RATED)
def test_any_rate_and_type_of_parameters_can_be_transformed_and_steps_to_the_same_bits(name, dtype, rate):
    def stepped(how):
        model = network().to(dtype)
        optimizer = how(RATES[name](list(model.parameters()), rate))
        for number in range(2):
            for position, parameter in enumerate(model.parameters()):
                parameter.grad = torch.full_like(parameter, 0.1 * position - number)
            optimizer.step()
        return numbers(model, optimizer)

    exact, rounds = SIX[:3], SIX[3:]
    assert len({repr(stepped(how)) for how in (ms.identity, *exact)}) == 1
    for how in rounds:
        stepped(how)


@every_transform
def test_it_is_a_value_that_maps_optimizers(how):
    assert eval(repr(how), vars(ms)) == how == pickle.loads(pickle.dumps(how))
    assert ms.Plan.from_json(ms.Plan({"": how}).to_json()) == ms.Plan({"": how})
    assert ms.compose(ms.identity, how) == how
    optimizer = ADAMW(network().parameters())
    assert repr(how(optimizer)) == f"{how!r}({optimizer!r})"
    assert ms.identity(optimizer) is optimizer
    for wrong in (torch.sin, 3, network()):
        with pytest.raises(ms.TransformError, match=r"maps an optimizer to an optimizer, got .*; pass a torch\.optim"):
            how(wrong)
    with pytest.raises(ms.TransformError, match="maps a function to a function, got AdamW"):
        ms.checkpoint()(optimizer)
    with pytest.raises(ms.ConfigError, match="of functions or of optimizers, got both"):
        ms.compose(ms.checkpoint(), how)


@every_transform
def test_dropping_it_leaves_nothing_on_the_parameters(how):
    model, original = trained(ADAMW, 1)
    hooks = [parameter._post_accumulate_grad_hooks for parameter in model.parameters()]
    optimizer = how(original)
    train(model, optimizer, [1])
    del optimizer
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters()), hooks


@pytest.mark.parametrize(("title", "steps", "hardware"), in_turn(TRANSFORMS, [0, 2, 2], [None, "h100"]))
def test_a_profile_changes_nothing_that_training_goes_on_with(title, steps, hardware):
    how = TRANSFORMS[title]
    (plain, expected), (model, optimizer) = twins(ADAMW, how, steps=steps)
    before = numbers(model, optimizer)
    ms.profile(model, batch(0), optimizer=optimizer, loss=lambda y, _: y.square().sum(), hardware=hardware)
    assert numbers(model, optimizer) == before
    for each in ((plain, expected), (model, optimizer)):
        train(*each, range(3))
    assert numbers(model, optimizer) == numbers(plain, expected)


@every_transform
def test_gradients_that_were_assigned_step_with_the_others(how):
    (plain, expected), (model, optimizer) = twins(ADAMW, how)
    for net, each in ((plain, expected), (model, optimizer)):
        for parameter in net[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        each.step()
        each.zero_grad(set_to_none=False)
        assert net[0].weight.grad.count_nonzero() == 0
    assert numbers(model, optimizer) == numbers(plain, expected)


def test_groups_share_a_learning_rate_that_is_a_tensor_as_they_did():
    """Each group had a copy, so that a rate that was changed in place reached neither the others nor a later group."""

    def rates(how):
        first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
        plain = torch.optim.Adam([{"params": [first]}, {"params": [second]}], lr=torch.tensor(0.5))
        optimizer = how(plain)
        optimizer.param_groups[0]["lr"].mul_(0.5)
        optimizer.add_param_group({"params": [third]})
        return [float(group["lr"]) for group in optimizer.param_groups], float(plain.param_groups[0]["lr"])

    own = rates(lambda optimizer: optimizer)
    assert own == ([0.25] * 3, 0.25)
    assert rates(ms.step_in_groups(group_bytes=1)) == (own[0], 0.5), "and the plain optimizer keeps its own"


@every_transform
@pytest.mark.parametrize("edit", ["moved", "taken out", "put in", "replaced"])
def test_parameters_step_with_the_group_that_they_are_in(how, edit):
    """Where the caller edits `param_groups`, `step_in_backward` stepped with the group before."""

    def run(transform):
        model = network()
        first, last = model[0].weight, model[5].weight
        groups = [{"params": [first], "lr": 0.3}, {"params": [model[3].weight, last]}]
        optimizer = transform(torch.optim.AdamW(groups, lr=0.01))
        train(model, optimizer, range(2))
        if edit == "moved":
            optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
        elif edit == "taken out":
            del optimizer.state[first], optimizer.param_groups[0]
        elif edit == "put in":
            optimizer.param_groups[1]["params"].append(model[0].bias)
        else:
            del optimizer.state[last]
            model[5].weight = optimizer.param_groups[1]["params"][1] = nn.Parameter(last.detach() * 2)
        train(model, optimizer, range(2, 5))
        return numbers(model, optimizer)

    assert run(how) == run(ms.identity)


@every_transform
def test_states_that_the_given_optimizer_changes_afterwards_are_not_stepped_with(how):
    model, plain = trained(ADAMW, 2)
    optimizer = how(plain)
    before = numbers(model, optimizer)[1]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    if numbers(model, optimizer)[1] == before:  # it has states of its own
        optimizer.step()
        return
    with pytest.raises(ms.CorrectnessError, match=r"states of parameter .* were changed in place by the optimizer"):
        optimizer.step()


def test_states_are_those_of_the_state_dict_that_hooks_return():
    """A hook may sort states anew; those of the rounding transforms were then of other parameters."""

    def run(sorts):
        weights = [nn.Parameter(torch.full((4, 4), number, dtype=torch.bfloat16)) for number in (1.0, 2.0)]
        optimizer = ms.compensate_rounding()(torch.optim.AdamW(weights, lr=0.1))
        for weight in weights:
            weight.grad = weight.detach().clone()
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        if sorts:
            saved["state"] = {1 - key: states for key, states in saved["state"].items()}
            optimizer.register_load_state_dict_pre_hook(
                lambda _, given: {**given, "state": {1 - key: states for key, states in given["state"].items()}}
            )
        optimizer.load_state_dict(saved)
        optimizer.step()
        return numbers(nn.ParameterList(weights), optimizer)

    assert run(sorts=True) == run(sorts=False)


@pytest.mark.parametrize("how", [ms.offload_states(), ms.step_in_groups(group_bytes=64)], ids=repr)
def test_states_that_steps_in_inference_mode_have_made(how):
    """They have no version by which a change would show."""

    def run(transform):
        model, optimizer = trained(ADAMW, 0)
        for number in range(4):
            optimizer = transform(optimizer) if number == 2 else optimizer
            optimizer.zero_grad()
            model(batch(number)).square().mean().backward()
            with torch.inference_mode():
                optimizer.step()
        return numbers(model, optimizer)

    assert run(how) == run(ms.identity)
