"""`Sizes`: makes the batches of a caller's batch factory, and checks that a batch depends on its size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memscale.core import Argument, ConfigError, available_host_bytes, batches, check_count, format_unlike

BatchFn = Callable[[int], Any]


class Sizes:
    """The batches of a batch factory, by size.

    Args:
        batch_fn: returns the batch of a size.
        at_least: the smallest size of the search, and the first whose batch is made.
        verb: the name of the public method in messages, such as ``"largest"``.
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
        self.parts: dict[int, list[Any]] = {}  # by size: the `parts_of` the batch
        self._nbytes: dict[int, tuple[int, int]] = {}  # by size: bytes of all tensors, bytes of tensors in host memory

    def batch(self, n: int) -> Any:
        """Returns the batch of size `n`.

        Raises:
            ConfigError: the factory raises, its batch equals that of the smallest size, or the host has no room for it.
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
        except Exception as error:  # the caller's function may raise any error
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
        """Returns a lower bound, in bytes, of the tensors of the batch of size `n`; 0 where the bound is unknown.

        The bound extrapolates from the batches that were made.
        """
        return self._expected(n, 0)

    def fault(self, n: int, what: str) -> ConfigError:
        """Returns the error for a size `n` without a step: `what` happened, and the remedy."""
        if n == self.at_least:
            bound = Argument(self.verb, "at_least")
            remedy = f"give {bound} the smallest size that there is"
        else:
            bound = Argument(self.verb, "at_most")
            remedy = f"give {bound} below {n} if that is beyond what the data or the model has"
        return ConfigError(f"{what} {remedy}").naming(bound)

    def only_values_differ(self, n: int) -> bool:
        """Returns whether the batch of size `n` has tensors of the same shapes as the batch of the smallest size."""
        return shapes(self.parts[n]) == shapes(self.parts[self.at_least])

    def _expected(self, n: int, which: int) -> int:
        """Returns the bytes of size `n` on the line through the two largest known sizes; `which` indexes `_nbytes`.

        The line is a lower bound: tensors grow linearly with the size, or faster, as an attention mask does.
        """
        known = sorted(self._nbytes)[-2:]
        if len(known) < 2 or n <= known[1]:
            return 0
        (first, second), (low, high) = known, (self._nbytes[each][which] for each in known)
        return high + (high - low) * (n - second) // (second - first)


def parts_of(batch: Any) -> list[Any]:
    """Returns the contents of a batch by which sizes are told apart: the shapes of tensors, and all other values."""
    leaves, _ = batches.flatten(batch)
    return [list(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def shapes(parts: list[Any]) -> list[Any]:
    """Returns the shapes in the result of `parts_of`."""
    return [part for part in parts if isinstance(part, list)]


def check_range(verb: str, at_least: Any, at_most: Any) -> None:
    """Raises ConfigError unless ``1 <= at_least <= at_most``, both of them ints."""
    for name, value in (("at_least", at_least), ("at_most", at_most)):
        check_count(f"{verb}({name}={value!r})", value)
    if at_most < at_least:
        raise ConfigError(f"{verb}(at_least={at_least}, at_most={at_most}) leaves no size; swap the two")
