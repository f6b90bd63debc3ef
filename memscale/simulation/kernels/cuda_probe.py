"""What a CUDA kernel takes inside one call, found by running it once on zeros where a CUDA device is at hand."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from memscale.core.errors import RuntimeUnavailable
from memscale.simulation.kernels.shapes import replaced, tensors_in


class CudaProbe:
    """Runs kernels on the present CUDA device, each signature once.

    Raises:
        RuntimeUnavailable: there is none; a probe of another device would say nothing.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeUnavailable(
                "profile(probe=True) runs kernels on the CUDA device that it predicts for, and PyTorch finds none "
                "here; leave probe out to predict by formulas"
            )

    def nbytes(self, op: OpOverload, args: Any, kwargs: Any) -> int:
        """The bytes of the caching allocator that ``op(*args, **kwargs)`` takes beside its results.

        The arguments are hollow or on the CPU; the kernel gets zeros with their layouts.
        """
        own = {id(tensor): _on_device(tensor) for tensor in tensors_in(args, kwargs)}
        args, kwargs = replaced(tuple(args), own), replaced(kwargs, own)
        op(*args, **kwargs)  # the first call of a kind leaves workspaces behind, which are counted by themselves
        torch.cuda.synchronize()
        before_bytes = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = op(*args, **kwargs)
        torch.cuda.synchronize()
        returned_bytes = torch.cuda.memory_allocated() - before_bytes
        del result
        return max(0, torch.cuda.max_memory_allocated() - before_bytes - returned_bytes)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda").zero_()
