"""The curve as a picture and as a page: every plan is on it, and it needs nothing else."""

import html
import re

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.core import format_bytes
from tests.support.pages import Page

BOX = ms.Hardware(name="<a & b>", device_type="cpu", memory_bytes=2**36)


@pytest.fixture(scope="module")
def curve():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)])
    return ms.frontier(model, torch.ones(512, 32), loss=lambda y, _: y.square().mean(), hardware=BOX, points=3)


def test_a_page_shows_every_plan_and_loads_nothing(curve, tmp_path):
    curve.html(tmp_path / "curve.html")
    text = (tmp_path / "curve.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.loaded() == []
    assert "http" not in re.sub(r"<pre>.*?</pre>", "", text, flags=re.S)
    assert "<a & b>" not in text, "names are escaped"
    marks = [attributes["data-at"] for _, attributes in page.elements if "data-at" in attributes]
    assert sorted(marks) == sorted([str(at) for at in range(len(curve))] * 2), "a dot and a row of the table for each"
    assert sum(tag == "section" for tag, _ in page.elements) == len(curve) > 2
    for point in curve:
        assert format_bytes(point.peak_bytes) in text
        for decision in point.plan.evidence.decisions:
            assert decision.chosen in html.unescape(text)
        assert point.plan.rules == () or re.search("checkpoint|tile", point.summary)


def test_a_price_is_an_axis_and_a_column(curve, tmp_path):
    curve.html(tmp_path / "priced.html", price=3.6, steps=10_000)
    text = (tmp_path / "priced.html").read_text(encoding="utf-8")
    Page(text)
    assert text.count("dollars for 10,000 steps") == 1
    for point in curve:
        assert f'<td class="number">{10 * point.step_seconds:,.2f}</td>' in text
    ticks = [float(each.replace(",", "")) for each in re.findall(r">\$([0-9.,e-]+)</text>", text)]
    assert len(ticks) >= 2
    assert max(ticks) <= 10 * 1.1 * curve[0].step_seconds
    curve.plot(tmp_path / "priced.svg", price=3.6, steps=10_000)
    curve.plot(tmp_path / "plain.svg")
    drawn, plain = ((tmp_path / f"{name}.svg").read_text() for name in ("priced", "plain"))
    assert drawn.count("<g id=") > plain.count("<g id=")


@pytest.mark.parametrize(("given", "named"), [({"price": -1}, "price=-1"), ({"price": 2.5, "steps": 0}, "steps=0")])
def test_a_price_that_is_none_is_named(curve, tmp_path, given, named):
    with pytest.raises(ms.ConfigError, match=named):
        curve.html(tmp_path / "curve.html", **given)
    assert not (tmp_path / "curve.html").exists()


def test_the_stairs_go_down(curve, tmp_path):
    curve.html(tmp_path / "curve.html")
    text = (tmp_path / "curve.html").read_text(encoding="utf-8")
    places = [tuple(map(float, place)) for place in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', text)]
    assert places == sorted(places)
    assert [y for _, y in places] == sorted(y for _, y in places), "further down is faster"


@pytest.mark.parametrize("name", ["curve.png", "curve.svg"])
def test_a_curve_is_drawn_also_with_one_point(curve, tmp_path, name):
    for drawn in (curve, curve[-1:]):
        drawn.plot(tmp_path / name)
        assert (tmp_path / name).read_bytes()[:4] in (b"\x89PNG", b"<?xm")
    curve[-1:].html(tmp_path / "one.html")


def test_wrong_files_are_refused(curve, tmp_path):
    for draw, name, message in (
        (curve.plot, "curve.gif", r"must end in \.png or \.svg"),
        (curve.html, "curve.png", r"must end in \.html"),
        (curve.plot, "no/curve.png", "folder that exists"),
    ):
        with pytest.raises(ms.ConfigError, match=message):
            draw(tmp_path / name)


def test_a_curve_comes_back_from_json(curve):
    again = ms.Frontier.from_json(curve.to_json())
    assert list(again) == list(curve)
    assert [each.plan.evidence for each in again] == [each.plan.evidence for each in curve]
    with pytest.raises(ms.ConfigError, match="is no frontier of memscale"):
        ms.Frontier.from_json("{}")
