"""Device memory that CUDA kernels take beyond their inputs and outputs, which fake kernels do not show.

This file has the workspaces of cuBLAS and cuBLASLt and the mask of dropout; simulation/rules has the scratch memory of
kernels while they run (cuDNN's convolutions by measurement). Not simulated, since no source gives a formula: the
workspace of cuDNN's batch norms (chosen by cuDNN's plan at run time), the small temporary storage of cub's scans, and
the split-KV buffers of a flash forward pass that is too small to fill the device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F

from memscale.core import internals
from memscale.simulation.process.process_state import patched
from memscale.simulation.rules.rule import Capability

_KIB, _MIB = 1 << 10, 1 << 20
#: The environment variables that this file reads.
BLAS_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "DISABLE_ADDMM_CUDA_LT",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
)


def cublas_workspace_bytes(
    capability: Capability,
    *,
    environ: Mapping[str, str] = os.environ,
    torch_version: tuple[int, int] = internals.TORCH_VERSION,
) -> int:
    """Returns the bytes that PyTorch allocates for one cuBLAS handle and stream at its first matrix product.

    A handle belongs to a thread, so a training step pays twice: in the caller's thread at the first product
    of the forward pass, and in autograd's device thread at the first product of the backward pass. The workspaces
    live until the process ends.

    >>> cublas_workspace_bytes((8, 0), environ={}), cublas_workspace_bytes((9, 0), environ={})
    (8519680, 33554432)
    >>> cublas_workspace_bytes((9, 0), environ={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    33554432

    Args:
        capability: the device's compute capability, (major, minor).
        environ: the environment with ``CUBLAS_WORKSPACE_CONFIG``: ``:size:count`` pairs, the size in KiB.
        torch_version: the version of PyTorch whose rule applies, (major, minor).

    Source: ``parseChosenWorkspaceSize`` and ``setWorkspaceForHandle`` in aten/src/ATen/cuda/CublasHandlePool.cpp
    of PyTorch 2.10 to 2.14, and the thread-local pool windows of aten/src/ATen/cuda/detail/DeviceThreadHandles.h.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * _KIB
    # pytorch/pytorch#175344, first released with 2.12, gave Blackwell the size of Hopper.
    wide = capability[0] in (9, 10, 12) if torch_version >= (2, 12) else capability == (9, 0)
    return 32 * _MIB if wide else (2 * 4096 + 8 * 16) * _KIB


def cublaslt_workspace_bytes(
    capability: Capability,
    *,
    environ: Mapping[str, str] = os.environ,
    torch_version: tuple[int, int] = internals.TORCH_VERSION,
) -> int:
    """Returns the bytes that PyTorch allocates for cuBLASLt besides cuBLAS, for one handle and stream.

    The allocation is at the first product that goes to cuBLASLt, see :func:`uses_cublaslt`. From PyTorch 2.12 on
    cuBLASLt shares the workspace of cuBLAS by default, and the result is 0.

    >>> cublaslt_workspace_bytes((8, 0), environ={}, torch_version=(2, 13))
    0
    >>> cublaslt_workspace_bytes((8, 0), environ={"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"})
    1048576

    Args:
        capability: the device's compute capability, (major, minor).
        environ: the environment with ``TORCH_CUBLASLT_UNIFIED_WORKSPACE`` and ``CUBLASLT_WORKSPACE_SIZE`` (in KiB).
        torch_version: the version of PyTorch whose rule applies, (major, minor).

    Source: ``getCUDABlasLtWorkspace`` in aten/src/ATen/cuda/CublasHandlePool.cpp; the default became shared with
    pytorch/pytorch#175879.
    """
    unified = {"1": True, "0": False}.get(environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", ""))
    if unified or (unified is None and torch_version >= (2, 12)):
        return 0
    digits = re.match(r"\s*\d+", environ.get("CUBLASLT_WORKSPACE_SIZE", ""))
    nbytes = int(digits.group()) * _KIB if digits else _MIB
    if unified is None:
        # PyTorch before 2.12 caps the size at that of cuBLAS's workspace, although the two are separate.
        nbytes = min(nbytes, cublas_workspace_bytes(capability, environ=environ, torch_version=torch_version))
    return nbytes


def uses_cublaslt(op: str, args: Sequence[Any], *, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a product goes to cuBLASLt: an ``addmm`` with a bias vector, and every scaled product.

    >>> x, bias = torch.empty(8, 8, device="meta"), torch.empty(8, device="meta")
    >>> [uses_cublaslt("aten.addmm.default", (first, x, x)) for first in (bias, x)], uses_cublaslt("aten.mm", (x, x))
    ([True, False], False)

    Args:
        op: the overload as ``str(func)`` prints it, with its namespace.
        args: the positional arguments of the call; the keywords ``beta`` and ``alpha``, which are rare, are ignored.
        environ: the environment with ``DISABLE_ADDMM_CUDA_LT``.

    Source: ``isInputCompliesAddmmCudaLt`` in aten/src/ATen/native/cuda/Blas.cpp.
    """
    if op == "aten._scaled_mm.default":
        return True
    if op != "aten.addmm.default" or environ.get("DISABLE_ADDMM_CUDA_LT") == "1":
        return False
    bias, left, right = args[:3]
    return (
        bias.dim() == 1
        and bias.size(0) == right.size(1)
        and bias.is_contiguous()
        and left.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
        and min(*left.shape, *right.shape) > 1
    )


@contextmanager
def cuda_dropout() -> Iterator[None]:
    """Makes dropout on CPU tensors save a bool mask for backward (1 byte an element), as on CUDA.

    On CUDA ``at::dropout`` becomes ``native_dropout``, whose backward pass needs a bool mask; on CPU it is a
    product with noise of the input's dtype.

    >>> kept = []
    >>> keep = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes), lambda t: t)
    >>> with cuda_dropout(), keep:
    ...     y = F.dropout(torch.ones(1000, requires_grad=True))
    >>> kept
    [1000]

    Source: ``is_fused_kernel_acceptable`` in aten/src/ATen/native/Dropout.cpp.
    """
    of_module, of_torch = F.dropout, torch.dropout

    def takes(input: torch.Tensor, p: float, training: bool) -> bool:
        # In evaluation, in place, and for p of 0 or 1, CUDA runs the general function of the CPU.
        return training and 0 < p < 1 and input.numel() > 0

    def drop(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if inplace or not takes(input, p, training):
            return of_module(input, p, training, inplace)
        return cast(torch.Tensor, torch.ops.aten.native_dropout.default(input, p, True)[0])

    def drop_by_torch(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return drop(input, p) if takes(input, p, train) else of_torch(input, p, train)

    with patched(F, "dropout", drop), patched(torch, "dropout", drop_by_torch):
        yield
