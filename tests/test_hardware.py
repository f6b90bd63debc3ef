"""Hardware: what is measured, and that limits from cgroups count."""

import dataclasses
import os

import pytest
import torch

from memscale import _host_memory
from memscale._errors import ConfigError, RuntimeUnavailable
from memscale.profiling._hardware import Hardware

GIB = 1024**3


def test_the_cpu():
    hardware = Hardware.detect("cpu")
    assert hardware.device_type == "cpu"
    assert hardware.name
    assert 0 < hardware.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert hardware == Hardware.detect("cpu")
    assert f"{hardware.memory_bytes / GIB:.2f} GiB" in str(hardware)


def test_none_is_the_accelerator_where_there_is_one():
    assert Hardware.detect().device_type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device():
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


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("name", 3), ("device_type", None), ("memory_bytes", 0), ("memory_bytes", 1.0),
     ("memory_bytes", True), ("free_bytes", -1)],
)  # fmt: skip
def test_bad_fields(field, value):
    good = {"name": "H", "device_type": "cpu", "memory_bytes": 1}
    with pytest.raises(ConfigError, match=rf"Hardware\({field}=.*; pass "):
        Hardware(**{**good, field: value})


def test_bad_devices():
    with pytest.raises(ConfigError, match="must name a device; pass 'cuda'"):
        Hardware.detect("gpu?")
    with pytest.raises(RuntimeUnavailable, match=r"cannot measure .* 'meta' .*; describe it yourself"):
        Hardware.detect("meta")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeUnavailable, match="sees 0 CUDA devices"):
            Hardware.detect("cuda")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_v2_counts_every_level(tmp_path):
    write(tmp_path / "cgroup", "0::/slice/unit\n")
    write(tmp_path / "fs/slice/unit/memory.max", "max\n")
    write(tmp_path / "fs/slice/memory.max", "4096\n")
    write(tmp_path / "fs/slice/memory.current", "96\n")
    write(tmp_path / "fs/slice/memory.stat", "anon 20\ninactive_file 64\nactive_file 12\n")
    assert list(_host_memory.cgroup_limits(tmp_path / "cgroup", tmp_path / "fs")) == [(4096, 32)]


def test_cgroup_v1_falls_back_to_the_mount_inside_a_container(tmp_path):
    write(tmp_path / "cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n")
    write(tmp_path / "fs/memory/memory.limit_in_bytes", "8192\n")
    assert list(_host_memory.cgroup_limits(tmp_path / "cgroup", tmp_path / "fs")) == [(8192, 0)]


def test_no_cgroups(tmp_path):
    assert list(_host_memory.cgroup_limits(tmp_path / "none", tmp_path)) == []


def test_the_limit_lowers_the_memory(monkeypatch):
    monkeypatch.setattr(_host_memory, "cgroup_limits", lambda *_: iter([(GIB, GIB // 4), (2 * GIB, 0)]))
    hardware = Hardware.detect("cpu")
    assert hardware.memory_bytes == GIB
    assert hardware.free_bytes <= 3 * GIB // 4
