"""Several processes: whether this is one of a group, and what FSDP2 keeps of a module; nothing is imported of it."""

from __future__ import annotations

import sys
from typing import Any

import torch


def in_process_group() -> bool:
    """Whether this process is one of a group that `torch.distributed` has made.

    >>> in_process_group()
    False
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers for a module with this state.

    Before torch 2.12 a module had one at most, under another name.
    """
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def fsdp_groups_of(module: Any) -> list[Any]:
    """Those of a module that ``fully_shard`` took; none of any other.

    >>> fsdp_groups_of(object())
    []
    """
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    state = None if fsdp is None else fsdp._get_module_fsdp_state(module)
    return [] if state is None else fsdp_groups(state)
