"""The batches of a batch factory: made when they are asked for, and checked to depend on their size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memscale.core import Argument, ConfigError, available_host_bytes, batches, check_count, format_unlike

BatchFn = Callable[[int], Any]


class Sizes:
    """What a factory returns for the sizes that were asked for.

    Args:
        batch_fn: returns the batch of a size.
        at_least: the first size that will be asked for.
        verb: what messages call whoever asks.
    """

    def __init__(self, batch_fn: BatchFn, at_least: int, verb: str) -> None:
        if not callable(batch_fn):
            raise ConfigError(
                f"{verb}(batch_fn) takes a function from a size to a batch, got {type(batch_fn).__name__}; pass one "
                "such as lambda n: torch.empty(n, 128, device='meta')"
            )
        self.batch_fn = batch_fn
        self.at_least = at_least
        self.verb = verb
        self.parts: dict[int, list[Any]] = {}  # by size, what the batch holds: shapes of tensors, other values
        self._nbytes: dict[int, tuple[int, int]] = {}  # of its tensors, and of those that are in host memory

    def batch(self, n: int) -> Any:
        """The batch of size `n`.

        Raises:
            ConfigError: there is none, it is that of another size, or the host has no room for it.
        """
        on_host, free_bytes = self._expected(n, 1), available_host_bytes()
        if free_bytes is not None and 2 * on_host > free_bytes:
            takes, free = format_unlike(on_host, free_bytes)
            raise self.fault(
                n,
                f"batch_fn({n}) would take about {takes} of the {free} that this machine has left; return tensors on "
                "meta, as torch.empty(n, 128, device='meta') does, or",
            )
        try:
            batch = self.batch_fn(n)
        except Exception as error:
            raise self.fault(n, f"batch_fn({n}) raises {type(error).__name__}: {error};") from error
        batches.check_batch(batch)
        self.parts[n] = parts_of(batch)
        tensors = batches.tensors(batch)
        held = [tensor.nbytes for tensor in tensors], [tensor.nbytes for tensor in tensors if tensor.is_cpu]
        self._nbytes[n] = sum(held[0]), sum(held[1])
        if n != self.at_least and self.parts[n] == self.parts[self.at_least]:
            raise ConfigError(
                f"batch_fn does not scale: batch_fn({self.at_least}) and batch_fn({n}) return batches of the same "
                f"shapes {shapes(self.parts[n])}; return a batch that grows with n"
            )
        return batch

    def least_bytes(self, n: int) -> int:
        """What the tensors of the batch of size `n` take at least, by those that were made; 0 where it is not known."""
        return self._expected(n, 0)

    def fault(self, n: int, what: str) -> ConfigError:
        """The error of a size `n` of which there is no step: `what` happened, and what to do."""
        if n == self.at_least:
            bound = Argument(self.verb, "at_least")
            remedy = f"give {bound} the smallest size that there is"
        else:
            bound = Argument(self.verb, "at_most")
            remedy = f"give {bound} below {n} if that is beyond what the data or the model has"
        return ConfigError(f"{what} {remedy}").naming(bound)

    def only_values_differ(self, n: int) -> bool:
        """Whether the batch of size `n` has the smallest one's tensors, and other values beside them."""
        return shapes(self.parts[n]) == shapes(self.parts[self.at_least])

    def _expected(self, n: int, which: int) -> int:
        """On the line through the two largest sizes that are known: a mask that grows with the square is above it."""
        known = sorted(self._nbytes)[-2:]
        if len(known) < 2 or n <= known[1]:
            return 0
        (first, second), (low, high) = known, (self._nbytes[each][which] for each in known)
        return high + (high - low) * (n - second) // (second - first)


def parts_of(batch: Any) -> list[Any]:
    """What a batch holds, to tell one size from another: the shapes of its tensors, and other values."""
    leaves, _ = batches.flatten(batch)
    return [list(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def shapes(parts: list[Any]) -> list[Any]:
    """The shapes among what a batch holds."""
    return [part for part in parts if isinstance(part, list)]


def check_range(verb: str, at_least: Any, at_most: Any) -> None:
    """Raise ConfigError for what is no range of sizes."""
    for name, value in (("at_least", at_least), ("at_most", at_most)):
        check_count(f"{verb}({name}={value!r})", value)
    if at_most < at_least:
        raise ConfigError(f"{verb}(at_least={at_least}, at_most={at_most}) leaves no size; swap the two")
