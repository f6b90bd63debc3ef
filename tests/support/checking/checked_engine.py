"""A runtime whose engines run over `Checked`: they say what their caller makes and uses, and raise what was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memscale.runtime.backends.protocol import Backend
from memscale.runtime.engine.entry import Handle
from memscale.runtime.engine.loader import Loadable, Loader
from memscale.runtime.engine.offload_engine import Engine
from memscale.runtime.engine.transfers import Transfers
from memscale.runtime.runtime import Runtime
from tests.support.checking.hazards import Checked


class CheckedLoader(Loader):
    """A loader that says which loads were not in vain."""

    def __init__(self, backend: Checked, transfers: Transfers) -> None:
        super().__init__(backend, transfers)
        self._checked = backend

    def arrived(self, item: Loadable) -> torch.Tensor:
        """See `Loader.arrived`, which is called with the lock held: another thread may let go of it right after."""
        tensor = super().arrived(item)
        self._checked.taken(tensor)
        return tensor


class CheckedEngine(Engine):
    """An engine over `Checked` that also says what its caller makes and uses, and raises what was found."""

    backend: Checked

    def new_loader(self) -> Loader:
        return CheckedLoader(self.backend, self.transfers)

    def go_on(self) -> None:
        super().go_on()
        self.backend.raise_hazards()

    def stash(self, tensor: torch.Tensor, **how: Any) -> Handle:
        self.backend.produced(tensor)
        handle = super().stash(tensor, **how)
        self.backend.raise_hazards()
        return handle

    def stash_all(self, tensors: Sequence[torch.Tensor], *, tier: str = "auto", region: str = "") -> list[Handle]:
        for tensor in tensors:
            self.backend.produced(tensor)
        return super().stash_all(tensors, tier=tier, region=region)

    def used_by_host(self, memory: torch.Tensor) -> None:
        self.backend.used_by_host(memory)

    def fetch(self, handle: Handle) -> torch.Tensor:
        return self.hand_out(super().fetch(handle))

    def hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = super().hand_out(tensor)
        self.backend.used(tensor)
        self.backend.raise_hazards()
        return tensor


class CheckedRuntime(Runtime):
    """A runtime that checks every copy for hazards, and raises them at the next call of an engine."""

    def engine_over(self, backend: Backend) -> CheckedEngine:
        return CheckedEngine(Checked(backend), depth=self.config.prefetch_depth, timeline=self._timeline)
