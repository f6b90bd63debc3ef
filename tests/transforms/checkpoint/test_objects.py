"""Objects among the arguments of a region: what the region does to them happens once, and gradients are right."""

import array
import collections
import types

import numpy as np
import pytest
import torch
from torch import nn

import memscale as ms
from memscale import checkpoint, offload, policies
from memscale.regions import argument_spec
from tests.support.checks import bits
from tests.support.coverings import in_turn
from tests.support.models import numbers

WIDTH = 4


class Cache:
    """What a block leaves for later ones: it grows, it is replaced, and it counts."""

    def __init__(self):
        self.entries = []
        self.total = torch.zeros(3, WIDTH)
        self.calls = 0


class Slotted:
    __slots__ = ("__weakref__", "calls", "entries", "total")
    __init__ = Cache.__init__


class Entry:
    def __init__(self, value):
        self.value = value


class Appends(nn.Linear):
    """Reads what earlier blocks left, and leaves its own."""

    def forward(self, x, cache, flag=None):
        hidden = super().forward(x).tanh()
        for earlier in cache.entries:
            hidden = hidden * earlier.sigmoid()
        cache.entries.append(hidden)
        cache.calls += 1
        return hidden.sin() * len(cache.entries) * cache.calls


class Replaces(nn.Linear):
    def forward(self, x, cache, flag=None):
        cache.total = cache.total.exp() * super().forward(x).tanh()
        cache.fresh = cache.total.cos()  # an attribute that was not there
        return (cache.total + cache.fresh).sin()


class Nests(nn.Linear):
    """Objects in a dictionary in a list of the object, one of them in a cycle; one list in two places."""

    def forward(self, x, cache, flag=None):
        if not cache.entries:
            first = Entry(cache.total + 1)
            first.itself, first.also = first, cache.entries
            cache.entries.append({"first": (first, 1)})
        first, count = cache.entries[0]["first"]
        first.value = super().forward(x).tanh() * first.value.exp()
        first.also.append(count)
        assert first.itself is first
        return (first.value * len(cache.entries)).sin() * len(first.also)


class Resets(nn.Linear):
    """Removes what is there."""

    def forward(self, x, cache, flag=None):
        hidden = super().forward(x).tanh() * (2 if hasattr(cache, "seen") else 1)
        if hasattr(cache, "seen"):
            del cache.seen
        else:
            cache.seen = hidden
        return hidden.sin().exp()


class InPlace(nn.Linear):
    """Writes into a tensor of the cache, as a cache of fixed size does."""

    def forward(self, x, cache, flag=None):
        with torch.no_grad():
            cache.total.add_(1)
        return (super().forward(x) * cache.total.clone()).sin().exp()


class Blocks(nn.Module):
    def __init__(self, block, wrapping=lambda cache: cache, kind=Cache):
        super().__init__()
        self.blocks = nn.ModuleList(block(WIDTH, WIDTH) for _ in range(3))
        self.wrapping, self.kind = wrapping, kind

    def forward(self, x):
        cache = self.kind()
        for block in self.blocks:
            given = self.wrapping(cache)
            x = block(x, given) if given is cache else Unwrap.apply(block, x, given)
        left = [entry for entry in cache.entries if isinstance(entry, torch.Tensor)]
        return x + sum(left) + cache.total, cache.calls, len(cache.entries)


class Unwrap:
    """A block that takes the cache by keyword, in a tuple in a dictionary."""

    @staticmethod
    def apply(block, x, given):
        return block(x, **given)


class ByKeyword(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.inner = Appends(*sizes)

    def forward(self, x, *, nested):
        return self.inner(x, nested[1]["cache"])


BLOCKS = {
    "appends": lambda: Blocks(Appends),
    "slots": lambda: Blocks(Appends, kind=Slotted),
    "replaces": lambda: Blocks(Replaces),
    "nests": lambda: Blocks(Nests),
    "resets": lambda: Blocks(Resets),
    "by keyword": lambda: Blocks(ByKeyword, lambda cache: {"nested": (1, {"cache": cache})}),
    "in a namedtuple": lambda: Blocks(ByKeyword, lambda cache: {"nested": Pair(1, {"cache": cache})}),
}
Pair = collections.namedtuple("Pair", ("number", "mapping"))
PLANS = {
    "each block": {"blocks.*": checkpoint()},
    "nested": {"": checkpoint(), "blocks.*": checkpoint()},
    "twice": {"blocks.*": ms.compose(checkpoint(), checkpoint())},
    "dots": {"blocks.*": checkpoint(policy=policies.dots_saveable)},
    "offload inside": {"blocks.*": ms.compose(checkpoint(), offload(min_bytes=0))},
    "offload around": {"blocks.*": ms.compose(offload(min_bytes=0), checkpoint())},
}


def made(block):
    torch.manual_seed(0)
    return BLOCKS[block]()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("block", BLOCKS)
def test_regions_that_change_objects_train_to_the_same_bits(block, plan):
    model, x = made(block), numbers(3, WIDTH)
    fit = ms.transform(model, plan)
    for _ in range(2):  # the first call of a region learns what it does
        expected, actual = model(x), fit(x)
        assert bits(actual) == bits(expected)
        parameters = [x, *model.parameters()]
        wanted = torch.autograd.grad(expected[0].sum(), parameters, retain_graph=True)
        for keep in (True, False):
            assert bits(torch.autograd.grad(actual[0].sum(), parameters, retain_graph=keep)) == bits(wanted)


@pytest.mark.parametrize("plan", ["each block", "nested", "dots"])
@pytest.mark.parametrize("block", BLOCKS)
def test_regions_that_change_objects_have_second_derivatives(block, plan):
    model, x = made(block).double(), numbers(3, WIDTH, dtype=torch.float64)
    fit = ms.transform(model, PLANS[plan])

    def second(f):
        (first,) = torch.autograd.grad(f(x)[0].sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *model.parameters()], allow_unused=True)

    torch.testing.assert_close(second(fit), second(model), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # PyTorch's own, when jvp is first used
@pytest.mark.parametrize(("block", "plan"), in_turn(BLOCKS, ["each block", "nested", "twice", "dots"]))
def test_regions_that_change_objects_run_under_torch_func(block, plan):
    model, x = made(block).double(), numbers(5, 3, WIDTH, grad=False, dtype=torch.float64)
    fit = ms.transform(model, PLANS[plan])

    def functions(f):
        fn, state = ms.functional(f)
        loss = lambda state, x: fn(state, x)[0].sum()  # noqa: E731
        yield fn(state, x[0])
        yield torch.func.grad(loss, argnums=(0, 1))(state, x[0])
        yield torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(state, x)
        yield torch.func.grad(lambda x: torch.func.grad(loss, argnums=1)(state, x).square().sum())(x[0])
        yield torch.func.jvp(lambda x: loss(state, x), (x[0],), (x[1],))

    torch.testing.assert_close([*functions(fit)], [*functions(model)], rtol=1e-12, atol=1e-12)


def test_a_tensor_changed_in_place_by_each_block():
    torch.manual_seed(0)
    model, x = Blocks(InPlace), numbers(3, WIDTH)
    fit = ms.transform(model, {"blocks.*": checkpoint()})
    for _ in range(2):
        found = [torch.autograd.grad(f(x)[0].sum(), [x, *model.parameters()]) for f in (model, fit)]
        assert bits(found[1]) == bits(found[0])
    fn, state = ms.functional(fit)
    with pytest.raises(ms.TransformError, match=r"changes an input of shape \[3, 4\] \(held by a Cache\) in place"):
        torch.func.grad(lambda state: fn(state, x)[0].sum())(state)


@pytest.mark.parametrize("reads", [True, False])
def test_a_tensor_changed_in_place_after_the_region(reads):
    cache, x = Cache(), numbers(3, WIDTH)
    loss = checkpoint()(lambda x, cache: (x.sin() + cache.total).exp() if reads else x.sin().exp())(x, cache).sum()
    cache.total.add_(1)
    if not reads:  # the next block may have written into a cache that all are given
        assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(x.sin().exp().sum(), x)[0])
        return
    with pytest.raises(
        ms.CorrectnessError, match=r"\(held by a Cache\) of a checkpointed region, float32\[3, 4\], is at"
    ):
        loss.backward()


def test_objects_are_after_backward_what_they_were_before():
    cache, x = Cache(), numbers(3, WIDTH)
    entries = cache.entries
    block = Appends(WIDTH, WIDTH)
    loss = checkpoint()(block)(x, cache).sum()
    left = cache.entries[0]
    cache.later, cache.calls = "later", 7
    loss.backward()
    assert cache.entries is entries
    assert cache.entries == [left]
    assert vars(cache) == {"entries": entries, "total": cache.total, "calls": 7, "later": "later"}


def test_a_rerun_that_fails_leaves_the_object_as_it_is():
    cache, x = Cache(), numbers(3, WIDTH)

    def fn(x, cache):
        cache.calls += 1
        if torch._C._current_graph_task_id() != -1:
            raise ZeroDivisionError
        return x.sin().exp()

    loss = checkpoint()(fn)(x, cache).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert cache.calls == 1


def test_a_module_among_the_arguments_is_part_of_the_region():
    dropout, x = nn.Dropout(0.5), numbers(64)

    def gradient(transform):
        torch.manual_seed(0)
        y = transform(lambda x, holder: holder.layer(x.sin()).exp())(x, types.SimpleNamespace(layer=dropout.train()))
        dropout.eval()
        return torch.autograd.grad(y.sum(), x)

    assert bits(gradient(checkpoint())) == bits(gradient(ms.identity))


def test_one_list_in_a_closure_and_in_an_object():
    shared, x = [1.0], numbers(4)
    cache = types.SimpleNamespace(shared=shared)

    def fn(x, cache):
        cache.shared.append(2.0)
        return (x * sum(shared)).sin()

    loss = checkpoint()(fn)(x, cache).sum()
    shared.append(100.0)
    (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, (x * 3.0).cos() * 3.0)
    assert shared == [1.0, 2.0, 100.0]


def test_an_object_that_leads_too_far_is_refused():
    chain = None
    for _ in range(argument_spec._MOST_OBJECTS + 1):  # longer than Python's recursion would reach
        chain = Entry(chain)
    with pytest.raises(ms.TransformError, match="by way of a Entry, to more than 4096 objects"):
        checkpoint()(lambda x, chain: x.sin())(numbers(4), chain)


def test_results_of_operators_with_several_outputs_are_given_again():
    x = numbers(3, 4)
    largest = torch.max(x, 0)
    output = checkpoint()(lambda found: (found.values.sin() * found[0]).exp())(largest)
    (gradient,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
    (wanted,) = torch.autograd.grad((largest.values.sin() * largest.values).exp().sum(), x)
    assert torch.equal(gradient, wanted)


def test_tile_refuses_what_every_piece_would_change():
    model = ms.transform(Blocks(Appends), {"blocks.*": ms.tile(chunks=3)})
    with pytest.raises(ms.TransformError, match=r"changes one of its arguments, a Cache, and every piece .*use_cache"):
        model(numbers(3, WIDTH))


@pytest.mark.parametrize("given", [lambda a: a, lambda a: [a], lambda a: {"a": (a, a)}], ids=["array", "list", "twice"])
def test_an_array_of_numpy_that_changes_in_the_region_and_after_it(given):
    def first(thing):
        while not isinstance(thing, np.ndarray):
            thing = next(iter(thing.values() if isinstance(thing, dict) else thing))
        return thing

    def region(x, thing):
        first(thing)[0] += 1
        return torch.sin(x * float(first(thing)[0]))

    def step(how):
        array, x = np.ones(2), torch.ones(2, requires_grad=True)
        y = how(region)(x, given(array)).sum()
        array[0] += 5
        y.backward()
        return x.grad.tolist(), array.tolist()

    assert step(ms.checkpoint()) == step(ms.identity)


def test_a_callable_object_has_the_attributes_of_the_forward_also_where_its_call_is_inherited():
    class Scaled:
        def __call__(self, x):
            self.calls += 1
            return torch.sin(x * self.calls)

    class Counting(Scaled):
        def __init__(self):
            self.calls = 0

    def step(how):
        fn, x = Counting(), torch.ones(2, requires_grad=True)
        how(fn)(x).sum().backward()
        return x.grad.tolist(), fn.calls

    assert step(ms.checkpoint()) == step(ms.identity)


def test_what_a_forward_takes_from_the_function_that_made_its_class():
    def trained(how):
        calls, found = [], []

        class Counts(nn.Linear):
            def forward(self, x):
                calls.append(1)
                return super().forward(x).tanh() * len(calls)

        torch.manual_seed(0)
        region = how(Counts(2, 2))
        for _ in range(2):
            x = torch.ones(3, 2, requires_grad=True)
            region(x).sum().backward()
            found.append(x.grad)
        return bits([found, calls])

    assert trained(ms.checkpoint()) == trained(ms.identity)


def _times(x, seen=[]):  # noqa: B006
    seen.append(1)
    return x * len(seen)


class CountsInDefaults(nn.Linear):
    def forward(self, x, calls=[]):  # noqa: B006
        calls.append(1)
        return self.tabled(_times(super().forward(x))).tanh() * len(calls)

    def tabled(self, x, *, table={}):  # noqa: B006
        table[len(table)] = 1
        return x * len(table)


def test_defaults_of_a_forward_and_of_what_it_calls_change_once():
    def trained(how):
        state = (
            *CountsInDefaults.forward.__defaults__,
            CountsInDefaults.tabled.__kwdefaults__["table"],
            *_times.__defaults__,
        )
        for each in state:
            each.clear()
        torch.manual_seed(0)
        region, found = how(CountsInDefaults(2, 2)), []
        for _ in range(2):
            x = torch.ones(3, 2, requires_grad=True)
            region(x).sum().backward()
            found.append(x.grad)
        return bits([found, list(map(len, state))])

    assert trained(ms.checkpoint()) == trained(ms.identity)


@pytest.mark.parametrize("make", [bytearray, lambda n: array.array("d", [0.0] * n)], ids=["bytearray", "array"])
def test_arrays_of_python_among_the_arguments_are_written_to_once(make):
    def region(x, counts):
        counts[0] += 1
        return torch.sin(x * counts[0])

    x, counts = torch.ones(1, requires_grad=True), make(2)
    ms.checkpoint()(region)(x, counts).backward()
    assert counts[0] == 1
    assert torch.equal(x.grad, torch.ones(1).cos())


class MeanInArrays:
    """A running mean as reinforcement learning keeps it, in an array of NumPy."""

    def __init__(self):
        self.mean = np.zeros(2)

    def update(self, x):
        self.mean += 0.5 * (x.detach().numpy().mean(0) - self.mean)
        return self.mean.item(0)


class Arrays(nn.Module):
    def __init__(self):
        super().__init__()
        self.counts, self.table, self.data, self.total = np.zeros(3), [np.ones(2)], bytearray(2), np.zeros(())
        self.history, self.mean = array.array("d"), MeanInArrays()
        self.constant = np.ones(2)
        self.constant.flags.writeable = False

    def forward(self, x, given):
        self.counts[1:] += 1
        self.table[0] *= 1.5
        self.data[0] += 2
        self.total += self.counts.sum()
        self.history.append(len(self.history) + 0.5)
        given.mean[0] += 1
        factors = (self.counts[1], self.table[0][0], self.data[0], self.total.item(), sum(self.history), given.mean[0])
        for factor in (*factors, self.mean.update(x), self.constant[0]):
            x = torch.sin(x * float(factor))
        return x


@pytest.mark.parametrize("how", [ms.checkpoint(), ms.compose(ms.checkpoint(), ms.checkpoint())], ids=["once", "nested"])
def test_small_arrays_of_modules_and_objects_are_written_to_once(how):
    def trained(how):
        module, given, found = Arrays(), MeanInArrays(), []
        region = how(module)
        for value in (0.3, 0.7, 0.9):
            x = torch.full((3, 2), value, requires_grad=True)
            y = region(x, given)
            module.total += 1  # after the forward: the recompute sees the old value
            y.sum().backward()
            arrays = (module.counts, module.table[0], module.total, module.mean.mean, given.mean)
            found += [x.grad, *map(torch.from_numpy, map(np.copy, arrays)), list(module.data), list(module.history)]
        return bits(found)

    assert trained(how) == trained(ms.identity)


def test_an_array_behind_a_closure_that_changes_before_backward_has_its_old_value_in_the_recompute():
    scale = np.ones(())
    x = torch.ones(1, requires_grad=True)
    y = ms.checkpoint()(lambda x: torch.sin(scale.item() * x))(x)
    scale.fill(2)
    y.backward()
    assert torch.equal(x.grad, torch.ones(1).cos())
    assert scale == 2


def test_a_tensor_that_the_first_call_makes_may_be_changed_in_the_next_ones():
    class Running(nn.Module):
        mean = None

        def forward(self, x):
            if self.mean is None:
                self.mean = x.detach().mean(0)
            else:
                self.mean.lerp_(x.detach().mean(0), 0.5)
            return torch.sin(x * self.mean)

    def trained(how):
        region, found = how(Running()), []
        for factor in range(1, 5):
            x = torch.full((3, 2), float(factor), requires_grad=True)
            region(x).sum().backward()
            found.append(x.grad)
        return bits(found)

    assert trained(ms.checkpoint()) == trained(ms.identity)


def test_a_backward_of_its_own_behind_what_an_object_holds_is_refused():
    """A recompute would add to the gradients of `w` a second time. Nothing in that backward is saved by the region."""

    def region(x, held):
        held.y.sum().backward(retain_graph=True)
        return torch.sin(x)

    w, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    out = ms.checkpoint()(region)(x, types.SimpleNamespace(y=w * 2))
    with pytest.raises(ms.CorrectnessError, match="a backward that goes on behind its arguments"):
        out.sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 2.0))


def test_identity_is_kept_while_an_object_lives():
    unset, x = Entry(None), numbers(4)
    fn = checkpoint()(lambda x, flag: x.sin() if flag is unset else x.exp())
    assert torch.equal(torch.autograd.grad(fn(x, unset).sum(), x)[0], x.cos())


def test_tile_takes_objects_that_it_only_reads():
    cache, x = Cache(), numbers(3, WIDTH)
    fn = lambda x, cache: x.sin() * (cache.calls + 2)  # noqa: E731
    assert bits(ms.tile(chunks=3)(fn)(x, cache)) == bits(fn(x, cache))
