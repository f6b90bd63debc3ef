"""Tensors that a region saves for its backward, as autograd would have saved them.

If saved-tensor hooks are active where the region is called (an outer checkpoint, an offload, PyTorch's
`save_on_cpu`), the hooks receive these tensors like any saved tensor. So a checkpoint inside a checkpoint holds no
tensors of its own, and an offload around a checkpoint moves the region's input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memscale.core import changed_error, described, version, versions
from memscale.regions import hooks_around, memory_of, pack_all, recomputes


class SavedTensors:
    """Some tensors, held directly or through saved-tensor hooks.

    Args:
        tensors: the tensors.
        hooks: the hooks as (pack, unpack), or `None`.
        direct: the indices of the tensors that are held directly in spite of hooks.
    """

    __slots__ = ("_direct", "_held", "_unpack", "_versions")

    def __init__(self, tensors: list[torch.Tensor], hooks: Any, direct: frozenset[int] = frozenset()) -> None:
        self._held: list[Any] = tensors
        self._direct = direct
        self._unpack: Callable[[Any], torch.Tensor] | None = None
        self._versions: list[int] = []
        if hooks is not None:
            pack, self._unpack = hooks
            distinct = {id(tensor): tensor for index, tensor in enumerate(tensors) if index not in direct}
            with torch.no_grad():
                packed = dict(zip(distinct, pack_all(pack, [*distinct.values()]), strict=True))
            self._held = [packed.get(id(tensor), tensor) for tensor in tensors]

    def through_hooks(self, index: int) -> bool:
        """Whether tensor `index` comes back from hooks, possibly as a copy whose version counter starts anew."""
        return self._unpack is not None and index not in self._direct

    @property
    def by_recompute(self) -> bool:
        """Whether the tensors come back by a recompute of the region around this one."""
        return recomputes(self._unpack)

    def seal(self, versions: list[int]) -> None:
        """Requires the tensors to stay at `versions` from now on. Tensors held by hooks are checked by the hooks."""
        self._versions = versions

    def unchanged(self) -> list[torch.Tensor] | None:
        """Returns the tensors if they are held directly and unchanged since `seal`, else `None`."""
        if self._unpack is not None or (self._versions and versions(self._held) != self._versions):
            return None
        return self._held

    def tensors(self) -> list[torch.Tensor]:
        """Returns all tensors."""
        return [self.tensor(index, "a saved output") for index in range(len(self._held))]

    def tensor(self, index: int, what: str, refused: dict[int, str] | None = None) -> torch.Tensor:
        """Returns the tensor at `index`, which errors name by `what`.

        The message about a changed tensor goes into `refused`, by its storage, if `refused` is given.

        Raises:
            CorrectnessError: the tensor was changed in place since `seal`, and `refused` is `None`.
        """
        held = self._held[index]
        if self._unpack is not None and index not in self._direct:
            return self._unpack(held)
        if self._versions and (now := version(held)) != self._versions[index]:
            error = changed_error(described(what, held.dtype, held.shape), now, self._versions[index])
            if refused is None:
                raise error
            refused[memory_of(held)] = str(error)
        return held  # type: ignore[no-any-return]

    def replace(self, index: int, tensor: torch.Tensor) -> None:
        """Replaces the tensor at `index` by `tensor`, a copy that belongs to the region."""
        self._held, self._versions = list(self._held), list(self._versions)
        if self.through_hooks(index):
            hooks = hooks_around()
            assert hooks is not None, "the hooks around a region stay in place while it runs"
            self._held[index] = hooks[0](tensor)
        else:
            self._held[index], self._versions[index] = tensor, version(tensor)
