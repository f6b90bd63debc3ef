"""Memory that CPU kernels allocate and free inside one call."""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload


def cpu_scratch_bytes(op: OpOverload, args: Any, kwargs: Any, result: Any) -> int:
    """The bytes that the CPU kernel of `op` takes beside its results."""
    return 0
