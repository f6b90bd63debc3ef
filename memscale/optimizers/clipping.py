"""Clips gradients by their total norm in two passes over one graph: the first pass measures, the second one clips."""

from __future__ import annotations

import torch

from memscale.core import CorrectnessError, device_type, simulating

# How far the norm of one gradient may differ between the two passes, as a share: some kernels sum in varying order.
_SHARE = 1e-3


class TwoPasses:
    """Collects the norm of each gradient in a first pass of backward, and scales the gradients in a second pass.

    The arithmetic is that of ``torch.nn.utils.clip_grad_norm_``, operator by operator, so the results are bit for bit
    its.
    """

    def __init__(self, max_norm: float) -> None:
        self._max_norm = max_norm
        self._norms: dict[int, torch.Tensor] = {}  # by the id of the parameter
        self._share: torch.Tensor | None = None
        self._differs: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._norms)

    def measure(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Records the norm of the gradient of `parameter`, in the first pass."""
        self._norms[id(parameter)] = _norm(gradient)

    def clip(self, parameter: torch.Tensor, gradient: torch.Tensor, order: list[torch.Tensor]) -> None:
        """Scales the gradient of `parameter` in place, in the second pass.

        Args:
            order: all parameters, in the order in which ``clip_grad_norm_`` would sum their norms.

        Raises:
            CorrectnessError: the gradient's norm is not the one that the first pass measured.
        """
        if self._share is None:
            self._share = self._share_of_all(order)
        before, now = self._norms.get(id(parameter)), _norm(gradient)
        if before is None:
            raise _differs()
        differs = ((now - before).abs() > _SHARE * before) | (now.isnan() != before.isnan())
        if device_type(gradient) == "cpu" and not simulating():
            if differs:
                raise _differs()
        else:  # read in `check`, once for all: reading each result at once would make the host wait for the accelerator
            self._differs = differs if self._differs is None else self._differs | differs.to(self._differs.device)
        gradient.mul_(self._share.to(gradient.device))

    def check(self) -> None:
        """Raises `CorrectnessError` if a gradient of the second pass had another norm than in the first pass."""
        if self._differs is not None and not simulating() and bool(self._differs):
            raise _differs()

    def clear(self) -> None:
        """Forgets all norms at the end of a step."""
        self._norms.clear()
        self._share = self._differs = None

    def _share_of_all(self, order: list[torch.Tensor]) -> torch.Tensor:
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in order:
            if (norm := self._norms.get(id(parameter))) is not None:
                groups.setdefault((parameter.device, parameter.dtype), []).append(norm)
        norms = [norm for group in groups.values() for norm in group]
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), 2.0)
        return torch.clamp(self._max_norm / (total + 1e-6), max=1.0)


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    if device_type(gradient) == "cpu":
        whole: torch.Tensor = torch.linalg.vector_norm(gradient, 2.0)
        return whole
    [norm] = torch._foreach_norm([gradient], 2.0)
    return norm


def _differs() -> CorrectnessError:
    return CorrectnessError(
        "step_in_backward(max_norm=...): a gradient is not the one whose norm was measured, and would be clipped by "
        "that of others; both passes go over one graph, loss.backward(retain_graph=True) and loss.backward(), with "
        "nothing in .grad before them"
    )
