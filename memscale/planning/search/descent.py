"""`Descent`: lowers the peak of a step by one move after the other, each of them simulated.

NOTE
The bytes at the peak decide the moves. A move adds a transform to one family: the modules of one class whose paths
differ only in numbers. With `held` bytes of the family at the peak, and `waiting` of those in modules that do not run
at the peak, a move is estimated to free::

    checkpoint, of children as well  _FREED * waiting
    tile with n chunks in place of m held * (1 - m / n)

The move with the largest estimate is simulated first. The first move that lowers the peak is kept, and the next moves
are those of the new peak. Moves compose: a checkpoint of blocks around tiles of their children, the whole model in rows
with checkpoints inside. The solver's candidates cannot have all of these, since each candidate takes a trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from memscale.algebra import Transform, chain, compose
from memscale.core import MemscaleError, template
from memscale.planning.parts.blocks import could_be_block, is_called
from memscale.planning.parts.candidates import MANY_TURNS, Menu, Rules, dims_of_rows
from memscale.planning.parts.heads import loss_head
from memscale.planning.trials.trials import Simulate
from memscale.simulation import Profile, Trace, analyse, operators_of, turns_of
from memscale.transforms import checkpoint, may_be_proven, proven_rows, tile

# The most simulated operators, and the most moves in a row that do not lower the peak; with fewer the smallest steps
# take more: benchmarks/bench_plan.py --smallest.
_MOST_OPERATORS, _MOST_FAILURES = 80_000, 4
# Share of the peak: the least estimate of a move that is simulated, and the least gain of a move that is kept:
# benchmarks/bench_plan.py --smallest.
_WORTH, _GAIN = 0.05, 0.01
# Share of the waiting bytes that a checkpoint is estimated to free, since its inputs stay: the order of the moves,
# benchmarks/bench_plan.py --smallest.
_FREED = 0.8
# The first numbers of chunks of a tile, and the most chunks. A loss head has few bytes besides the logits:
# benchmarks/bench_plan.py --smallest.
_FIRST, _MOST_CHUNKS, _MOST_HEAD_CHUNKS = (4, 2), 64, 512
# The categories of the bytes at the peak that transforms free.
_FREE = ("activation", "temporary", "workspace")


@dataclass(frozen=True, eq=False)
class DescentMove:
    """A move: a transform for the modules of one family, in place of a transform of its kind.

    Attributes:
        paths: the paths of the modules.
        how: the transform.
        gain_bytes: the bytes that the move is estimated to free at the peak.
    """

    paths: tuple[str, ...]
    how: Transform
    gain_bytes: float

    def after(self, rules: Mapping[str, Transform]) -> dict[str, Transform]:
        """Returns `rules` after the move, in the order of the paths."""
        found = dict(rules)
        for path in self.paths:
            before = chain(found[path]) if path in found else ()
            found[path] = compose(self.how, *(each for each in before if each.spelling != self.how.spelling))
        return dict(sorted(found.items()))


@dataclass(frozen=True, eq=False)
class DescentStep:
    """A step of a descent: the rules, and the bytes and seconds of the simulated step without its update."""

    rules: Rules
    taken_bytes: int
    seconds: float


class Descent:
    """A descent for the model of a step.

    Args:
        model: the model.
        plain: the trace of the step as written.
        menu: says which techniques are allowed, and how many rows the batch has.
        simulate: returns the trace of a step with rules.

    Attributes:
        simulations: the number of simulated steps.
    """

    def __init__(self, model: nn.Module, plain: Trace, menu: Menu, simulate: Simulate) -> None:
        self._modules, self._plain, self._menu, self._simulate = dict(model.named_modules()), plain, menu, simulate
        self._head = loss_head(model, ())
        self._families: dict[object, list[str]] = {}
        for path, module in self._modules.items():
            if is_called(module) and any(True for _ in module.parameters()):
                self._families.setdefault((template(path), type(module)), []).append(path)
        self._rows_are_independent: dict[tuple[str, ...], bool] = {}
        self._operators = 0
        self.simulations = 0

    def run(self, rules: Rules, floor_bytes: int) -> list[DescentStep]:
        """Returns the steps of a descent from a plan, each with a smaller peak than the step before.

        Args:
            rules: the rules of the plan.
            floor_bytes: the descent ends at a step that takes no more.
        """
        now = dict(rules)
        step = self._run(now)
        assert step is not None, "the plan was simulated before"
        found: list[DescentStep] = []
        failed = set[tuple[tuple[str, ...], Transform]]()
        failures = 0
        while True:
            profile, size = analyse(step), len(step.ops)
            if found and profile.taken_bytes <= floor_bytes:
                return found
            for move in self._moves(now, profile):
                if (move.paths, move.how) in failed or not self._may(move):
                    continue
                if failures >= _MOST_FAILURES or self._operators >= _MOST_OPERATORS:
                    return found
                other = self._run(move.after(now))
                reached = None if other is None else analyse(other)
                if reached is not None and reached.taken_bytes <= (1 - _GAIN) * profile.taken_bytes:
                    assert other is not None
                    now, step, failures = move.after(now), other, 0
                    found.append(DescentStep(tuple(now.items()), reached.taken_bytes, reached.step_seconds or 0.0))
                    break
                failures += 1
                failed.add((move.paths, move.how))
                if other is not None and len(other.ops) == size and move.how.spelling == "tile":
                    # There are no more rows than chunks.
                    failed |= {(move.paths, each) for each in self._tiles(move.paths, _chunks(move.how))}
            else:
                return found

    def _run(self, rules: Mapping[str, Transform]) -> Trace | None:
        """Returns the trace of the step with `rules`; None if a transform or the model refuses."""
        try:
            step = self._simulate(tuple(rules.items()), frozenset())
        except MemscaleError:  # a transform refuses its region, or the model's code fails under the transform
            return None
        self._operators += len(step.ops)
        self.simulations += 1
        return step

    def _moves(self, rules: Mapping[str, Transform], profile: Profile) -> list[DescentMove]:
        """Returns the moves that may lower the peak of a step with `rules`, the largest estimate first."""
        held = self._held(profile)
        found: list[DescentMove] = []
        for paths in map(tuple, self._families.values()):
            mine = sum(held.get(path, 0) for path in paths)
            own = [each for path in paths if path in rules for each in chain(rules[path])]
            # Checkpoints with policies or cuts give way to plain ones; a tile recomputes by itself.
            kept = any(each.spelling == "tile" for each in own) or own.count(checkpoint()) == len(paths)
            may = "checkpoint" in self._menu.techniques and not kept
            if may and (not paths[0] or could_be_block(self._modules[paths[0]])):
                for covered in dict.fromkeys((paths, (*paths, *self._children(paths)))):
                    inner = [path for path in covered if not any(is_inside(other, path) for other in covered)]
                    running = [held.get(path, 0) for path in inner if f"{profile.moment.path}.".startswith(f"{path}.")]
                    runs = mine if covered == ("",) else sum(running)
                    found.append(DescentMove(covered, checkpoint(), _FREED * (mine - runs)))
            chunks = min((_chunks(each) for each in own if each.spelling == "tile"), default=1)
            found += [DescentMove(paths, how, mine * (1 - chunks / _chunks(how))) for how in self._tiles(paths, chunks)]
        least_bytes = _WORTH * profile.taken_bytes
        return sorted((each for each in found if each.gain_bytes >= least_bytes), key=lambda each: -each.gain_bytes)

    def _tiles(self, paths: tuple[str, ...], chunks: int) -> Iterator[Transform]:
        """Yields the tiles with more than `chunks` chunks that come next for the modules at `paths`."""
        if "tile" not in self._menu.techniques or (not paths[0] and chunks >= self._menu.rows):
            return
        most = _MOST_HEAD_CHUNKS if paths == (self._head,) else _MOST_CHUNKS
        whole = not paths[0] or self._menu.rows >= max(_FIRST)
        for each in _FIRST if chunks == 1 else (2 * chunks,):
            if each <= most:
                yield tile(chunks=each, **(dims_of_rows(self._modules[paths[0]]) if whole else {"dim": 1}))

    def _children(self, paths: tuple[str, ...]) -> list[str]:
        """Returns the paths of the children of the modules at `paths` that can be regions."""
        named = [(path, name, child) for path in paths for name, child in self._modules[path].named_children()]
        return [f"{path}.{name}".lstrip(".") for path, name, child in named if could_be_block(child)]

    def _may(self, move: DescentMove) -> bool:
        """Returns whether a move is allowed: the rows of what a tile cuts must be provably independent."""
        if move.how.spelling != "tile" or move.paths == (self._head,):
            return True
        if move.paths not in self._rows_are_independent:
            path = move.paths[0]
            may = turns_of(self._plain, path) < MANY_TURNS and may_be_proven(operators_of(self._plain, path))
            if may:
                with proven_rows():
                    may = self._run({path: move.how}) is not None
            self._rows_are_independent[move.paths] = may
        return self._rows_are_independent[move.paths]

    def _held(self, profile: Profile) -> dict[str, int]:
        """Returns, by path, the bytes at the peak that transforms may free, of a module and the modules inside."""
        found: dict[str, int] = {}
        for path, categories in profile.categories_by_module.items():
            nbytes = sum(categories.get(each, 0) for each in _FREE)
            above = path if path in self._modules else ""
            found[above] = found.get(above, 0) + nbytes
            while above:
                above = above.rpartition(".")[0]
                found[above] = found.get(above, 0) + nbytes
        return found


def is_inside(path: str, other: str) -> bool:
    """Returns whether the module at `path` is inside the module at `other`."""
    return path != other and (not other or path.startswith(f"{other}."))


def _chunks(how: Transform) -> int:
    """Returns the number of chunks of a tile; 1 for a tile of another kind."""
    return getattr(how, "chunks", None) or 1
