"""The kernels of the simulated device: scratch memory, workspaces, times, and PyTorch's choices among kernels.

Not simulated on a card, since no source gives a formula: the workspace of cuDNN's batch norms (chosen by cuDNN's plan
at run time), the small temporary storage of cub's scans, and the split-KV buffers of a flash forward pass that is too
small to fill the device.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor

from memscale.core import OpOverload, RuntimeUnavailable, internals
from memscale.hardware import Hardware, Work
from memscale.simulation.kernels.attention_choice import cuda_attention
from memscale.simulation.kernels.cpu_scratch import CpuScratch
from memscale.simulation.kernels.cuda_fused import cuda_fused
from memscale.simulation.kernels.cuda_rnns import RNNS, recurrence_notes
from memscale.simulation.kernels.shapes import exchanged, tensors_in
from memscale.simulation.process.process_state import all_patched
from memscale.simulation.rules.recurrences import (
    DROPOUT,
    DROPOUT_STATES,
    RNN,
    RNN_BACKWARD,
    dropout_states_bytes,
)
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.rule import RESULTS, Capability, CardTraits, Program, taken

_LINEAR = F.linear
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NO_WORK = Work(0, 0, "")
_DEFAULT_CAPABILITY = (8, 0)


class Kernels:
    """The kernels of the simulated device.

    Attributes:
        card: the traits of the card that its kernels depend on; None for a CPU.
        key: all that the effect of a call depends on besides the call and PyTorch's switches.
        programs: cached knowledge of compiled modules, which a planner's simulations share.
    """

    def __init__(self, hardware: Hardware, *, probe: bool) -> None:
        self.hardware = hardware
        self.device_type = hardware.device_type
        self.is_cuda = hardware.device_type == "cuda"
        self.capability = hardware.capability or _DEFAULT_CAPABILITY
        traits = CardTraits(self.capability, *filter(None, [hardware.multiprocessors]))
        self.card = traits if self.is_cuda else None
        self.key = (self.device_type, self.card, probe)
        self.programs: dict[Any, Any] = {}
        self._unfused: set[torch.dtype] = set()
        self._cpu = None if self.is_cuda else CpuScratch(probe=probe)
        self._cuda = CudaProbe() if self.is_cuda and probe else None

    def program(
        self, op: OpOverload, args: Any, kwargs: Any, result: Any, flops: int, *, by_values: bool = False
    ) -> Program:
        """Returns the allocations of one call of `op`, of `flops` FLOPs, in order, with the place of its results.

        `by_values` says that the shape of its results follows from the values of its arguments.
        """
        # Recurrences cannot be probed: the simulation lacks the flat storage of all weights that cuDNN requires.
        if self._cuda is not None and op not in (RNN, RNN_BACKWARD, DROPOUT):
            # An operator may be for CPUs only, refuse zeros, or exceed the memory; the formulas below serve then.
            with contextlib.suppress(RuntimeError):
                return RESULTS, *taken(self._cuda.nbytes(op, args, kwargs))
        if self.card is not None:
            return rule_of(op).program(args, result, self.card)
        assert self._cpu is not None, "only a card has its own rules"
        return *taken(self._cpu.nbytes(op, args, kwargs, flops, by_values=by_values)), RESULTS

    def cost(self, op: OpOverload, args: Any, work: Work) -> Work:
        """Returns the work that takes the device as long as this call of `op`, of `work`."""
        return work if self.card is None or work == _NO_WORK else rule_of(op).time(args, work, self.card)

    def save(self) -> None:
        """Writes the measurements of kernels to disk."""
        if self._cpu is not None:
            self._cpu.save()

    def workspaces(self, op: OpOverload, args: Any) -> dict[str, int]:
        """Return the workspace bytes, by library, that the first call of such an operator allocates and never frees."""
        if self.card is not None and op is DROPOUT:
            return {DROPOUT_STATES: dropout_states_bytes(self.card.multiprocessors)}
        if self.card is None or not rule_of(op).uses_cublas(args, self.card):
            return {}
        # cuBLASLt uses the handle of cuBLAS (getCurrentCUDABlasLtHandle), whose workspace is allocated with it.
        found = {"cuBLAS": cublas_workspace_bytes(self.capability)}
        if uses_cublaslt(str(op), args) and (nbytes := cublaslt_workspace_bytes(self.capability)):
            found["cuBLASLt"] = nbytes
        return found

    def notes(self, modules: Iterable[nn.Module]) -> list[str]:
        """Returns notes on uncertain bytes of these modules' kernels."""
        if not self.is_cuda:
            return []
        modules = list(modules)
        found = recurrence_notes(modules, self.capability)
        if self._unfused:
            dtypes = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in self._unfused))
            other = "; in float16 it has one" if self._unfused == {torch.bfloat16} else ""
            found.append(
                f"attention in {dtypes} has no fused kernel on {self.hardware.name}, so backward keeps its scores, one "
                f"for each pair of tokens{other}"
            )
        if torch.backends.cudnn.enabled and any(isinstance(module, _CONVOLUTIONS) for module in modules):
            found.append(
                "the workspaces of cuDNN's convolutions follow rules measured on an H100, where peaks of 40 other "
                "steps were off by 0.6 % in the median and 13 % at most; torch.backends.cudnn.benchmark takes more"
            )
        return found

    @contextmanager
    def chosen(self, is_below: Callable[[torch.Tensor], bool]) -> Iterator[None]:
        """Makes PyTorch choose kernels as on the device: attention, dropout, recurrences, multi-tensor optimizer loops.

        An optimizer loops over single tensors where `is_below` is true for one of them (it lives on the host).
        """
        patches: list[tuple[Any, str, Any]] = [(F, "linear", linear)]
        if not self.is_cuda:
            with all_patched(patches):
                yield
            return
        self._unfused.clear()
        # Optimizers with foreach=None (except Adafactor) and weight averaging call this function; without the patch
        # they would see CPU tensors and choose the loop over single tensors.
        devices, name = partial(_with_loops, is_below), "_get_foreach_kernels_supported_devices"
        names = "torch.optim.optimizer", "torch.optim.swa_utils"  # torch.optim deletes the name of the first
        patches += [*RNNS, *((importlib.import_module(each), name, devices) for each in names)]
        with all_patched(patches), cuda_attention(self.capability, unfused=self._unfused), cuda_fused():
            yield


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``F.linear`` of these arguments, from a Python frame that `InPlaceSums` recognises.

    For non-contiguous rows PyTorch adds the bias to the product in place, unless a mode (such as the simulation's) is
    active or the bias is a wrapper of `torch.func`, which takes another frame.
    """
    if bias is not None and is_functorch_wrapped_tensor(bias):
        return _linear_of_wrapped(input, weight, bias)
    return _LINEAR(input, weight, bias)


def _linear_of_wrapped(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return _LINEAR(input, weight, bias)


def _with_loops(is_below: Callable[[torch.Tensor], bool]) -> list[str]:
    """Returns the devices with multi-tensor loops; an empty list where one of the caller's `params` is on the host."""
    parameters = sys._getframe(2).f_locals.get("params", ())
    return [] if any(each is not None and is_below(each) for each in parameters) else ["cpu", "cuda"]


# The workspaces of cuBLAS and cuBLASLt.

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


class CudaProbe:
    """A probe of kernels on this machine's CUDA device.

    Raises:
        RuntimeUnavailable: this machine has no CUDA device.
    """

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RuntimeUnavailable(
                "profile(probe=True) runs kernels on the CUDA device that it predicts for, and PyTorch finds none "
                "here; leave probe out to predict by formulas"
            )

    def nbytes(self, op: OpOverload, args: Any, kwargs: Any) -> int:
        """Returns the bytes of the caching allocator that ``op(*args, **kwargs)`` takes beyond its results.

        The arguments are fake or on the CPU; the kernel gets zeros with their layouts.
        """
        own = {id(tensor): _on_device(tensor) for tensor in tensors_in(args, kwargs)}
        args, kwargs = exchanged(tuple(args), own), exchanged(kwargs, own)
        op(*args, **kwargs)  # the first call also allocates workspaces, which `Kernels.workspaces` counts
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
