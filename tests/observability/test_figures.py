"""Live figures of a wrapped model: names and units, who serves them, and when not (M1 to M4)."""

from __future__ import annotations

import gc
import logging
import os
import re
import socket
import socketserver
import sys
import urllib.request
from typing import Any

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.observability import Metrics

prometheus = pytest.importorskip("prometheus_client", reason="figures are served with prometheus-client")


@pytest.fixture(autouse=True)
def _servers_that_stop_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One looks twice a second whether it shall stop, which all tests here would wait for."""
    monkeypatch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.01,))


def wrapped(port: int | str | None = 0, **given: Any) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks)
    config = ms.Config(force_optimize=True, observability_port=port, enable_logging=False, **given)
    return ms.wrap(model, config, torch.ones(2, 8))


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def value(text: str, name: str, *labels: str) -> float:
    (line,) = [
        line
        for line in text.splitlines()
        if re.match(rf"{name}(\{{|\s)", line) and all(label in line for label in labels)
    ]
    return float(line.rpartition(" ")[2])


UNITS = ("_bytes", "_seconds", "_total", "_info", "_regions", "_bucket", "_sum", "_count")
NAMES = {
    "memscale_build_info",
    "memscale_steps_total",
    "memscale_step_duration_seconds",
    "memscale_recomputed_regions_total",
    "memscale_plan_regions",
    "memscale_device_capacity_bytes",
}


def test_names_units_and_types() -> None:
    model = wrapped()
    ms.wrap(wrapped(None), ms.Config(force_optimize=True, observability_port=0, enable_logging=False))  # a second one
    url = model._memscale_executor.metrics_url
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
    before = scraped(url)
    train(model, 3)
    text = scraped(url)
    types = dict(re.findall(r"# TYPE (\S+) (\S+)", text))
    assert set(types) == NAMES
    samples = [line for line in text.splitlines() if line and line[0] != "#"]
    keys = [line.rpartition(" ")[0] for line in samples]
    assert len(set(keys)) == len(keys)
    for key in keys:
        name = key.partition("{")[0]
        assert name.endswith(UNITS)
        assert 'rank="0"' in key
    for name, kind in types.items():
        assert f"# HELP {name} " in text
        assert (kind == "counter") == name.endswith("_total")
    assert value(text, "memscale_steps_total") - value(before, "memscale_steps_total") == 3
    assert value(text, "memscale_recomputed_regions_total") - value(before, "memscale_recomputed_regions_total") == 9
    assert value(text, "memscale_plan_regions", 'transform="checkpoint"') == 3
    assert value(text, "memscale_plan_regions", 'transform="tile"') == 0
    assert value(text, "memscale_step_duration_seconds_count") == 2
    assert value(text, "memscale_device_capacity_bytes") == model._memscale_executor.hardware.memory_bytes
    ms.detach(model)


def test_what_was_moved_is_counted() -> None:
    config = ms.AsyncOffloadConfig(min_bytes=0)
    model = wrapped(enable_offloading=True, max_cpu_offload_gb=1, async_config=config)
    train(model, 2)
    text = scraped(model._memscale_executor.metrics_url)
    stats = model._memscale_executor.runtime.stats()["cpu"]
    moved = sum(stats.out_bytes.values())
    assert moved > 0
    copied = re.findall(r'memscale_offload_copied_bytes_total\{.*direction="out".* (\S+)', text)
    assert sum(map(float, copied)) == moved
    assert value(text, "memscale_offload_exposed_seconds_total") >= 0
    assert model._memscale_executor.as_log()["memory/offloaded_gib"] == 0
    ms.detach(model)


def test_detach_frees_the_port_and_so_does_the_end_of_the_model() -> None:
    model = wrapped()
    url = model._memscale_executor.metrics_url
    ms.detach(model)
    with pytest.raises(OSError):  # noqa: PT011  # refused, in the words of the system
        scraped(url)
    port = int(url.rpartition(":")[2].partition("/")[0])
    model = wrapped(port)
    assert str(port) in model._memscale_executor.metrics_url
    del model
    gc.collect()
    again = wrapped(port)
    assert str(port) in again._memscale_executor.metrics_url
    ms.detach(again)


def test_a_busy_port_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with caplog.at_level(logging.WARNING, logger="memscale"):
            model = wrapped(port)
        train(model, 1)
    assert model._memscale_executor.metrics_url is None
    (record,) = caplog.records
    assert str(port) in record.getMessage()
    assert "0 for any free one" in record.getMessage()
    ms.detach(model)


def test_each_process_of_a_machine_has_its_own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "5")
    model = wrapped(port - 1)
    assert model._memscale_executor.metrics_url.endswith(f":{port}/metrics")
    assert 'memscale_steps_total{rank="5"}' in scraped(model._memscale_executor.metrics_url)
    ms.detach(model)


@pytest.mark.parametrize("port", [-1, 65536, "9464", ":9464", "host:70000", True, 1.5])
def test_a_bad_port_is_refused(port: Any) -> None:
    with pytest.raises(ms.ConfigError, match=r"observability_port=.* must be"):
        ms.Config(observability_port=port)


def test_a_forked_process_closes_its_copy_of_the_socket() -> None:
    model = wrapped()
    server = model._memscale_executor._server._server
    descriptor = server.socket.fileno()
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:  # as a worker of a DataLoader
        try:
            os.fstat(descriptor)
            os.write(writes, b"open")
        except OSError:
            os.write(writes, b"closed")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reads, 10) == b"closed"
    os.close(reads)
    os.close(writes)
    assert "memscale_steps_total" in scraped(model._memscale_executor.metrics_url)
    ms.detach(model)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ms.RuntimeUnavailable, match=r"memscale-transforms\[metrics\]"):
        wrapped()


def test_on_a_card_peaks_are_read_and_never_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(None)
    executor = model._memscale_executor
    stats = {"allocated_bytes.all.peak": 7, "allocated_bytes.all.current": 5, "num_ooms": 2}
    monkeypatch.setattr(type(executor), "device", property(lambda self: torch.device("cuda", 0)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 << 30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: pytest.fail("a peak was reset"))
    found = {family.name: family for family in Metrics(executor).collect()}
    (sample,) = found["memscale_step_peak_allocated_bytes"].samples
    assert (sample.labels, sample.value) == ({"rank": "0", "device": "cuda:0"}, 7)
    assert found["memscale_out_of_memory_errors"].samples[0].value == 2
    assert found["memscale_allocation_retries"].samples[0].value == 0  # others may have reset the counts
    assert executor.as_log()["memory/peak_allocated_gib"] == 3
    ms.detach(model)
