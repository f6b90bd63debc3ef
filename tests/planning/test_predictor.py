"""`OOMPredictor`: what fits by prediction fits by the allocator, and one more does not."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import memscale as ms
from memscale.core import wrapped
from memscale.core.units import budget_bytes
from memscale.planning.prediction.largest import largest_fitting
from memscale.planning.prediction.prediction import OOMPrediction, OOMRisk
from memscale.planning.remedies import summary
from memscale.simulation.measured.allocator_trace import measure, training_roles

WIDTH = 64
MIB = 2**20
FEW = ms.Config(mode="conservative")  # a short search, where what it may choose is not what is tested


def box(memory_bytes, device_type="cpu", **speeds):
    return ms.Hardware(name="box", device_type=device_type, memory_bytes=memory_bytes, **speeds)


def blocks(count=4, width=WIDTH):
    def block():
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return nn.Sequential(*[block() for _ in range(count)])


def square(output, _):
    return output.square().mean()


def rows(n):
    return torch.ones(n, WIDTH)


class Speaker(nn.Module):
    """Blocks between an embedding and a head with many classes."""

    def __init__(self, words=2000, width=32, layers=3):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = blocks(layers, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(self.layers(hidden))


def next_token(output, tokens):
    return F.cross_entropy(output.flatten(0, 1), tokens.flatten())


def tokens(batch, length=64):
    return torch.zeros(batch, length, dtype=torch.long)


def truth(model, batch, optimizer=None, loss=square, parts=1):
    """The peak bytes of the third step, by PyTorch's allocator."""

    def step():
        for part in batch.chunk(parts):
            loss(model(part), part).backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()

    step()
    step()
    return measure(step, roles=training_roles(model, optimizer, batch)).peak_bytes


# -- risk and verdict --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peak", "risk"),
    [(0, "LOW"), (850, "LOW"), (851, "MODERATE"), (950, "MODERATE"), (951, "HIGH"), (1000, "HIGH"), (1001, "CRITICAL")],
)
def test_risk_has_exact_thresholds(peak, risk):
    assert str(OOMRisk.of(peak, 1000)) == risk
    # Exact also where a float is not: 85% of 10**18 and one byte more.
    assert OOMRisk.of(85 * 10**16, 10**18) is OOMRisk.LOW
    assert OOMRisk.of(85 * 10**16 + 1, 10**18) is OOMRisk.MODERATE


def test_the_peak_is_the_allocators_and_the_capacity_is_exact():
    model, batch = blocks(), rows(256)
    expected = truth(model, batch)
    for spare, fits in ((0, True), (-1, False)):
        prediction = ms.OOMPredictor(model, loss=square, keeps_output=False, hardware=box(expected + spare)).predict(
            batch, recommend=False
        )
        assert (prediction.peak_bytes, prediction.capacity_bytes) == (expected, expected + spare)
        assert (prediction.fits, prediction.headroom_bytes) == (fits, spare)
        assert prediction.risk is (OOMRisk.HIGH if fits else OOMRisk.CRITICAL)


def test_a_first_step_that_takes_more_counts():
    class Warming(nn.Linear):
        """Makes a table at its first call."""

        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.zeros(MIB).sum()
            return super().forward(x)

    model = Warming(4, 4)
    prediction = ms.OOMPredictor(model, loss=square, keeps_output=False, hardware=box(MIB)).predict(
        torch.ones(2, 4), recommend=False
    )
    assert prediction.profile.peak_bytes < MIB
    assert prediction.peak_bytes == prediction.profile.first_step_peak_bytes > 4 * MIB
    assert not prediction.fits
    assert model.table is None


def test_on_a_card_it_is_what_the_caching_allocator_reserves():
    predictor = ms.OOMPredictor(blocks(), loss=square, keeps_output=False, hardware="t4")
    prediction = predictor.predict(rows(256))
    assert prediction.peak_bytes == prediction.profile.reserved_peak_bytes > prediction.profile.peak_bytes
    assert prediction.peak_bytes % (2 * MIB) == 0
    assert prediction.capacity_bytes == ms.Hardware.named("t4").memory_bytes - 512 * MIB
    assert "in tensors, the rest kept by the allocator" in str(prediction)


@pytest.mark.parametrize(
    ("budget", "capacity"),
    [(None, 1000), (999, 999), ("0.5kB", 500), (0.25, 250), (1.0, 1000), ("1GiB", 1000), (10**9, 1000)],
)
def test_a_budget_is_a_capacity_below_the_devices(budget, capacity):
    predictor = ms.OOMPredictor(nn.Linear(2, 2), loss=square, keeps_output=False, hardware=box(1000))
    assert predictor.predict(torch.ones(1, 2), budget=budget, recommend=False).capacity_bytes == capacity


@pytest.fixture(scope="module")
def critical():
    """The prediction of a step that does not fit."""
    return ms.OOMPredictor(blocks(), loss=square, keeps_output=False, hardware=box(3 * MIB)).predict(rows(256))


def test_it_prints_what_matters(critical):
    prediction = critical
    verdict = f"CRITICAL: {prediction.message}"
    assert verdict.startswith("CRITICAL: the step, without an optimizer, does not fit: its peak of 3.13 MiB is 133 KiB")
    assert verdict.endswith("above the 3.00 MiB of box")
    first, _, rest = str(prediction).partition("\nat the peak")
    assert first == wrapped(verdict)
    text = ["", *f"at the peak{rest}".splitlines()]
    assert text[1].startswith("at the peak, in backward, ")
    assert text[2].split()[0] == "activation"
    best = prediction.recommendations[0]
    assert (
        f"{best.action}: peak {best.peak_bytes / MIB:.2f} MiB, fits" in text[text.index("what would free memory") + 1]
    )
    assert (
        repr(prediction)
        == f"OOMPrediction(risk=CRITICAL, peak_bytes={prediction.peak_bytes}, capacity_bytes={3 * MIB})"
    )


def test_json_keeps_everything_and_says_the_verdict(critical):
    prediction = critical
    assert {each.plan is None for each in prediction.recommendations} == {True, False}
    assert OOMPrediction.from_json(prediction.to_json()) == prediction
    for part in ('"risk": "CRITICAL"', '"fits": false', f'"headroom_bytes": {prediction.headroom_bytes}'):
        assert part in prediction.to_json()


# -- recommendations ---------------------------------------------------------------------------------------------------


def test_the_recommended_plan_is_the_planners_and_frees_by_the_allocator_what_it_says():
    model, batch = Speaker(layers=1), tokens(8)
    before = truth(model, batch, loss=next_token)
    capacity = before * 8 // 10
    step = {
        "loss": next_token,
        "keeps_output": False,
        "hardware": box(capacity),
        "config": ms.Config(mode="conservative", enable_tiling=True),
    }
    prediction = ms.OOMPredictor(model, **step).predict(batch)
    (advice,) = [each for each in prediction.recommendations if each.action.startswith("apply the plan: ")]
    expected = ms.plan(model, batch, budget=capacity, **step)
    assert advice.plan == expected
    assert advice.action == f"apply the plan: {summary(expected)}"
    after = truth(ms.transform(model, advice.plan), batch, loss=next_token)
    assert advice.peak_bytes == after <= capacity
    assert advice.freed_bytes == before - advice.peak_bytes
    assert advice.step_seconds is None, "the box does not say how fast it is"


@pytest.mark.deep
def test_recommendations_free_something_and_come_best_first():
    prediction = ms.OOMPredictor(Speaker(), loss=next_token, keeps_output=False, hardware=box(MIB)).predict(tokens(8))
    freed = [each.freed_bytes for each in prediction.recommendations]
    assert len(freed) >= 3
    assert freed == sorted(freed, reverse=True)
    assert freed[-1] > 0
    assert all(each.freed_bytes + each.peak_bytes == prediction.peak_bytes for each in prediction.recommendations)


def test_accumulation_takes_as_few_parts_as_fit():
    model, batch = blocks(1), rows(1024)
    whole, half, quarter = (truth(model, batch, parts=parts) for parts in (1, 2, 4))
    assert whole > half > quarter
    for capacity, parts, peak in ((half, 2, half), (half - 1, 4, quarter)):
        predictor = ms.OOMPredictor(model, loss=square, keeps_output=False, hardware=box(2 * whole), config=FEW)
        prediction = predictor.predict(batch, budget=capacity)
        advice = next(each for each in prediction.recommendations if each.plan is None and each.parts > 1)
        assert advice.action == f"accumulate the gradients of {parts} equal parts of the batch"
        assert (advice.peak_bytes, advice.freed_bytes, advice.plan, advice.parts) == (peak, whole - peak, None, parts)


def test_parts_that_the_model_does_not_take_are_not_recommended():
    # With a convolution, so that the rows are what takes the memory.
    model = nn.Sequential(nn.Conv1d(1, 64, 1), nn.Flatten(), nn.Linear(64 * WIDTH, 4), nn.BatchNorm1d(4))
    prediction = ms.OOMPredictor(model, loss=square, keeps_output=False, hardware=box(1), config=FEW).predict(
        torch.ones(16, 1, WIDTH)
    )
    (advice,) = [each for each in prediction.recommendations if each.parts > 1]
    assert advice.parts == 8  # a single row has no variance
    assert prediction.notes == ()


def test_a_simulation_is_not_compared_with_real_steps():
    class ReadsFewRows(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks(2)

        def forward(self, x):
            return self.blocks(x) * (self.blocks[0][0].weight.sum().item() if len(x) < 256 else 1)

    prediction = ms.OOMPredictor(ReadsFewRows(), loss=square, keeps_output=False, hardware=box(1), config=FEW).predict(
        rows(256)
    )
    assert prediction.profile.method == "static"
    assert [each for each in prediction.recommendations if each.parts > 1] == []
    assert any(
        note.startswith("not simulated: accumulate gradients: the step cannot be simulated: ")
        for note in prediction.notes
    )


@pytest.mark.parametrize(
    ("memory_bytes", "recommend", "asks"),
    [
        (2**40, None, False),
        (2**40, False, False),
        (1, False, False),
        pytest.param(1, None, True, marks=pytest.mark.deep),
        (2**40, True, True),
    ],
)
def test_recommending_costs_simulations_only_when_it_is_close_or_asked_for(memory_bytes, recommend, asks):
    calls = []
    predictor = ms.OOMPredictor(
        blocks(2),
        loss=square,
        keeps_output=False,
        config=FEW,
        hardware=box(memory_bytes),
        progress=lambda *call: calls.append(call),
    )
    prediction = predictor.predict(rows(256), recommend=recommend)
    assert (len(calls) > 1) is asks
    assert [done for _, done, _ in calls] == list(range(len(calls)))
    assert calls[0][2] == (1 if recommend is False else None)
    assert bool(prediction.recommendations) is asks


def test_a_model_that_reads_values_is_measured_and_so_is_what_is_recommended():
    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks(2)

        def forward(self, x):
            return self.blocks(x) * self.blocks[0][0].weight.sum().item()

    model, batch = Reading(), rows(256)
    before = truth(model, batch)
    prediction = ms.OOMPredictor(model, loss=square, keeps_output=False, hardware=box(before)).predict(batch)
    assert prediction.profile.method == "empirical"
    advice = {each.plan: each.freed_bytes for each in prediction.recommendations}
    plan = ms.Plan({"blocks.*": ms.checkpoint()})
    assert advice[plan] == before - truth(ms.transform(model, plan), batch)


# -- the largest batch -------------------------------------------------------------------------------------------------


def test_the_largest_batch_fits_by_the_allocator_and_one_more_does_not():
    model = blocks(2)
    optimizer = torch.optim.AdamW(model.parameters())
    capacity = 4 * MIB + 123
    largest = ms.OOMPredictor(model, optimizer, loss=square, keeps_output=False, hardware=box(capacity)).largest(rows)
    assert largest.peak_bytes == truth(model, rows(largest.n), optimizer) <= capacity
    assert largest.next_peak_bytes == truth(model, rows(largest.n + 1), optimizer) > capacity
    assert largest.simulations <= 8
    assert largest.capacity_bytes == capacity


@pytest.mark.deep
def test_a_plan_and_accumulation_count_in_the_largest_batch():
    model = blocks()
    plan = {"*": ms.checkpoint()}
    fit = ms.OOMPredictor(
        model, loss=square, keeps_output=False, plan=plan, accumulate=2, hardware=box(6 * MIB)
    ).largest(rows)
    doubled = torch.ones(2 * fit.n, WIDTH)
    # Both parts are views of one batch there, and the batch itself is there once in a simulation.
    expected_bytes = truth(ms.transform(model, plan), doubled, parts=2) - doubled.nbytes + doubled.nbytes // 2
    assert fit.peak_bytes == expected_bytes
    assert fit.n > 1.5 * ms.OOMPredictor(model, loss=square, keeps_output=False, hardware=box(6 * MIB)).largest(rows).n


def search(peak, capacity, at_least=1, at_most=2**20):
    asked = []

    def counted(n):
        assert at_least <= n <= at_most
        asked.append(n)
        return peak(n)

    n, peaks = largest_fitting(counted, capacity, at_least=at_least, at_most=at_most)
    assert asked == list(peaks)  # none twice
    return n, len(asked)


lines = st.tuples(st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 9))


@given(
    st.lists(lines, min_size=1, max_size=3),
    st.sampled_from([1, 512, 10**5]),
    st.integers(0, 10**9),
    st.integers(1, 5000),
)
def test_the_search_finds_the_boundary_of_any_peak_that_does_not_fall(parts, granule, capacity, at_most):
    def peak(n):
        return -(-max(base + slope * n + bend * n * n for base, slope, bend in parts) // granule) * granule

    n, asked = search(peak, capacity, at_most=at_most)
    fitting = sum(peak(n) <= capacity for n in range(1, at_most + 1))
    assert (n or 0) == fitting
    assert asked <= 2 * at_most.bit_length() + 8


# -- nothing is changed, and bad input ---------------------------------------------------------------------------------


def state_of(model, optimizer):
    return (
        [
            (name, id(tensor), tensor._version, tensor.tolist(), tensor.grad)
            for name, tensor in model.named_parameters()
        ],
        model.training,
        [(key, value) for group in optimizer.param_groups for key, value in group.items() if key != "params"],
        {
            id(key): {name: float(value.sum()) for name, value in state.items()}
            for key, state in optimizer.state.items()
        },
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )


def dropping():
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)) for _ in range(2)])


def test_nothing_is_changed_by_an_interrupt_and_what_was_found_is_kept():
    model = dropping()
    optimizer = torch.optim.Adam(model.parameters())
    before = state_of(model, optimizer)

    def predict(at):
        calls = itertools.count()

        def interrupted(output, _):
            if next(calls) == at:
                raise KeyboardInterrupt
            return square(output, _)

        step = {"loss": interrupted, "hardware": box(1), "config": FEW}
        return ms.OOMPredictor(model, optimizer, **step).predict(torch.ones(8, 8))

    with pytest.raises(KeyboardInterrupt):
        predict(0)  # there is no verdict yet
    whole, cut = predict(None), predict(8)
    assert cut.peak_bytes == whole.peak_bytes
    assert cut.recommendations
    assert len(cut.recommendations) < len(whole.recommendations)
    assert cut.notes[-1].startswith("interrupted, while simulating: ")
    assert state_of(model, optimizer) == before


def test_no_simulation_begins_after_the_last_second():
    prediction = predictor(hardware=box(1)).predict(torch.ones(8, 4), seconds=0)
    assert not prediction.fits
    assert not prediction.recommendations
    assert prediction.notes[-1].startswith("stopped after 0 s (seconds= or --seconds allows more), while simulating: ")


@pytest.mark.deep
def test_what_a_checkpointed_model_needs_to_fit_is_told_as_arguments():
    """In a step whose update holds most of the peak, a fused update or one in backward beside checkpointed blocks."""
    with torch.device("meta"):
        model = blocks(6, 512)
    step = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": square, "hardware": "t4"}
    batch = torch.empty(8, 512, device="meta")
    found = ms.OOMPredictor(model, **step).predict(batch, budget=8 * ms.profile(model, batch, **step).taken_bytes // 10)
    (advice,) = [each for each in found.recommendations if each.arguments]
    assert str(advice.arguments[0]) in advice.action
    assert advice.peak_bytes <= found.capacity_bytes
    assert OOMPrediction.from_json(found.to_json()) == found


def predictor(**options):
    return ms.OOMPredictor(**{"model": nn.Linear(4, 4), "loss": square, "hardware": box(MIB), **options})


def fours(n):
    return torch.ones(n, 4)


def failing(n):
    if n > 20:
        raise IndexError("only 20 rows")
    return fours(n)


BAD = {
    "model": (lambda: predictor(model=3), r"OOMPredictor\(model=\.\.\.\) takes a torch.nn.Module, got int"),
    "a function": (lambda: predictor(model=lambda: None), r"got function; .* compare memscale.profile"),
    "optimizer": (lambda: predictor(optimizer="adam"), r"torch.optim.Optimizer or None; pass the optimizer itself"),
    "other parameters": (
        lambda: predictor(optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters())),
        r"updates 2 parameters and none of them is the model's",
    ),
    "accumulate": (lambda: predictor(accumulate=0).predict(fours(2)), r"accumulate=0\) must be an int of at least 1"),
    "batch": (lambda: predictor().predict(torch.ones(2, 5)), r"the step fails when it runs: RuntimeError"),
    "no batch": (lambda: predictor().predict(None), r"a batch is a tensor, .* got NoneType"),
    "loss": (lambda: predictor(loss=lambda y, _: y).predict(fours(2)), r"must be a tensor with one element, got"),
    "no training": (
        lambda: predictor(model=nn.Linear(4, 4).requires_grad_(False)).predict(fours(2)),
        r"has no parameter that requires a gradient",
    ),
    "at_least": (lambda: predictor().largest(fours, at_least=0), r"largest\(at_least=0\) must be an int of at least 1"),
    "at_most": (lambda: predictor().largest(fours, at_most=2.0), r"largest\(at_most=2\.0\) must be an int"),
    "range": (lambda: predictor().largest(fours, at_least=5, at_most=4), r"at_least=5, at_most=4\) leaves no size"),
    "constant": (
        lambda: predictor().largest(lambda n: fours(3)),
        r"does not scale: batch_fn\(1\) and batch_fn\(2\) return batches of the same shapes \[\[3, 4\]\]",
    ),
    "ignored": (
        lambda: predictor(model=Ignoring()).largest(lambda n: (fours(3), n)),
        r"does not scale: the peak is \d+ bytes at n=1 as at n=1048576, with tensors of the same shapes",
    ),
    "no batch for n": (
        lambda: predictor().largest(failing),
        r"batch_fn\(32\) raises IndexError: only 20 rows; give largest\(at_most=\.\.\.\) below 32",
    ),
    "no step for n": (
        lambda: predictor().largest(lambda n: torch.ones(n, 4 if n < 20 else 5)),
        r"the step does not run with batch_fn\(32\): .*; give largest\(at_most=\.\.\.\) below 32",
    ),
    "no step at all": (lambda: predictor().largest(lambda n: torch.ones(n, 5)), r"^the step fails when it runs"),
}


class Ignoring(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, n):
        return super().forward(x)


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_error(make, message):
    with pytest.raises(ms.ConfigError, match=message):
        make()


def test_a_plan_for_another_model_is_a_plan_error():
    with pytest.raises(ms.PlanError, match=r"'layers\.\*' matches nothing"):
        predictor(plan={"layers.*": ms.checkpoint()})


def test_a_smallest_batch_that_does_not_fit_is_a_budget_error():
    peak = truth(nn.Linear(4, 4), fours(3))
    with pytest.raises(ms.BudgetError, match=rf"not even batch_fn\(3\) fits: its step takes {peak} B \({peak} bytes\)"):
        predictor().largest(fours, at_least=3, budget=peak - 1)
    assert predictor().largest(fours, at_least=3, at_most=3, budget=peak).n == 3


# -- budgets as text ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("6GiB", 6 * 2**30),
        ("6GB", 6 * 10**9),
        (" 1.5 MiB ", 3 * 2**19),
        (".5kB", 500),
        ("0.1GB", 10**8),  # which a float product misses on the way
        ("1.9999B", 1),
        (1234, 1234),
        ("90%", 900),
        (" 12.5 % ", 125),
        (0.5, 500),
        (1.0, 1001),
        ("0.5", 500),
        ("4096", 4096),
        ("6G", 6 * 2**30),
        ("6mi", 6 * 2**20),
    ],
)
def test_a_budget_as_text_is_bytes(text, nbytes):
    assert budget_bytes(text, 1001) == nbytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("six", r"budget='six' must be bytes as an int, a string such as '6GiB' or '6GB'"),
        ("1.5", r"budget=1\.5 must be .*; write '1\.5GiB'$"),
        ("-1GiB", r"budget='-1GiB' must be"),
        (0, r"budget=0 is 0 bytes"),
        ("101%", r"budget='101%' must be"),
        (1.0001, r"budget=1\.0001 must be"),
        (float("nan"), r"budget=nan must be"),
        (True, r"budget=True must be"),
        (None, r"budget=None must be"),
    ],
)
def test_budgets_that_are_none(value, message):
    with pytest.raises(ms.ConfigError, match=message):
        budget_bytes(value, 1000)


def test_a_budget_is_called_what_the_verb_calls_it():
    with pytest.raises(ms.ConfigError, match=r"^max_cpu='x' must be"):
        budget_bytes("x", 1, argument="max_cpu")


VARIED = (700, 2900, 300, 1800, 3000, 1100, 2400)


def _mlp(device):
    with torch.device(device):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters())


def test_batches_that_differ_in_size_reserve_more_than_the_largest():
    predictor = ms.OOMPredictor(*_mlp("meta"), loss=lambda y, _: y.square().mean(), hardware="t4")
    batches = [torch.empty(rows, 512, device="meta") for rows in VARIED]
    over, largest = predictor.predict_steps(batches), predictor.predict(batches[4], recommend=False)
    assert over.profile.peak_bytes == largest.profile.peak_bytes
    assert over.peak_bytes > largest.peak_bytes
    assert over.notes[-1].startswith("over 7 steps the allocator reserves")
    assert predictor.predict_steps([batches[4]] * 3).peak_bytes == largest.peak_bytes
    assert not predictor.predict_steps(batches, budget=largest.peak_bytes).fits
    with pytest.raises(ms.ConfigError, match="at least one batch"):
        predictor.predict_steps([])


@pytest.mark.cuda
def test_what_steps_of_different_sizes_reserve_on_a_card():
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    if (before := torch.cuda.memory_reserved()) != 0:
        pytest.skip(f"earlier tests hold {before} bytes on the device, and their free space would be used")
    model, optimizer = _mlp("cuda")
    batches = [torch.ones(rows, 512, device="cuda") for rows in VARIED]
    predictor = ms.OOMPredictor(model, optimizer, loss=lambda y, _: y.square().mean())
    predicted = predictor.predict_steps(batches).peak_bytes
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for batch in (batches[0], *batches):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.cuda.max_memory_reserved() == predicted
