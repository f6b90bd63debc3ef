"""The errors and the warning for tensors that cannot be moved."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import torch

from memscale.core import TransformError


def refuse_in_fork(process: int) -> None:
    """Raises `TransformError` in a fork of `process`, which made the backend."""
    if os.getpid() != process:
        raise TransformError(
            f"offload() in process {os.getpid()} uses the runtime of process {process}, of which it is a fork: the "
            "threads that copy, and CUDA, did not come along; run forward and backward in one process, start workers "
            "with the 'spawn' method, or give the model a new runtime in the worker"
        )


def refuse_in_capture() -> None:
    """Raises `TransformError` while a CUDA graph captures the current stream."""
    if torch.cuda.is_current_stream_capturing():
        raise TransformError(
            "offload() inside a CUDA graph capture: a captured graph replays fixed addresses, and moved tensors "
            "come back to others; capture without offload(), or offload without capture"
        )


def warn_of_staying(nbytes: int, tiers: Sequence[str], error: BaseException | None) -> None:
    """Warns that a tensor stays on the device, because its copy failed with `error` or no tier has room."""
    reason = f"the copy failed ({error})" if error else f"no tier of {list(tiers)} has room"
    warnings.warn(
        f"offload() keeps a tensor of {nbytes} bytes on the device: {reason}. Give the runtime more bytes, or move "
        "less; this is said once",
        RuntimeWarning,
        stacklevel=4,
    )
