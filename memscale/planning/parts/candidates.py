"""The candidates for each part of a model: transforms that may help; trials measure their costs.

"Pieces" are the chunks of `tile`; "segments" are the runs of layers that a checkpoint with cuts recomputes one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from memscale import policies
from memscale.algebra import Transform, chain, compose
from memscale.core import batches
from memscale.planning.parts.blocks import could_be_block
from memscale.planning.parts.heads import is_tied, loss_head
from memscale.planning.parts.parts import Part
from memscale.planning.parts.rows import cuts_of_row
from memscale.runtime import AsyncOffloadConfig
from memscale.simulation import Trace, operators_of, turns_of
from memscale.transforms import Cut, cast, checkpoint, may_be_proven, offload, tile

# Chunks of a tile: enough for small tensors, few enough for large matrix products (benchmarks/bench_plan.py: seconds of
# a step). The fine number is for steps that fit no other way, since the time to simulate grows with the number of
# chunks (benchmarks/bench_plan.py --smallest: peaks).
_CHUNKS, _FINE_CHUNKS = 4, 16
# The most positions in a chunk of one long row, as far as `_FINE_CHUNKS` chunks suffice:
# benchmarks/bench_long_context.py.
_MOST_POSITIONS = 2**15
# Chunks of a loss head: benchmarks/bench_plan.py --only gpt2-tile.
_HEAD_CHUNKS = (_CHUNKS, _FINE_CHUNKS, 64)
# The fewest rows in a chunk of a whole part, except for fine chunks: chunks of one row cost time and free little more:
# benchmarks/bench_plan.py --smallest.
_FEWEST_ROWS = 2
# A row of single operations is cut at every n-th operation with a weight, a row of blocks at every n-th block; with
# fewer the smallest steps take more: benchmarks/bench_plan.py --smallest.
_EVERY = (1, 2, 4)
# Calls in a step from which a module, such as a cell in a loop, is not tiled: one call works with a small share of the
# bytes that the module keeps, so that tiles free next to nothing, and take long to simulate: benchmarks/bench_plan.py
# --only lstm.
MANY_TURNS = 8
# The fewest bytes of a parameter that `offload` moves; `transform` warns of a plan that moves no parameter.
_FEWEST_BYTES = AsyncOffloadConfig().min_bytes

# Operators that compute each row independently of all other rows: modules of only these operators are tiled as parts.
_ROW_BY_ROW = frozenset(
    f"aten::{name}"
    for line in (
        "mm addmm _addmm_activation add.Tensor add.Scalar sub.Tensor mul.Tensor mul.Scalar div.Tensor div.Scalar exp",
        "gelu silu relu sigmoid tanh pow.Tensor_Scalar rsqrt hardswish elu leaky_relu softplus mish _to_copy clone",
        "native_layer_norm _fused_rms_norm _unsafe_view mean.dim",
    )
    for name in line.split()
)

# Modules in a part that a candidate's text names; of more modules the text has the number. By choice.
_MOST_NAMED = 2

Rules = tuple[tuple[str, Transform], ...]


@dataclass(frozen=True)
class Candidate:
    """A candidate: the transforms that a plan may apply to a part and to modules inside the part.

    Attributes:
        rules: transforms by path relative to the part, outer paths first; empty leaves the part as written.
    """

    rules: Rules = ()

    def at(self, path: str) -> Rules:
        """Returns the plan's rules for the part at `path`."""
        return tuple((".".join(filter(None, (path, inside))), how) for inside, how in self.rules)

    @property
    def techniques(self) -> frozenset[str]:
        """Returns the names of the candidate's techniques, as in `Config.eligible`; ``"stream"`` moves parameters."""
        return frozenset(_technique(each) for _, how in self.rules for each in chain(how))

    @property
    def unmoved(self) -> Candidate:
        """Returns the candidate without its transforms that move activations."""
        kept = ((inside, [each for each in chain(how) if _technique(each) != "offload"]) for inside, how in self.rules)
        return Candidate(tuple((inside, compose(*parts)) for inside, parts in kept if parts))

    def __str__(self) -> str:
        if not self.rules:
            return "as written"
        phrases = []
        for (how, within), rules in itertools.groupby(self.rules, lambda rule: (rule[1], bool(rule[0]))):
            paths = [inside for inside, _ in rules]
            many = len(paths) > _MOST_NAMED
            phrases += (
                [f"{how!r} on {each}" for each in ([f"{len(paths)} modules in it"] if many else paths)]
                if within
                else [repr(how)]
            )
        return ", ".join(phrases)


AS_IT_IS = Candidate()


@dataclass(frozen=True)
class Menu:
    """The menu of candidates for the parts of a model.

    Attributes:
        techniques: the names of the allowed techniques, as in `Config.eligible`, with ``"stream"``.
        dtype: the dtype that `cast` computes in.
        rows: the rows of the batch, its size along dimension 0.
        positions: the positions of a row, the batch's size along dimension 1; 1 without that dimension.
        casts: whether the whole model is cast.
    """

    techniques: frozenset[str]
    dtype: torch.dtype
    rows: int
    casts: bool = False
    positions: int = 1

    @classmethod
    def of(cls, techniques: Iterable[str], dtype: torch.dtype, batch: Any) -> Menu:
        """Returns the menu for `batch`."""
        # The rows of a mapping are those of its first keyword, whose tensor `tile` cuts.
        leaves = batches.tensors([*batch.values()] if isinstance(batch, Mapping) else batch)
        shape = next((leaf.shape for leaf in leaves if leaf.dim()), (1,))
        return cls(frozenset(techniques), dtype, shape[0], positions=shape[1] if len(shape) > 1 else 1)

    def for_part(self, part: Part, step: Trace) -> tuple[Candidate, ...]:
        """Returns the candidates for `part`, `AS_IT_IS` first, simple candidates before composed ones."""
        found = self._for_part(part, step)
        return tuple(dict.fromkeys([AS_IT_IS, *(map(self.cast_within, found) if self.casts else found)]))

    def _for_part(self, part: Part, step: Trace) -> Iterator[Candidate]:
        whole, again = "", checkpoint()
        may = self.techniques.__contains__
        may_cut = may("tile") and turns_of(step, part.path) < MANY_TURNS
        cut = [
            child
            for child in (part.children if may_cut else ())
            if _is_row_by_row(part.module.get_submodule(child), operators_of(step, f"{part.path}.{child}".lstrip(".")))
        ]
        pieces = self._tile(self._pieces)
        together = self._together(part.module, part.path, step) if may_cut else ()
        # On a GPU the host launches the many small kernels of tiles within a recompute too slowly, and a mix of tiled
        # and other blocks fragments the allocator's memory: these candidates are for steps that fit no other way.
        deep = step.hardware.device_type == "cpu"
        operators = operators_of(step, part.path)
        # The output of fused attention is the best tensor to keep: few bytes for much time. Attention without a fused
        # operator consists of matrix products, and products without batch dimensions are the best tensors to keep.
        fused = any(name.removesuffix(".default") in policies.FUSED_ATTENTION for name in operators)
        kept = (
            policies.dots_saveable,
            policies.attention_saveable if fused else policies.dots_with_no_batch_dims_saveable,
        )
        if may("checkpoint"):
            yield Candidate(((whole, again),))
            for policy in kept:
                yield Candidate(((whole, checkpoint(policy=policy)),))
            for child in part.children:
                yield Candidate(((child, again),))
            if len(part.children) > 1:
                yield Candidate(tuple((child, again) for child in part.children))
            for cuts in dict.fromkeys((*_at_weights(part.module), *self._cuts(part, step))):
                yield Candidate(((whole, checkpoint(cuts=cuts)),))
        for child in cut:
            yield Candidate(((child, pieces),))
            if may("checkpoint"):
                yield Candidate(((whole, again), (child, pieces)))
                others = tuple((other, again) for other in part.children if other != child)
                if others:
                    yield Candidate((*others, (child, pieces)))
        if together and may("checkpoint"):
            yield Candidate(((whole, again), *together))
        if chunks := self._whole_chunks(part, step):
            yield from self._cut_whole(part, step)
            cut_in = partial(tile, chunks=chunks, **dims_of_rows(part.module))
            for policy in kept if may("checkpoint") else ():
                yield Candidate(((whole, compose(cut_in(recompute=False), checkpoint(policy=policy))),))
            if may("checkpoint") and deep:
                halves = cut_in(chunks=2, recompute=False)
                yield Candidate(((whole, compose(halves, checkpoint(policy=kept[1]))),))
        for child in cut if may("checkpoint") and deep else ():
            yield Candidate(((whole, checkpoint(policy=kept[1])), (child, pieces)))
        if not part.path:
            yield from self._of_head(part.module, ())
        if may("offload"):
            yield Candidate(((whole, offload()),))
            if may("checkpoint"):
                yield Candidate(((whole, compose(offload(), again)),))
                yield Candidate(((whole, compose(offload(), checkpoint(policy=policies.dots_saveable))),))
                for child in cut:
                    yield Candidate(((whole, compose(offload(), again)), (child, pieces)))
                if together:
                    yield Candidate(((whole, compose(offload(), again)), *together))
        if may("stream") and any(each.nbytes >= _FEWEST_BYTES for each in part.module.parameters()):
            streamed = offload(what="params")
            yield Candidate(((whole, streamed),))
            if may("checkpoint"):
                yield Candidate(((whole, compose(streamed, again)),))
                yield Candidate(((whole, compose(streamed, offload(), again)),))
                if together:
                    yield Candidate(((whole, compose(streamed, offload(), again)), *together))

    def for_group(self, group: Part, inside: Iterable[str], step: Trace) -> tuple[Candidate, ...]:
        """Returns the candidates for a group around the parts at the paths `inside`; the parts keep their own menus."""
        found = self._for_group(group, [path.removeprefix(f"{group.path}.") for path in inside], step)
        return tuple(dict.fromkeys([AS_IT_IS, *(map(self.cast_within, found) if self.casts else found)]))

    def _for_group(self, group: Part, inside: Sequence[str], step: Trace) -> Iterator[Candidate]:
        whole, again = "", checkpoint()
        if "checkpoint" in self.techniques:
            # Nested checkpoints: the recompute of the group saves the input of each part, and the backward of each part
            # recomputes that part.
            twice = tuple((path, again) for path in inside if len(inside) > 1)
            # A checkpoint of the whole model frees what waits between its parts, which is little unless the model is a
            # row of its parts, and takes long to simulate.
            if group.path:
                yield Candidate(((whole, again),))
            if twice and (group.path or _is_row(group.module)):
                yield Candidate(((whole, again), *twice))
            for cuts in dict.fromkeys((*_segments(group.module), *self._cuts(group, step))):
                yield Candidate(((whole, checkpoint(cuts=cuts)),))
            for ((_, pieces),) in (each.rules for each in self._cut_whole(group, step) if twice):
                yield Candidate(((whole, pieces), *twice))
        yield from self._cut_whole(group, step)

    def _cut_whole(self, part: Part, step: Trace) -> Iterator[Candidate]:
        """Yields the tile of all rows of a part."""
        if chunks := self._whole_chunks(part, step):
            yield Candidate((("", tile(chunks=chunks, **dims_of_rows(part.module))),))

    def for_outside(self, model: nn.Module, parts: tuple[Part, ...], step: Trace) -> tuple[Candidate, ...]:
        """Returns the candidates for the rest of the model: a tiled loss head, and tiled norms for one long row."""
        paths = [part.path for part in parts]
        heads = () if "" in paths else self._of_head(model, paths)
        norms: Rules = ()
        for around in dict.fromkeys(path.rpartition(".")[0].rpartition(".")[0] for path in paths) if heads else ():
            within = self._together(model.get_submodule(around), around, step, fewest=1)
            norms += Candidate(within).at(around)
        return (AS_IT_IS, *heads, *(Candidate((*norms, *each.rules)) for each in heads if norms))

    def _of_head(self, model: nn.Module, paths: Iterable[str]) -> tuple[Candidate, ...]:
        head = loss_head(model, paths) if self.tiles else None
        if head is None:
            return ()
        cuts = [tile(chunks=chunks) for chunks in _HEAD_CHUNKS]
        if is_tied(model, head):  # `late_gradient` changes tied heads of more than 16 bits only
            cuts.append(tile(chunks=_FINE_CHUNKS, late_gradient=True))
        return tuple(Candidate(((head, how),)) for how in cuts)

    @property
    def tiles(self) -> bool:
        """Returns whether `tile` is allowed."""
        return "tile" in self.techniques

    @property
    def _is_one_row(self) -> bool:
        """Returns whether the batch has too few rows to tile, and rows of more positions than a chunk."""
        return self.rows < _CHUNKS and self.positions > _MOST_POSITIONS

    @property
    def _pieces(self) -> int:
        """Returns the number of chunks of a tile; long rows have more chunks, of about `_MOST_POSITIONS` positions."""
        if not self._is_one_row:
            return _CHUNKS
        return max(_CHUNKS, min(_FINE_CHUNKS, self.positions // _MOST_POSITIONS))

    def _together(self, module: nn.Module, path: str, step: Trace, fewest: int = 2) -> Rules:
        """Returns the tiles of all children of a module that compute each position independently, for one long row.

        Each norm of a long row makes temporaries as large as the row, so that all such children are tiled at once.
        Empty for a batch of other shapes, or for less than `fewest` such children.
        """
        if not self._is_one_row:
            return ()
        found = [
            name
            for name, child in module.named_children()
            if not isinstance(child, (nn.Linear, nn.Embedding))
            and _is_row_by_row(child, operators_of(step, f"{path}.{name}".lstrip(".")), fewest_dims=1)
        ]
        pieces = self._tile(self._pieces)
        return tuple((name, pieces) for name in found) if len(found) >= fewest else ()

    def _whole_chunks(self, part: Part, step: Trace) -> int:
        """Returns the number of chunks for the rows of a whole part; 0 if the rows cannot be cut.

        The number of chunks is fixed, not the rows of a chunk: a larger batch would have very many chunks.
        """
        may = self.tiles and turns_of(step, part.path) < MANY_TURNS and may_be_proven(operators_of(step, part.path))
        return min(_CHUNKS, self.rows // _FEWEST_ROWS) if may and self.rows >= 2 * _FEWEST_ROWS else 0

    def _cuts(self, part: Part, step: Trace) -> Iterator[tuple[Cut, ...]]:
        return cuts_of_row(part.module, part.path, step) if turns_of(step, part.path) < MANY_TURNS else iter(())

    def _tile(self, chunks: int) -> Transform:
        # A batch of fewer rows than chunks is cut along dimension 1: modules that compute each position independently
        # treat positions as rows.
        return tile(chunks=chunks) if self.rows >= chunks else tile(chunks=chunks, dim=1)

    def cast_within(self, candidate: Candidate) -> Candidate:
        """Returns the candidate for a cast model: each checkpoint has its own cast inside, and casts again."""
        how = cast(compute=self.dtype)
        rules = [
            (inside, compose(each, how)) if "checkpoint" in {_technique(one) for one in chain(each)} else (inside, each)
            for inside, each in candidate.rules
        ]
        return Candidate(tuple(rules))


def _at_weights(module: nn.Module) -> Iterator[tuple[Cut, ...]]:
    """Yields cuts of a row of single operations, at the operations with a weight.

    A cut behind such an operation keeps its result; a cut before the operation may keep less, and recomputes the
    operation. Cuts are at each, every second or every fourth such operation: at all of these, or at the early ones.
    """
    row = list(module.children())
    if not _is_row(module) or any(map(could_be_block, row)):
        return
    weighty = [at for at, each in enumerate(row) if any(one.ndim >= 2 for one in each.parameters())]
    for places in ([at + 1 for at in weighty if at + 1 < len(row)], [at for at in weighty if at]):
        for every in _EVERY if len(weighty) > 1 else ():
            cuts = places[every - 1 :: every]
            for count in dict.fromkeys((len(cuts), 2 * len(cuts) // 3, len(cuts) // 3)):
                if count:
                    yield tuple(cuts[:count])


def _segments(module: nn.Module) -> Iterator[tuple[Cut, ...]]:
    """Yields cuts of a row of blocks into segments of several blocks: of the whole row, or of the early blocks."""
    if _is_row(module):
        for every in _EVERY[1:]:
            cuts = range(every, len(list(module.children())), every)
            for count in dict.fromkeys((len(cuts), 2 * len(cuts) // 3, len(cuts) // 3)):
                if count:
                    yield tuple(cuts[:count])


def _is_row(module: nn.Module) -> bool:
    return type(module).forward is nn.Sequential.forward


def dims_of_rows(module: nn.Module) -> dict[str, Any]:
    """Returns the dimensions of rows in a module's arguments and results, for `tile`; empty for dimension 0."""
    if not isinstance(module, nn.RNNBase):
        return {}
    rows = 0 if module.batch_first else 1
    # Hidden states have layers in dimension 0 and rows in dimension 1.
    return {"in_dims": rows, "out_dims": (rows, (1, 1) if isinstance(module, nn.LSTM) else 1)}


def _technique(transform: Transform) -> str:
    return "stream" if getattr(transform, "what", None) == "params" else transform.spelling


def _is_row_by_row(module: nn.Module, operators: frozenset[str], fewest_dims: int = 2) -> bool:
    # "aten::mm.default" is the default overload of "aten::mm".
    names = {name.removesuffix(".default") for name in operators}
    return bool(names) and names <= _ROW_BY_ROW and any(fewest_dims <= each.ndim <= 2 for each in module.parameters())
