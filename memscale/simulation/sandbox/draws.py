"""What a simulated step draws where random numbers decide what it does: typical ones, the least, or the most."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from memscale.core import internals
from memscale.simulation.sandbox.process_state import patched

_MOST_NUMBERS = 256  # one for each layer, and not a mask


class Draws(enum.Enum):
    """Which numbers a step draws."""

    SEEDED = "as its generators give them"
    LEAST = "the least that each could be"
    MOST = "the most"


def settle(drawn: Any, op: Any, args: Sequence[Any], draws: Draws) -> None:
    """Give `drawn`, what `op` returned, the values of `draws`.

    That is for one number, or for a list of them: of a mask, no draw makes all elements alike.
    """
    if draws is Draws.SEEDED or not isinstance(drawn, torch.Tensor) or drawn.dim() > 1 or drawn.numel() > _MOST_NUMBERS:
        return
    bounds = _bounds(drawn, op._schema, args)
    if bounds is not None:
        drawn.fill_(bounds[draws is Draws.MOST])


def _bounds(drawn: torch.Tensor, schema: Any, args: Sequence[Any]) -> tuple[float, float] | None:
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    match schema.name.partition("::")[2].rstrip("_"):
        case "rand" | "rand_like" | "uniform":
            least, most = given.get("from", 0.0), given.get("to", 1.0)
            below = torch.nextafter(*torch.tensor([most, least], dtype=drawn.dtype))
            return least, float(below)
        case "randint" | "randint_like":
            return given.get("low", 0), given["high"] - 1
        case "bernoulli" if isinstance(p := given.get("p"), float):
            return float(p >= 1), float(p > 0)
    return None


_PYTHON: Any = random.uniform.__self__  # type: ignore[attr-defined]  # whose other numbers are made of its `random()`
_NUMPY = ("rand", "random", "random_sample", "uniform")
_MOST_CALLS = 100_000
PYTHON_DRAWN = (
    "the step draws numbers of Python's or NumPy's: the least, the most or typical ones, whichever takes most"
)


@contextmanager
def drawing(draws: Draws) -> Iterator[Callable[[], bool]]:
    """Run the body, in which single numbers of Python's and NumPy's own generators are those of `draws`, too.

    It is given what says whether any was drawn so far.

    >>> with drawing(Draws.LEAST) as drawn:
    ...     drawn(), random.random(), random.uniform(2, 3), np.random.rand(), drawn()
    (False, 0.0, 2.0, 0.0, True)
    """
    if draws is Draws.SEEDED:
        before = _states()
        yield lambda: _states() != before
        return
    number = math.nextafter(1.0, 0.0) if draws is Draws.MOST else 0.0
    calls = 0

    def fixed() -> float:
        nonlocal calls
        calls += 1
        if calls > _MOST_CALLS:
            raise RuntimeError("it waits for a number that is not drawn here")
        return number

    def of_numpy(own: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("size") is not None or len(args) > 2 or any(map(np.ndim, args)):
                return own(*args, **kwargs)
            if own.__name__ != "uniform":
                return own(*args, **kwargs) if args else fixed()
            low, high = (*args, *(kwargs.get(key, default) for key, default in _UNIFORM[len(args) :]))
            return low + (high - low) * fixed()

        return one

    with ExitStack() as stack:
        stack.enter_context(patched(random, "random", fixed))
        stack.enter_context(patched(_PYTHON, "random", fixed))
        for name in _NUMPY:
            stack.enter_context(patched(np.random, name, of_numpy(getattr(np.random, name))))
        yield lambda: calls > 0


@contextmanager
def states_seen() -> Iterator[None]:
    """Have states of the generator that `torch.utils.checkpoint` keeps be tensors of the step."""
    get = torch.get_rng_state

    def seen() -> torch.Tensor:
        state = get()
        found = torch.zeros(state.shape, dtype=state.dtype)  # an operator, which the generator's own function is not
        with internals.disable_current_modes():
            return found.copy_(state)

    with patched(torch, "get_rng_state", seen), patched(torch.random, "get_rng_state", seen):
        yield


_UNIFORM = (("low", 0.0), ("high", 1.0))


def _states() -> Any:
    state: Any = np.random.get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()
