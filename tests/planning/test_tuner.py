"""The tuner: the best size of all, within the budget on the real allocator, with nothing left of the search."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import memscale as ms
from memscale.planning import Confirmation
from memscale.planning.tuning import tuner
from memscale.planning.tuning.rates import TOLERANCE, Pace, fastest_size
from tests.support.checks import bits

BOX = ms.Hardware(name="box", device_type="cpu", memory_bytes=2**36)
ROWS = 45  # of a size, so that a few sizes make a difference
MOST, BUDGET = 10, 400_000


def mlps(count=2, width=32):
    torch.manual_seed(0)
    block = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)]
    return nn.Sequential(*block)


def square(output, _):
    return output.square().mean()


def rows(size):
    return torch.ones(ROWS * size, 32)


def step(model=None, **fields):
    model = mlps() if model is None else model
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loss": square,
        "hardware": BOX,
        **fields,
    }


def tuning(budget, batch_fn=rows, *, said=None, stop=None, made=None, **fields):
    def progress(what, *_):
        if said is not None:
            said.append(what)
        if stop is not None and stop(what):
            raise KeyboardInterrupt

    found = ms.AutoTuner(**(step() if made is None else made), progress=progress)
    return found.tune(batch_fn, budget=budget, **fields)


@pytest.fixture(scope="module")
def every():
    """What `plan` finds for all sizes, of which the larger ones do not fit the budget."""
    found = {}
    for size in range(1, MOST + 1):
        try:
            found[size] = ms.plan(batch=rows(size), budget=BUDGET, **step())
        except ms.BudgetError:
            found[size] = None
    fitting = [size for size, plan in found.items() if plan is not None]
    assert len(fitting) < len(found), "some do not fit"
    assert any(found[size] for size in fitting), "some need a plan"
    assert not found[1], "and some do not"
    return found


@pytest.mark.deep
def test_the_largest_is_the_largest_of_all(every):
    best = tuning(BUDGET, objective="batch", at_most=MOST)
    assert best.size == max(size for size, plan in every.items() if plan is not None)
    assert best.plan.to_json() == every[best.size].to_json(), "the plan that `plan` finds"
    assert best.too_large == best.size + 1
    assert best.trials[-1].taken_bytes > BUDGET >= best.plan.evidence.planned.taken_bytes
    assert best.confirmation.peak_bytes <= BUDGET


@pytest.mark.deep
def test_the_fastest_is_the_fastest_of_all(every):
    best = tuning(BUDGET, at_most=MOST)
    plans = {**every, best.size: ms.plan(batch=rows(best.size), budget=BUDGET, **step())}
    rates = {size: size / plan.evidence.planned.step_seconds for size, plan in plans.items() if plan is not None}
    assert best.per_second == rates[best.size]
    assert best.plan == plans[best.size]
    assert max(rates.values()) <= best.per_second * (1 + TOLERANCE)
    assert max(rates.values()) <= best.bound_per_second * (1 + 1e-9)
    for trial in best.trials:
        assert trial.size not in plans or trial.fits == (plans[trial.size] is not None)
        assert not trial.fits or trial.taken_bytes <= BUDGET


@st.composite
def curves(draw):
    """Plans add more and more to steps whose time grows evenly; beyond some size nothing fits."""
    fixed, each = draw(st.floats(0.0, 50.0)), draw(st.floats(0.01, 2.0))
    added, total = [], 0.0
    steps = draw(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=60))
    for more in steps:
        total += more if draw(st.booleans()) else 0.0
        added.append(total)
    return {n + 1: Pace(n + 1, fixed + each * (n + 1), fixed + each * (n + 1) + more) for n, more in enumerate(added)}


@given(curves(), st.integers(0, 20))
def test_no_size_is_beyond_the_bound(curve, most):
    ends = {size: curve[size] for size in {1, max(curve)}}
    found, bound = fastest_size(curve.__getitem__, ends, most=most)
    best = max(each.rate for each in curve.values())
    assert best <= bound * (1 + 1e-9)
    assert len(found) <= most + 2
    seen = max(each.rate for each in found.values())
    if len(found) < most + len(ends):
        assert best <= seen * (1 + TOLERANCE + 1e-9)


@pytest.mark.deep
def test_the_longest_sequence_counts_tokens():
    made = step(nn.Sequential(nn.Embedding(50, 32), mlps()))

    def ids(length):
        return torch.zeros(4, 10 * length, dtype=torch.long)

    best = tuning(900_000, ids, made=made, objective="sequence", at_most=64)
    assert 4 < best.size < 64
    assert best.plan
    assert best.unit == "tokens"
    assert best.per_second == 40 * best.size / best.plan.evidence.planned.step_seconds
    with pytest.raises(ms.BudgetError):
        ms.plan(batch=ids(best.size + 1), budget=900_000, **made)


def test_accumulated_batches_count():
    one, two = (tuning("1GiB", at_least=4, at_most=4, made=step(accumulate=passes)) for passes in (1, 2))
    assert two.per_second == 2 * 4 / two.plan.evidence.planned.step_seconds
    assert two.per_second > one.per_second, "the update is shared"


def test_a_result_travels_as_json_and_prints_and_draws_itself(tmp_path):
    best = tuning(200_000, made=step(mlps(1)), objective="batch", at_most=3)
    assert ms.Tuning.from_json(best.to_json()) == best
    text = str(best)
    assert f"batch size {best.size}" in text
    assert f"{best.size + 1} is too large for every plan" in text
    assert "a real step held" in text
    assert repr(best).startswith("Tuning(objective='batch'")
    best.plot(tmp_path / "sizes.png")
    best.html(tmp_path / "sizes.html")
    page = (tmp_path / "sizes.html").read_text(encoding="utf-8")
    assert page.count('class="choice') == len(best.trials)
    assert (tmp_path / "sizes.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ms.ConfigError, match=r"Tuning\.plot\(path\) must end in \.png or \.svg"):
        best.plot(tmp_path / "sizes.gif")
    with pytest.raises(ms.ConfigError, match="the tuning is not JSON"):
        ms.Tuning.from_json("{")


def test_nothing_is_left_of_a_search():
    made = step()
    model, optimizer = made["model"], made["optimizer"]
    model(rows(1)).sum().backward()
    before = bits([*model.parameters(), *(each.grad for each in model.parameters())])
    gradients = [each.grad for each in model.parameters()]
    versions = [each._version for each in model.parameters()]
    state = torch.get_rng_state()
    best = tuning(900_000, made=made, at_most=2)
    assert best.confirmation is not None
    with pytest.raises(
        ms.BudgetError, match=r"not even batch_fn\(1\) fits: .*\n  the smallest peak within reach"
    ) as caught:
        tuning(5_000, made=made)
    assert caught.value.peak_bytes > 5_000
    assert before == bits([*model.parameters(), *(each.grad for each in model.parameters())])
    assert all(each.grad is gradient for each, gradient in zip(model.parameters(), gradients, strict=True))
    assert versions == [each._version for each in model.parameters()]
    assert torch.equal(state, torch.get_rng_state())
    assert not optimizer.state
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("objective", ["throughput", pytest.param("batch", marks=pytest.mark.deep)])
def test_an_interrupt_leaves_the_best_so_far(objective):
    seen = []

    def late(what):
        seen.append(what)
        return len(seen) > 14

    best = tuning(900_000, stop=late, objective=objective, at_most=MOST)
    assert best.interrupted
    assert best.confirmation is None
    assert best.plan.evidence.planned.taken_bytes <= 900_000
    assert "stopped: the best so far" in " ".join(str(best).split())  # whatever the width
    with pytest.raises(KeyboardInterrupt):
        tuning(900_000, stop=lambda _: True)


@pytest.mark.deep
def test_real_steps_that_take_more_are_believed(monkeypatch):
    real = tuner.confirmed

    def heavy(*args, over=50_000, **fields):
        found, note = real(*args, **fields)
        return Confirmation(found.peak_bytes + over, found.step_seconds), note

    taken = tuning("1GiB", at_least=2, at_most=2).plan.evidence.planned.taken_bytes
    monkeypatch.setattr(tuner, "confirmed", heavy)
    best = tuning(taken, objective="batch", at_most=2)
    assert best.confirmation.peak_bytes <= taken == best.budget_bytes
    assert best.plan.evidence.planned.taken_bytes <= taken - 50_000
    asked = []
    too_much = Confirmation(taken + 1, 0.1), ""
    monkeypatch.setattr(tuner, "confirmed", lambda *args, **_: asked.append(args) or too_much)
    with pytest.raises(ms.BudgetError, match=r"a real step with batch_fn\(\d\) takes .* are allowed; it was simulated"):
        tuning(taken, objective="batch", at_most=2)
    assert len(asked) == 3
    monkeypatch.setattr(tuner, "confirmed", lambda *args, **fields: heavy(*args, over=2**40, **fields))
    with pytest.raises(ms.BudgetError, match="a real step"):
        tuning(taken, objective="batch", at_most=2)


def test_without_the_device_a_note_says_why_nothing_is_confirmed(monkeypatch):
    on_meta = tuning(900_000, made=step(mlps().to("meta")), at_most=2)
    assert "the model is on meta" in on_meta.notes[-1]
    elsewhere = tuning("1GiB", made=step(hardware="h100"), at_most=2)
    assert "the model is on cpu, not on NVIDIA H100" in elsewhere.notes[-1]
    assert tuning("1GiB", at_most=2, confirm=False).confirmation is None
    monkeypatch.setattr("memscale.planning.tuning.confirmation.available_host_bytes", lambda: 100)
    full = tuning(900_000, at_most=2)
    assert "100 B are free" in full.notes[-1]
    assert on_meta.confirmation is elsewhere.confirmation is full.confirmation is None


def test_a_size_that_fits_under_the_plan_of_another_fits(monkeypatch):
    """The planner does not find the smallest plan of every size."""
    find = ms.DecisionEngine.fastest

    def blind(engine, budget, **given):
        if len(engine.step.batch) == 6 * ROWS:
            raise ms.BudgetError("nothing")
        return find(engine, budget, **given)

    monkeypatch.setattr(ms.DecisionEngine, "fastest", blind)
    best = tuning(900_000, objective="batch", at_most=6)
    assert best.size == 6
    assert "adopted" in best.plan.explain()
    evidence = best.plan.evidence
    assert evidence.planned.taken_bytes <= 900_000 < evidence.plain.taken_bytes
    found = ms.profile(batch=rows(6), plan=best.plan, **step())
    assert found.peak_bytes == evidence.planned.peak_bytes
    assert best.confirmation.peak_bytes <= 900_000


def test_no_size_is_slower_than_a_larger_one(monkeypatch):
    """A size that the planner finds a slow plan for gets the plan of the next one."""
    fastest = ms.DecisionEngine.fastest

    def lazy(engine, budget, **given):
        return engine.smallest() if len(engine.step.batch) == 5 * ROWS else fastest(engine, budget, **given)

    monkeypatch.setattr(ms.DecisionEngine, "fastest", lazy)
    asked = {"at_least": 5, "at_most": 6, "confirm": False}
    best = tuning(1_200_000, **asked)
    seconds = [each.step_seconds for each in best.trials]
    assert [each.size for each in best.trials] == [5, 6]
    assert seconds == sorted(seconds)


BAD = {
    "objective": (
        {"objective": "speed"},
        r"tune\(objective='speed'\) must be one of 'throughput', 'batch', 'sequence'",
    ),
    "at_least": ({"at_least": 1.0}, r"tune\(at_least=1\.0\) must be an int of at least 1"),
    "no factory": ({"batch_fn": rows(1)}, r"tune\(batch_fn\) takes a function from a size to a batch, got Tensor"),
    "ignores its size": (
        {"batch_fn": lambda _: rows(3)},
        r"batch_fn does not scale: batch_fn\(1\) and batch_fn\(2\) return batches of the same shapes \[\[135, 32\]\]",
    ),
    "raises": (
        {"batch_fn": lambda size: [rows(1)][size]},
        r"batch_fn\(1\) raises IndexError: .*tune\(at_least=\.\.\.\)",
    ),
    "not taken later": (
        {"batch_fn": lambda size: torch.ones(size, 32 if size < 3 else 7)},
        r"the step does not run with batch_fn\(\d+\): .*; give tune\(at_most=\.\.\.\) below",
    ),
    "count": ({"count": 3}, r"tune\(count=3\) must be a function from a batch to a number, or None"),
    "counts": ({"count": lambda _: 0.5}, r"count\(batch_fn\(1\)\) must be an int of at least 1, got 0\.5"),
}


@pytest.mark.parametrize(("fields", "message"), BAD.values(), ids=BAD)
def test_arguments_of_the_tuner_out_of_range_are_refused(fields, message):
    with pytest.raises(ms.ConfigError, match=message):
        tuning(**{"budget": 900_000, "confirm": False, **fields})


@pytest.mark.deep
def test_after_the_last_second_the_best_so_far_is_returned():
    fits = tuning(900_000, objective="throughput", at_most=MOST, seconds=0)
    assert (fits.size, fits.interrupted) == (1, False)
    assert fits.notes[0] == "stopped after 0 s (seconds= or --seconds allows more): other sizes may do better"
    assert not fits.complete
    assert "(stopped: the best so far)" in " ".join(str(fits).split())
    small = tuning("1GiB", at_least=4, at_most=4).plan.evidence.plain.taken_bytes - 1
    planned = tuning(small, at_least=4, at_most=8, seconds=0)
    assert planned.size == 4
    assert planned.plan.evidence.planned.taken_bytes <= small
    with pytest.raises(ms.BudgetError, match=r"not even batch_fn\(4\) fits: no plan that fits .* stopped after 0 s"):
        tuning("1KiB", at_least=4, at_most=8, seconds=0)
