"""Memory for what many parameters keep, in few blocks.

A caching allocator hands out whole blocks, and one of several MiB has up to one more than was asked for: with two
tensors for each parameter that is some percent of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

_BLOCK_BYTES = 2**26  # taken when the first parameter in it needs it: those that never step are mostly neighbours
_LEAST_BYTES = 10 * 2**20  # for less, the caching allocator may take 20 MiB
_ALIGNED = 256


class Packed:
    """Room for bytes of parameters, in blocks for those that are next to each other."""

    def __init__(self) -> None:
        # By the id of the parameter: its block, where in it, and how many bytes.
        self._places: dict[int, tuple[_Block, int, int]] = {}

    def attend(self, parameters: Sequence[torch.Tensor], nbytes: Callable[[torch.Tensor], int]) -> None:
        """There is to be room of `nbytes` for each of these, and for no others; none is taken yet."""
        known, self._places = self._places, {}
        open_blocks: dict[torch.device, _Block] = {}
        for parameter in parameters:
            size = nbytes(parameter)
            place = known.get(id(parameter))
            if size and (place is None or place[2] != size):
                block = open_blocks.get(parameter.device)
                if block is None or block.nbytes + size > _BLOCK_BYTES:
                    block = open_blocks[parameter.device] = _Block()
                place = block, block.nbytes, size
                block.nbytes += -(-size // _ALIGNED) * _ALIGNED
            if size and place is not None:
                self._places[id(parameter)] = place

    def room(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The bytes of a parameter; None for one that was not attended to, is to have none, or has few neighbours.

        None also for one that went elsewhere than its neighbours since.
        """
        block, start, size = self._places.get(id(parameter), (None, 0, 0))
        if block is None or block.nbytes < _LEAST_BYTES:
            return None
        if block.memory is None:
            block.memory = torch.empty(block.nbytes, dtype=torch.uint8, device=parameter.device)
        return block.memory[start : start + size] if block.memory.device == parameter.device else None


class _Block:
    def __init__(self) -> None:
        self.nbytes = 0
        self.memory: torch.Tensor | None = None
