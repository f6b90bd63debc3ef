"""Which modules of a simulated step run, and what the host takes for the calls that are no operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memscale.algebra import Method, Transformed
from memscale.core import internals
from memscale.regions import OperatorWatch
from memscale.simulation.dispatch.step_recorder import StepRecorder
from memscale.simulation.sandbox.process_state import patched


@contextmanager
def calls_followed(recorder: StepRecorder, paths: dict[int, str]) -> Iterator[None]:
    """Keep ``recorder.modules`` at the modules that are running, and the host busy with modules, regions and hooks.

    Modules are not followed by forward hooks: they are not told of a forward that ends in an exception outside
    `Exception`, such as the one that ends a recompute early, and modules take another path while global hooks exist.
    """
    run, forward, push = nn.Module.__call__, Method.__call__, internals.autograd._push_saved_tensors_default_hooks
    look = OperatorWatch.__torch_dispatch__
    calls = recorder.calls

    def module_run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls("module")
        recorder.modules.append(paths.get(id(module), type(module).__name__))
        try:
            return run(module, *args, **kwargs)
        finally:
            recorder.modules.pop()

    def region_run(method: Method, *args: Any, **kwargs: Any) -> Any:
        if isinstance(method.fn, Transformed):  # and no face of the whole model
            calls("region")
        return forward(method, *args, **kwargs)

    def pushed(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        @functools.wraps(pack)
        def packing(tensor: torch.Tensor) -> Any:
            calls("saved")
            return pack(tensor)

        packing.__self__ = getattr(pack, "__self__", None)  # type: ignore[attr-defined]  # a region asks whose it is
        calls("region")
        push(packing, unpack)

    def looked(mode: OperatorWatch, *args: Any, **kwargs: Any) -> Any:
        calls("watched")
        return look(mode, *args, **kwargs)

    with (
        patched(OperatorWatch, "__torch_dispatch__", looked),
        patched(nn.Module, "__call__", module_run),
        patched(Method, "__call__", region_run),
        patched(internals.autograd, "_push_saved_tensors_default_hooks", pushed),
    ):
        yield
