"""Pytrees: optree, plus the containers that models return and optree does not know.

Hugging Face outputs are subclasses of `OrderedDict`, and plain dataclasses are common as outputs. Both are registered
in optree on first use, in the namespace of memscale, so that other users of optree see no change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import optree
import torch

from memscale.core import internals

NAMESPACE = "memscale"
_KNOWN: set[type] = set()


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of `tree` in order, and the spec for `unflatten`; `None` is structure, not a leaf."""
    if torch.compiler.is_compiling():  # Dynamo can only trace torch's own pytrees
        return internals.pytree.tree_flatten(tree)
    leaves, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    if any(_learn(type(leaf)) for leaf in leaves):
        return flatten(tree)
    return leaves, spec


def unflatten(spec: Any, leaves: list[Any]) -> Any:
    """Rebuilds the tree of `spec` with `leaves`."""
    if isinstance(spec, internals.pytree.TreeSpec):
        return internals.pytree.tree_unflatten(leaves, spec)
    return optree.tree_unflatten(spec, leaves)


def tensors(tree: Any) -> list[torch.Tensor]:
    """Returns the tensors of `tree`, in order."""
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def map_only(cls: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns `tree` with each leaf of class `cls` replaced by its `function`."""
    leaves, spec = flatten(tree)
    return unflatten(spec, [function(leaf) if isinstance(leaf, cls) else leaf for leaf in leaves])


def _learn(cls: Any) -> bool:
    """Registers `cls` if it is a container that optree treated as a leaf. Returns whether to flatten the tree again."""
    if cls is torch.Tensor or cls in _KNOWN:
        return False
    read: Any
    rebuild: Any
    if issubclass(cls, dict):
        read, rebuild = _read_mapping, _rebuild_mapping
    elif dataclasses.is_dataclass(cls):
        read, rebuild = _read_dataclass, _rebuild_dataclass
    else:
        _KNOWN.add(cls)
        return False
    optree.register_pytree_node(cls, read, functools.partial(rebuild, cls), namespace=NAMESPACE)
    _KNOWN.add(cls)
    return True


def _read_mapping(node: Any) -> tuple[Any, Any, Any]:
    keys = tuple(node.keys())
    return tuple(node.values()), keys, keys


def _rebuild_mapping(cls: Any, keys: Any, values: Any) -> Any:
    # By its constructor, since Hugging Face's ModelOutput mirrors its items as attributes.
    items = dict(zip(keys, values, strict=True))
    by_field: bool = dataclasses.is_dataclass(cls)
    return cls(**items) if by_field else cls(items)


def _read_dataclass(node: Any) -> tuple[Any, Any, Any]:
    names = tuple(field.name for field in dataclasses.fields(node))
    return tuple(getattr(node, name) for name in names), names, names


def _rebuild_dataclass(cls: Any, names: Any, values: Any) -> Any:
    # Without the constructor: __post_init__ has run already, and may reject or change its own results.
    node: Any = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(node, name, value)
    return node
