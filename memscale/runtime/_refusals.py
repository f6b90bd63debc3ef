"""Where nothing can be moved, said before it goes wrong."""

from __future__ import annotations

import os

import torch

from memscale._errors import TransformError


def refuse_where_impossible(process: int, tensor: torch.Tensor | None) -> None:
    """Raise `TransformError` in a fork of the engine's `process`, and in a capture on the device of `tensor`."""
    if os.getpid() != process:
        raise TransformError(
            "offload() was used by the parent process of this forked one, and its copying threads did not come "
            "along; run forward and backward in one process, start workers with the 'spawn' method, or give the model "
            "a new runtime in the worker"
        )
    if tensor is not None and tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise TransformError(
            "offload() inside a CUDA graph capture: a captured graph replays fixed addresses, and moved tensors "
            "come back to others; capture without offload(), or offload without capture"
        )
