"""Simulated steps are what `golden.json` says: a row of every fifth model by default, all of them in a deep run."""

from __future__ import annotations

import warnings

import pytest

from tests.simulation.golden import golden

FILE = golden.load()


def _quick_key(at: int, name: str) -> str:
    """One row of the model that is number `at`: targets and variants take turns."""
    own = sorted(key for key in FILE["rows"] if key.startswith(f"{name} ") and not key.endswith("compiled"))
    return own[at * 5 % len(own)]


QUICK = {name: _quick_key(at, name) for at, name in enumerate(golden.names()[::5])}


@pytest.fixture(autouse=True)
def _as_the_file_was_made():
    here = golden.machine()
    if any(here[of] != FILE["machine"][of] for of in ("torch", "transformers")):
        pytest.skip(f"the rows are those of {FILE['machine']}, and this is {here}")
    with golden.one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models that warn of themselves, as Mamba does of kernels that it lacks
        yield


def _is_comparable(key: str) -> bool:
    """Whether a row depends on nothing that this machine has otherwise than the one that made the file."""
    return " cpu " not in key or golden.machine() == FILE["machine"]


def _check(name: str, wanted) -> None:
    moved = {
        key: differences
        for key, row in golden.rows(name, golden.subjects()[name], wanted)
        if (differences := golden.differences(FILE["rows"][key], row))
    }
    assert not moved, f"rows moved; if they should, `python -m tests.simulation.golden.golden` writes them: {moved}"


@pytest.mark.parametrize("name", QUICK)
def test_one_row_of_every_fifth_model_is_that_of_the_file(name):
    if not _is_comparable(QUICK[name]):
        pytest.skip("a CPU's scratch memory depends on its instructions, and this CPU has others")
    _check(name, lambda key: key == QUICK[name])


@pytest.mark.deep
@pytest.mark.parametrize("name", golden.names())
def test_all_rows_are_those_of_the_file(name):
    _check(name, _is_comparable)


def test_the_file_covers_what_it_says():
    about = {tuple(key.split()[1:]) for key in FILE["rows"]}
    everything = {(target, variant) for target in golden.TARGETS for variant in golden.VARIANTS}
    assert about == everything - golden._LEFT_OUT
    assert len({key.split()[0] for key in FILE["rows"]}) >= 40
