"""What a simulated step draws from, and what where random numbers decide what it does: typical ones, least, or most.

The generators of PyTorch's CPU, of `random` and of NumPy are all threads': a simulation has others in their place.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._ops import OpOverload

from memscale.core import internals, simulated
from memscale.simulation.process.process_state import patched

_SEED = 0  # any would do
_TORCHS = torch.default_generator  # by whatever name the step has it
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
        here = simulated()
        for owner in (random, _PYTHON if here is None else here.randomness.python):
            stack.enter_context(patched(owner, "random", fixed))
        for name in _NUMPY:
            stack.enter_context(patched(np.random, name, of_numpy(getattr(np.random, name))))
        yield lambda: calls > 0


class StepRandomness:
    """Generators of a step's own, the same for each simulation.

    Attributes:
        torch, python, numpy: in place of PyTorch's for the CPU, of that of `random` and of NumPy's.
    """

    def __init__(self) -> None:
        self.torch = torch.Generator("cpu")
        self.torch.manual_seed(_SEED)
        self.python = random.Random(_SEED)
        self.numpy = np.random.RandomState(_SEED)

    @contextmanager
    def installed(self, *, counts: bool) -> Iterator[None]:
        """Have the step find them by the names of the process's own.

        If it `counts`, states that `torch.utils.checkpoint` keeps are tensors of the step.
        """
        with ExitStack() as stack:
            for owner, own, mine in ((random, _PYTHON, self.python), (np.random, _numpys(), self.numpy)):
                for name, value in list(vars(owner).items()):
                    if getattr(value, "__self__", None) is own:
                        stack.enter_context(patched(owner, name, getattr(mine, value.__name__)))
            for name in ("random", "getrandbits"):  # of which its other methods are made, whoever imported these before
                stack.enter_context(patched(_PYTHON, name, getattr(self.python, name)))
            functions: dict[str, Callable[..., Any]] = {
                "manual_seed": lambda seed: self.torch.manual_seed(int(seed)),
                "seed": self.torch.seed,
                "initial_seed": self.torch.initial_seed,
                "get_rng_state": self._counted if counts else self.torch.get_state,
                "set_rng_state": self.torch.set_state,
            }
            for module in (torch, torch.random):
                for name, function in functions.items():
                    stack.enter_context(patched(module, name, function))
                stack.enter_context(patched(module, "default_generator", self.torch))
            yield

    def _counted(self) -> torch.Tensor:
        state = self.torch.get_state()
        found = torch.zeros(state.shape, dtype=state.dtype)  # an operator, which the generator's own function is not
        with internals.disable_current_modes():
            return found.copy_(state)


def drawing_from(op: OpOverload) -> Callable[..., Any] | None:
    """`op`, which draws, from a generator that it is given first; None where no operator does that.

    >>> drawing_from(torch.ops.aten.rand_like.default)(torch.Generator().manual_seed(0), torch.empty(1))
    tensor([0.4963])
    """
    if op is torch.ops.aten.native_dropout.default:
        return _dropout
    names = [argument.name for argument in op._schema.arguments]
    packet = getattr(torch.ops.aten, op._opname)
    for overload in (op, *(getattr(packet, name) for name in packet.overloads())):
        arguments = overload._schema.arguments
        takes = [argument for argument in arguments if "Generator" in str(argument.type)]
        rest = [argument for argument in arguments if argument not in takes]
        if takes and [(each.name, str(each.type)) for each in rest] == [
            (each.name, str(each.type)) for each in op._schema.arguments if "Generator" not in str(each.type)
        ]:
            return partial(_drawn, overload, names.index(takes[0].name) if takes[0].name in names else -1)
    return None


def _drawn(op: OpOverload, at: int, own: torch.Generator, /, *args: Any, **kwargs: Any) -> Any:
    by_place = 0 <= at < len(args)
    given = args[at] if by_place else kwargs.get("generator")
    if given is not None and given is not _TORCHS:
        return op(*args, **kwargs)  # a generator of the user's
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


def _numpys() -> Any:
    return np.random.rand.__self__  # type: ignore[attr-defined]


_UNIFORM = (("low", 0.0), ("high", 1.0))


def _states() -> Any:
    state: Any = np.random.get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()
