"""State slots: where a region's dependencies are stored, read, compared and written back."""

import copy
from collections import Counter, OrderedDict, UserList, defaultdict, deque, namedtuple

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.regions.captures import Captures
from memscale.regions.state_slots import holds, read, write
from tests.support.checks import bits


def swap(module):
    del module.mask
    module.other = 1


@pytest.mark.parametrize(
    "change",
    [
        swap,
        lambda module: module.table.update({"b": module.table.pop("a")}),
        lambda module: module.table.update({"a": module.table.pop("a")}),
        lambda module: module.table.update(a=3),
        lambda module: module.items.append(1),
    ],
    ids=["another attribute for None", "another key", "another order", "another value", "another item"],
)
def test_a_change_that_leaves_as_many_entries_is_seen_and_put_back(change):
    module = nn.Linear(2, 2)
    module.mask, module.table, module.items = None, {"a": 1, "b": 2}, [0]
    captures = Captures(module)
    attributes = list(module.__dict__)
    assert all(map(holds, captures.slots, captures.contents))
    change(module)
    assert not all(map(holds, captures.slots, captures.contents))
    captures.restore()
    assert all(map(holds, captures.slots, captures.contents))
    assert sorted(module.__dict__) == sorted(attributes)
    assert list(module.table.items()) == [("a", 1), ("b", 2)]


def test_an_attribute_that_took_the_place_of_none_is_not_there_in_the_recompute():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = None

        def forward(self, x):
            return x.sin() * (2 if hasattr(self, "mask") else 3)

    def step(how):
        module, x = Masked(), torch.ones(2, requires_grad=True)
        y = how(module)(x).sum()
        swap(module)
        y.backward()
        return x.grad

    assert torch.equal(step(ms.checkpoint()), step(ms.identity))


loss = None  # as a script names its last one; its module has an attribute of that name


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.Linear(2, 2)

    def forward(self, x):
        return self.loss(x)


def test_a_global_that_an_attribute_is_called_like_is_none_of_the_regions(monkeypatch):
    scale = torch.ones(2)
    monkeypatch.setitem(globals(), "loss", scale)
    module = Scored()
    for region in (module, lambda x: module.loss(x)):
        assert not any(tensor is scale for _, _, tensor in Captures(region).tensors)
    assert any(tensor is scale for _, _, tensor in Captures(lambda x: [each * loss for each in x]).tensors)


class Named(dict):
    pass


class Frugal(dict):
    """Forbids what Hugging Face's outputs forbid."""

    def update(self, *args, **kwargs):
        raise RuntimeError


Pair = namedtuple("Pair", "steps name")


COUNTED = {
    "Counter": (Counter(), lambda c: c.update(n=1) or c["n"]),
    "OrderedDict": (OrderedDict(n=0), lambda c: c.update(n=c["n"] + 1) or c["n"]),
    "defaultdict": (defaultdict(list), lambda c: c["n"].append(1) or len(c["n"])),
    "subclass": (Named(n=0), lambda c: c.update(n=c["n"] + 1) or c["n"]),
    "attribute of one": (Named(), lambda c: setattr(c, "n", getattr(c, "n", 0) + 1) or c.n),
    "without update": (Frugal(n=0), lambda c: c.__setitem__("n", c["n"] + 1) or c["n"]),
    "UserList": (UserList([1]), lambda c: c.append(1) or sum(c)),
    "bounded deque": (deque(maxlen=2), lambda c: c.append(sum(c) + 1) or sum(c)),
    "named tuple": (Pair([0], "pair"), lambda c: c.steps.append(1) or len(c.steps)),
}


@pytest.mark.parametrize(("container", "count"), COUNTED.values(), ids=COUNTED)
def test_what_counts_in_any_container_counts_once(container, count):
    class Counting(nn.Linear):
        def forward(self, x):
            return torch.sin(super().forward(x) * count(self.counted))

    def steps(how):
        torch.manual_seed(0)
        model, found = Counting(2, 2), []
        model.counted = copy.deepcopy(container)
        fit = ms.transform(model, {"": how})
        for _ in range(3):
            x = torch.ones(1, 2, requires_grad=True)
            fit(x).sum().backward()
            found += [x.grad]
        return bits(found), fit.counted, getattr(fit.counted, "n", None), getattr(fit.counted, "maxlen", None)

    assert steps(ms.checkpoint()) == steps(ms.identity)


def test_children_exchanged_before_backward_are_not_those_of_the_recompute():
    def step(how):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        parameters = list(model.parameters())
        y = how(model)(torch.ones(1, 2)).sum()
        model[1], model[2] = nn.ReLU(), nn.Linear(2, 2)
        model.append(nn.Tanh())
        y.backward()
        return bits([parameter.grad for parameter in parameters]), [type(child) for child in model]

    assert step(ms.checkpoint()) == step(ms.identity)


class MakesParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            self.scale = nn.Parameter(torch.rand(2))
        return torch.sin(nn.functional.dropout(x, 0.5) * self.scale)


class MakesBuffer(nn.Module):
    def forward(self, x):
        if hasattr(self, "table"):
            self.table += 1
        else:
            self.register_buffer("table", torch.rand(2))
        return torch.sin(nn.functional.dropout(x, 0.5) * self.table.clone())


class MakesModule(nn.Module):
    def forward(self, x):
        if not hasattr(self, "linear"):
            self.linear = nn.Linear(2, 2)
        return torch.sin(nn.functional.dropout(self.linear(x), 0.5))


@pytest.mark.parametrize("kind", [MakesParameter, MakesBuffer, MakesModule])
def test_what_a_module_registers_on_its_first_use_is_registered_once(kind):
    """The recompute makes it again, for its random numbers; the module keeps the one that the forward made."""

    def steps(how):
        torch.manual_seed(0)
        model = kind()
        region, found = how(model), []
        for _ in range(2):
            x = torch.ones(4, 2, requires_grad=True)
            y = region(x).sum()
            made = [*model.parameters(), *model.buffers()]
            y.backward()
            assert all(a is b for a, b in zip(made, [*model.parameters(), *model.buffers()], strict=True))
            found += [x.grad, *[p.grad for p in model.parameters()], *map(torch.clone, made)]
        return bits(found)

    assert steps(ms.checkpoint()) == steps(ms.identity)


def test_a_sparse_buffer_is_no_obstacle():
    class Graph(nn.Linear):
        def forward(self, x):
            return torch.sparse.mm(self.edges, super().forward(x)).tanh()

    def step(how):
        torch.manual_seed(0)
        model = Graph(2, 2)
        model.register_buffer("edges", torch.eye(3).to_sparse())
        how(model)(torch.ones(3, 2)).sum().backward()
        return bits([p.grad for p in model.parameters()])

    assert step(ms.checkpoint()) == step(ms.identity)


def test_a_buffer_that_takes_its_shape_from_the_first_batch():
    """As the observers of quantisation-aware training do."""

    class Observed(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            self.largest.resize_(y.shape[1]).copy_(y.detach().amax(0) + (self.largest.sum() if self.seen else 0))
            self.seen = True
            return torch.sin(y * self.largest.clone())

    def steps(how):
        torch.manual_seed(0)
        model, found = Observed(2, 2), []
        model.seen = False
        model.register_buffer("largest", torch.empty(0))
        region = how(model)
        for _ in range(3):
            region(torch.ones(3, 2)).sum().backward()
            found += [*[p.grad.clone() for p in model.parameters()], model.largest.clone()]
        return bits(found)

    assert steps(ms.checkpoint()) == steps(ms.identity)


def test_what_a_hook_of_all_modules_collects_is_collected_once():
    def step(how):
        model, seen = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), []
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
        try:
            how(model)(torch.ones(1, 2)).sum().backward()
        finally:
            handle.remove()
        return seen

    assert step(ms.checkpoint()) == step(ms.identity)


@pytest.mark.parametrize("base", [OrderedDict, dict])
def test_a_dictionary_that_makes_what_it_is_asked_for_keeps_its_classes(base):
    class Making(base):
        def __getitem__(self, key):
            return super().__getitem__(key)()

    activations = Making(tanh=nn.Tanh, relu=nn.ReLU)
    content = read(activations)
    assert content == {"tanh": nn.Tanh, "relu": nn.ReLU}
    assert holds(activations, content)
    write(activations, content)
    assert list(activations.values()) == [nn.Tanh, nn.ReLU]

    class Chooses(nn.Linear):
        def forward(self, x):
            return activations["tanh"](super().forward(x))

    ms.profile(Chooses(2, 2), torch.ones(2), loss=lambda y, _: y.sum())
    assert list(activations.values()) == [nn.Tanh, nn.ReLU]


def _another_table(module):
    module._buffers = {"scale": torch.full((4,), 2.0)}


def _another_order(module):
    module._modules["first"] = module._modules.pop("first")


def _one_attribute_for_another(module):
    del module.factor
    module.other = 2.0


@pytest.mark.parametrize("change", [_another_table, _another_order, _one_attribute_for_another])
def test_sealed_captures_see_a_change_that_leaves_as_many_entries(change):
    module = nn.Module()
    module.first, module.second, module.factor = nn.Linear(4, 4), nn.Linear(4, 4), 1.0
    module.register_buffer("scale", torch.ones(4))
    captures = Captures(module, follows=True).seal()
    assert captures.is_current()
    change(module)
    assert not captures.is_current()
