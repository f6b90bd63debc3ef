"""Random numbers that a simulation chooses by: what stands for activations whose largest, or order, a step asks for."""

from __future__ import annotations

import torch


class Choices:
    """A source of them, which regions put back for a recompute as they do random generators: it has to choose alike.

    Not a generator of the step's, which its own regions would then seem to draw from, and keep the state of.

    >>> choices = Choices()
    >>> state, source = choices.get_state(), torch.empty(3)
    >>> first = choices.numbers(source)
    >>> choices.set_state(state)
    >>> torch.equal(first, choices.numbers(source)), torch.equal(first, choices.numbers(source))
    (True, False)
    """

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu")
        self._taken = 0

    def get_state(self) -> int:
        """How often it was asked."""
        return self._taken

    def set_state(self, state: int) -> None:
        """Let what comes next be what came then."""
        self._taken = state

    def numbers(self, source: torch.Tensor, *, positive: bool = False) -> torch.Tensor:
        """Numbers of the shape and the dtype of `source`: normal ones, or such as lie between 0 and 1."""
        self._generator.manual_seed(self._taken)
        self._taken += 1
        numbers = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        return numbers.uniform_(generator=self._generator) if positive else numbers.normal_(generator=self._generator)
