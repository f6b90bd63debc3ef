"""The ways to read or resize a tensor that pass by the dispatcher, answered by a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memscale.simulation.dispatch.fake_mode import FakeMode
from memscale.simulation.dispatch.values import NeedsValues
from memscale.simulation.sandbox.process_state import patched


@contextmanager
def reads_checked(mode: FakeMode) -> Iterator[None]:
    """Make the ways to read a tensor that pass by the dispatcher raise for values that were not computed."""

    def checked(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                return original(tensor, *args, **kwargs)
            with _disable_current_modes():  # values computed for this, by no operator of the step
                values = mode.values.of(tensor)
                if values is None:
                    raise NeedsValues(
                        f"Tensor.{name}() reads values that only a real run computes", mode.recorder.path()
                    )
                return original(values, *args, **kwargs)

        return read

    def resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        mode.storages.resized(storage, nbytes)
        return storage

    def size(storage: torch.UntypedStorage) -> int:
        return mode.storages.size(storage)

    with (
        patched(torch.Tensor, "tolist", checked("tolist")),
        patched(torch.Tensor, "numpy", checked("numpy")),
        patched(torch.UntypedStorage, "resize_", resize),
        patched(torch.UntypedStorage, "size", size),
    ):
        yield
