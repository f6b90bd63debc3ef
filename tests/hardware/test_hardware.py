"""Hardware: as a value, as it is found and measured, and that limits from cgroups count."""

import dataclasses
import itertools
import json
import os

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.core import format_bytes, machine
from memscale.core.errors import ConfigError, RuntimeUnavailable
from memscale.hardware import device as _hardware
from memscale.hardware.calibrate import _product, calibrate, disk_rates
from memscale.hardware.device import Hardware

GIB = 1024**3


def test_the_cpu_is_detected_with_its_memory():
    hardware = Hardware.detect("cpu")
    assert hardware.device_type == "cpu"
    assert hardware.name
    assert 0 < hardware.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert hardware == Hardware.detect("cpu")
    assert format_bytes(hardware.memory_bytes) in str(hardware)


def test_none_is_the_accelerator_where_there_is_one():
    assert Hardware.detect().device_type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_is_detected_with_its_memory():
    hardware = Hardware.detect("cuda:0")
    _, memory_bytes = torch.cuda.mem_get_info(0)
    assert (hardware.name, hardware.memory_bytes) == (torch.cuda.get_device_name(0), memory_bytes)
    assert 0 < hardware.free_bytes <= memory_bytes
    with pytest.raises(RuntimeUnavailable, match="this process sees"):
        Hardware.detect(f"cuda:{torch.cuda.device_count()}")


def test_as_text_and_as_a_value():
    hardware = Hardware(name="H", device_type="cuda", memory_bytes=3 * GIB, free_bytes=GIB)
    assert str(hardware) == "H (cuda, 3.00 GiB, 1.00 GiB free)"
    assert hardware == dataclasses.replace(hardware, free_bytes=0)
    assert eval(repr(hardware)) == hardware


FULL = Hardware(
    name="H", device_type="cuda", memory_bytes=3 * GIB, free_bytes=0, flops_per_second={"bfloat16": 2e12, "int8": 4e12},
    bandwidth_bytes_per_second=1e11, host_to_device_bytes_per_second=2e10, device_to_host_bytes_per_second=1e10,
    peer_bytes_per_second=5e10, capability=(8, 6), multiprocessors=84, launch_seconds=1e-6, measured=True,
)  # fmt: skip


def test_hardware_comes_back_from_json():
    for hardware in (FULL, Hardware("H", "cpu", 1), Hardware.named("h100")):
        again = Hardware.from_json(hardware.to_json())
        assert again == hardware
        assert again.free_bytes == hardware.free_bytes
    assert json.loads(FULL.to_json())["memscale_hardware"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [(FULL.to_json().replace("20000000000.0", "-1"), r"host_to_device_bytes_per_second=-1\) must be a positive"),
     (FULL.to_json().replace("100000000000.0", "Infinity"), "must be a positive finite number; pass bytes per second")],
)  # fmt: skip
def test_json_that_says_something_else(text, message):
    with pytest.raises(ConfigError, match=message):
        Hardware.from_json(text)


def test_a_cuda_context_takes_its_part():
    assert Hardware("H", "cuda", 2 * GIB).usable_bytes == 2 * GIB - 512 * 1024**2
    assert Hardware("H", "cuda", 1).usable_bytes == 0
    assert Hardware("H", "cpu", 2 * GIB).usable_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("name", 3), ("device_type", None), ("memory_bytes", 0), ("memory_bytes", 1.0),
     ("memory_bytes", True), ("memory_bytes", None), ("free_bytes", -1), ("flops_per_second", 1e12),
     ("flops_per_second", {"float": 1e12}), ("flops_per_second", {"bf16": 1e12}), ("flops_per_second", {torch.int8: 1}),
     ("flops_per_second", {"int8": 0}), ("flops_per_second", {"int8": True}), ("flops_per_second", None),
     ("bandwidth_bytes_per_second", 0), ("bandwidth_bytes_per_second", float("nan")),
     ("host_to_device_bytes_per_second", "fast"), ("device_to_host_bytes_per_second", float("inf")),
     ("peer_bytes_per_second", -1.0), ("launch_seconds", 0), ("capability", 9), ("capability", (9,)),
     ("capability", [9, 0]), ("capability", (9.0, 0)), ("multiprocessors", 0), ("measured", 1), ("measured", None),
     ("call_seconds", {"operator": 0.0}), ("call_seconds", None)],
)  # fmt: skip
def test_a_field_out_of_range_is_refused(field, value):
    good = {"name": "H", "device_type": "cpu", "memory_bytes": 1}
    with pytest.raises(ConfigError, match=rf"Hardware\({field}=.*; (pass|choose) "):
        Hardware(**{**good, field: value})


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="must name a device; pass 'cuda'"):
        Hardware.detect("gpu?")
    with pytest.raises(RuntimeUnavailable, match=r"cannot measure .* 'meta' .*; describe it yourself"):
        Hardware.detect("meta")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeUnavailable, match="sees 0 CUDA devices"):
            Hardware.detect("cuda")


class Clock:
    """Every run takes the next of `durations` seconds: a run is timed by two readings."""

    def __init__(self, *durations):
        self.readings = itertools.accumulate(
            step for duration in itertools.cycle(durations) for step in (0.0, duration)
        )

    def __call__(self):
        return next(self.readings)


CPU = torch.device("cpu")


def calibrated(clock, **changes):
    arguments = {"sizes": (16, 32), "copy_bytes": 4096, "budget_seconds": 1e9} | changes
    return calibrate(CPU, arguments.pop("free_bytes", None), clock=clock, **arguments)


def test_measuring_leaves_the_settings_and_the_random_state_alone():
    matmul = torch.backends.cuda.matmul
    state, precision, threads = torch.get_rng_state(), matmul.fp32_precision, torch.get_num_threads()
    calibrated(Clock(1.0))
    assert torch.equal(torch.get_rng_state(), state)
    assert (matmul.fp32_precision, torch.get_num_threads()) == (precision, threads)


@pytest.mark.parametrize(("dtype", "precision"), [("tfloat32", "tf32"), ("float32", "ieee")])
def test_float32_is_measured_with_and_without_rounding_to_tf32(dtype, precision):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with _product(dtype, 4, CPU) as run:
        assert matmul.fp32_precision == precision
        assert run().dtype is torch.float32
    assert matmul.fp32_precision == before


def test_the_disk_is_timed_by_what_offloading_does_with_it():
    nbytes = 4 * 4 * 1024**2
    best_of = Clock(9.0, 4.0, 1.0, 2.0, 5.0, 6.0)  # writes and reads take turns
    assert disk_rates(nbytes, best_of) == {
        "disk_write_bytes_per_second": nbytes / 1.0,
        "disk_read_bytes_per_second": nbytes / 2.0,
    }


def test_what_is_measured_is_filled_in(monkeypatch):
    speeds = {"flops_per_second": {"float32": 1e9}, "bandwidth_bytes_per_second": 2e9, "launch_seconds": 1e-6}
    monkeypatch.setattr(_hardware, "calibrate", lambda device, free_bytes: speeds if device == CPU else None)
    measured = Hardware.measure("cpu")
    assert measured == dataclasses.replace(Hardware.detect("cpu"), measured=True, **speeds)
    assert Hardware.from_json(measured.to_json()) == measured
    assert eval(repr(measured)) == measured
    assert hash(measured) == hash(Hardware.from_json(measured.to_json()))
    with pytest.raises(ConfigError, match=r"Hardware\.measure\(device='gpu\?'\) must name a device"):
        Hardware.measure("gpu?")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measuring_a_cuda_device():
    measured = Hardware.measure("cuda")
    assert {"float32", "tfloat32", "float16", "bfloat16"} <= measured.flops_per_second.keys()
    assert measured.host_to_device_bytes_per_second < measured.bandwidth_bytes_per_second
    assert Hardware.from_json(measured.to_json()) == measured


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_v2_counts_every_level(tmp_path):
    write(tmp_path / "cgroup", "0::/slice/unit\n")
    write(tmp_path / "fs/slice/unit/memory.max", "max\n")
    write(tmp_path / "fs/slice/memory.max", "4096\n")
    write(tmp_path / "fs/slice/memory.current", "96\n")
    write(tmp_path / "fs/slice/memory.stat", "anon 20\ninactive_file 64\nactive_file 12\n")
    assert list(machine.cgroup_limits(tmp_path / "cgroup", tmp_path / "fs")) == [(4096, 32)]


def test_cgroup_v1_falls_back_to_the_mount_inside_a_container(tmp_path):
    write(tmp_path / "cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n")
    write(tmp_path / "fs/memory/memory.limit_in_bytes", "8192\n")
    assert list(machine.cgroup_limits(tmp_path / "cgroup", tmp_path / "fs")) == [(8192, 0)]


def test_without_cgroups_there_are_no_limits(tmp_path):
    assert list(machine.cgroup_limits(tmp_path / "none", tmp_path)) == []


def test_the_limit_lowers_the_memory(monkeypatch):
    monkeypatch.setattr(machine, "cgroup_limits", lambda *_: iter([(GIB, GIB // 4), (2 * GIB, 0)]))
    hardware = Hardware.detect("cpu")
    assert hardware.memory_bytes == GIB
    assert hardware.free_bytes <= 3 * GIB // 4


# ------------------------------------------------------------------------------------ memory that host and device share

SPARK = ms.Hardware.named("gb10")
BATCH = torch.zeros(8192, 256)


def stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))


def loss(output, _):
    return output.square().mean()


def test_what_is_offloaded_counts_as_taken():
    plan = ms.Plan({"*": ms.offload()})
    apart = dataclasses.replace(SPARK, unified_memory=False)
    shared, own = (ms.profile(stack(), BATCH, loss=loss, plan=plan, hardware=each) for each in (SPARK, apart))
    assert own.by_tier["pinned"] > 4 * BATCH.nbytes
    assert shared.reserved_peak_bytes == own.reserved_peak_bytes
    assert shared.taken_bytes == own.taken_bytes + sum(own.by_tier.values())


def test_a_plan_offloads_nothing():
    model = stack()
    plain = ms.profile(model, BATCH, loss=loss, hardware=SPARK)
    plan = ms.plan(model, BATCH, int(0.7 * plain.taken_bytes), loss=loss, hardware=SPARK)
    assert "checkpoint" in repr(plan)
    assert "offload" not in repr(plan)
    planned = ms.profile(model, BATCH, loss=loss, plan=plan, hardware=SPARK)
    assert planned.taken_bytes <= 0.7 * plain.taken_bytes


def test_a_config_that_asks_for_offloading_is_told_why_not():
    with pytest.raises(ms.ConfigError, match="shares its host's memory"):
        ms.plan(stack(), BATCH, "10MiB", loss=loss, hardware=SPARK, config=ms.Config(enable_offloading=True))


def test_it_is_written_down():
    assert ms.Hardware.from_json(SPARK.to_json()) == SPARK
    with pytest.raises(ms.ConfigError, match=r"unified_memory='yes'\) must be True or False"):
        dataclasses.replace(SPARK, unified_memory="yes")
