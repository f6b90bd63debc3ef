"""How long a collective takes: bytes over the links within a node and between nodes, and the steps of its ring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from memscale.hardware.device import Hardware

#: Kinds of collectives, as schedules name them.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "other collectives")

# Of the rates of data sheets. NVLink's protocol takes a fifth: 370 of 450 GB/s of an H100 (NVIDIA/nccl-tests#212).
# An adapter of 400 Gb/s gives 46 to 48 of its 50 GB/s (NVIDIA/nccl-tests#290).
_NODE_SHARE, _NETWORK_SHARE = 0.82, 0.94

# What NCCL reckons with for a call, beside its steps (`src/graph/tuning.cc`, LL128).
_CALL_SECONDS = 14e-6

# What is assumed where the hardware does not say: as many as the largest servers hold are in one.
_NODE_LATENCY, _NETWORK_LATENCY, _MOST_TOGETHER = 2.5e-6, 4e-6, 16


class Span(NamedTuple):
    """How the processes of a group are spread: how many they are, and over how many nodes."""

    size: int
    nodes: int

    @property
    def per_node(self) -> int:
        """How many a node has at most."""
        return -(-self.size // self.nodes)


def span(ranks: Sequence[int], hardware: Hardware) -> Span:
    """The spread of these processes over nodes that are filled in order, as `torchrun` does.

    >>> span(range(16), Hardware.named("h100")), span([0, 8, 16], Hardware.named("h100"))
    (Span(size=16, nodes=2), Span(size=3, nodes=3))
    """
    each = hardware.devices_per_node
    return Span(len(ranks), 1 if each is None else len({rank // each for rank in ranks}))


def collective_seconds(kind: str, nbytes: int, over: Span, hardware: Hardware) -> float | None:
    """How long a collective takes with nothing else on its links; None where `hardware` does not know their speed.

    Args:
        kind: one of `COLLECTIVES`.
        nbytes: the whole of it: what an all-gather returns, what a reduce-scatter or an all-to-all is given.
        over: its processes.
        hardware: what each of them runs on.

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
        # Two have a bridge or a link to themselves; where more take part, a ring goes through all that there is.
        peer = hardware.peer_bytes_per_second if over.per_node == 2 else None
        rate = peer or hardware.node_bytes_per_second
        assert rate is not None, "it is not missing"
        rates.append(rate * (1.0 if hardware.measured else _NODE_SHARE))
    if over.nodes > 1:
        assert hardware.network_bytes_per_second is not None, "likewise"
        network = hardware.network_bytes_per_second * (1.0 if hardware.measured else _NETWORK_SHARE)
        # Rings leave a node through the adapters of all of its processes. All-to-all has no ring: each sends its own.
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
    # Up a tree and down again, where that is shorter.
    tree = (over.per_node - 1) * within + math.ceil(math.log2(over.nodes)) * between
    return 2 * min(ring, tree)


def _missing(over: Span, hardware: Hardware) -> list[str]:
    """The fields of `hardware` without which nothing can be said."""
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
    """What `collective_seconds` would have to know of `hardware`, or takes for granted, in words; "" for nothing."""
    if over.size == 1:
        return ""
    if missing := _missing(over, hardware):
        fields = ", ".join(f"{name}=..." for name in missing)
        return (
            f"how fast {over.size} processes talk to each other is not known of {hardware.name}, and that time is not "
            f"in the step's seconds: write it down with dataclasses.replace(hardware, {fields})"
        )
    if hardware.devices_per_node is None:
        return (
            f"how many {hardware.name} a machine holds is not known: all {over.size} were taken to be in one; write it "
            "down with dataclasses.replace(hardware, devices_per_node=...)"
        )
    return ""
