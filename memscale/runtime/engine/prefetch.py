"""`Prefetch`: predicts which tensors are requested next, and how many of them to load ahead."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from memscale.runtime.backends.protocol import Event

Key = TypeVar("Key", bound=Hashable)

# Bounds the recorded order in a process that never frees its graphs.
MOST_HINTS = 1 << 16
_SMOOTHING = 1 / 8  # the weight of the newest measurement in an average
_MOST_UNREAD = 64  # measurements whose events are not done yet


class Prefetch(Generic[Key]):
    """Predicts requests from the order of the previous pass. A wrong prediction costs time, never correctness.

    The depth is the number of requests that arrive during one copy, at most `most`. A plan reserves the memory for
    `most`, so measured times can only lower the memory.

    >>> ahead = Prefetch(most=2)
    >>> for _ in range(2):
    ...     ahead.begin()
    ...     for key in "abc":
    ...         _ = ahead.requested(key, at=None)
    ...         print(key, [after for after, _ in ahead.upcoming()])
    a []
    b []
    c []
    a ['b', 'c']
    b ['c']
    c []

    Args:
        most: the largest depth; 0 loads nothing ahead.
        guess: returns the key to expect after a key without a recorded successor, or None.
        repeats: whether a pass may request a key several times; otherwise a repeated request begins a new pass.
    """

    def __init__(
        self, most: int, *, guess: Callable[[Key], Key | None] = lambda key: None, repeats: bool = True
    ) -> None:
        self.most = most
        self.passed: set[Key] = set()  # the requests of this pass
        self.first: Key | None = None  # the first request of the last pass that had any
        self._guess = guess
        self._repeats = repeats
        self._next: dict[Key, Key] = {}
        self._last: Key | None = None
        self._last_at: Event | None = None
        self._gaps: deque[tuple[Event, Event]] = deque(maxlen=_MOST_UNREAD)
        self._copies: deque[Event] = deque(maxlen=_MOST_UNREAD)
        self._requests = self._copied = 0
        self._gap_seconds: float | None = None
        self._copy_seconds: float | None = None

    def begin(self) -> None:
        """Begins a new pass: its first request is not recorded as the successor of the last one."""
        self._last = self._last_at = None
        self.passed.clear()

    def requested(self, key: Key, *, at: Event | None) -> bool:
        """Records a request and its place in the compute stream; returns False if this pass has requested it before."""
        if key in self.passed:
            if self._repeats or key == self._last:
                return False
            self.begin()
        if self._last is None:
            self.first = key
        else:
            if len(self._next) >= MOST_HINTS:
                self._next.clear()
            self._next[self._last] = key
            if at is not None and self._last_at is not None:
                self._gaps.append((self._last_at, at))
        self._requests += 1
        self.passed.add(key)
        self._last, self._last_at = key, at
        return True

    def copied(self, event: Event) -> None:
        """Records a copy that ends with `event`."""
        self._copied += 1
        self._copies.append(event)

    def upcoming(self) -> Iterator[tuple[Key, float]]:
        """Yields the requests expected next, nearest first, each with the seconds until then."""
        key = self._last
        gap = self._gap_seconds or 0.0
        for distance in range(1, self.depth() + 1):
            if key is None:
                return
            after = self._next.get(key)
            key = self._guess(key) if after is None else after
            if key is None or key in self.passed:
                return
            yield key, distance * gap

    def depth(self) -> int:
        """Returns how many requests ahead to load."""
        for gap in _finished(self._gaps, lambda pair: pair[1]):
            first, last = gap[0].span(), gap[1].span()
            if first is not None and last is not None:
                self._gap_seconds = _average(self._gap_seconds, last[0] - first[0])
        for copy in _finished(self._copies, lambda event: event):
            span = copy.span()
            if span is not None:
                self._copy_seconds = _average(self._copy_seconds, span[1] - span[0])
        if self.most == 0 or self._gap_seconds is None or self._copy_seconds is None:
            return self.most
        copying = self._copy_seconds * self._copied / self._requests  # one request may need several copies, or none
        if copying >= self.most * self._gap_seconds:
            return self.most
        return max(1, math.ceil(copying / self._gap_seconds))


Item = TypeVar("Item")


def _finished(items: deque[Item], end: Callable[[Item], Event]) -> Iterator[Item]:
    while items and end(items[0]).done():
        yield items.popleft()


def _average(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + _SMOOTHING * (seconds - before)
