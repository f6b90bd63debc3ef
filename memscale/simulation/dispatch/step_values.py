"""The values of a simulated step: known values, values that follow from known ones, and stand-ins.

Small integer and boolean tensors are computed for real. A model's control flow reads these (lengths, masks, expert
numbers), so `.item()`, `nonzero` and the routing of a mixture of experts take a real path.
"""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

import torch

from memscale.simulation.dispatch.lazy_values import NeedsValues, TooLarge, lazy_value, overwritten, stands_in, value_of
from memscale.simulation.dispatch.live_storages import LiveStorages, is_small
from memscale.simulation.dispatch.operators import Call, Operator
from memscale.simulation.dispatch.trace_builder import CHOICE, DRAW, GIVEN, SCALAR, StorageRecord
from memscale.simulation.kernels.shapes import results_of
from memscale.simulation.process.fake_storages import FakeStorages

_MOST_READS = 512  # reads of stand-ins by one line; reads in torch's code (an optimizer's loop) are not counted
_TORCH = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(os.path.dirname(__file__))  # the folder memscale/simulation
# This file of PyTorch reads values only to check that arguments are valid, and raises for invalid ones.
_VALIDATES = os.path.join(_TORCH, "distributions", "distribution.py")
# The notes about stand-ins for values that are not computed, the least certain origin first.
_ASSUMED = {
    SCALAR: "reads a number computed by the step: a number without overflow was assumed",
    CHOICE: "chooses by activations: random activations were assumed",
    DRAW: "decides by a random number: the peak is the largest with the least, most or typical draws",
}
_VALID = "validates arguments of torch.distributions: valid arguments were assumed"


class Values:
    """The known values of one step.

    Args:
        storages: the live storages of the step.
        alike: whether all random numbers are equal.

    Attributes:
        assumptions: notes on the assumptions about stand-ins, each once.
        goes_by_draws: whether the step has read a random number.
    """

    def __init__(self, storages: LiveStorages, *, alike: bool = False) -> None:
        self.assumptions: dict[str, None] = {}
        self.goes_by_draws = False
        self._alike = alike
        self._storages = storages
        self._sites: dict[Any, int] = {}  # how often a line of this step has read stand-ins

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns a tensor with the values of `tensor`; None if the values are unknown."""
        record = self._storages.record(tensor)
        if record.later is None:
            return tensor if record.known else None
        try:
            return value_of(tensor, record.later)
        except TooLarge:
            return None

    def trust(self, result: Any, guess: str) -> None:
        """Notes that the results' values are known: computed, or stand-ins by `guess`."""
        for tensor in results_of(result):
            if not tensor.is_meta:
                record = self._storages.record(tensor)
                record.known, record.guess = True, guess

    def follow(self, call: Call, result: Any) -> bool:
        """Records how to compute `result`, if its values follow from known ones; returns whether they do."""
        operator, args, kwargs, tensors, records, _ = call
        if not _follows(call, result):
            return False
        record = self._storages.record(result)
        is_constant = operator.rule.values == "constant"
        contents = None if is_constant else [each.later for each in records]
        record.later = lazy_value(operator.op, args, kwargs, tensors, contents, result)
        record.guess = "" if is_constant else guess_of(records)
        return True

    def overwrite(self, call: Call, written: list[torch.Tensor]) -> None:
        """Notes that `written` now have values that are not computed."""
        operator, args, kwargs, tensors, records, _ = call
        later = None
        if len(written) == 1 and written[0] is args[0] and _follows(call, args[0]):
            later = overwritten(operator.op, args, kwargs, tensors, [record.later for record in records])
        for tensor in written:
            record = self._storages.record(tensor)
            # A scalar keeps its value, as a stand-in: a loss scaler's flag for overflow stays down.
            record.guess = SCALAR if later is None else guess_of(records)
            record.known, record.later = record.known and later is None and stands_in(tensor), later

    def forget(self, written: list[torch.Tensor]) -> None:
        """Notes that another process has written to `written`."""
        for tensor in written:
            record = self._storages.record(tensor)
            record.known, record.later, record.guess = record.known and stands_in(tensor), None, SCALAR

    def begin_step(self) -> None:
        """Begins another step, which may read as often as the one before."""
        self._sites.clear()

    def assume(
        self, operator: Operator, records: list[StorageRecord], path: str, *, decides: bool, reads: bool
    ) -> None:
        """Notes that a stand-in value is read.

        Args:
            operator: the reading operator.
            records: the storages that it reads.
            path: the path of the running module.
            decides: whether a stand-in must not decide the model's course here.
            reads: whether the model receives the number itself, rather than a tensor whose size depends on it.

        Raises:
            NeedsValues: a stand-in would decide the model's course.
        """
        guess = guess_of(records)
        if not guess or guess == GIVEN:
            return
        assumed = _ASSUMED[guess]
        if guess == DRAW and reads:
            self.goes_by_draws = True
            if self._alike and self._reads_often():  # a loop that waits for another random number
                raise NeedsValues(f"{operator.op} keeps reading a random number", path)
        if guess == SCALAR:
            if _validates():
                assumed = _VALID
            elif decides or self._reads_often():
                raise NeedsValues(f"{operator.op} reads a value that only a real run computes", path)
        self.assumptions[f"{operator.name} in {path or 'the step'} {assumed}"] = None

    def _reads_often(self) -> bool:
        """Whether one line keeps reading stand-ins: a loop that waits for a value would be endless."""
        frame: FrameType = sys._getframe(1)
        for inside in (_HERE, _TORCH):
            while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
                frame = frame.f_back
        site = (frame.f_code, frame.f_lineno)
        self._sites[site] = self._sites.get(site, 0) + 1
        return bool(self._sites[site] > _MOST_READS)


def _validates() -> bool:
    """Whether a distribution of PyTorch is checking its arguments."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame.f_code.co_filename == _VALIDATES


def _follows(call: Call, result: Any) -> bool:
    """Whether the values of `result` follow from known ones, so that they can be computed later."""
    rule, draws = call.operator.rule, call.operator.draws
    if rule.values == "constant" or not isinstance(result, torch.Tensor) or draws or rule.empty:
        return rule.values == "constant" and isinstance(result, torch.Tensor)
    for tensor, record in zip(call.tensors, call.records, strict=True):
        # Large floats from before the step are a batch's; a batch on meta has no values.
        if record.later is None and not (
            record.known and (record.op >= 0 or is_small(tensor) or not tensor.is_floating_point())
        ):
            return False
    return True


def guess_of(records: list[StorageRecord]) -> str:
    """Returns the least certain `guess` of `records`; ``""`` if all values follow from constants."""
    guesses = {record.guess for record in records}
    return next((guess for guess in (*_ASSUMED, GIVEN) if guess in guesses), "")


def with_numbers(operator: Operator, result: Any) -> Any:
    """Returns `result` with real tensors for scalars: 1.0, and for flags the value for finite numbers."""
    if isinstance(result, (list, tuple)):
        return type(result)([with_numbers(operator, part) for part in result])
    if not isinstance(result, torch.Tensor) or not stands_in(result):
        return result
    storage = torch.empty(result.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    number = FakeStorages.tensor(storage, result.dtype, result.shape, result.stride(), int(result.storage_offset()))
    # Flags come from `isnan(x).any()` and `isfinite(x).all()`.
    return number.fill_(operator.op.overloadpacket.__name__ != "any")


def integers_of(real: Any, fake: Any) -> Any:
    """Returns `fake` with the real tensors in place of its integer tensors."""
    if isinstance(fake, torch.Tensor):
        return fake if fake.is_floating_point() else real
    return type(fake)([integers_of(*pair) for pair in zip(real, fake, strict=True)])


class Choices:
    """A source of chosen indices, which regions restore for a recompute like a random generator.

    The source is separate from the step's generators: otherwise regions would save a generator's state on its account.

    >>> choices = Choices()
    >>> state, source = choices.get_state(), torch.empty(3)
    >>> first = choices.numbers(source)
    >>> choices.set_state(state)
    >>> torch.equal(first, choices.numbers(source)), torch.equal(first, choices.numbers(source))
    (True, False)
    """

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu")
        self._taken = 0

    def get_state(self) -> int:
        """Returns the number of draws so far."""
        return self._taken

    def set_state(self, state: int) -> None:
        """Restores the state, so that the next draws repeat the draws after `get_state`."""
        self._taken = state

    def numbers(self, source: torch.Tensor, *, positive: bool = False) -> torch.Tensor:
        """Returns random values of the shape and dtype of `source`: normal, or between 0 and 1 with `positive`."""
        self._generator.manual_seed(self._taken)
        self._taken += 1
        numbers = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        return numbers.uniform_(generator=self._generator) if positive else numbers.normal_(generator=self._generator)
