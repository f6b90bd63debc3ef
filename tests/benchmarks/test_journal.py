"""A comparison that was cut goes on where it stopped, and never with what other sources have found."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def opened(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from _journal import Journal

    (tmp_path / "rule.py").write_text("one = 1\n")
    return lambda circumstances="torch 2.13": Journal(tmp_path / "kept", [tmp_path], circumstances)


def test_a_run_goes_on_where_it_was_cut(opened):
    cut = opened()
    cut.add("one", {"peak": 1})
    cut.add("two", "no truth")
    cut.path.write_text(cut.path.read_text() + '["three", {"pe')  # killed while it wrote
    again = opened()
    assert (again.find("one"), again.find("two"), again.find("three")) == ({"peak": 1}, "no truth", None)
    again.add("three", 3)
    assert opened().find("three") == 3


def test_what_other_sources_found_is_not_taken(opened, tmp_path):
    opened().add("one", 1)
    assert opened("torch 2.14").find("one") is None
    opened().add("one", 1)
    (tmp_path / "rule.py").write_text("one = 2\n")
    assert opened().find("one") is None


def test_a_whole_run_leaves_nothing(opened):
    journal = opened()
    journal.add("one", 1)
    journal.close()
    assert opened().find("one") is None
