"""A note about keys and values that a model's output keeps: generating text needs them, a training step does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memscale.core import format_bytes


def about_key_values(outputs: Iterable[Any]) -> tuple[str, ...]:
    """What the caches in `outputs` take, as models of transformers return them unless told not to.

    >>> keys = torch.ones(2, 512)
    >>> about_key_values([{"logits": keys}]), about_key_values([{"past_key_values": ((keys, keys),)}])[0][:48]
    ((), 'the output keeps 4.00 KiB of keys and values, wh')
    """
    nbytes = sum(_cached_bytes(output["past_key_values"]) for output in outputs if _has_cache(output))
    if not nbytes:
        return ()
    return (
        f"the output keeps {format_bytes(nbytes)} of keys and values, which training does not read: "
        "model.config.use_cache = False frees them",
    )


def _has_cache(output: Any) -> bool:
    return isinstance(output, dict) and output.get("past_key_values") is not None


def _cached_bytes(cache: Any) -> int:
    """Of the tensors behind a cache of transformers, of any of its versions."""
    found: dict[int, int] = {}
    to_see: list[Any] = [cache]
    while to_see:
        each = to_see.pop()
        if isinstance(each, torch.Tensor):
            found[id(each)] = each.nbytes
        elif isinstance(each, (list, tuple)):
            to_see.extend(each)
        elif "cache" in type(each).__module__:
            to_see.extend(vars(each).values())
    return sum(found.values())
