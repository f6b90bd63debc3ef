"""The rank of this process in its run."""

from __future__ import annotations

import os

import torch

from memscale.core import in_process_group


def rank() -> int:
    """Returns the rank in the process group, else the launcher's ``RANK``; 0 for a single process.

    >>> rank()
    0
    """
    if in_process_group():
        return torch.distributed.get_rank()
    return _number("RANK")


def local_rank() -> int:
    """Returns the number of the process on its machine, from the launcher's ``LOCAL_RANK``; else 0.

    >>> local_rank()
    0
    """
    return _number("LOCAL_RANK")


def _number(variable: str) -> int:
    text = os.environ.get(variable, "").strip()
    return int(text) if text.isdecimal() else 0
