"""`profile` where numbers, caches or devices decide: routing, lazy tables, models on meta, and what it says."""

from __future__ import annotations

import copy
import functools
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from tests.simulation.test_profile_programs import CASES as programs
from tests.simulation.test_profile_storages import CASES as storages
from tests.simulation.test_profile_transforms import CASES as transforms
from tests.support.profiled import ROWS, Forward, adamw, mlp, train, x
from tests.support.steps import assert_exact, mean, real_peaks

# ------------------------------------------------------------------------------------------------ routing by numbers


class Experts(nn.Module):
    """A mixture whose tokens go to the best experts; `how` is the way in which they are picked out."""

    def __init__(self, how, experts=4, width=48):
        super().__init__()
        self.how, self.gate = how, nn.Linear(width, experts)
        self.experts = nn.ModuleList([mlp(width, width) for _ in range(experts)])

    def forward(self, y):
        weights, chosen = self.gate(y).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(y)
        hits = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            if self.how == "where":
                slot, token = torch.where(hits[number])
            elif self.how == "nonzero":
                token, slot = (chosen == number).nonzero(as_tuple=True)
            else:
                token, slot = (chosen == number).nonzero().t()
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(y[token]) * weights[token, slot, None])
        return out


@pytest.mark.parametrize("how", ["where", "nonzero", "rows"])
def test_a_mixture_is_routed_at_random_and_says_so(how):
    model = Experts(how)
    training = train(model, x(ROWS, 48))
    profile = training.profile()
    assert profile.method == "static"
    assert any("random activations were assumed" in note for note in profile.notes), profile.notes
    _, steady = real_peaks(training.step, model, training.optimizer, training.batch)
    assert abs(profile.peak_bytes - steady) < 0.1 * steady  # the routes differ, their number does not


def test_a_mixture_with_known_routes_is_exact():
    routes = torch.arange(ROWS) % 3

    def forward(m, y):
        out = torch.zeros_like(y)
        for number, expert in enumerate(m.experts):
            token = (routes == number).nonzero().squeeze(1)
            out = out.index_add(0, token, expert(y[token]))
        return out

    model = Forward(forward, experts=nn.ModuleList([mlp(48, 48) for _ in range(3)]))
    profile = assert_exact(train(model, x(ROWS, 48), held=lambda: [routes]))
    assert profile.notes == ()


# ------------------------------------------------------------------------------------------------------ lazy caches


class Rotary(nn.Module):
    """Makes a table at the first call and keeps it where nothing that a simulation puts back holds it."""

    _shared: ClassVar[dict] = {}

    def __init__(self, where):
        super().__init__()
        self.where, self.net = where, mlp(48, 48)

    def make(self):
        return torch.outer(torch.arange(ROWS).float(), torch.arange(48).float() / 48).cos()

    def look_up(self):
        if self.where == "class attribute":
            return type(self)._shared.setdefault("table", self.make())
        if self.where == "lru_cache of a method":
            return self.cached_method()
        return _TABLES.setdefault(ROWS, self.make())

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def cached_method(self):
        return self.make()

    def forward(self, y):
        return self.net(y) * self.look_up()


_TABLES: dict = {}


@pytest.mark.parametrize("where", ["class attribute", "global", "lru_cache of a method"])
def test_a_table_that_is_made_at_the_first_call(where):
    model = Rotary(where)
    reference = copy.deepcopy(model)
    batch = x(ROWS, 48)
    profile = ms.profile(model, batch, optimizer=torch.optim.SGD(model.parameters()), loss=mean)
    table = ROWS * 48 * 4
    assert profile.method == "static"
    assert sum(h.nbytes for h in profile.holdings if h.op.startswith("aten::cos")) == table
    result = model(batch)
    assert torch.equal(result, reference.net(batch) * reference.make()), "the model runs on what the simulation left"


# --------------------------------------------------------------------------------------------------- where tensors are


STEPS = {**storages, **programs, **transforms}
META = ["views_and_aliases", "norms_and_dropout", "plan_checkpoint"]
MORE_META = ["transformer_with_masks", "lora"]  # of the same layers


@pytest.mark.parametrize("name", [*META, *(pytest.param(name, marks=pytest.mark.deep) for name in MORE_META)])
def test_a_model_on_meta_has_the_profile_of_the_same_model_on_the_cpu(name):
    on_cpu, on_meta = STEPS[name](), STEPS[name]()
    on_meta.model.to("meta")
    on_meta.optimizer = adamw([parameter for parameter in on_meta.model.parameters() if parameter.requires_grad])
    expected = on_cpu.profile()
    for batch in (on_meta.batch, torch.utils._pytree.tree_map(lambda t: t.to("meta"), on_meta.batch)):
        step = {"optimizer": on_meta.optimizer, "loss": on_meta.loss, "plan": on_meta.plan, "keeps_output": False}
        found = ms.profile(on_meta.model, batch, hardware="cpu", **step)
        assert (found.peak_bytes, found.first_step_peak_bytes) == (expected.peak_bytes, expected.first_step_peak_bytes)
        assert found.by_category == expected.by_category
        assert found.flops == expected.flops
        assert all(tensor.is_meta for tensor in [*on_meta.model.parameters(), *on_meta.model.buffers()])


def test_tied_weights_stay_tied_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
        model[1].weight = model[0].weight
    profile = ms.profile(model, x(9, 48), loss=mean, hardware="cpu")
    assert profile.by_category["parameter"] == (48 * 48 + 2 * 48) * 4


# ------------------------------------------------------------------------------------------------------ what it says


def test_categories_say_what_each_byte_is_for():
    model, batch = mlp(), x(ROWS, 48)
    profile = train(model, batch).profile()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert profile.by_category["parameter"] == weights
    assert profile.by_category["input"] == batch.nbytes
    assert profile.by_category["optimizer state"] == 2 * weights + 4 * 4
    assert sum(profile.by_category.values()) == sum(profile.by_module.values()) == profile.peak_bytes
    assert int(profile.timeline.total_bytes.max()) == profile.peak_bytes
    assert sum(holding.nbytes for holding in profile.holdings) == profile.peak_bytes
    assert profile.flops == 2 * 3 * ROWS * (48 * 144 + 144 * 20) - 2 * ROWS * 48 * 144  # no gradient of the input


def test_8_bit_states_of_bitsandbytes():
    bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes, whose kernels are custom operators")
    model, batch = mlp(320, 512), x(16, 320)
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    profile = ms.profile(model, batch, optimizer=optimizer, loss=mean)
    assert profile.method == "static"
    model(batch).square().mean().backward()
    optimizer.step()
    states = [tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    own_bytes = sum(tensor.nbytes for tensor in states if tensor.shape != (256,))
    shared_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in states if tensor.shape == (256,)}.values())
    assert profile.by_category["optimizer state"] - own_bytes in (0, shared_bytes)  # tables, made when first needed


def test_a_lazy_module_is_refused_by_name():
    with pytest.raises(ms.ConfigError, match=r"parameter '0\.weight' has no shape yet.*run a batch"):
        ms.profile(nn.Sequential(nn.LazyLinear(3)), x(2, 4), loss=mean)


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        (ms.Hardware.named("mi300x"), "scratch memory of AMD's libraries"),
        (ms.Hardware("M4", "mps", 2**34), "allocator for mps rounds and caches is not modelled"),
        (ms.Hardware("Arc B580", "xpu", 2**34), "allocator for xpu rounds and caches is not modelled"),
        (ms.Hardware.named("t4"), ""),
    ],
)
def test_a_device_whose_allocator_is_not_known_is_told(hardware, said):
    profile = ms.profile(nn.Linear(8, 8), torch.ones(2, 8), loss=lambda y, _: y.sum(), hardware=hardware)
    assert profile.notes == () if not said else said in profile.notes[0]
    assert (profile.reserved_peak_bytes is None) == (hardware.device_type != "cuda")


# ------------------------------------------------------------------------------------------- a cache of keys and values

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_profile_says_what_the_cache_takes(use_cache):
    with torch.device("meta"):
        config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, use_cache=use_cache)
        model = transformers.GPT2LMHeadModel(config)
        batch = dict.fromkeys(("input_ids", "labels"), torch.zeros(4, 16, dtype=torch.long))
    notes = [note for note in ms.profile(model, batch, hardware="t4").notes if "use_cache" in note]
    # Keys and values of two layers, 4 x 16 tokens of 32 numbers of 4 bytes.
    assert notes == ["the output keeps 32.0 KiB of keys and values, which training does not read: "
                     "model.config.use_cache = False frees them"][: int(use_cache)]  # fmt: skip
