"""A step on the fake libraries, whose operators, copies and calls of the host take the time that `profile` says."""

import contextlib
import ctypes
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memscale.hardware import copy_seconds, host_calls, host_seconds
from memscale.runtime.backends.cuda import CudaBackend
from memscale.simulation.kernels.kernels import Kernels
from memscale.simulation.rules.work import work_of


class _Timed(TorchDispatchMode):
    """Tells the fake libcudart what each operator takes, behind it."""

    def __init__(self, lib, hardware):
        super().__init__()
        self._work, self._hardware = lib.ghost_work, hardware
        self._kernels, self._host = Kernels(hardware, probe=False), host_calls(hardware)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [tensor for tensor in tree_leaves((args, kwargs, result)) if isinstance(tensor, torch.Tensor)]
        on_card = [tensor for tensor in tensors if tensor.is_cuda]
        if not tensors or func.is_view:
            return result
        work = work_of(func, args, kwargs, result)
        if not on_card:
            self._work(0, host_seconds(work.nbytes, self._hardware), 0.0)
        elif len(on_card) == len(tensors):
            found = self._kernels.cost(func, args, work).seconds(self._hardware)
            kind = "backward" if torch._C._current_graph_task_id() != -1 else "operator"
            stream = torch._C._cuda_getCurrentRawStream(on_card[0].device.index)
            self._work(stream, getattr(self._host, kind), found or 0.0)
        return result


@contextlib.contextmanager
def timed(hardware):
    """Let what is done on the fake libraries take the time of `hardware`, from one step to the next."""
    lib = ctypes.CDLL("libcudart.so.13")
    lib.ghost_clock.argtypes = [ctypes.c_double] * 3
    lib.ghost_work.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_double]
    lib.ghost_now.restype = ctypes.c_double
    large = 1 << 40
    rates = [large / copy_seconds(large, "pinned", direction, hardware) for direction in ("out", "in")]
    lib.ghost_clock(host_calls(hardware).copy, *rates)
    try:
        with mock.patch.object(CudaBackend, "clock", side_effect=lib.ghost_now), _Timed(lib, hardware):
            yield lib.ghost_now
    finally:
        torch.cuda.synchronize()
        lib.ghost_clock(0.0, 0.0, 0.0)
