"""Queries about process groups and FSDP2, without importing `torch.distributed`."""

from __future__ import annotations

import sys
from typing import Any

import torch


def in_process_group() -> bool:
    """Whether this process has an initialized `torch.distributed` process group.

    >>> in_process_group()
    False
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def fsdp_groups(state: Any) -> list[Any]:
    """Returns the parameter groups of an FSDP2 module state.

    Before torch 2.12 a module had at most one group, in an attribute of another name.
    """
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return groups


def fsdp_groups_of(module: Any) -> list[Any]:
    """Returns the FSDP2 parameter groups of a module; empty unless ``fully_shard`` took the module.

    >>> fsdp_groups_of(object())
    []
    """
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_state")
    state = None if fsdp is None else fsdp._get_module_fsdp_state(module)
    return [] if state is None else fsdp_groups(state)
