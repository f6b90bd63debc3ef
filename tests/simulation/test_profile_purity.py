"""`profile` changes nothing: objects, values, versions, states and patches are as before, also when it raises."""

from __future__ import annotations

import random
import resource

import numpy as np
import pytest
import torch
import torch._dynamo  # replaces torch.manual_seed when it is first imported, which is no doing of a profile
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import memscale as ms
from memscale.simulation.measured import part_times
from tests.support.coverings import in_turn
from tests.support.steps import mean


class Interrupted(BaseException):
    """Raised by the models here at a chosen point; no `except Exception` sees it."""


class Model(nn.Module):
    """Has something of everything that a step changes; raises `failure` at the point named `fail_in`."""

    def __init__(self, fail_in=None, failure=Interrupted):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(50, 16), nn.BatchNorm1d(16), nn.Linear(16, 50, bias=False)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(32, 16))
        self.head.weight = self.embed.weight
        self.register_buffer("direction", torch.randn(16))
        self.register_buffer("late", None)
        self.plain = torch.zeros(3)
        self.calls, self.seen, self.cache, self.kept = 0, [], {}, None
        self.fail_in, self.failure = fail_in, failure

    def reach(self, point):
        if point == self.fail_in:
            raise self.failure(point)

    def forward(self, ids):
        self.calls += 1
        self.seen.append(ids.shape)
        hidden = self.embed(ids)
        self.cache["mask"] = torch.ones(ids.shape[1], ids.shape[1]).tril()
        self.kept = hidden
        self.late = hidden.detach().mean(0)
        self.plain.add_(1)
        with torch.no_grad():
            self.direction.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
        hidden = self.cache["mask"] @ hidden
        hidden = self.norm(hidden.flatten(0, 1))
        self.reach("forward")
        hidden = hidden + random.random() + float(np.random.rand()) + torch.rand(16)
        hidden = self.body(hidden)
        hidden.register_hook(lambda gradient: self.reach("backward"))
        return F.cross_entropy(self.head(hidden), ids.flatten())


class Optimizer(torch.optim.AdamW):
    def __init__(self, model):
        super().__init__([{"params": model.body.parameters(), "lr": 0.1}, {"params": [model.embed.weight]}])
        self.model, self.count = model, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        result = super().step(closure)
        self.model.reach("optimizer")
        return result


def world(*modules, optimizers=(), others=(), tensors=()):
    """Everything that can be told apart: objects by identity, tensors also by version and bytes.

    What a process has beside them is in test_process_snapshot.py.
    """
    seen = {}

    def tensor(value):
        gradient = None if not value.is_leaf or value.grad is None else (id(value.grad), tensor(value.grad))
        hooks = value._backward_hooks and list(value._backward_hooks.items())
        values = (
            None
            if value.is_meta
            else value.detach().clone().view(torch.uint8)
            if value.dim()
            else value.detach().clone()
        )
        return [
            id(value), value._version, value.requires_grad, value.shape, value.stride(), value.dtype, value.device,
            value.untyped_storage()._cdata, type(value), gradient, hooks,
            None if values is None else values.tolist(),
        ]  # fmt: skip

    def enter(value, depth=0):
        if isinstance(value, torch.Tensor):
            return tensor(value)
        if id(value) in seen or depth > 6:
            return id(value)
        seen[id(value)] = value
        if isinstance(value, dict):
            return id(value), [
                (id(key) if isinstance(key, torch.Tensor) else key, enter(item, depth + 1))
                for key, item in value.items()
            ]
        if isinstance(value, (list, tuple)):
            return id(value), [enter(item, depth + 1) for item in value]
        if isinstance(value, (set, frozenset)):
            return id(value), sorted(map(id, value))
        if isinstance(value, (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, Trainer)):
            return id(value), type(value), enter(value.__dict__, depth + 1)
        return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)

    return {
        "modules": [enter(module) for module in modules],
        "optimizers": [enter(optimizer) for optimizer in optimizers],
        "others": [enter(other) for other in others],
        "tensors": [enter(value) for value in tensors],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": str(np.random.get_state()),
        "modes": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
    }


class Trainer:
    def __init__(self, fail_in=None, failure=Interrupted):
        self.model = Model(fail_in, failure)
        self.optimizer = Optimizer(self.model)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        self.batch, self.steps, self.losses, self.best = torch.arange(40).reshape(4, 10), 0, [], None
        self.log = {"history": []}

    def train(self):
        self.steps += 1
        loss = self.model(self.batch)
        self.losses.append(loss)
        self.best = loss.detach()
        self.log["history"].append((self.steps, loss.detach()))
        self.scaler.scale(loss).backward()
        self.model.reach("between")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()

    def world(self):
        return world(
            self.model,
            optimizers=[self.optimizer],
            others=[self, self.schedule, vars(self.scaler)],
            tensors=[self.batch],
        )


def assert_same(before, after):
    assert [key for key in before if before[key] != after[key]] == []


def trained(steps):
    """A trainer some steps into its work, with gradients left over."""
    torch.manual_seed(1)
    trainer = Trainer()
    for _ in range(steps):
        trainer.train()
    if steps:
        trainer.model(trainer.batch).backward()
    return trainer


OF = {
    "model": lambda trainer, **plan: ms.profile(trainer.model, trainer.batch, optimizer=trainer.optimizer, **plan),
    "loop": lambda trainer: ms.profile(trainer.train),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("of", OF.values(), ids=OF)
def test_nothing_is_changed_by_a_profile(of, steps):
    trainer = trained(steps)
    before = trainer.world()
    profile = of(trainer)
    assert profile.method == "static", profile.notes
    assert_same(before, trainer.world())


POINTS = ["forward", "backward", "between", "optimizer"]
FAILURES = [Interrupted, KeyboardInterrupt, SystemExit, GeneratorExit]


@pytest.mark.parametrize(
    ("point", "failure", "steps"),
    [*in_turn(POINTS, FAILURES, [0, 1]), *((point, ZeroDivisionError, 1) for point in POINTS)],
)
def test_nothing_is_changed_when_the_step_ends_early(point, failure, steps):
    trainer = trained(steps)
    trainer.model.fail_in, trainer.model.failure = point, failure
    before = trainer.world()
    is_error = failure is ZeroDivisionError
    with pytest.raises(ms.ConfigError if is_error else failure, match="ZeroDivisionError" if is_error else None):
        ms.profile(trainer.train)
    assert_same(before, trainer.world())


def test_the_next_real_steps_are_the_same_as_without_a_profile():
    def history(profiled):
        torch.manual_seed(2), random.seed(2), np.random.seed(2)
        trainer = Trainer()
        for _ in range(3):
            if profiled:
                ms.profile(trainer.train)
                ms.profile(trainer.model, trainer.batch, optimizer=trainer.optimizer, accumulate=2)
            trainer.train()
        state = [
            trainer.model.state_dict(),
            trainer.optimizer.state_dict(),
            trainer.schedule.state_dict(),
            trainer.scaler.state_dict(),
        ]
        return [loss.item() for loss in trainer.losses], torch.utils._pytree.tree_map(
            lambda value: value.tolist() if isinstance(value, torch.Tensor) else value, state
        )

    assert history(profiled=True) == history(profiled=False)


def test_hooks_and_what_they_hold_are_left_alone():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    seen, optimizers = [], {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}
    model.register_forward_hook(lambda *_: seen.append(1))
    model[1].register_full_backward_hook(lambda *_: seen.append(2))

    def update(parameter):
        seen.append(3)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    model[1].weight.register_hook(lambda gradient: seen.append(4))
    before = world(model, optimizers=optimizers.values())
    ms.profile(model, torch.ones(3, 8), loss=mean)
    assert seen == [], "lists that hooks write to are put back"
    assert_same(before, world(model, optimizers=optimizers.values()))
    assert all(not optimizer.state for optimizer in optimizers.values())


def writes_to_views(model, _):
    weight, view = model[0].weight, model[0].weight.detach()[2:5]
    with torch.no_grad():
        view.zero_()
        weight.data.fill_(3.0)
        weight.lerp_(weight.detach() * 2, 0.5)
        model.many.mul_(0.9)


def replaces_a_parameter(model, _):
    model[0].weight.data = model[0].weight.data * 2
    model[0].weight = nn.Parameter(model[0].weight.detach() + 1)


def resizes_a_storage(model, batch):
    batch["room"].resize_(100)
    batch["room"].untyped_storage().resize_(0)
    batch["room"].untyped_storage().resize_(400)


def writes_to_the_batch(model, batch):
    batch["mask"].logical_not_()
    batch["large"].mul_(2)


def switches_modes(model, _):
    model.eval() if model.training else model.train()


CHANGES = [writes_to_views, replaces_a_parameter, resizes_a_storage, writes_to_the_batch, switches_modes]


@pytest.mark.parametrize(("change", "probe"), [*((change, False) for change in CHANGES), (writes_to_views, True)])
def test_what_a_step_changes_comes_back(change, probe, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMSCALE_CACHE", str(tmp_path))  # what was measured before would not be run again
    monkeypatch.setattr(part_times, "_is_clean", lambda samples: True)  # a busy machine measures, too
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout())
    model[2].eval()
    model.register_buffer("many", torch.randn(40_000))
    batch = {"mask": torch.ones(5, dtype=torch.bool), "room": torch.ones(8), "large": torch.randn(300, 200)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step():
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        change(model, batch)

    before = world(model, optimizers=[optimizer], others=[batch])
    ms.profile(step, probe=probe)
    assert_same(before, world(model, optimizers=[optimizer], others=[batch]))


def test_a_profile_in_no_grad_and_in_autocast_leaves_the_modes_alone():
    model = nn.Linear(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        before = world(model)
        ms.profile(model, torch.ones(2, 8), loss=mean)
        assert_same(before, world(model))
    with torch.no_grad():
        before = world(model)
        with pytest.raises(ms.ConfigError, match="gradients enabled"):
            ms.profile(model, torch.ones(2, 8), loss=mean)
        assert_same(before, world(model))


def test_thirty_gigabytes_on_meta_take_no_memory():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(16384, 16384, bias=False) for _ in range(30)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = ms.profile(
        model, torch.empty(64, 16384, device="meta"), optimizer=torch.optim.AdamW(model.parameters()), loss=mean
    )
    assert profile.by_category["parameter"] == 30 * (1 << 30)
    assert profile.peak_bytes > 4 * 30 * (1 << 30)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 200 << 20


LAYERS = st.sampled_from(
    [
        lambda: nn.Linear(8, 8),
        lambda: nn.Linear(8, 8, bias=False).requires_grad_(False),
        lambda: nn.BatchNorm1d(8),
        lambda: nn.Dropout(0.5),
        lambda: nn.ReLU(inplace=True),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        lambda: nn.LayerNorm(8),
    ]
)
OPTIMIZERS = st.sampled_from(
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.RMSprop(p),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.ASGD(p),
    ]
)


@given(st.lists(LAYERS, max_size=5), OPTIMIZERS, st.integers(0, 2), st.booleans())
def test_nothing_is_changed_in_random_models(layers, optimizer, steps, meta):
    model = nn.Sequential(nn.Linear(8, 8), *[make() for make in layers])
    optimizer = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    batch = torch.randn(6, 8)
    for _ in range(steps):
        model(batch).square().mean().backward()
        optimizer.step()
    before = world(model, optimizers=[optimizer], tensors=[batch])
    profile = ms.profile(model, batch.to("meta") if meta else batch, optimizer=optimizer, loss=mean)
    assert profile.method == "static"
    assert_same(before, world(model, optimizers=[optimizer], tensors=[batch]))


@pytest.mark.parametrize("ask", ["profile", "plan"])
def test_autocast_keeps_no_weight_of_the_simulation(ask):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    loss = lambda y, _: y.float().sum()  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        if ask == "profile":
            ms.profile(layer, x, loss=loss)
        else:
            ms.plan(layer, x, loss=loss, budget="1GiB")
        assert torch.equal(layer(x), expected)


class HooksItself(nn.Module):
    """Registers a hook on its layer in the first forward, as models of transformers do to collect hidden states."""

    def __init__(self):
        super().__init__()
        self.layer, self.is_hooked = nn.Linear(4, 4), False

    def forward(self, x):
        if not self.is_hooked:
            self.layer.register_forward_hook(lambda module, args, output: output * 2)
            self.is_hooked = True
        return self.layer(x)


def test_hooks_that_the_first_forward_registers_do_not_stay():
    model, x = HooksItself(), torch.ones(2, 4)
    ms.profile(model, x, loss=lambda y, _: y.sum())
    assert (len(model.layer._forward_hooks), model.is_hooked) == (0, False)


def test_a_model_on_meta_is_left_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        model[1].weight = model[0].bias
    optimizer = torch.optim.AdamW(model.parameters())
    before = world(model, optimizers=[optimizer])
    ms.profile(model, torch.ones(4, 8), optimizer=optimizer, loss=mean)
    assert_same(before, world(model, optimizers=[optimizer]))
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
