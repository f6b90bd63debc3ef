"""A schedule as a trace, and as text."""

import dataclasses
import json
import re
from collections import defaultdict

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.reports.plot import profile_figure
from memscale.reports.queues import queue_rows
from tests.support.hosts import QUICK_HOST


@pytest.fixture(scope="module")
def profile():
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.ReLU()) for _ in range(6)]).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.empty(8192, 2048, device="meta", dtype=torch.bfloat16)
    plan = {"*": ms.offload()}
    card = dataclasses.replace(ms.Hardware.named("h100"), call_seconds=QUICK_HOST)
    return ms.profile(model, batch, optimizer=optimizer, loss=lambda y, _: y.float().sum(), plan=plan, hardware=card)


def rows(data):
    """The slices of each thread, by its name, as (begin, end, name)."""
    names = {each["tid"]: each["args"]["name"] for each in data["traceEvents"] if each["ph"] == "M"}
    found = defaultdict(list)
    for each in data["traceEvents"]:
        if each["ph"] == "X":
            found[names[each["tid"]]].append((each["ts"], each["ts"] + each["dur"], each["name"]))
    return found


def test_the_trace_has_a_row_for_each_queue_and_nothing_overlaps_in_one(profile, tmp_path):
    profile.trace(tmp_path / "step.json")
    data = json.loads((tmp_path / "step.json").read_text())
    found = rows(data)
    assert set(found) == {"device", "device to host", "host to device"}
    for slices in found.values():
        for (_, end, _), (begin, _, _) in zip(sorted(slices), sorted(slices)[1:], strict=False):
            assert begin >= end - 1e-6
    device = sorted(found["device"])
    assert device[0][0] == 0
    assert sum(end - begin for begin, end, _ in device) == pytest.approx(1e6 * profile.step_seconds)
    assert {name for _, _, name in found["device to host"]} == {"to pinned"}
    counted = [each["args"]["live"] for each in data["traceEvents"] if each["ph"] == "C"]
    assert max(counted) == profile.peak_bytes


def test_the_schedule_says_what_moved_and_what_waited(profile):
    schedule = profile.schedule
    out = [copy for copy in schedule.copies if copy.direction == "out"]
    assert len(out) == len(schedule.copies) / 2
    assert {copy.nbytes for copy in out} == {8192 * 2048 * 2}
    waits = sum(wait.seconds for wait in schedule.waits if wait.queue == "device")
    assert waits == pytest.approx(sum(profile.exposed_seconds.values()))
    assert schedule.utilisation["device"] == pytest.approx(1 - waits / profile.step_seconds)
    assert 0.1 < schedule.utilisation["out"] < 1
    assert {operator.phase for operator in schedule.operators} == {"forward", "backward", "optimizer"}
    assert ms.Profile.from_json(profile.to_json()) == profile


def test_the_text_says_what_the_step_waits_for(profile):
    text = str(profile)
    assert re.search(r"^  on other tiers at most .* pinned; prefetch depth \d; waits .* for room", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 120


def test_without_a_schedule_there_is_no_trace(tmp_path):
    untimed = ms.profile(nn.Linear(4, 4), torch.ones(2, 4), loss=lambda y, _: y.sum())
    assert untimed.schedule is None
    for path, message in (("step.json", "needs a schedule"), ("step.txt", "must end in .json"), ("a/s.json", "folder")):
        with pytest.raises(ms.ConfigError, match=message):
            untimed.trace(tmp_path / path)


def test_the_picture_and_the_page_have_the_queues_under_the_curve(profile, tmp_path):
    figure = profile_figure(profile)
    memory, queues = figure.axes
    assert [label.get_text() for label in queues.get_yticklabels()] == ["device", "device to host", "host to device"]
    drawn = {text.get_text() for text in queues.get_legend().get_texts()}
    assert {"busy", "waits for room", "waits for copies back"} <= drawn
    assert queues.get_xlim() == memory.get_xlim()
    profile.html(tmp_path / "step.html")
    page = (tmp_path / "step.html").read_text()
    assert page.count('class="queue"') >= 6
    assert "device to host: busy" in page


def test_bars_show_what_the_schedule_says(profile):
    rows = queue_rows(profile.schedule, columns=10**9)
    for row, share in profile.schedule.utilisation.items():
        busy = sum(bar.end - bar.begin for bar in rows[row] if bar.what == "busy")
        assert busy == pytest.approx(share * profile.step_seconds)
    assert queue_rows(None, columns=10) == {}
