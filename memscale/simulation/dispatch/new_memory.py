"""What of a process's memory is new to it, once malloc has given back what was free."""

from __future__ import annotations

# Of what is allocated beside tensors that move. The rest is where something was freed since malloc last gave back what
# was free: with `offload()` operators of three models found 0.25 to 0.4 of what they wrote to there, and copies 0.25 to
# 0.5 of what they brought back. A heap followed chunk by chunk says 0.45 to 0.6: it has not aged as a process's has.
_NEW_SHARE = 2 / 3


class NewMemory:
    """Counts what malloc gave back, and a step asks for again.

    What a step frees, the next one finds, until a runtime has malloc give it back: at most all that it had at once.

    >>> memory = NewMemory()
    >>> memory.born(96)
    >>> memory.died(96)
    >>> memory.new_bytes(96)
    0
    >>> memory.trim()
    >>> memory.new_bytes(96)
    64
    >>> memory.born(96)
    >>> memory.new_bytes(96)
    32
    """

    def __init__(self) -> None:
        self._used_bytes = self._most_bytes = self._given_back_bytes = 0

    def trim(self) -> None:
        """Note that malloc gives back what is free."""
        self._given_back_bytes = self._most_bytes

    def new_bytes(self, nbytes: int) -> int:
        """How much of a storage of so many bytes the system would have to give."""
        return min(int(nbytes * _NEW_SHARE), self._given_back_bytes)

    def born(self, nbytes: int) -> None:
        """Note that a storage was allocated."""
        self._given_back_bytes -= self.new_bytes(nbytes)
        self._used_bytes += nbytes
        self._most_bytes = max(self._most_bytes, self._used_bytes)

    def died(self, nbytes: int) -> None:
        """Note that it was freed."""
        self._used_bytes -= nbytes
