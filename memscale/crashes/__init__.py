"""Out of memory, explained: what held the memory when an allocation failed, and which plan would have fitted."""

from __future__ import annotations

from memscale.crashes.cause import explain
from memscale.crashes.explanation import Explanation, Holder

__all__ = ["Explanation", "Holder", "explain"]
