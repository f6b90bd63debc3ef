"""Device spoofing: a model's own code sees a CUDA device while one is simulated.

The tensors of a simulated step are on the CPU. Code of users and libraries that reads the device (``x.is_cuda``,
``x.device``, ``torch.cuda.is_available()``, ``torch.autocast("cuda")``) sees the simulated device: such code takes the
branch for CUDA, and the tensors that it makes on CUDA are made in the simulation. The code of PyTorch and of memscale
sees the CPU, since the true device decides which kernels run.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.utils._device

from memscale.core import MemscaleError
from memscale.hardware import Hardware
from memscale.simulation.dispatch.lazy_values import NeedsValues
from memscale.simulation.kernels.cuda_fused import CudaAutocast
from memscale.simulation.process.process_state import all_patched, without_library_caches

# Code in the folders of PyTorch and memscale sees the true device. Two parts of PyTorch see the simulated device, like
# users' code: optimizers, which keep step counts where the device says, and `custom_fwd` of autocast, which compares a
# tensor's device with the spoofed device.
_TORCH = os.path.dirname(torch.__file__)
_INSIDERS = (os.path.join(_TORCH, ""), os.path.join(str(Path(__file__).parents[2]), ""))
_SPOOFED = (os.path.join(_TORCH, "optim", ""), os.path.join(_TORCH, "amp", "autocast_mode.py"))
_DEVICE = torch.device("cuda", 0)
_PLAIN = {torch.Tensor, torch.nn.Parameter}
# The answers of functions of `torch.cuda`; PyTorch's default for bfloat16 counts emulation, before Ampere.
_ANSWERS: dict[str, Any] = {
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
    **dict.fromkeys(("synchronize", "empty_cache"), None),
    "device_count": 1,
    "current_device": 0,
}


# Errors of code for a card where no card is: a missing library, an operator without a kernel, a kernel that refuses
# tensors of a CPU. The modules raise other errors for the same reasons.
_REFUSALS = (ImportError, NotImplementedError, RuntimeError)
_OF_CUDA = ("torch.cuda", "triton", "cupy")


def needs_a_card(error: Exception) -> bool:
    """Whether `error` says that code for CUDA needs a card, or values; any other error is a mistake in the code."""
    if isinstance(error, MemscaleError):
        return isinstance(error, NeedsValues)
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, _REFUSALS) or str(frame.f_globals.get("__name__")).startswith(_OF_CUDA)


class DeviceSpoofing:
    """The patches that make the code of one step see the simulated CUDA device.

    Attributes:
        reads: the names of the spoofed attributes and functions that the step's code has read, each once.
        notes: notes on code that would act in another way on the real device.
    """

    def __init__(self, hardware: Hardware, capability: tuple[int, int], on_device: Callable[[Any], bool]) -> None:
        self.reads: dict[str, None] = {}
        self.notes: dict[str, None] = {}
        self._answers = _ANSWERS | {"get_device_capability": capability, "get_device_name": hardware.name}
        self._on_device = on_device
        self._insider: dict[str, bool] = {}
        self._autocast = CudaAutocast(on_device, self.notes)

    @contextmanager
    def given(self) -> Iterator[None]:
        """Spoofs the device in the body."""
        # PyTorch lists its factory functions at the first `with torch.device(...)`: make the list before the patches.
        torch.utils._device._device_constructors()
        patches = [*without_library_caches(), *_PATCHES]
        if not torch.cuda.is_available():
            torch._C._ensureCUDADeviceGuardSet()
            patches.append((torch.cuda, "_lazy_init", lambda: None))
        for name, value in (("is_cuda", True), ("is_cpu", False), ("device", _DEVICE)):
            patches.append((torch.Tensor, name, self._attribute(name, value)))
        patches += [(torch.cuda, name, self._function(name, answer)) for name, answer in self._answers.items()]
        with all_patched(patches), self._autocast.installed():
            yield

    def _function(self, name: str, answer: Any) -> Callable[..., Any]:
        original = getattr(torch.cuda, name)

        def function(*args: Any, **kwargs: Any) -> Any:
            # Autocast, inside PyTorch, reads this function and must see the simulated device.
            if name != "is_bf16_supported" and self._is_insider(sys._getframe(2).f_code):
                return original(*args, **kwargs)
            self.reads[f"torch.cuda.{name}()"] = None
            return answer

        return function

    def _attribute(self, name: str, value: Any) -> property:
        get = getattr(torch.Tensor, name).__get__

        def read(tensor: torch.Tensor) -> Any:
            code = sys._getframe(2).f_code
            inside = self._is_insider(code) and not code.co_filename.startswith(_SPOOFED)
            if inside or not self._on_device(tensor):
                if tensor.__class__ in _PLAIN:
                    return get(tensor)
                # A subclass would receive this patched function in `__torch_function__`.
                with torch._C.DisableTorchFunctionSubclass():
                    return get(tensor)
            self.reads[f"Tensor.{name}"] = None
            return value

        return property(read)

    def _is_insider(self, code: CodeType) -> bool:
        file = code.co_filename  # the key is the file: hashing a code object hashes all its constants
        known = self._insider.get(file)
        if known is None:
            known = self._insider[file] = file.startswith(_INSIDERS)
        return known


def _indexed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function` so that a CUDA device without an index means index 0."""

    def indexed(value: Any) -> Any:
        if isinstance(value, (str, torch.device)) and str(value) == "cuda":
            return _DEVICE
        return value

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*map(indexed, args), **{name: indexed(value) for name, value in kwargs.items()})

    return call


def _made_on_cpu(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wraps `function` so that its result is made on the CPU and copied to a CUDA device by an operator."""

    def call(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = torch.get_default_device() if kwargs.get("device") is None else torch.device(kwargs["device"])
        if device.type != "cuda":
            return function(data, *args, **kwargs)
        if isinstance(data, torch.Tensor):
            return function(data, *args, **{**kwargs, "device": _DEVICE})
        trains = kwargs.pop("requires_grad", False)
        made = function(data, *args, **{**kwargs, "device": "cpu"}).to(_DEVICE)
        return made.requires_grad_() if trains else made

    return call


def _to_device(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    return tensor.to(_DEVICE, non_blocking=non_blocking, **kwargs)


_PATCHES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    # Without CUDA, PyTorch cannot resolve "cuda" without an index.
    (torch.Tensor, "to", _indexed(torch.Tensor.to)),
    (torch.Tensor, "cuda", _to_device),
    (torch, "tensor", _made_on_cpu(torch.tensor)),
    (torch, "as_tensor", _made_on_cpu(torch.as_tensor)),
    (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
)
