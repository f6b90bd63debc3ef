"""The saved-tensor hooks with which regions of `offload` run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memscale.core import internals
from memscale.regions import Streams, name_refused_hooks, never_compiled, unrecorded
from memscale.runtime import Hooks, HostParameter, Saved, host_parameter_on_device, is_plain

_autograd = internals.autograd


@contextmanager
def saving_by(hooks: Hooks | None, how: object) -> Iterator[None]:
    """Runs a region of the transform `how` under `hooks`, or if None under the surrounding hooks.

    Raises:
        TransformError: the region uses a transform of `torch.func`, which refuses hooks.
    """
    if hooks is None:
        yield
        return
    _autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
    try:
        yield
    except RuntimeError as error:
        name_refused_hooks(error, how, "offloading")
        raise
    finally:
        _autograd._pop_saved_tensors_default_hooks()
        hooks.leave()


class StreamedHooks(Hooks):
    """Hooks that save host parameters by reference, and leave all other tensors on the device."""

    def __init__(self, streams: Streams, *args: Any) -> None:
        super().__init__(*args)
        self._streams = streams

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        self._streams.see(tensor)
        if is_plain(tensor):
            if (host := host_parameter_on_device(tensor)) is not None:
                with unrecorded():
                    return host.mover.save(host, tensor)
            if (host := _cast_of(tensor)) is not None:
                return _Cast(host.mover.save(host), tensor)
        return self.keep(tensor)

    def pack_all(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Packs each tensor by `pack`: none of them moves by itself."""
        return [self.pack(tensor.detach()) for tensor in tensors]


def _cast_of(tensor: torch.Tensor) -> HostParameter | None:
    """Returns the host parameter of which `tensor` is a cast made by autocast, or a view of one; else None."""
    whole = tensor if tensor._base is None else tensor._base
    if type(whole.grad_fn).__name__ != "ToCopyBackward0" or whole.untyped_storage().nbytes() != whole.nbytes:
        return None
    assert whole.grad_fn is not None
    host = getattr(whole.grad_fn.next_functions[0][0], "host_parameter_on_device", None)
    if host is None or whole.device != host.device or whole.stride() != host.layout.stride or whole._version != 0:
        return None
    return host  # type: ignore[no-any-return]


class _Cast:
    """A cast of a host parameter: saved as the parameter, and cast again in backward."""

    __slots__ = ("_dtype", "_offset", "_saved", "_size", "_stride")

    def __init__(self, saved: Saved, tensor: torch.Tensor) -> None:
        self._saved = saved
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def unpack(self, hooks: Hooks) -> torch.Tensor:
        with torch.no_grad():
            whole = hooks.unpack(self._saved).to(self._dtype)
            return whole.as_strided(self._size, self._stride, self._offset).detach()
