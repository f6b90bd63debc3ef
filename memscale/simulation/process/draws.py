"""The random numbers of a simulated step: generators of its own, and the least or the largest draws on request.

All threads share the generators of PyTorch's CPU, of `random` and of NumPy, so a simulation draws from other ones.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from memscale.core import OpOverload, internals
from memscale.simulation.process.process_state import all_patched

_SEED = 0  # arbitrary
_TORCHS = torch.default_generator  # the process's generator, under any name
_MOST_NUMBERS = 256  # the most elements of a drawn decision, such as one for each layer; a mask has more


class Draws(enum.Enum):
    """The choice of the numbers that a step draws: by its generators, the least, or the largest."""

    SEEDED = "as its generators give them"
    LEAST = "the least that each could be"
    MOST = "the most"


def settle(drawn: Any, op: Any, args: Sequence[Any], draws: Draws) -> None:
    """Fills `drawn`, the result of `op`, with the values of `draws`, if it is a single number or a short list.

    A mask stays as drawn, since no real draw makes all its elements equal.
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


_PYTHON: Any = random.uniform.__self__  # type: ignore[attr-defined]
_NUMPY: Any = np.random.rand.__self__  # type: ignore[attr-defined]
_MOST_CALLS = 100_000
PYTHON_DRAWN = (
    "the step draws from Python's or NumPy's generator: the peak is the largest with the least, most or typical draws"
)


class _Fixed:
    """A function that returns one number from 0 up to but not including 1, and counts its calls."""

    def __init__(self, draws: Draws) -> None:
        self.number = math.nextafter(1.0, 0.0) if draws is Draws.MOST else 0.0
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        if self.calls > _MOST_CALLS:
            raise RuntimeError("it waits for a number that is not drawn here")
        return self.number


class _FixedPython(random.Random):
    """A generator of Python that returns a fixed number for each single one; its bits are random."""

    fixed: _Fixed

    def random(self) -> float:
        return self.fixed()

    def getrandbits(self, k: int, /) -> int:
        # A class that overrides `random` alone makes whole numbers and choices of it, too.
        return super().getrandbits(k)


class _FixedNumpy(np.random.RandomState):
    """A generator of NumPy that returns a fixed number for each single one; arrays are random."""

    fixed: _Fixed

    def random_sample(self, size: Any = None) -> Any:
        return self.fixed() if size is None else super().random_sample(size)

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        if size is not None or np.ndim(low) or np.ndim(high):
            return super().uniform(low, high, size)
        return low + (high - low) * self.fixed()


class StepRandomness:
    """The random generators of a simulated step, with the same seed for each simulation.

    >>> least = StepRandomness(Draws.LEAST)
    >>> least.is_drawn, least.python.random(), least.python.uniform(2, 3), least.numpy.rand(), least.is_drawn
    (False, 0.0, 2.0, 0.0, True)

    Args:
        draws: the choice of single numbers of Python and NumPy.

    Attributes:
        torch: replaces PyTorch's generator for the CPU.
        python: replaces the generator of `random`.
        numpy: replaces NumPy's global generator.
    """

    def __init__(self, draws: Draws = Draws.SEEDED) -> None:
        self.torch = torch.Generator("cpu")
        self.torch.manual_seed(_SEED)
        self._fixed = None if draws is Draws.SEEDED else _Fixed(draws)
        self.python, self.numpy = random.Random(_SEED), np.random.RandomState(_SEED)
        if self._fixed is not None:
            self.python, self.numpy = _FixedPython(_SEED), _FixedNumpy(_SEED)
            self.python.fixed = self.numpy.fixed = self._fixed
        self._before = self._state()

    @property
    def is_drawn(self) -> bool:
        """Whether a number of Python or NumPy was drawn."""
        return bool(self._state() != self._before)

    def _state(self) -> Any:
        if self._fixed is not None:
            return self._fixed.calls
        state: Any = self.numpy.get_state(legacy=False)["state"]
        return self.python.getstate(), state["pos"], state["key"].tobytes()

    @contextmanager
    def installed(self, *, counts: bool) -> Iterator[None]:
        """Patches the functions of the process's generators to use these generators in the body.

        With `counts`, generator states that `torch.utils.checkpoint` saves count as tensors of the step.
        """
        functions: dict[str, Any] = {
            "manual_seed": lambda seed: self.torch.manual_seed(int(seed)),
            "seed": self.torch.seed,
            "initial_seed": self.torch.initial_seed,
            "get_rng_state": self._counted if counts else self.torch.get_state,
            "set_rng_state": self.torch.set_state,
            "default_generator": self.torch,
        }
        patches = [
            (owner, name, getattr(mine, value.__name__))
            for owner, own, mine in ((random, _PYTHON, self.python), (np.random, _NUMPY, self.numpy))
            for name, value in vars(owner).items()
            if getattr(value, "__self__", None) is own
        ]
        # The other methods call these two, also where imported earlier.
        patches += [(_PYTHON, name, getattr(self.python, name)) for name in ("random", "getrandbits")]
        patches += [(module, name, each) for module in (torch, torch.random) for name, each in functions.items()]
        with all_patched(patches):
            yield

    def _counted(self) -> torch.Tensor:
        state = self.torch.get_state()
        found = torch.zeros(state.shape, dtype=state.dtype)  # an operator, which the mode sees
        with internals.disable_current_modes():
            return found.copy_(state)


def drawing_from(op: OpOverload) -> Callable[..., Any] | None:
    """Returns the random operator `op` with a generator as first argument; None if no overload takes a generator.

    >>> drawing_from(torch.ops.aten.rand_like.default)(torch.Generator().manual_seed(0), torch.empty(1))
    tensor([0.4963])
    """
    if op is torch.ops.aten.native_dropout.default:
        return _dropout
    names = [argument.name for argument in op._schema.arguments]
    packet = getattr(torch.ops.aten, op.overloadpacket.__name__)
    for overload in (op, *(getattr(packet, name) for name in packet.overloads())):
        arguments = overload._schema.arguments
        takes = [argument for argument in arguments if "Generator" in str(argument.type)]
        rest = [argument for argument in arguments if argument not in takes]
        if takes and [(each.name, str(each.type)) for each in rest] == [
            (each.name, str(each.type)) for each in op._schema.arguments if "Generator" not in str(each.type)
        ]:
            return partial(_drawn, overload, names.index(takes[0].name) if takes[0].name in names else -1)
    return None


def with_own_draws(op: OpOverload) -> Callable[..., Any]:
    """Returns `op`, drawing from a generator of its own: one more draw would change every later draw of the process."""
    drawing = drawing_from(op) if torch.Tag.nondeterministic_seeded in op.tags else None
    return op if drawing is None else partial(drawing, torch.Generator("cpu"))


def _drawn(op: OpOverload, at: int, own: torch.Generator, /, *args: Any, **kwargs: Any) -> Any:
    by_place = 0 <= at < len(args)
    given = args[at] if by_place else kwargs.get("generator")
    if given is not None and given is not _TORCHS:
        return op(*args, **kwargs)  # a generator of the user
    if by_place:
        return op(*args[:at], own, *args[at + 1 :], **kwargs)
    return op(*args, **{**kwargs, "generator": own})


def _dropout(
    generator: torch.Generator, input: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or not p:
        return torch.ops.aten.native_dropout.default(input, 0.0, train)  # type: ignore[no-any-return]
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return input * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
