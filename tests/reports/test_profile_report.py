"""How a `Profile` is shown: as text, as a picture, as a page. Every number that is shown is a number of the profile."""

import dataclasses
import json
import re
import sys

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.core.units import format_bytes
from memscale.reports import plot
from memscale.reports.drawing import COLOURS, css_class
from memscale.reports.module_tree import stacks
from memscale.reports.page import TEMPLATES
from memscale.simulation.results import Holding, Moment
from memscale.simulation.trace import CATEGORIES
from tests.support.pages import Page

MIB = 1 << 20
CARD = ms.Hardware.named("h100")


def layer(number):
    return {
        f"net.layers.{number}": {"activation": 2 * MIB},
        f"net.layers.{number}.mlp": {"parameter": 8 * MIB, "optimizer state": 16 * MIB, "activation": 24 * MIB},
        f"net.layers.{number}.attn": {"parameter": 4 * MIB, "optimizer state": 8 * MIB, "activation": 10 * MIB},
    }


BY_MODULE = {
    "": {"input": MIB, "temporary": 40 * MIB},
    "net.embed": {"parameter": 30 * MIB, "optimizer state": 60 * MIB},
    **layer(0),
    **layer(1),
    "net.norm": {"parameter": 1024},
}
BY_CATEGORY = {
    category: nbytes
    for category in CATEGORIES
    if (nbytes := sum(parts.get(category, 0) for parts in BY_MODULE.values()))
}
PEAK = sum(BY_CATEGORY.values())
HOLDINGS = (
    Holding(40 * MIB, "temporary", "", "aten::nll_loss_backward", "backward", (2048, 5120), "float32"),
    Holding(30 * MIB, "parameter", "net.embed.weight", "", "", (7680, 1024), "float32"),
    *(
        Holding(24 * MIB, "activation", f"net.layers.{n}.mlp", "aten::mm", "forward", (6144, 1024), "float32")
        for n in (0, 1)
    ),
    Holding(8 * MIB, "parameter", "net.layers.0.mlp.weight", "", "", (2048, 1024), "float32"),
)
SECONDS = {"": 0.001, "net.embed": 2e-5, "net.layers.0.mlp": 0.01, "net.layers.1.mlp": 0.01, "net.layers.1.attn": 0.005}


def category(name):
    return CATEGORIES.index(name)


def shown(**changes):
    """A profile of which every number is known: resident 150 MiB, then 109 MiB more at 20 ms, then all of them gone."""
    resident = [(category(name), BY_CATEGORY[name]) for name in ("parameter", "optimizer state", "input")]
    transient = [(category(name), BY_CATEGORY[name]) for name in ("activation", "temporary")]
    fields = {
        "method": "static",
        "notes": ("aten::topk in net chooses by activations: random activations were assumed",),
        "hardware": CARD,
        "peak_bytes": PEAK,
        "first_step_peak_bytes": PEAK - 100 * MIB,
        "reserved_peak_bytes": PEAK + 20 * MIB,
        "moment": Moment("aten::nll_loss_backward", "net.head", "backward"),
        "by_category": BY_CATEGORY,
        "categories_by_module": BY_MODULE,
        "by_tier": {},
        "holdings": HOLDINGS,
        "flops": 12_900_000_000,
        "step_seconds": sum(SECONDS.values()),
        "exposed_seconds": {},
        "prefetch_depth": None,
        "seconds_by_module": SECONDS,
        "changes": (*resident, *transient, *((index, -nbytes) for index, nbytes in transient)),
        "positions": (0.0, 0.0, 0.0, 0.01, 0.02, 0.0215, 0.026),
        "position_unit": "seconds",
        "phases": (("forward", 0.0), ("backward", 0.012), ("optimizer", 0.024)),
        "schedule": None,
    }
    return ms.Profile(**{**fields, **changes})


EMPIRICAL = shown(
    method="empirical",
    notes=("measured on real steps, since it cannot be simulated",),
    hardware=ms.Hardware(name="box", device_type="cpu", memory_bytes=1 << 30),
    reserved_peak_bytes=None,
    moment=Moment("", "", "backward"),
    categories_by_module={},
    holdings=(),
    flops=0,
    seconds_by_module={},
)
UNTIMED = shown(step_seconds=None, seconds_by_module={}, position_unit="operators", positions=(0, 0, 0, 1, 2, 2, 3),
                phases=(("forward", 0.0), ("backward", 2.0)))  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ text


def test_a_profile_prints_as_this():
    assert (
        str(shown())
        == """\
peak 275 MiB in backward, aten::nll_loss_backward of net.head
  0.3 % of 78.7 GiB on NVIDIA H100 80GB HBM3; the allocator reserves 295 MiB
  simulated; first step 175 MiB; time at least 26.0 ms; 12.9 GFLOP
at the peak           bytes     %
  optimizer state   108 MiB  39.3
  activation       72.0 MiB  26.2
  parameter        54.0 MiB  19.6
  temporary        40.0 MiB  14.5
  input            1.00 MiB   0.4
by module                resident  transient     total     %     time
  net.layers.*.mlp       48.0 MiB   48.0 MiB  96.0 MiB  34.9  20.0 ms
  net.embed              90.0 MiB          -  90.0 MiB  32.7  20.0 µs
  net.layers.*.attn      24.0 MiB   20.0 MiB  44.0 MiB  16.0  5.00 ms
  (top level)                   -   41.0 MiB  41.0 MiB  14.9  1.00 ms
  net.layers.* (itself)         -   4.00 MiB  4.00 MiB   1.5        -
  (the rest)             1.00 KiB          -  1.00 KiB  <0.1        -
largest tensors at the peak
   2 × 24.0 MiB  activation  float32[6144, 1024]  net.layers.*.mlp: mm
   1 × 40.0 MiB  temporary   float32[2048, 5120]  (top level): nll_loss_backward
   1 × 30.0 MiB  parameter   float32[7680, 1024]  net.embed.weight
  1+ × 8.00 MiB  parameter   float32[2048, 1024]  net.layers.*.mlp.weight
note: aten::topk in net chooses by activations: random activations were assumed"""
    )


def test_a_measured_step_prints_what_is_known_of_it():
    assert (
        str(EMPIRICAL)
        == """\
peak 275 MiB in backward
  26.9 % of 1.00 GiB on box
  measured; first step 175 MiB; time 26.0 ms
at the peak           bytes     %
  optimizer state   108 MiB  39.3
  activation       72.0 MiB  26.2
  parameter        54.0 MiB  19.6
  temporary        40.0 MiB  14.5
  input            1.00 MiB   0.4
note: measured on real steps, since it cannot be simulated"""
    )


def without_activations():
    """The same step with the activations of the two layers' parts gone, and a little more time."""
    by_module = {
        path: {**parts, "activation": 0} if path.endswith(("mlp", "attn")) else parts
        for path, parts in BY_MODULE.items()
    }
    return shown(
        peak_bytes=PEAK - 68 * MIB,
        by_category={**BY_CATEGORY, "activation": 4 * MIB},
        categories_by_module=by_module,
        step_seconds=0.03,
    )


def test_a_difference_prints_as_this():
    diff = shown().diff(without_activations())
    assert diff.peak_bytes == -68 * MIB
    assert diff.by_category["activation"] == -68 * MIB
    assert diff.by_module["net.layers.1.mlp"] == -24 * MIB
    assert (
        str(diff)
        == """\
peak 275 MiB -> 207 MiB (-68.0 MiB, 0.753 ×), now in backward, aten::nll_loss_backward of net.head
  time 26.0 ms -> 30.0 ms (1.153 ×)
at the peaks    before     after     change
  activation  72.0 MiB  4.00 MiB  -68.0 MiB
by module            resident  transient     change
  net.layers.*.mlp          -  -48.0 MiB  -48.0 MiB
  net.layers.*.attn         -  -20.0 MiB  -20.0 MiB"""
    )


def test_however_much_there_is_it_stays_on_a_screen():
    path = ".".join(f"a_module_with_a_long_name_{depth}" for depth in range(8))
    by_module = {f"{path}.part_{n}.of_{m}": {"activation": MIB * (n + m + 1)} for n in range(9) for m in range(9)}
    holdings = tuple(
        Holding(MIB * n, "optimizer state", f"{path}.{n}", "aten::_a_foreach_operator_with_a_very_long_name",
                "optimizer", (1000, 1000, 10, 10, n), "complex128")
        for n in range(90, 1, -1)
    )  # fmt: skip
    profile = shown(
        by_category=dict.fromkeys(CATEGORIES, 40 * MIB),
        categories_by_module=by_module,
        holdings=holdings,
        moment=Moment("aten::mm", path, "backward"),
        notes=tuple(f"note {n} " + "that goes on and on " * 6 for n in range(9)),
    )
    for text in (str(profile), str(profile.diff(shown())), str(shown().diff(profile))):
        lines = text.splitlines()
        assert len(lines) <= 35
        assert max(map(len, lines[1:])) <= 80
    assert re.fullmatch(r"note: \d more in Profile.notes", str(profile).splitlines()[-1])
    assert str(profile).splitlines()[-3].startswith("note: note 0 that goes on")


@pytest.mark.parametrize(
    ("parameter_bytes", "expected"),
    [
        ({"h.0.fc": 4, "h.1.fc": 4, "head": 9}, {"h.0.fc": "h.*.fc", "h.1": "h.*", "head": "head"}),
        # The first layer of a mixture is often dense.
        (
            {"h.0.fc": 4, **{f"h.{n}.experts.{m}": 2 for n in (1, 2, 3) for m in (0, 1)}},
            {"h.0": "h.0", "h.0.fc": "h.0.fc", "h.2.experts.1": "h.{1-3}.experts.*"},
        ),
        ({str(n): 1 if n % 3 else n + 2 for n in range(12)}, {"1": "{1,2,…,11}", "3": "3"}),
        # The levels of a U-Net have a number each and are not alike.
        ({f"down.{n}.conv": 4**n for n in range(3)}, {"down.1.conv": "down.1.conv"}),
        # What has no parameters and is not alive in every layer goes with its layer all the same.
        ({"h.0.fc": 4, "h.0.drop": 0, "h.1.fc": 4}, {"h.0.drop": "h.*.drop"}),
    ],
)
def test_layers_are_taken_together_where_their_parameters_are_alike(parameter_bytes, expected):
    found = stacks(parameter_bytes)
    assert {path: found[path] for path in expected} == expected


# -------------------------------------------------------------------------------------------------------- drawings


def drawn(profile):
    (axes,) = plot.profile_figure(profile).axes
    texts = [text.get_text() for text in axes.texts]
    heights = {area.get_label(): area.get_paths()[0].vertices for area in axes.collections}
    return texts, heights


def test_the_picture_shows_the_stack_the_peak_and_the_phases():
    texts, heights = drawn(shown())
    assert list(heights) == ["parameter", "optimizer state", "input", "activation", "temporary"]
    assert heights["parameter"][:, 1].max() == pytest.approx(54.0, abs=0.01)
    # The activations are there from 10 ms on, the temporary ones from 20 to 26 ms.
    activation = heights["activation"]
    assert activation[activation[:, 1] > 164][:, 0].min() == pytest.approx(10, abs=0.03)
    assert heights["temporary"][:, 1].max() == pytest.approx(PEAK / MIB)
    assert texts == [
        "peak 275 MiB",
        "in backward, aten::nll_loss_backward of net.head",
        "forward",
        "backward",
        "optimizer",
    ]


def long_profile(events=20_000):
    """Many short-lived blocks of 1 to 3 MiB, and one of 500 MiB that lives for an instant."""
    changes = [(category("parameter"), 40 * MIB)]
    for at in range(events // 2):
        nbytes = 500 * MIB if at == 7001 else MIB * (1 + at % 3)
        changes += [(category("temporary"), nbytes), (category("temporary"), -nbytes)]
    positions = tuple(1e-5 * (at // 2) for at in range(len(changes)))
    phases = tuple((name, 1e-5 * at) for at, name in enumerate(["forward", "backward"] * 20))
    return shown(changes=tuple(changes), positions=positions, peak_bytes=540 * MIB, phases=phases)


def test_a_long_step_is_drawn_with_as_many_points_as_pixels_and_keeps_its_peak(tmp_path):
    profile = long_profile()
    texts, heights = drawn(profile)
    assert heights["temporary"][:, 1].max() == 540
    assert len(heights["temporary"]) < 5_000
    assert len(texts) <= 2 + 4
    profile.plot(tmp_path / "step.svg")
    profile.html(tmp_path / "step.html")
    assert (tmp_path / "step.svg").stat().st_size < 1_000_000
    assert (tmp_path / "step.html").stat().st_size < 300_000
    assert max(timeline_of((tmp_path / "step.html").read_text())["total"]) == 540 * MIB


@pytest.mark.parametrize(
    ("method", "path", "message"),
    [
        ("plot", "step.jpg", r"must end in \.png or \.svg, got 'step\.jpg'; use html\(\)"),
        ("plot", "step", r"must end in \.png or \.svg, got 'step'"),
        ("plot", "no/such/folder/step.png", r"must be in a folder that exists, got 'no/such/folder/step\.png'"),
        ("html", "step.svg", r"must end in \.html, got 'step\.svg'; use plot\(\)"),
        ("html", "no/such/folder/step.html", r"must be in a folder that exists, got 'no/such/folder/step\.html'"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(method, path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ms.ConfigError, match=rf"Profile\.{method}\(path\) {message}"):
        getattr(shown(), method)(path)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_there_is_still_a_report(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ms.RuntimeUnavailable, match=r"Profile\.plot needs matplotlib: pip install"):
        shown().plot(tmp_path / "step.png")
    shown().html(tmp_path / "step.html")
    assert (tmp_path / "step.html").exists()


# ------------------------------------------------------------------------------------------------------------ page


def page_of(profile, tmp_path):
    profile.html(tmp_path / "step.html")
    text = (tmp_path / "step.html").read_text(encoding="utf-8")
    return text, Page(text)


def timeline_of(text):
    return json.loads(re.search(r'<script type="application/json" class="timeline">\n(.*)\n</script>', text)[1])


@pytest.mark.parametrize("profile", [shown(), EMPIRICAL, UNTIMED], ids=["static", "empirical", "untimed"])
def test_the_page_asks_for_nothing_from_elsewhere(profile, tmp_path):
    text, page = page_of(profile, tmp_path)
    for word in ("http:", "https:", "//", "@import", "url(", "src=", "href=", "fetch(", "import("):
        assert word not in text
    assert {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object", "base", "use", "image"} == set()
    assert text.startswith("<!doctype html>")
    assert "prefers-color-scheme: dark" in text


def test_the_page_has_the_numbers(tmp_path):
    _, page = page_of(shown(), tmp_path)
    for text in ("275 MiB", "in backward, aten::nll_loss_backward of net.head", *shown().notes):
        assert text in page.texts
    assert "0.3 % of 78.7 GiB on NVIDIA H100 80GB HBM3; the allocator reserves 295 MiB" in page.texts
    assert page.row("activation")[:2] == ["72.0 MiB", "26.2"]
    tensor = ["activation", "float32[6144, 1024]", "aten::mm", "forward", "net.layers.*.mlp"]
    assert page.row("2") == ["24.0 MiB", "48.0 MiB", *tensor]
    assert page.row("1+") == ["8.00 MiB", "8.00 MiB", "parameter", "float32[2048, 1024]", "net.layers.*.mlp.weight"]


def test_the_tree_of_modules_has_the_sums(tmp_path):
    text, page = page_of(shown(), tmp_path)
    assert page.row("(model)") == ["162 MiB", "113 MiB", "275 MiB", "100.0", "26.0 ms"]
    assert page.row("net") == ["162 MiB", "72.0 MiB", "234 MiB", "85.1", "25.0 ms"]
    assert page.row("layers") == ["72.0 MiB", "72.0 MiB", "144 MiB", "52.4", "25.0 ms"]
    assert page.rows.count(["mlp", "24.0 MiB", "24.0 MiB", "48.0 MiB", "17.5", "10.0 ms"]) == 2
    assert 'title="net.layers.1.attn"' in text


def test_the_chart_is_the_timeline(tmp_path):
    text, _ = page_of(shown(), tmp_path)
    data = timeline_of(text)
    assert data["total"][0] == PEAK - 112 * MIB
    assert max(data["total"]) == data["total"][data["peak"]] == PEAK
    assert (data["end"], data["unit"]) == (pytest.approx(26.0), "ms")
    assert data["phases"] == [["forward", 0.0], ["backward", 12.0], ["optimizer", 24.0]]
    # From the top of the stack down, as in the legend.
    names = ["temporary", "activation", "input", "optimizer state", "parameter"]
    assert re.findall(r"</span>([a-z ]+) <b>([\d.]+ \w+)</b>", text) == [
        (name, format_bytes(BY_CATEGORY[name])) for name in names
    ]
    assert [values[data["peak"]] for values in data["live"]] == [BY_CATEGORY[name] for name in names]
    assert [values[0] for values in data["live"]] == [0, 0, MIB, 108 * MIB, BY_CATEGORY["parameter"]]


def test_pages_have_the_colours_of_pictures():
    style = (TEMPLATES / "page.css").read_text()
    classes = dict(re.findall(r"^\.(c-[\w-]+) \{ fill: (.*?); background: \2; \}$", style, re.MULTILINE))
    assert classes == {css_class(name): colour for name, colour in COLOURS.items()} | {"c-input": "var(--input)"}


def test_the_script_finds_what_it_looks_for(tmp_path):
    text, page = page_of(shown(), tmp_path)
    classes = {name for _, attributes in page.elements for name in attributes.get("class", "").split()}
    of_a_step = text[text.index("function followPointer") : text.index("function showPlans")]
    looked_for = set(re.findall(r'\("\w*\.(\w+)( b)?"\)', of_a_step))
    assert {name for name, _ in looked_for} == {"timeline", "cursor", "categories", "moment"} <= classes
    fields = set(re.findall(r"\bdata\.(\w+)", text))
    assert fields == set(timeline_of(text))


def test_names_cannot_become_markup(tmp_path):
    evil = "<script>alert(1)</script>&'\""
    profile = shown(
        notes=(evil,),
        hardware=dataclasses.replace(CARD, name=evil),
        moment=Moment(evil, evil, "forward"),
        holdings=(Holding(MIB, "activation", evil, evil, "forward", (1,), evil),),
        categories_by_module={evil: {"activation": MIB}},
        phases=(("</script>", 0.0), (evil, 0.01)),
    )
    text, page = page_of(profile, tmp_path)
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert text.count(evil) == 0
    assert page.row(evil) == ["1.00 MiB", "1.00 MiB", "0.4"]
    assert any(evil in row and f"{evil}[1]" in row for row in page.rows)
    assert evil in page.texts
    assert timeline_of(text)["phases"][0][0] == "</script>"


# --------------------------------------------------------------------------------------------------- real profiles


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return torch.cat([x, x.new_empty(0, *x.shape[1:])]).square().mean()  # an empty tensor has no block


@pytest.fixture(scope="module")
def profile():
    with torch.device("meta"):
        net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    return ms.profile(net, torch.zeros(32, 16, dtype=torch.long), optimizer=optimizer, hardware="h100")


def test_a_real_profile_is_shown(profile, tmp_path):
    text = str(profile)
    assert re.search(r"^  layers\.\*\.\d ", text, re.MULTILINE)
    assert f"peak {format_bytes(profile.peak_bytes)} in " in text
    profile.plot(tmp_path / "step.png")
    page, _ = page_of(profile, tmp_path)
    assert max(timeline_of(page)["total"]) == profile.peak_bytes


def test_a_table_by_time_needs_times():
    model = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 1))
    timeless = ms.Hardware(name="box", device_type="cpu", memory_bytes=1 << 30)
    profiled = ms.profile(model, torch.ones(8, 64), loss=lambda y, _: y.sum(), hardware=timeless)
    assert profiled.table() in str(profiled)
    for wrong, message in (
        ({"by": "time"}, "has no times.*box"),
        ({"by": "size"}, "'bytes' or 'time'"),
        ({"rows": 0}, "1$"),
    ):
        with pytest.raises(ms.ConfigError, match=message):
            profiled.table(**wrong)
