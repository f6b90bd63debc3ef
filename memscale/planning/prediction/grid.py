"""`SizeGrid`: the table of batch sizes by sequence lengths that fit, found by a walk along the table's staircase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memscale.core import format_bytes


@dataclass(frozen=True)
class SizeGrid:
    """A table of the pairs (batch size, sequence length) whose step fits.

    Attributes:
        batches, lengths: the sizes, ascending.
        capacity_bytes: bytes that the step may take.
        peaks: the peak in bytes of each pair (batch, length) that was simulated.

    >>> grid = fitting_grid(lambda batch, length: batch * length, 8, batches=(1, 2, 4), lengths=(2, 4, 8))
    >>> grid.fits(4, 2), grid.fits(4, 4), len(grid.peaks)
    (True, False, 5)
    >>> print(grid)
    fits in 8 B, batch by sequence length; peaks as simulated
               2     4     8
    1        yes   yes   8 B
    2        yes   8 B  16 B
    4        8 B  16 B    no
    """

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    capacity_bytes: int
    peaks: dict[tuple[int, int], int] = field(hash=False)

    def fits(self, batch: int, length: int) -> bool:
        """Returns whether a step of this size fits: a simulated pair at least as large in both sizes fits."""
        return any(
            nbytes <= self.capacity_bytes and batch <= rows and length <= tokens
            for (rows, tokens), nbytes in self.peaks.items()
        )

    def plot(self, path: str | Path) -> None:
        """Draws the table to the file `path`; its suffix is the format (``.png``, ``.svg``, ``.pdf``)."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(1.5 + 0.9 * len(self.lengths), 1.2 + 0.45 * len(self.batches)), layout="constrained")
        axes: Any = figure.add_subplot()
        shade = [[0.25 if self.fits(batch, length) else 0.75 for length in self.lengths] for batch in self.batches]
        axes.imshow(shade, cmap="RdYlGn_r", vmin=0, vmax=1, aspect="auto")
        for row, batch in enumerate(self.batches):
            for column, length in enumerate(self.lengths):
                axes.text(column, row, self._cell(batch, length), ha="center", va="center", fontsize=8)
        axes.set_xticks(range(len(self.lengths)), [str(length) for length in self.lengths])
        axes.set_yticks(range(len(self.batches)), [str(batch) for batch in self.batches])
        axes.set_xlabel("sequence length")
        axes.set_ylabel("batch size")
        axes.set_title(f"what fits in {format_bytes(self.capacity_bytes)}")
        figure.savefig(path)

    def __str__(self) -> str:
        cells = [["", *map(str, self.lengths)]]
        cells += [[str(batch), *(self._cell(batch, length) for length in self.lengths)] for batch in self.batches]
        wide = max(len(cell) for row in cells for cell in row[1:])
        first = max(len("batch"), *(len(row[0]) for row in cells))
        rows = [row[0].ljust(first) + "".join(f"  {cell:>{wide}}" for cell in row[1:]) for row in cells]
        return "\n".join(
            [f"fits in {format_bytes(self.capacity_bytes)}, batch by sequence length; peaks as simulated", *rows]
        )

    def _cell(self, batch: int, length: int) -> str:
        if (batch, length) in self.peaks:
            return format_bytes(self.peaks[batch, length])
        return "yes" if self.fits(batch, length) else "no"


def fitting_grid(
    peak: Callable[[int, int], int], capacity_bytes: int, *, batches: Sequence[int], lengths: Sequence[int]
) -> SizeGrid:
    """Returns the table of the pairs that fit, from ``len(batches) + len(lengths) - 1`` simulations or fewer.

    The walk assumes that peaks do not fall as either size grows. The walk starts at the smallest batch with the longest
    sequence: from a pair that fits to the next larger batch, and from a pair that does not to the next shorter length.

    Args:
        peak: returns the peak in bytes at a batch size and a length.
        capacity_bytes: bytes that the step may take.
        batches, lengths: the sizes, ascending.
    """
    peaks: dict[tuple[int, int], int] = {}
    row, column = 0, len(lengths) - 1
    while row < len(batches) and column >= 0:
        pair = batches[row], lengths[column]
        peaks[pair] = peak(*pair)
        if peaks[pair] <= capacity_bytes:
            row += 1
        else:
            column -= 1
    return SizeGrid(tuple(batches), tuple(lengths), capacity_bytes, peaks)
