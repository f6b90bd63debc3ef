"""Steps that are put together of the parts of others hold what they hold when they are simulated."""

import itertools

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.simulation import Given, MemoryProfiler, Strand, reserved_bytes, spliced
from tests.support.models import Block

COUNT, WIDTH = 6, 1024
LARGEST = 4 * 4096 * 4 * WIDTH  # a block that finds room in what is cached, or does not
PATHS = [str(at) for at in range(COUNT)]


def simulated(rules, *, updates=True, steps=True):
    with torch.device("meta"):
        model, batch = nn.Sequential(*[Block(WIDTH, norm=True) for _ in range(COUNT)]), torch.zeros(4096, WIDTH)
    step = {"loss": lambda y, _: y.square().mean(), "hardware": "h100"}
    optimizer = torch.optim.AdamW(model.parameters()) if steps else None
    return MemoryProfiler(model, optimizer, plan=rules, keeps_output=False, **step).simulated(batch, updates=updates)


def strand(rules, **options):
    return Strand(simulated(rules, **options).ledger, PATHS)


@pytest.fixture(scope="module")
def plain():
    return strand(None)


def reserved(ledger):
    return reserved_bytes(ledger, ms.Hardware.named("h100"))


def most_live(ledger):
    return max(
        itertools.accumulate(
            ledger.records[abs(event) - 1].nbytes * (1 if event > 0 else -1) for event in ledger.events
        )
    )


@pytest.mark.parametrize("rules", [None, {"3": ms.checkpoint()}, dict.fromkeys(("4", "5"), ms.offload(what="params"))])
def test_a_step_of_its_own_parts_is_itself(rules, plain):
    step = simulated(rules)
    ledger = spliced(Strand(step.ledger, PATHS), {}, None, plain)
    assert reserved(ledger) == step.profile().reserved_peak_bytes


@pytest.mark.parametrize("chosen", [(3,), (0, 1, 2), (0, 2, 4, 5)])
def test_what_a_part_did_in_another_step_is_what_others_like_it_do(chosen, plain):
    tried = strand({"2": ms.checkpoint()}, updates=False)
    ledger = spliced(plain, {part: Given(tried, 2) for part in chosen}, None, plain)
    truth = simulated({str(part): ms.checkpoint() for part in chosen}).profile()
    assert most_live(ledger) == pytest.approx(truth.peak_bytes, rel=0.01)
    assert most_live(ledger) < 0.97 * most_live(spliced(plain, {}, None, plain))
    assert abs(reserved(ledger) - truth.reserved_peak_bytes) <= LARGEST


def test_where_nothing_steps_the_first_step_leaves_no_gradients():
    plain, tried = strand(None, steps=False), strand({"2": ms.checkpoint()}, updates=False, steps=False)
    ledger = spliced(plain, {0: Given(tried, 2), 3: Given(tried, 2)}, None, plain)
    truth = simulated(dict.fromkeys("03", ms.checkpoint()), steps=False).profile()
    assert most_live(ledger) == pytest.approx(truth.peak_bytes, rel=0.01)  # 1.06 of it with them


def test_what_streams_has_no_parameters_states_and_gradients_on_the_device(plain):
    streams = ms.compose(ms.offload(what="params"), ms.checkpoint())
    base = strand({"2": ms.checkpoint(), "3": ms.checkpoint(), "4": streams, "5": streams})
    given = {1: Given(base, 3), 2: Given(base, 4, moves=True), 5: Given(plain, 5)}
    ledger = spliced(base, given, None, plain)
    truth = simulated({"1": ms.checkpoint(), "2": streams, "3": ms.checkpoint(), "4": streams}).profile()
    assert most_live(ledger) == pytest.approx(truth.peak_bytes, rel=0.03)
    assert abs(reserved(ledger) - truth.reserved_peak_bytes) <= LARGEST


class Tied(nn.Module):
    """A head that shares its weight with an embedding, which is a part; the head is none."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16384, WIDTH), nn.Linear(WIDTH, 16384, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def test_a_weight_that_two_parts_share_has_one_gradient():
    with torch.device("meta"):
        model, tokens = Tied(), torch.zeros(256, dtype=torch.long)
    step = {"loss": nn.functional.cross_entropy, "hardware": "h100"}
    optimizer = torch.optim.AdamW(model.parameters())

    def simulated(rules, **options):
        return MemoryProfiler(model, optimizer, plan=rules, keeps_output=False, **step).simulated(tokens, **options)

    rules = {"head": ms.tile(chunks=4)}
    plain, tried = (Strand(each.ledger, ["embed"]) for each in (simulated(None), simulated(rules, updates=False)))
    ledger, truth = spliced(plain, {}, tried, plain), simulated(rules).profile()
    assert sum(each.category == "gradient" for each in ledger.records) == 2  # in the first step and in the last
    assert most_live(ledger) == pytest.approx(truth.peak_bytes, rel=0.1)  # 1.45 of it with two in each
