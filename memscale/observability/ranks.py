"""Which of the processes of a run this is."""

from __future__ import annotations

import os

import torch

from memscale.core import in_process_group


def rank() -> int:
    """The rank in the process group, or else what the launcher said; 0 for a process on its own.

    >>> rank()
    0
    """
    if in_process_group():
        return torch.distributed.get_rank()
    return _number("RANK")


def local_rank() -> int:
    """The number of the process on its machine, as the launcher says it: ``LOCAL_RANK``.

    >>> local_rank()
    0
    """
    return _number("LOCAL_RANK")


def _number(variable: str) -> int:
    text = os.environ.get(variable, "").strip()
    return int(text) if text.isdecimal() else 0
