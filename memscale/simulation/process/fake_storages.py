"""Fake tensors: ordinary CPU tensors over untouched address space.

A simulated step must take the path that the real one takes. Under PyTorch's `FakeTensor` it does not: libraries ask
`isinstance(x, FakeTensor)` and choose another attention mask, `type(p)` is not `Parameter` for an optimizer's foreach
path, and PyTorch decomposes an LSTM differently. A fake tensor here is a plain `torch.Tensor` on the CPU, with a
storage of the right size, so everything above the kernels behaves as it would; and since no kernel ever runs on it, the
operating system never gives it a page.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from memscale.core import RuntimeUnavailable

_SMALLEST_MAPPING = 1 << 40
# Linux refuses a private mapping larger than memory without MAP_NORESERVE; other systems are lazy by default.
_NO_RESERVE = 0x4000 if hasattr(mmap, "MAP_NORESERVE") or hasattr(mmap, "MAP_POPULATE") else 0


class FakeStorages:
    """Makes fake tensors. All of them share one range of addresses, each with a storage object of its own.

    >>> storages = FakeStorages()
    >>> tensor = storages.tensor(storages.storage(1 << 38), torch.bfloat16, (1 << 18, 1 << 19), (1 << 19, 1))
    >>> tensor.shape, tensor.nbytes == 1 << 38, type(tensor) is torch.Tensor
    (torch.Size([262144, 524288]), True, True)
    """

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._mapped_bytes = 0

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """Returns a new storage of `nbytes` bytes that takes no memory."""
        if nbytes == 0:
            return torch.UntypedStorage(0)
        return torch.frombuffer(self._room_for(nbytes), dtype=torch.uint8, count=nbytes).untyped_storage()

    def alone(self, nbytes: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        """Returns a tensor over a new storage of its own, in half the time of `storage` and `tensor`.

        >>> FakeStorages().alone(24, torch.float32, (3, 2), (1, 3)).stride()
        (1, 3)
        """
        count, rest = divmod(nbytes, dtype.itemsize)
        if rest or not count:
            return self.tensor(self.storage(nbytes), dtype, shape, stride)
        return torch.frombuffer(self._room_for(nbytes), dtype=dtype, count=count).as_strided_(shape, stride)

    def _room_for(self, nbytes: int) -> mmap.mmap:
        if self._mapping is None or self._mapped_bytes < nbytes:
            self._mapping = _reserve(nbytes)
            self._mapped_bytes = len(self._mapping)
        return self._mapping

    @staticmethod
    def tensor(
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        shape: Sequence[int],
        stride: Sequence[int],
        offset: int = 0,
    ) -> torch.Tensor:
        """Returns a tensor over `storage`; `offset` and `stride` count elements."""
        return torch.empty(0, dtype=dtype).set_(storage, offset, tuple(shape), tuple(stride))

    def like(self, tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
        """Returns a fake tensor with the layout and dtype of `tensor`, over `storage` or a storage of its own."""
        storage = storage or self.storage(tensor.untyped_storage().nbytes())
        return self.tensor(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _reserve(nbytes: int) -> mmap.mmap:
    sizes = (max(_SMALLEST_MAPPING, nbytes), nbytes)
    for size in sizes:
        try:
            if _NO_RESERVE:
                return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
            return mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError):
            continue
    raise RuntimeUnavailable(
        f"the simulation needs {nbytes} bytes of address space (no memory behind it) and the system refuses; "
        "raise the limit on address space (ulimit -v) or allow overcommit (vm.overcommit_memory=0 or 1)"
    )
