"""`Hardware`: the device that a step runs on, described as data."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from memscale.core import (
    Check,
    ConfigError,
    Document,
    Misfit,
    RuntimeUnavailable,
    available_host_bytes,
    boolean,
    cgroup_limit_bytes,
    format_bytes,
    integer,
    optional,
    read_or_empty,
    validate,
)
from memscale.hardware.calibrate import calibrate
from memscale.hardware.call_seconds import CALLS, call_seconds
from memscale.hardware.cards import NETWORK_US, Card, by_device_name, by_name

_DOCUMENT = Document("hardware", version=1, writer="Hardware.to_json()", error=ConfigError)

_MIB = 1024**2  # bytes. Source: IEC 80000-13

# Bytes of a CUDA process outside of PyTorch's allocator. Source: the context, about 400 MB with lazy loading of kernels
# (a PyTorch maintainer in pytorch/pytorch#109888; 300 MB in #107667), and the kernels that the step loads.
_CONTEXT_BYTES = 512 * _MIB


class Rates(Mapping[str, float]):
    """An immutable, hashable mapping from dtype names to rates."""

    __slots__ = ("_by_dtype",)

    def __init__(self, by_dtype: Mapping[str, float]) -> None:
        self._by_dtype = dict(by_dtype)

    def __getitem__(self, dtype: str) -> float:
        return self._by_dtype[dtype]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_dtype)

    def __len__(self) -> int:
        return len(self._by_dtype)

    def __hash__(self) -> int:
        return hash(frozenset(self._by_dtype.items()))

    def __repr__(self) -> str:
        return repr(self._by_dtype)


@dataclass(frozen=True, repr=False)
class Hardware:
    """A device with its memory and speeds: name a known card, detect or measure a device, or pass the fields.

    Args:
        name: the maker's name of the device.
        device_type: ``"cuda"`` or ``"cpu"``.
        memory_bytes: the most memory that a process may use, in bytes; at least 1.
        free_bytes: the memory that was free when detected; `None` if unknown. Not part of equality.
        flops_per_second: operations a second of large dense matrix products, by the name of a torch dtype;
            ``"tfloat32"`` is for float32 products that may round their inputs to TF32.
        bandwidth_bytes_per_second: bandwidth of the device's memory, reads and writes together.
        host_to_device_bytes_per_second: rate of copies from pinned host memory; on a CPU, of copies within its memory.
        device_to_host_bytes_per_second: rate of copies to pinned host memory.
        peer_bytes_per_second: rate of copies to one other device of its kind, for example over NVLink.
        devices_per_node: how many devices of its kind are in one machine.
        node_bytes_per_second: rate at which one device can send to all others in its machine at once.
        node_latency_seconds: latency to the next device of a ring within the machine.
        network_bytes_per_second: the device's share of the network between machines, in one direction.
        network_latency_seconds: latency between two machines.
        host_memory_bytes: RAM of an accelerator's machine, which bounds the offloaded tensors.
        host_bandwidth_bytes_per_second: bandwidth that operators reach in that RAM, reads and writes together.
        disk_read_bytes_per_second, disk_write_bytes_per_second: rates that offloading reaches during a step, without
            the system's cache, into memory that is already allocated.
        capability: CUDA compute capability, ``(9, 0)`` for an H100.
        multiprocessors: the number of streaming multiprocessors, which determines the scratch memory of some kernels;
            `None` means those of an H100 (132).
        launch_seconds: the least device time of an operator.
        call_seconds: time of an accelerator's host for a call: an ``"operator"`` called by Python, up to its launch;
            one called by autograd (``"backward"``); one that computes nothing (``"view"``); a ``"module"``. Without it
            the times are those of a virtual machine with an H100.
        unified_memory: whether an accelerator shares the host's memory, as a GB10 does. Tensors offloaded to the host
            stay in that memory: ``Profile.taken_bytes`` counts them, and `plan` has no link to use.
        measured: whether real kernels reached the speeds. If not, they are peaks from a data sheet, of which kernels
            reach a part.

    Unknown fields are `None`. A verb that needs an unknown field raises an error.

    Raises:
        ConfigError: fields are of the wrong type or out of range; the message lists all of them.

    >>> card = Hardware.named("H100 SXM")
    >>> print(card)
    NVIDIA H100 80GB HBM3 (cuda, 79.2 GiB)
    >>> f"{card.flops_per_second['bfloat16']:.4g} FLOP/s, {card.bandwidth_bytes_per_second:.4g} B/s"
    '9.894e+14 FLOP/s, 3.352e+12 B/s'
    >>> Hardware(name="A100", device_type="cuda", memory_bytes=80 * 1024**3)
    Hardware(name='A100', device_type='cuda', memory_bytes=85899345920)
    """

    name: str
    device_type: str
    memory_bytes: int
    free_bytes: int | None = field(default=None, compare=False)
    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    bandwidth_bytes_per_second: float | None = None
    host_to_device_bytes_per_second: float | None = None
    device_to_host_bytes_per_second: float | None = None
    peer_bytes_per_second: float | None = None
    devices_per_node: int | None = None
    node_bytes_per_second: float | None = None
    node_latency_seconds: float | None = None
    network_bytes_per_second: float | None = None
    network_latency_seconds: float | None = None
    host_memory_bytes: int | None = None
    host_bandwidth_bytes_per_second: float | None = None
    disk_read_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None
    capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    launch_seconds: float | None = None
    call_seconds: Mapping[str, float] = field(default_factory=dict)
    unified_memory: bool = False
    measured: bool = False

    def __post_init__(self) -> None:
        validate(self, _CHECKS)

    @property
    def usable_bytes(self) -> int:
        """The most bytes that PyTorch's allocator can get: on CUDA, `memory_bytes` less 512 MiB for the CUDA context.

        >>> Hardware.named("t4").memory_bytes - Hardware.named("t4").usable_bytes
        536870912
        """
        return max(0, self.memory_bytes - (_CONTEXT_BYTES if self.device_type == "cuda" else 0))

    @classmethod
    def named(cls, name: str) -> Hardware:
        """Returns the data sheet of a known card, which need not be present.

        Args:
            name: as in ``"h100"``, ``"A100-80"`` or ``"RTX 4090"``; case, spaces and dashes do not matter.

        Raises:
            ConfigError: no card has this name. The message lists the nearest names, or all.

        >>> Hardware.named("a100-80").flops_per_second["tfloat32"]
        156000000000000.0
        """
        card = by_name(name)
        return cls(
            card.device_names[0],
            "cuda",
            card.memory_mib * _MIB,
            capability=card.capability,
            multiprocessors=card.multiprocessors,
            unified_memory=card.host_gb_per_second is None,
            **_speeds(card),
        )

    @classmethod
    def detect(cls, device: torch.device | str | None = None) -> Hardware:
        """Returns the description of `device`. `None` is the current CUDA device if there is one, else the CPU.

        The CPU's memory is the RAM of the machine or the process's cgroup limit, whichever is smaller. A card that
        `named` knows gets the speeds of its data sheet; `measure` finds the speeds of any device.

        Raises:
            ConfigError: `device` does not name a device.
            RuntimeUnavailable: the device does not exist, or is of a kind that memscale cannot measure.

        >>> Hardware.detect("cpu").memory_bytes > 0
        True
        """
        where = _place("detect", device)
        if where.type == "cuda":
            return cls._of_cuda(where)
        if where.type == "cpu":
            return cls._of_cpu()
        raise RuntimeUnavailable(
            f"memscale cannot measure the memory of {str(where)!r} devices; describe it yourself with "
            f"Hardware(name=..., device_type={where.type!r}, memory_bytes=...)"
        )

    @classmethod
    def measure(cls, device: torch.device | str | None = None) -> Hardware:
        """Measures `device` for up to 20 seconds and returns its description with the measured speeds.

        Times matrix products of growing size in each dtype, copies in the device's memory, copies to and from the host,
        reads and writes of a temporary file of 64 MiB, an operator on one number, and for a CUDA device the host's time
        for calls of operators and modules. Keep the machine idle during the measurement. Store the result: its `repr`
        is the Python that makes it, and `to_json` returns a text.

        Args:
            device: as in `detect`.

        Raises:
            ConfigError, RuntimeUnavailable: as in `detect`.
        """
        where = _place("measure", device)
        hardware = cls.detect(where)
        speeds = calibrate(where, hardware.free_bytes)
        if hardware.unified_memory:
            speeds |= dict.fromkeys(("host_to_device_bytes_per_second", "device_to_host_bytes_per_second"))
        calls = {} if where.type == "cpu" else call_seconds(where)
        return dataclasses.replace(hardware, measured=True, call_seconds=calls, **speeds)

    @classmethod
    def _of_cuda(cls, device: torch.device) -> Hardware:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0 or (device.index is not None and device.index >= count):
            raise RuntimeUnavailable(
                f"device {str(device)!r} does not exist, this process sees {count} CUDA devices; use one of "
                f"these or 'cpu'"
            )
        properties = torch.cuda.get_device_properties(device)
        free_bytes, memory_bytes = torch.cuda.mem_get_info(device)
        card = by_device_name(properties.name)
        # ROCm devices are "cuda" in PyTorch, but their (9, 4) is no CUDA capability.
        capability = (properties.major, properties.minor) if torch.version.hip is None else None
        speeds = _speeds(card) if card is not None else {}
        return cls(
            properties.name,
            "cuda",
            memory_bytes,
            free_bytes,
            host_memory_bytes=_ram_bytes(),
            capability=capability,
            multiprocessors=properties.multi_processor_count,
            unified_memory=bool(properties.is_integrated),
            **speeds,
        )

    @classmethod
    def _of_cpu(cls) -> Hardware:
        memory_bytes = _ram_bytes()
        if memory_bytes is None:
            raise RuntimeUnavailable(
                "this system does not report the size of its RAM; describe it yourself with "
                "Hardware(name=..., device_type='cpu', memory_bytes=...)"
            )
        return cls(cpu_name(), "cpu", memory_bytes, available_host_bytes())

    def __str__(self) -> str:
        free = "" if self.free_bytes is None else f", {format_bytes(self.free_bytes)} free"
        return f"{self.name} ({self.device_type}, {format_bytes(self.memory_bytes)}{free})"

    def __repr__(self) -> str:
        return f"Hardware({', '.join(f'{key}={value!r}' for key, value in self._known_fields().items())})"

    def _known_fields(self) -> dict[str, Any]:
        """Returns the fields that are known. Compares by `is`, since 0 free bytes are known."""
        fields = vars(self).items()
        return {key: value for key, value in fields if value is not None and value is not False and value != {}}

    def to_json(self) -> str:
        """Returns the description as JSON text, with a schema version."""
        known = self._known_fields()
        known |= {name: dict(rates) for name, rates in known.items() if isinstance(rates, Rates)}
        return _DOCUMENT.write(known, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """Returns the description that `to_json` wrote.

        Raises:
            ConfigError: the text is truncated or not JSON, is of another schema version, has fields that this version
                does not know, or values that are out of range.

        >>> card = Hardware.named("l4")
        >>> Hardware.from_json(card.to_json()) == card
        True
        """
        data = _DOCUMENT.read(text)
        if isinstance(data.get("capability"), list):
            data["capability"] = tuple(data["capability"])
        with _DOCUMENT.parts():
            return cls(**data)


def _ram_bytes() -> int | None:
    """Returns the most RAM that this process may use, in bytes; `None` if unknown."""
    try:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # no sysconf on Windows
        return None
    limit_bytes = cgroup_limit_bytes()
    return memory_bytes if limit_bytes is None else min(memory_bytes, limit_bytes)


def _speeds(card: Card) -> dict[str, Any]:
    joined = card.joined
    network = joined.network_gb_per_second
    link = None if card.host_gb_per_second is None else card.host_gb_per_second * 1e9
    return {
        # Rounded, since 66.9 * 1e12 differs from 66.9e12.
        "flops_per_second": {dtype: float(round(rate * 1e12)) for dtype, rate in card.tflops.items()},
        "bandwidth_bytes_per_second": card.memory_gb_per_second * 1e9,
        "host_to_device_bytes_per_second": link,
        "device_to_host_bytes_per_second": link,
        "peer_bytes_per_second": None if card.peer_gb_per_second is None else card.peer_gb_per_second * 1e9,
        "devices_per_node": joined.devices_per_node,
        "node_bytes_per_second": joined.node_gb_per_second * 1e9,
        "node_latency_seconds": joined.node_latency_us / 1e6,
        "network_bytes_per_second": None if network is None else network * 1e9,
        "network_latency_seconds": None if network is None else NETWORK_US / 1e6,
    }


def _name(value: object) -> str:
    if isinstance(value, str) and value:
        return value
    raise Misfit("must be a non-empty str; pass what the device is called")


def _device_type(value: object) -> str:
    with suppress(RuntimeError):
        if isinstance(value, str) and torch.device(value).type == value:
            return value
    raise Misfit("must be a type of torch.device; pass 'cuda' or 'cpu'")


def _rate(unit: str) -> Check:
    def check(value: object) -> Any:
        if value is None or _is_rate(value):
            return value
        raise Misfit(f"must be a positive finite number; pass {unit}, or None")

    return check


def _rates(keys: str, is_key: Callable[[Any], bool], example: str) -> Check:
    def check(value: object) -> Rates:
        if isinstance(value, Mapping) and all(is_key(key) and _is_rate(rate) for key, rate in value.items()):
            return Rates(value)
        raise Misfit(f"must be a mapping from {keys} to positive finite numbers; pass {example}")

    return check


def _capability(value: object) -> Any:
    if value is None or (isinstance(value, tuple) and len(value) == 2 and all(type(each) is int for each in value)):
        return value
    raise Misfit("must be a pair of ints; pass (9, 0) for compute capability 9.0")


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_dtype(name: Any) -> bool:
    return name == "tfloat32" or (isinstance(name, str) and str(getattr(torch, name, None)) == f"torch.{name}")


_CHECKS: Mapping[str, Check] = {
    "name": _name,
    "device_type": _device_type,
    "memory_bytes": integer(1),
    "free_bytes": optional(integer(0)),
    "host_memory_bytes": optional(integer(0)),
    "flops_per_second": _rates("names of torch dtypes, 'tfloat32' included,", _is_dtype, "{'bfloat16': 312e12}"),
    "call_seconds": _rates(", ".join(map(repr, CALLS)), CALLS.__contains__, "seconds such as {'operator': 9e-6}"),
    "capability": _capability,
    "multiprocessors": optional(integer(1)),
    "devices_per_node": optional(integer(1)),
    "measured": boolean,
    "unified_memory": boolean,
    **{
        each: _rate("seconds" if each.endswith("_seconds") else "bytes per second")
        for each in Hardware.__annotations__
        if each.endswith(("bytes_per_second", "_seconds")) and each != "call_seconds"
    },
}


def _place(verb: str, device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(
            f"Hardware.{verb}(device={device!r}) must name a device; pass 'cuda', 'cuda:1' or 'cpu'"
        ) from None


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the maker's name of the processor, as far as the system reports it."""
    for line in read_or_empty(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"
