"""Estimates the seconds of a collective: bytes over the links within and between nodes, plus latencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from memscale.hardware.device import Hardware

#: Kinds of collectives, as schedules name them.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "other collectives")

# Shares of data sheet rates. NVLink reaches 370 of 450 GB/s on an H100, its protocol takes the rest
# (NVIDIA/nccl-tests#212). An adapter of 400 Gb/s reaches 46 to 48 of its 50 GB/s (NVIDIA/nccl-tests#290).
_NODE_SHARE, _NETWORK_SHARE = 0.82, 0.94

# Seconds of a call in NCCL's own model, besides those of its steps (`src/graph/tuning.cc`, LL128).
_CALL_SECONDS = 14e-6

# Defaults for unknown hardware: the latencies in seconds, and the number of devices in one node, as in the largest
# servers.
_NODE_LATENCY, _NETWORK_LATENCY, _MOST_TOGETHER = 2.5e-6, 4e-6, 16


class Span(NamedTuple):
    """The size of a process group, and the number of nodes that it is spread over."""

    size: int
    nodes: int

    @property
    def per_node(self) -> int:
        """The largest number of processes in a node."""
        return -(-self.size // self.nodes)


def span(ranks: Sequence[int], hardware: Hardware) -> Span:
    """Returns the spread of these processes over nodes that are filled in order, as `torchrun` does.

    >>> span(range(16), Hardware.named("h100")), span([0, 8, 16], Hardware.named("h100"))
    (Span(size=16, nodes=2), Span(size=3, nodes=3))
    """
    each = hardware.devices_per_node
    return Span(len(ranks), 1 if each is None else len({rank // each for rank in ranks}))


def collective_seconds(kind: str, nbytes: int, over: Span, hardware: Hardware) -> float | None:
    """Returns the seconds of a collective on idle links; `None` if `hardware` lacks their speed.

    Args:
        kind: one of `COLLECTIVES`.
        nbytes: the full size: the result of an all-gather, the input of a reduce-scatter or an all-to-all.
        over: the spread of its processes.
        hardware: the device of each process.

    >>> card = Hardware.named("h100")
    >>> [f"{collective_seconds('all-gather', 10**9, span(range(n), card), card) * 1e3:.2f} ms" for n in (1, 8, 64)]
    ['0.00 ms', '2.40 ms', '2.82 ms']
    """
    if over.size == 1:
        return 0.0
    if _missing(over, hardware):
        return None
    rates = []
    if over.per_node > 1:
        # Two processes use the bridge or link between their cards; a ring of more uses all links of the node.
        peer = hardware.peer_bytes_per_second if over.per_node == 2 else None
        rate = peer or hardware.node_bytes_per_second
        assert rate is not None, "it is not missing"
        rates.append(rate * (1.0 if hardware.measured else _NODE_SHARE))
    if over.nodes > 1:
        assert hardware.network_bytes_per_second is not None, "likewise"
        network = hardware.network_bytes_per_second * (1.0 if hardware.measured else _NETWORK_SHARE)
        # Rings leave a node by the adapters of all its processes. In an all-to-all each process sends its own part.
        sent = (over.size - over.per_node) / (over.size - 1) if kind == "all-to-all" else 1 / over.per_node
        rates.append(network / sent)
    rounds = 2 if kind == "all-reduce" else 1
    share = 1.0 if kind == COLLECTIVES[-1] else (over.size - 1) / over.size
    return _CALL_SECONDS + rounds * nbytes * share / min(rates) + _latency(kind, over, hardware)


def _latency(kind: str, over: Span, hardware: Hardware) -> float:
    within = hardware.node_latency_seconds or _NODE_LATENCY
    between = hardware.network_latency_seconds or _NETWORK_LATENCY
    ring = (over.size - over.nodes) * within + (over.nodes - 1) * between
    if kind != "all-reduce":
        return ring
    # NCCL uses a tree, up and down, if it is shorter than the ring.
    tree = (over.per_node - 1) * within + math.ceil(math.log2(over.nodes)) * between
    return 2 * min(ring, tree)


def _missing(over: Span, hardware: Hardware) -> list[str]:
    """Returns the fields that `collective_seconds` needs and `hardware` lacks."""
    if hardware.devices_per_node is None and over.size > _MOST_TOGETHER:
        return ["devices_per_node", "node_bytes_per_second", "network_bytes_per_second"]
    has_peer = over.per_node == 2 and hardware.peer_bytes_per_second
    missing = []
    if over.per_node > 1 and not (hardware.node_bytes_per_second or has_peer):
        missing.append("node_bytes_per_second")
    if over.nodes > 1 and not hardware.network_bytes_per_second:
        missing.append("network_bytes_per_second")
    return missing


def assumed_links(over: Span, hardware: Hardware) -> str:
    """Returns a note of what `collective_seconds` lacks or assumes about `hardware`; ``""`` if nothing."""
    if over.size == 1:
        return ""
    if missing := _missing(over, hardware):
        fields = ", ".join(f"{name}=..." for name in missing)
        return (
            f"the speed of links between {over.size} {hardware.name} is not known, and the step's seconds exclude "
            f"communication; pass it with dataclasses.replace(hardware, {fields})"
        )
    if hardware.devices_per_node is None:
        return (
            f"the number of {hardware.name} in a machine is not known: all {over.size} were taken to be in one; pass "
            "it with dataclasses.replace(hardware, devices_per_node=...)"
        )
    return ""
