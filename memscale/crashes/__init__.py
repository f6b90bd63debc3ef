"""Explains out-of-memory errors: which tensors held the memory, and which plan would have fitted."""

from memscale.crashes.cause import explain
from memscale.crashes.explanation import Explanation, Holder
