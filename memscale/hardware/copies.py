"""Estimates the seconds of copies between tiers, of operators on an accelerator's host, and of collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from memscale.hardware.cards import NETWORK_US, PCIE_US
from memscale.hardware.device import Hardware

# Share of the data sheet's link rate; benchmarks/bench_offload.py measures the link. Source: copies of pinned memory
# reach 57 of 63 GB/s on an H100 (NVIDIA/nvbandwidth#6), 25 of 31.5 on an A100 (NVIDIA/nvbandwidth#42) and 12.2 to 12.9
# of 15.75 on a P100 (mpicbg-scicomp/gearshifft#82).
_LINK_SHARE = 0.85

# Seconds between two queued copies: benchmarks/bench_offload.py measures those of the caller.
_COPY_SECONDS = 5e-6
# Seconds of one disk request: waits for a disk by benchmarks/bench_clock.py --offload.
_DISK_SECONDS = 100e-6

# Assumed, an order of magnitude: the driver copies pageable memory through a buffer of its own, with one CPU thread.
_PAGEABLE_BYTES_PER_SECOND = 8e9

# Assumed, and reported in a note, for hardware that was not measured: a server's NVMe disk and RAM. For the machine at
# hand `Hardware.measure()` measures all three, against the raw rates of benchmarks/bench_disk.py.
_DISK_READ_BYTES_PER_SECOND = 3e9
_DISK_WRITE_BYTES_PER_SECOND = 2e9
_HOST_BYTES_PER_SECOND = 50e9

# Seconds of a PyTorch operator on an accelerator's host. Assumed, an order of magnitude above `_CPU_LAUNCH_SECONDS`.
_HOST_OPERATOR_SECONDS = 5e-6

Direction = Literal["out", "in"]
DIRECTIONS: tuple[Direction, Direction] = ("out", "in")


def host_seconds(nbytes: int, hardware: Hardware) -> float:
    """Returns the seconds that an accelerator's host CPU takes for an operator that reads and writes `nbytes`."""
    return _HOST_OPERATOR_SECONDS + nbytes / (hardware.host_bandwidth_bytes_per_second or _HOST_BYTES_PER_SECOND)


def knows_copies(hardware: Hardware) -> bool:
    """Whether `hardware` has the speeds of its link to the host. The disk's speeds have defaults."""
    return hardware.device_type == "cpu" or None not in (
        hardware.host_to_device_bytes_per_second,
        hardware.device_to_host_bytes_per_second,
    )


def assumed_speeds(hardware: Hardware, *, disk: bool, host: bool) -> str:
    """Returns a note on the default copy speeds that stand for unknown ones of `hardware`; ``""`` if all are known."""
    found = []
    if disk and not hardware.disk_read_bytes_per_second:
        found.append(f"how fast its disk reads: {_DISK_READ_BYTES_PER_SECOND / 1e9:g} GB/s was assumed")
    if disk and not hardware.disk_write_bytes_per_second:
        found.append(f"how fast its disk writes: {_DISK_WRITE_BYTES_PER_SECOND / 1e9:g} GB/s was assumed")
    if host and not hardware.host_bandwidth_bytes_per_second:
        found.append(f"how fast its host computes: {_HOST_BYTES_PER_SECOND / 1e9:g} GB/s of traffic was assumed")
    return ", nor ".join(found)


def copy_seconds(nbytes: int, tier: str, direction: Direction, hardware: Hardware) -> float:
    """Returns the seconds of a copy of `nbytes` from `hardware` to `tier` ("out"), or back ("in"), on an idle link.

    >>> card = Hardware.named("h100")
    >>> f"{copy_seconds(2**30, 'pinned', 'out', card) * 1e3:.1f} ms"
    '20.1 ms'
    """
    rates = []
    if hardware.device_type != "cpu":
        out, back = hardware.device_to_host_bytes_per_second, hardware.host_to_device_bytes_per_second
        link = out if direction == "out" else back
        assert link is not None, "callers check `knows_copies` first"
        rates.append(link * (1.0 if hardware.measured else _LINK_SHARE))
        if tier == "pageable":
            rates.append(_PAGEABLE_BYTES_PER_SECOND)
    if tier == "disk":
        write = hardware.disk_write_bytes_per_second or _DISK_WRITE_BYTES_PER_SECOND
        read = hardware.disk_read_bytes_per_second or _DISK_READ_BYTES_PER_SECOND
        rates.append(write if direction == "out" else read)
    return nbytes / min(rates) + (_DISK_SECONDS if tier == "disk" else _COPY_SECONDS)


#: Kinds of collectives, as schedules name them.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "other collectives")

# Shares of data sheet rates. Source: NVLink reaches 370 of 450 GB/s on an H100; its protocol takes the rest
# (NVIDIA/nccl-tests#212). An adapter of 400 Gb/s reaches 46 to 48 of its 50 GB/s (NVIDIA/nccl-tests#290).
_NODE_SHARE, _NETWORK_SHARE = 0.82, 0.94

# Seconds of a call besides those of its steps. Source: NCCL's own model (`src/graph/tuning.cc`, LL128).
_CALL_SECONDS = 14e-6

# Devices in one node of unknown hardware. Source: NVIDIA DGX-2 data sheet, the largest server without racks.
_MOST_TOGETHER = 16


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
    within = hardware.node_latency_seconds or PCIE_US / 1e6
    between = hardware.network_latency_seconds or NETWORK_US / 1e6
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
    """Returns a note on the link speeds of `hardware` that are unknown or assumed; ``""`` if all are known."""
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
