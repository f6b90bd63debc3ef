"""The table of cards: that its rows are possible, that people's names find them, and that near misses are named."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from memscale import ConfigError, Hardware
from memscale.hardware.cards import CARDS, by_device_name, by_name

MIB = 1024**2
GIB_ON_THE_BOX = {
    "v100-16": 16, "v100-32": 32, "t4": 16, "rtx-2080-ti": 11, "a10": 24, "a100-40": 40, "a100-80": 80,
    "a100-80-pcie": 80, "a6000": 48, "rtx-3060": 12, "rtx-3080": 10, "rtx-3090": 24, "rtx-3090-ti": 24, "l4": 24,
    "l40s": 48, "rtx-6000-ada": 48, "rtx-4070": 12, "rtx-4080": 16, "rtx-4090": 24, "rtx-5060-ti": 16,
    "rtx-5070": 12, "rtx-5070-ti": 16, "rtx-5080": 16, "rtx-5090": 32,
    "rtx-pro-6000": 96, "h100": 80, "h100-pcie": 80, "h200": 141, "gh200": 96, "gb10": 128, "b200": 180, "b300": 288,
    "mi300x": 192, "mi355x": 288, "rx-7900-xtx": 24,
}  # fmt: skip


def test_the_usual_cards_are_there():
    assert [card.name for card in CARDS] == list(GIB_ON_THE_BOX)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_a_row_is_possible(card):
    hardware = Hardware.named(card.name)  # which validates every figure
    assert card.source
    flops = hardware.flops_per_second
    assert {"float64", "float32", "float16"} <= flops.keys()
    # Dense figures, not sparse ones: a dtype of half the size has twice the rate. GeForce cards alone run float16 at
    # half rate when it is summed in float32, which leaves int8 four times as fast.
    half = flops["float16"]
    assert flops.get("bfloat16", half) == half
    assert half == pytest.approx(2 * flops.get("tfloat32", half / 2), rel=0.03)
    assert flops.get("int8", 2 * half) == pytest.approx((4 if "GeForce" in hardware.name else 2) * half, rel=0.03)
    float8 = [flops[key] for key in flops if key.startswith("float8")]
    assert float8 == [pytest.approx(2 * half, rel=0.03)] * len(float8)
    assert flops["float64"] <= flops["float32"] <= half
    since_ampere, since_ada = (card.capability is None or card.capability >= first for first in ((8, 0), (8, 9)))
    assert ("bfloat16" in flops) == since_ampere
    assert ("tfloat32" in flops) == (since_ampere and card.name not in ("mi355x", "rx-7900-xtx"))
    assert bool(float8) == (since_ada and card.name != "rx-7900-xtx")
    assert hardware.unified_memory == (hardware.host_to_device_bytes_per_second is None) == (card.name == "gb10")
    assert (hardware.host_to_device_bytes_per_second or 0) < hardware.bandwidth_bytes_per_second
    assert 0.9 * 1024 * GIB_ON_THE_BOX[card.name] < card.memory_mib <= 1024 * GIB_ON_THE_BOX[card.name]


def test_figures_of_an_h100_and_an_rtx_4090():
    # From the white papers: dense, and accumulated in float32.
    h100, rtx = Hardware.named("h100"), Hardware.named("rtx-4090")
    assert h100.flops_per_second == {"float64": 66.9e12, "float32": 66.9e12, "tfloat32": 494.7e12, "float16": 989.4e12,
                                     "bfloat16": 989.4e12, "int8": 1978.9e12, "float8_e4m3fn": 1978.9e12}  # fmt: skip
    assert (h100.bandwidth_bytes_per_second, h100.peer_bytes_per_second) == (3352e9, 450e9)
    assert (h100.host_to_device_bytes_per_second, h100.device_to_host_bytes_per_second) == (63e9, 63e9)
    assert (h100.capability, h100.memory_bytes, h100.name) == ((9, 0), 81082 * MIB, "NVIDIA H100 80GB HBM3")
    assert (rtx.flops_per_second["bfloat16"], rtx.flops_per_second["float8_e4m3fn"]) == (165.2e12, 330.3e12)
    assert (rtx.peer_bytes_per_second, rtx.capability) == (None, (8, 9))
    assert not h100.measured


def test_cards_of_amd_have_no_cuda_capability_and_float8_of_their_own():
    card = Hardware.named("mi300x")
    assert card.capability is None
    assert "float8_e4m3fnuz" in card.flops_per_second
    assert "float8_e4m3fn" not in card.flops_per_second


@pytest.mark.parametrize(
    ("name", "card"),
    [("h100", "h100"), ("H100-SXM", "h100"), ("NVIDIA H100 80GB HBM3", "h100"), ("H100 PCIe", "h100-pcie"),
     ("a100-80", "a100-80"), ("A100 80GB", "a100-80"), ("a100_40gb", "a100-40"), ("A100-SXM4-40GB", "a100-40"),
     ("rtx 4090", "rtx-4090"), ("RTX4090", "rtx-4090"), ("4090", "rtx-4090"), ("GeForce RTX 4090", "rtx-4090"),
     ("Tesla T4", "t4"), ("AMD Instinct MI300X", "mi300x"), ("l40s", "l40s"), ("L4", "l4"),
     ("RTX 3060", "rtx-3060"), ("RTX 5060 Ti 16GB", "rtx-5060-ti"), ("3090 Ti", "rtx-3090-ti"), ("GH200", "gh200"),
     ("RTX PRO 6000", "rtx-pro-6000"), ("GB10", "gb10"), ("DGX Spark", "gb10"), ("RTX 5070", "rtx-5070")],
)  # fmt: skip
def test_names_that_people_use(name, card):
    assert by_name(name).name == card


def test_every_name_means_one_card():
    owners = {}
    for card in CARDS:
        for name in (card.name, *card.aliases, *card.device_names):
            assert by_name(name) is card, name
            assert owners.setdefault(name, card) is card


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("h1000", "'h100'"), ("rtx-3090-tj", "'rtx-3090-ti'"), ("a100", "'a100-40', 'a100-80', 'a100-80-pcie'"),
     ("v100", "'v100-16', 'v100-32'"), ("mi300", "'mi300x'"), ("RTX 409O", "'rtx-4090'")],
)  # fmt: skip
def test_unknown_names_are_told_the_nearest_and_where_all_are(name, nearest):
    said = f"no card is called '{name}'; the nearest are {nearest}.*, and `memscale cards` lists all; leave hardware="
    with pytest.raises(ConfigError, match=said):
        Hardware.named(name)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 3080 Ti", "NVIDIA A10G", "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
                                  "NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090 Laptop GPU", "h100"])  # fmt: skip
def test_drivers_names_match_exactly_or_not_at_all(name):
    assert by_device_name(name) is None


@pytest.fixture
def device(monkeypatch):
    """A CUDA device of any name."""

    def install(name, major, minor, hip=None):
        properties = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=132, is_integrated=0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * MIB, 80_000 * MIB))
        monkeypatch.setattr(torch.version, "hip", hip)

    return install


def test_detecting_a_known_card_fills_in_its_speeds(device):
    device("NVIDIA H100 80GB HBM3", 9, 0)
    found, card = Hardware.detect("cuda:0"), Hardware.named("h100")
    assert (found.memory_bytes, found.free_bytes) == (80_000 * MIB, 3 * MIB)  # as the driver says, not as the table
    assert (found.flops_per_second, found.capability) == (card.flops_per_second, (9, 0))
    assert found.bandwidth_bytes_per_second == card.bandwidth_bytes_per_second
    assert not found.measured


def test_detecting_an_unknown_card_leaves_its_speeds_open(device):
    device("NVIDIA H100 NVL", 9, 0)
    found = Hardware.detect("cuda:0")
    assert (found.name, found.capability, dict(found.flops_per_second)) == ("NVIDIA H100 NVL", (9, 0), {})
    assert found.bandwidth_bytes_per_second is None


def test_the_documentation_has_the_same_table():
    page = (Path(__file__).parents[2] / "docs/hardware.md").read_text(encoding="utf-8")
    lines = page[page.index("| name | GiB |") :].splitlines()[2:]
    rows = {cells[0]: cells for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}
    assert list(rows) == [card.name for card in CARDS]
    for card in CARDS:
        float8 = next((rate for dtype, rate in card.tflops.items() if dtype.startswith("float8")), None)
        rates = [card.tflops.get(key) for key in ("float32", "tfloat32", "float16", "bfloat16", "int8")]
        speeds = [*rates, float8, card.memory_gb_per_second, card.host_gb_per_second, card.peer_gb_per_second]
        shown = ["" if speed is None else f"{speed:.4g}" for speed in speeds]
        assert rows[card.name] == [card.name, f"{card.memory_mib / 1024:.2f}", *shown, card.source]


def test_the_documentation_has_the_interconnect_of_every_card():
    page = (Path(__file__).parents[2] / "docs/hardware.md").read_text(encoding="utf-8")
    lines = page[page.index("| name | in a node |") :].split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in rows] == [card.name for card in CARDS]
    for (name, *cells), card in zip(rows, CARDS, strict=True):
        joined, hardware = card.joined, Hardware.named(name)
        shown = [
            joined.devices_per_node,
            joined.node_gb_per_second,
            joined.node_latency_us,
            joined.network_gb_per_second,
        ]
        assert cells == ["" if value is None else f"{value:.4g}" for value in shown] + [joined.source]
        assert (hardware.devices_per_node, hardware.node_bytes_per_second) == (shown[0], shown[1] * 1e9)
        assert hardware.network_bytes_per_second == (None if shown[3] is None else shown[3] * 1e9)
