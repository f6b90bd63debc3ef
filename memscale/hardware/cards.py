"""A table of accelerator cards and of the links in a typical server of each, from the makers' data sheets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from memscale.core import Argument, ConfigError


@dataclass(frozen=True)
class Interconnect:
    """The links between cards of one kind.

    Args:
        devices_per_node: the number of cards in one node; `None` if servers differ.
        node_gb_per_second: the rate at which one card can send to the others of its node, in 10⁹ bytes a second.
        node_latency_us: the latency between two cards of a node, in microseconds.
        network_gb_per_second: a card's share of the network adapters of its node, in one direction; `None` if its
            servers have none for it.
        source: the source of the figures.
    """

    devices_per_node: int | None
    node_gb_per_second: float
    node_latency_us: float
    network_gb_per_second: float | None
    source: str


@dataclass(frozen=True)
class Card:
    """A row of the table of cards, in the units of data sheets.

    Args:
        name: the name in this table; `aliases` are further names.
        device_names: the names that drivers report, the newest spelling first.
        memory_mib: total memory in MiB as ``torch.cuda.get_device_properties`` reports it: less than the advertised
            size, because of ECC and firmware, and up to 1% different between drivers. The value is the lowest in
            public logs of PyTorch runs, so that a plan fits under every driver.
        tflops: peak 10¹² operations a second of a dense matrix product, without sparsity, by dtype. With tensor cores
            where the card has them, accumulating in float32 (int8: in int32). ``float32`` is the plain rate and
            ``tfloat32`` the tensor cores' on float32 inputs.
        memory_gb_per_second: peak bandwidth of the card's memory, 10⁹ bytes a second.
        host_gb_per_second: peak of the link to the host, in one direction; `None` if card and host share one memory.
        peer_gb_per_second: peak of the link to one other card, in one direction; `None` without NVLink or similar.
        capability: CUDA compute capability; `None` for cards of other makers.
        multiprocessors: streaming multiprocessors; AMD calls them compute units.
        joined: the links to other cards of its kind.
        source: the source of the figures.
    """

    name: str
    aliases: tuple[str, ...]
    device_names: tuple[str, ...]
    memory_mib: int
    tflops: Mapping[str, float]
    memory_gb_per_second: float
    host_gb_per_second: float | None
    peer_gb_per_second: float | None
    capability: tuple[int, int] | None
    multiprocessors: int
    joined: Interconnect
    source: str


# GB/s of PCI Express with 16 lanes, one direction; data sheets quote both together. Source: PCI-SIG base specifications
# 3.0, 4.0 and 5.0, 8, 16 and 32 GT/s a lane less the 128b/130b line code.
_PCIE3, _PCIE4, _PCIE5 = 15.75, 31.5, 63.0
# GB/s of NVLink-C2C between the two dies of a Grace Hopper. Source: NVIDIA GH200 data sheet, 900 both ways together.
_C2C = 450.0


def _rates(float64: float, float32: float, tfloat32: float | None, half: float, **others: float) -> dict[str, float]:
    """Returns the rates by dtype. `half` is the rate of float16, and of bfloat16 on cards with TF32."""
    rates = {"float64": float64, "float32": float32, "float16": half}
    if tfloat32 is not None:
        rates |= {"tfloat32": tfloat32, "bfloat16": half}
    return rates | others


# Rates in TFLOP/s. Source: the data sheets that `CARDS` names. Those of NVIDIA cards with slow float64 omit its rate:
# 1/32 of float32 on Turing, 1/64 on Ampere GA10x, Ada and RTX Blackwell (their architecture white papers).
_V100 = _rates(7.8, 15.7, None, 125)
_T4 = _rates(8.1 / 32, 8.1, None, 65, int8=130)
_RTX_2080_TI = _rates(13.4 / 32, 13.4, None, 53.8, int8=215.2)
_A10 = _rates(31.2 / 64, 31.2, 62.5, 125, int8=250)
_A100 = _rates(19.5, 19.5, 156, 312, int8=624)
_A6000 = _rates(38.7 / 64, 38.7, 77.4, 154.8, int8=309.7)
_RTX_3060 = _rates(12.7 / 64, 12.7, 12.7, 25.5, int8=102)
_RTX_3080 = _rates(29.8 / 64, 29.8, 29.8, 59.5, int8=238)
_RTX_3090 = _rates(35.6 / 64, 35.6, 35.6, 71, int8=284)
_RTX_3090_TI = _rates(40 / 64, 40, 40, 80, int8=320)
_L4 = _rates(30.3 / 64, 30.3, 60, 121, int8=242.5, float8_e4m3fn=242.5)
_L40S = _rates(91.6 / 64, 91.6, 183, 362.05, int8=733, float8_e4m3fn=733)
_RTX_6000_ADA = _rates(91.1 / 64, 91.1, 182.1, 364.2, int8=728.5, float8_e4m3fn=728.5)
_RTX_4070 = _rates(29.1 / 64, 29.1, 29.1, 58.3, int8=233.2, float8_e4m3fn=116.6)
_RTX_4080 = _rates(48.7 / 64, 48.7, 48.7, 97.5, int8=389.9, float8_e4m3fn=194.9)
_RTX_4090 = _rates(82.6 / 64, 82.6, 82.6, 165.2, int8=660.6, float8_e4m3fn=330.3)
# Source: the same sheets. float32 is two operations a core and boost clock. Sheets quote FP4 with sparsity, which is 16
# times float16 summed in float32: 759, 1406 and 1801 of these three.
_RTX_5060_TI = _rates(23.7 / 64, 23.7, 23.7, 47.4, int8=189.8, float8_e4m3fn=94.9)
_RTX_5070 = _rates(30.9 / 64, 30.9, 30.9, 61.7, int8=246.9, float8_e4m3fn=123.5)
_RTX_5070_TI = _rates(43.9 / 64, 43.9, 43.9, 87.9, int8=351.5, float8_e4m3fn=175.8)
_RTX_5080 = _rates(56.3 / 64, 56.3, 56.3, 112.6, int8=450.2, float8_e4m3fn=225.1)
_RTX_PRO_6000 = _rates(126 / 64, 126, 251.9, 503.8, int8=1007.6, float8_e4m3fn=1007.6)
# Source: the same sheets. GB10's has one number, 10¹⁵ operations in FP4 with sparsity: eight times bfloat16, as for an
# RTX PRO.
_GB10 = _rates(31 / 64, 31, 62.5, 125, int8=250, float8_e4m3fn=250)
_RTX_5090 = _rates(104.8 / 64, 104.8, 104.8, 209.5, int8=838, float8_e4m3fn=419)
_H100_PCIE = _rates(51.2, 51.2, 378, 756, int8=1513, float8_e4m3fn=1513)
_HOPPER_SXM = _rates(66.9, 66.9, 494.7, 989.4, int8=1978.9, float8_e4m3fn=1978.9)
_B200 = _rates(37, 75, 1100, 2250, int8=4500, float8_e4m3fn=4500)
_B300 = _rates(1.2, 75, 1125, 2250, float8_e4m3fn=4500)
_MI300X = _rates(163.4, 163.4, 653.7, 1307.4, int8=2614.9, float8_e4m3fnuz=2614.9)
# Source: the same sheets. Neither has TF32, and RDNA 3 has no float8.
_MI355X = _rates(78.6, 157.3, None, 2516.6, bfloat16=2516.6, int8=5033.2, float8_e4m3fn=5033.2)
_RX_7900_XTX = _rates(1.9, 61.4, None, 122.8, bfloat16=122.8)

# Microseconds of one step of a ring. Source: NCCL's own model (its `src/graph/tuning.cc`, LL128).
_NVLINK_US, PCIE_US, NETWORK_US = 1.9, 2.5, 4.0

# One network adapter of 200 or 400 Gb/s belongs to each card of these servers; a DGX-1 has four of 100 Gb/s.
_DGX_1 = Interconnect(8, 150, _NVLINK_US, 6.25, "NVIDIA DGX-1 With Tesla V100 System Architecture white paper")
_DGX_A100 = Interconnect(8, 300, _NVLINK_US, 25, "NVIDIA DGX A100 data sheet")
_DGX_H100 = Interconnect(8, 450, _NVLINK_US, 50, "NVIDIA DGX H100 data sheet")
_DGX_H200 = Interconnect(8, 450, _NVLINK_US, 50, "NVIDIA DGX H200 data sheet")
_DGX_B200 = Interconnect(8, 900, _NVLINK_US, 50, "NVIDIA DGX B200 data sheet")
_DGX_B300 = Interconnect(8, 900, _NVLINK_US, 100, "NVIDIA DGX B300 data sheet")
# Seven links of 64 GB/s to the seven others.
_MI300X_LINKS = Interconnect(
    8, 448, _NVLINK_US, 50, "AMD Instinct MI300X Platform data sheet and Cluster Reference Guide"
)

_MI355X_LINKS = Interconnect(8, 537.6, _NVLINK_US, 50, "AMD Instinct MI355X Platform data sheet (seven links of 76.8)")


def _pcie(gb_per_second: float, devices_per_node: int | None = None, sheet: str = "") -> Interconnect:
    """Returns the links of cards in PCI Express slots, which carry all traffic between more than two cards."""
    base = "PCI-SIG base specification, 16 lanes"
    return Interconnect(
        devices_per_node, gb_per_second, PCIE_US, None, f"{base}; {sheet} (servers with 1 to 8)" if sheet else base
    )


_GH200_ALONE = Interconnect(1, _PCIE5, PCIE_US, None, "NVIDIA GH200 data sheet (one in a node); PCI-SIG, 16 lanes")
_GB10_ALONE = Interconnect(1, 25, PCIE_US, 25, "NVIDIA DGX Spark data sheet (one in a node, an adapter of 200 Gb/s)")
_IN_PCIE3, _IN_PCIE4, _IN_PCIE5 = _pcie(_PCIE3), _pcie(_PCIE4), _pcie(_PCIE5)

_GA102 = "NVIDIA Ampere GA102 GPU Architecture white paper, appendix A"
_RTX_50 = "NVIDIA GeForce RTX 50 product pages (cores, boost clock, bandwidth, AI TOPS)"
_ADA = "NVIDIA Ada GPU Architecture white paper, appendix A"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture white paper, appendix A"
_HOPPER = "NVIDIA H100 Tensor Core GPU Architecture white paper"

# NVLink figures are half of what the sheets quote, which is both directions together. The MI300X has one link of
# 128 GB/s (both directions) to each of its seven neighbours, and NVIDIA's switches give one neighbour everything.
CARDS = (
    Card("v100-16", ("v100-sxm2-16",), ("Tesla V100-SXM2-16GB",), 16_130, _V100, 900, _PCIE3, 150, (7, 0), 80, _DGX_1,
         "NVIDIA V100 data sheet, January 2020 (SXM2)"),
    Card("v100-32", ("v100-sxm2-32",), ("Tesla V100-SXM2-32GB",), 32_494, _V100, 900, _PCIE3, 150, (7, 0), 80, _DGX_1,
         "NVIDIA V100 data sheet, January 2020 (SXM2)"),
    Card("t4", (), ("Tesla T4", "NVIDIA T4"), 14_912, _T4, 320, _PCIE3, None, (7, 5), 40, _IN_PCIE3,
         "NVIDIA T4 data sheet, 2019"),
    Card("rtx-2080-ti", ("2080-ti",), ("NVIDIA GeForce RTX 2080 Ti", "GeForce RTX 2080 Ti"), 10_825, _RTX_2080_TI, 616,
         _PCIE3, 50, (7, 5), 68, _IN_PCIE3, "NVIDIA Turing GPU Architecture white paper, appendix A"),
    Card("a10", ("a10-24",), ("NVIDIA A10",), 22_594, _A10, 600, _PCIE4, None, (8, 6), 72, _IN_PCIE4,
         "NVIDIA A10 data sheet, 2021"),
    Card("a100-40", ("a100-sxm-40", "a100-sxm4-40"), ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB",
         "NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"), 40_326, _A100, 1555, _PCIE4, 300, (8, 0), 108, _DGX_A100,
         "NVIDIA A100 Tensor Core GPU data sheet, 2020 (40 GB)"),
    Card("a100-80", ("a100-sxm-80", "a100-sxm4-80"), ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), 81_037, _A100, 2039,
         _PCIE4, 300, (8, 0), 108, _DGX_A100, "NVIDIA A100 Tensor Core GPU data sheet, 2021 (80 GB SXM)"),
    Card("a100-80-pcie", ("a100-pcie", "a100-pcie-80"), ("NVIDIA A100 80GB PCIe",), 81_037, _A100, 1935, _PCIE4, 300,
         (8, 0), 108, _pcie(_PCIE4, 8, "NVIDIA A100 data sheet"),
         "NVIDIA A100 Tensor Core GPU data sheet, 2021 (80 GB PCIe)"),
    Card("a6000", ("rtx a6000",), ("NVIDIA RTX A6000", "RTX A6000"), 48_676, _A6000, 768, _PCIE4, 56.25, (8, 6), 84,
         _IN_PCIE4, _GA102),
    Card("rtx-3060", ("3060", "rtx-3060-12"), ("NVIDIA GeForce RTX 3060", "GeForce RTX 3060"), 11_906, _RTX_3060, 360,
         _PCIE4, None, (8, 6), 28, _IN_PCIE4,
         "NVIDIA GeForce RTX 3060 product page (12 GB), rates as GA102's by the core"),
    Card("rtx-3080", ("3080", "rtx-3080-10"), ("NVIDIA GeForce RTX 3080", "GeForce RTX 3080"), 10_002, _RTX_3080, 760,
         _PCIE4, None, (8, 6), 68, _IN_PCIE4, f"{_GA102} (10 GB)"),
    Card("rtx-3090", ("3090",), ("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"), 24_120, _RTX_3090, 936, _PCIE4, 56.25,
         (8, 6), 82, _IN_PCIE4, _GA102),
    Card("rtx-3090-ti", ("3090-ti",), ("NVIDIA GeForce RTX 3090 Ti",), 24_112, _RTX_3090_TI, 1008, _PCIE4, 56.25,
         (8, 6), 84, _IN_PCIE4, _GA102),
    Card("l4", ("l4-24",), ("NVIDIA L4",), 22_562, _L4, 300, _PCIE4, None, (8, 9), 58,
         _pcie(_PCIE4, 8, "NVIDIA L4 data sheet"), "NVIDIA L4 data sheet, 2023"),
    Card("l40s", ("l40s-48",), ("NVIDIA L40S",), 45_450, _L40S, 864, _PCIE4, None, (8, 9), 142, _IN_PCIE4,
         "NVIDIA L40S data sheet, 2023"),
    Card("rtx-6000-ada", ("6000-ada",), ("NVIDIA RTX 6000 Ada Generation",), 48_520, _RTX_6000_ADA, 960, _PCIE4, None,
         (8, 9), 142, _IN_PCIE4, _ADA),
    Card("rtx-4070", ("4070",), ("NVIDIA GeForce RTX 4070",), 11_866, _RTX_4070, 504, _PCIE4, None, (8, 9), 46,
         _IN_PCIE4, "NVIDIA GeForce RTX 4070 product page, rates as the Ada white paper's by the core"),
    Card("rtx-4080", ("4080",), ("NVIDIA GeForce RTX 4080",), 15_945, _RTX_4080, 717, _PCIE4, None, (8, 9), 76,
         _IN_PCIE4, _ADA),
    Card("rtx-4090", ("4090",), ("NVIDIA GeForce RTX 4090",), 24_080, _RTX_4090, 1008, _PCIE4, None, (8, 9), 128,
         _IN_PCIE4, _ADA),
    # Eight lanes of PCI Express 5.0 are as fast as sixteen of 4.0.
    Card("rtx-5060-ti", ("5060-ti", "rtx-5060-ti-16"), ("NVIDIA GeForce RTX 5060 Ti",), 15_823, _RTX_5060_TI, 448,
         _PCIE4, None, (12, 0), 36, _IN_PCIE4, f"{_RTX_50}, 16 GB"),
    # Estimated without a log under Linux: the driver's 12,227 MiB minus the part it reserves on an RTX 5070 Ti.
    Card("rtx-5070", ("5070",), ("NVIDIA GeForce RTX 5070",), 11_732, _RTX_5070, 672, _PCIE5, None, (12, 0), 48,
         _IN_PCIE5, _RTX_50),
    Card("rtx-5070-ti", ("5070-ti",), ("NVIDIA GeForce RTX 5070 Ti",), 15_808, _RTX_5070_TI, 896, _PCIE5, None, (12, 0),
         70, _IN_PCIE5, _RTX_50),
    Card("rtx-5080", ("5080",), ("NVIDIA GeForce RTX 5080",), 15_840, _RTX_5080, 960, _PCIE5, None, (12, 0), 84,
         _IN_PCIE5, _BLACKWELL),
    Card("rtx-5090", ("5090",), ("NVIDIA GeForce RTX 5090",), 32_102, _RTX_5090, 1792, _PCIE5, None, (12, 0), 170,
         _IN_PCIE5, _BLACKWELL),
    Card("rtx-pro-6000", ("pro-6000", "rtx-pro-6000-blackwell"), ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",),
         97_234, _RTX_PRO_6000, 1792, _PCIE5, None, (12, 0), 188, _IN_PCIE5,
         "NVIDIA RTX PRO Blackwell GPU Architecture white paper (Workstation Edition)"),
    Card("h100", ("h100-sxm", "h100-sxm5", "h100-80"), ("NVIDIA H100 80GB HBM3",), 81_082, _HOPPER_SXM, 3352, _PCIE5,
         450, (9, 0), 132, _DGX_H100, f"{_HOPPER} (SXM5)"),
    Card("h100-pcie", (), ("NVIDIA H100 PCIe",), 81_008, _H100_PCIE, 2039, _PCIE5, 300, (9, 0), 114,
         _pcie(_PCIE5, 8, "NVIDIA H100 data sheet"), f"{_HOPPER} (PCIe)"),
    Card("h200", ("h200-sxm", "h200-141"), ("NVIDIA H200",), 143_156, _HOPPER_SXM, 4800, _PCIE5, 450, (9, 0), 132,
         _DGX_H200, "NVIDIA H200 data sheet, 2024 (SXM), whose arithmetic is the H100's"),
    Card("gh200", ("gh200-96", "gh200-480"), ("NVIDIA GH200 480GB",), 96_763, _HOPPER_SXM, 4000, _C2C, None, (9, 0),
         132, _GH200_ALONE, "NVIDIA GH200 Superchip data sheet (96 GB HBM3), whose arithmetic is the H100's"),
    Card("gb10", ("dgx-spark",), ("NVIDIA GB10",), 122_548, _GB10, 273, None, None, (12, 1), 48, _GB10_ALONE,
         "NVIDIA DGX Spark data sheet, 2025 (128 GB for processor and GPU together)"),
    Card("b200", ("b200-sxm", "b200-180"), ("NVIDIA B200",), 182_631, _B200, 7700, _PCIE5, 900, (10, 0), 148, _DGX_B200,
         "NVIDIA Blackwell data sheet, 2025 (HGX B200, one GPU)"),
    Card("b300", ("b300-sxm", "b300-288"), ("NVIDIA B300 SXM6 AC",), 274_110, _B300, 8000, _PCIE5, 900, (10, 3), 148,
         _DGX_B300, "NVIDIA HGX B300 data sheet, 2025 (one GPU)"),
    Card("mi300x", ("mi300x-192",), ("AMD Instinct MI300X",), 196_592, _MI300X, 5300, _PCIE5, 64, None, 304,
         _MI300X_LINKS, "AMD Instinct MI300X data sheet, 2023"),
    Card("mi355x", ("mi355x-288",), ("AMD Instinct MI355X",), 294_886, _MI355X, 8000, _PCIE5, 76.8, None, 256,
         _MI355X_LINKS, "AMD Instinct MI355X data sheet, 2025"),
    Card("rx-7900-xtx", ("7900-xtx",), ("AMD Radeon RX 7900 XTX", "Radeon RX 7900 XTX"), 24_560, _RX_7900_XTX, 960,
         _PCIE4, None, None, 96, _IN_PCIE4, "AMD Radeon RX 7900 XTX product page"),
)  # fmt: skip


def by_device_name(device_name: str) -> Card | None:
    """Returns the card with exactly the driver's name `device_name`, or `None`.

    The match is exact because "RTX 3090" and "RTX 3090 Ti", "A10" and "A10G", a card and its slice (MIG) all differ.
    """
    return next((card for card in CARDS if device_name in card.device_names), None)


def card_name(device_name: str) -> str | None:
    """Returns the table's name of the card with the driver's name `device_name`, or `None`.

    >>> card_name("NVIDIA GeForce RTX 4090"), card_name("a card of tomorrow")
    ('rtx-4090', None)
    """
    card = by_device_name(device_name)
    return None if card is None else card.name


def card_names() -> tuple[str, ...]:
    """Returns the names of all cards in the table."""
    return tuple(card.name for card in CARDS)


def by_name(name: str) -> Card:
    """Returns the card called `name`; case, spaces, dashes and the maker's name are ignored.

    >>> by_name("NVIDIA GeForce RTX 4090").name, by_name("A100 80GB").name
    ('rtx-4090', 'a100-80')

    Raises:
        ConfigError: no card has this name; the message lists the nearest names, or all.
    """
    known = {_plain(each): card for card in CARDS for each in (*card.device_names, *card.aliases, card.name)}
    plain = _plain(name) if isinstance(name, str) else ""
    if plain in known:
        return known[plain]
    near = [each for each in known if plain and each.startswith(plain)]
    near += difflib.get_close_matches(plain, known, n=3, cutoff=0.7)
    nearest = list(dict.fromkeys(known[each].name for each in near))[:3]
    if nearest:
        known_ones = f"; the nearest are {', '.join(map(repr, nearest))}, and `memscale cards` lists all"
    else:
        known_ones = f". Known are {', '.join(card.name for card in CARDS)}"
    left_out = Argument("", "hardware")
    raise ConfigError(
        f"no card is called {name!r}{known_ones}; leave {left_out} out for the device that the model is on, or "
        "describe any other in Python with Hardware(name=..., device_type=..., memory_bytes=...)"
    ).naming(left_out)


def _plain(name: str) -> str:
    words = re.sub(r"\b(nvidia|amd|tesla|geforce|instinct|generation)\b|(?<=\d)\s*gi?b\b", "", name.lower())
    return re.sub(r"[^a-z0-9]", "", words)
