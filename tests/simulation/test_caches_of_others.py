"""What a step caches on its first use, wherever: after a simulation it has what a process has that never simulated."""

import functools
import sys
import threading
import types
import weakref

import pytest
import torch
from torch import nn

import memscale as ms


def table(n, device=None):
    """What does not depend on the input: larger than what a simulation computes by the way."""
    return torch.full((n, n), float("-inf"), device=device).triu(1) + torch.arange(n) / n


class Holder:
    mask = None


def cached_by_dict(holder, key, make):
    if key not in holder:
        holder[key] = make()
    return holder[key]


def unbounded():
    cached = functools.cache(table)
    return lambda n, x: cached(n)


def views_of_one():
    cache = {}

    def get(n, x):
        whole = cached_by_dict(cache, n, lambda: table(n + 1))
        return cached_by_dict(cache, (n, "view"), lambda: whole[1:, 1:])

    return get


def hundreds_of_views():
    cache = {}

    def get(n, x):
        whole = cached_by_dict(cache, n, lambda: table(n))
        views = [cached_by_dict(cache, (n, at), lambda: whole.view(n, n)) for at in range(600)]
        return views[-1]

    return get


def attribute_of_function():
    def get(n, x):
        if not hasattr(get, "mask"):
            get.mask = table(n)
        return table(n) if get.mask is None else get.mask

    return get


def attribute_of_object():
    holder = types.SimpleNamespace(inner=Holder())

    def get(n, x):
        if holder.inner.mask is None:
            holder.inner.mask = table(n)
        return holder.inner.mask

    return get


def dict_of_another_file():
    other = types.ModuleType("other_file")
    exec("CACHE = {}\nSEEN = []", vars(other))
    sys.modules["other_file"] = other

    def get(n, x):
        cache = sys.modules["other_file"].CACHE
        return cached_by_dict(cache, n, lambda: table(n))

    return get


def weak_values():
    cache, kept = weakref.WeakValueDictionary(), []

    def make(n):
        kept.append(table(n))
        return kept[-1]

    return lambda n, x: cached_by_dict(cache, n, lambda: make(n))


def thread_local():
    local = threading.local()

    def get(n, x):
        if not hasattr(local, "masks"):
            local.masks = {}
        return cached_by_dict(local.masks, n, lambda: table(n))

    return get


def hidden_in_a_cell():
    def make():
        mask = None

        def get(n, x):
            nonlocal mask
            if mask is None:
                mask = table(n)
            return mask

        return get

    hidden = [make()]
    return lambda n, x: hidden[0](n, x)


def of_a_batch():
    cache = {}
    return lambda n, x: cached_by_dict(cache, n, lambda: x.detach().mean() * torch.ones(n, n))


def of_a_weight():
    cache, weight = {}, nn.Parameter(torch.full((300,), 0.5))
    get = lambda n, x: cached_by_dict(cache, n, lambda: (weight.detach()[None, :n] * torch.ones(n, n)).exp())  # noqa: E731
    get.weight = weight
    return get


def drawn():
    cache = {}
    return lambda n, x: cached_by_dict(cache, n, lambda: torch.rand(n, n))


KINDS = [
    unbounded, views_of_one, hundreds_of_views, attribute_of_function, attribute_of_object, dict_of_another_file,
    weak_values, thread_local, hidden_in_a_cell, of_a_batch, of_a_weight, drawn,
]  # fmt: skip


class Attends(nn.Module):
    def __init__(self, n, get):
        super().__init__()
        self.layer, self.n = nn.Linear(n, n), n
        # Where nothing that the code names leads to the cache.
        self.find = types.MappingProxyType({"get": get})

    def forward(self, x):
        y = self.layer(x)
        bias = self.find["get"](self.n, x)
        return (y @ y.mT + bias[: y.shape[1], : y.shape[1]]).softmax(-1) @ y


class OfEachKind(nn.Module):
    def __init__(self, n=160):
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(Attends(n, get), Attends(n, get)) for get in (kind() for kind in KINDS)
        )

    def forward(self, x):
        return torch.stack([part(x) for part in self.parts])


def made():
    torch.manual_seed(11)
    return OfEachKind(), torch.randn(2, 160, 160)


WAYS = {
    "profile": lambda model, x: ms.profile(model, x, loss=mean),
    "card": lambda model, x: ms.profile(model, x, loss=mean, hardware="h100"),
    "wrap": lambda model, x: ms.wrap(model, sample_input=x),
    "plan": lambda model, x: ms.plan(model, x, loss=mean, budget="2GiB", optimizer=None, hardware="h100"),
}


def mean(y, _):
    return y.nan_to_num().mean()


# A plan for a card simulates what the others do.
@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.deep] * (way != "plan")) for way in WAYS])
def test_a_model_gives_what_it_gives_in_a_process_that_did_not_simulate(way, monkeypatch):
    monkeypatch.setenv("MEMSCALE_CACHE", "")
    model, x = made()
    torch.manual_seed(5)
    expected = model(x)
    assert torch.isfinite(expected).all()
    model, x = made()
    wrapped = WAYS[way](model, x)
    torch.manual_seed(5)
    found = model(x)
    assert [kind.__name__ for kind, *both in zip(KINDS, found, expected, strict=True) if not torch.equal(*both)] == []
    if way == "wrap":
        torch.manual_seed(5)
        assert torch.allclose(wrapped(x), expected, atol=1e-6)


STATS = []
TRACKER = {}


def track(module, inputs, output):
    STATS.append(float(output.shape[0]))
    TRACKER.setdefault("calls", []).append(output.detach().mean())


def test_what_a_hook_writes_to_its_file_does_not_stay():
    STATS.clear(), TRACKER.clear()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[1].register_forward_hook(track)
    for hardware in (None, "h100"):
        ms.profile(model, torch.ones(2, 8), loss=mean, hardware=hardware)
        assert (STATS, TRACKER) == ([], {})
    model(torch.ones(2, 8))
    assert STATS == [2.0]
    assert list(TRACKER) == ["calls"]


def test_what_cannot_be_taken_out_is_refused_by_name():
    class Closed:
        """Has tensors where Python sees them, and lets go of none."""

        __slots__ = ("_tensor",)

        def __setattr__(self, name, value):
            if getattr(self, "_tensor", None) is None:
                object.__setattr__(self, name, value)

    closed, weight = Closed(), nn.Linear(8, 8)
    closed._tensor = None

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.find = weight, types.MappingProxyType({"closed": closed})

        def forward(self, x):
            y = self.layer(x)
            self.find["closed"]._tensor = y.detach()
            return y

    with pytest.raises(ms.ConfigError, match="which has no values, in a Closed"):
        ms.profile(Keeps(), torch.ones(2, 8), loss=mean)
