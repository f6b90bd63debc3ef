"""What joins the cards of the table: within a node of the usual server of each, and between such nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interconnect:
    """How several cards of one kind are joined.

    Args:
        devices_per_node: how many are in one node; None where servers differ.
        node_gb_per_second: what one card can send to the others of its node, 10⁹ bytes a second.
        node_latency_us: from one to the next of them.
        network_gb_per_second: a card's share of the network adapters of its node, in one direction; None where none
            belong to it.
        source: where the figures are from.
    """

    devices_per_node: int | None
    node_gb_per_second: float
    node_latency_us: float
    network_gb_per_second: float | None
    source: str


# What NCCL itself reckons with for one step of a ring (its `src/graph/tuning.cc`, LL128), in microseconds.
_NVLINK_US, _PCIE_US, NETWORK_US = 1.9, 2.5, 4.0

# One network adapter of 200 or 400 Gb/s belongs to each card of these servers; a DGX-1 has four of 100 Gb/s.
_DGX_1 = Interconnect(8, 150, _NVLINK_US, 6.25, "NVIDIA DGX-1 With Tesla V100 System Architecture white paper")
_DGX_A100 = Interconnect(8, 300, _NVLINK_US, 25, "NVIDIA DGX A100 data sheet")
_DGX_H100 = Interconnect(8, 450, _NVLINK_US, 50, "NVIDIA DGX H100 data sheet")
_DGX_H200 = Interconnect(8, 450, _NVLINK_US, 50, "NVIDIA DGX H200 data sheet")
_DGX_B200 = Interconnect(8, 900, _NVLINK_US, 50, "NVIDIA DGX B200 data sheet")
# Seven links of 64 GB/s to the seven others.
_MI300X = Interconnect(8, 448, _NVLINK_US, 50, "AMD Instinct MI300X Platform data sheet and Cluster Reference Guide")


def _pcie(gb_per_second: float, devices_per_node: int | None = None, sheet: str = "") -> Interconnect:
    """Cards in slots: more than two of them talk over these, whatever bridges pairs have."""
    base = "PCI-SIG base specification, 16 lanes"
    return Interconnect(
        devices_per_node, gb_per_second, _PCIE_US, None, f"{base}; {sheet} (servers with 1 to 8)" if sheet else base
    )


INTERCONNECTS = {
    "v100-16": _DGX_1,
    "v100-32": _DGX_1,
    "t4": _pcie(15.75),
    "a10": _pcie(31.5),
    "a100-40": _DGX_A100,
    "a100-80": _DGX_A100,
    "a100-80-pcie": _pcie(31.5, 8, "NVIDIA A100 data sheet"),
    "a6000": _pcie(31.5),
    "rtx-3090": _pcie(31.5),
    "l4": _pcie(31.5, 8, "NVIDIA L4 data sheet"),
    "l40s": _pcie(31.5),
    "rtx-6000-ada": _pcie(31.5),
    "rtx-4090": _pcie(31.5),
    "rtx-5090": _pcie(63.0),
    "h100": _DGX_H100,
    "h100-pcie": _pcie(63.0, 8, "NVIDIA H100 data sheet"),
    "h200": _DGX_H200,
    "b200": _DGX_B200,
    "mi300x": _MI300X,
}
