"""`offload` around a checkpoint under `torch.func`: the region's inputs wait on another tier.

`torch.func` refuses saved-tensor hooks, but a checkpointed region is one function that owns what it keeps: its inputs.
In place of an input it keeps a *token*, a tensor of the input's shape over one element. The token is what the input is
to autograd and to `vmap`, so derivatives of any order find their way; the bytes behind it are the engine's.
"""

from __future__ import annotations

from typing import Any

import torch

from memscale.core import CorrectnessError
from memscale.regions import Keeper
from memscale.runtime import Hooks


class Away(Keeper):
    """Keeps inputs where `hooks` put them."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        slip = _Slip(self._hooks)
        return _Send.apply(tensor, slip), slip  # type: ignore[no-untyped-call]

    def bring(self, token: torch.Tensor, slip: Any) -> torch.Tensor:
        back: torch.Tensor = _Bring.apply(token, slip)  # type: ignore[no-untyped-call]
        return back


class _Slip:
    """Says where the bytes behind a token are."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._packed: Any = None

    def pack(self, tensor: torch.Tensor) -> None:
        self._packed = self._hooks.pack(tensor)

    def unpack(self) -> torch.Tensor:
        # Another object than what the engine holds: autograd writes the history of a function's output into it.
        return self._hooks.unpack(self._packed).detach()


class _Exchanged(torch.autograd.Function):
    """One tensor for another with the same gradient."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Send(_Exchanged):
    """From an input to its token, once for all levels of `torch.func`: at the bottom the tensor is a plain one."""

    @staticmethod
    def forward(tensor: torch.Tensor, slip: _Slip) -> torch.Tensor:
        slip.pack(tensor)
        return tensor.new_zeros(()).expand(tensor.size())

    @staticmethod
    def vmap(info: Any, in_dims: Any, tensor: torch.Tensor, slip: _Slip) -> Any:
        # The batch comes first on both ways: which dimension it is must not depend on where it was saved.
        return _Send.apply(tensor.movedim(in_dims[0], 0), slip), 0  # type: ignore[no-untyped-call]


class _Bring(_Exchanged):
    """From a token to the input."""

    @staticmethod
    def forward(token: torch.Tensor, slip: _Slip) -> torch.Tensor:
        tensor = slip.unpack()
        if tensor.size() != token.size():
            raise CorrectnessError(
                f"offload() around a checkpoint under torch.func kept an input as {list(tensor.size())} and is asked "
                f"for it as {list(token.size())}; leave offload() out of this composition of transforms"
            )
        return tensor

    @staticmethod
    def vmap(info: Any, in_dims: Any, token: torch.Tensor, slip: _Slip) -> Any:
        return _Bring.apply(token.movedim(in_dims[0], 0), slip), 0  # type: ignore[no-untyped-call]
