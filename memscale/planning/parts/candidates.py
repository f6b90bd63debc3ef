"""What may be done to a part of a model: candidates only, of which the simulation says what each costs and frees."""

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

# Into how many pieces rows are cut: enough for what is alive at once to be small, few enough for large products. Finer
# where nothing fits otherwise: as many pieces take as many times as long to simulate.
_CHUNKS, _FINE_CHUNKS = 4, 16
# Positions of a row in one of more pieces, up to as many as are fine.
_MOST_POSITIONS = 2**15
_HEAD_CHUNKS, _LATE_HEAD_CHUNKS = (4, 16, 64), 16
# Of a piece of a whole part, but for fine ones: of a GPT-2 with 4 x 512 tokens on a CPU pieces of one row took 7 % more
# time than pieces of two, and the step held 3 % less.
_FEWEST_ROWS = 2
# A row of single operations is cut at each of so many with a weight, one of blocks into stretches of so many.
_EVERY = (1, 2, 4)
# What runs so often in a step, as a cell in a loop does, works with a small share of what it keeps: pieces of that free
# next to nothing, and are many to simulate (of 24 rounds of two cells, the smallest plan took 5 s instead of 28).
_MANY_TURNS = 8
# Of a parameter: smaller ones stay where they are, and `transform` warns of a plan that moves none.
_FEWEST_BYTES = AsyncOffloadConfig().min_bytes

# Operators that compute each row by itself, whichever rows there are; only such are cut without being asked to.
_ROW_BY_ROW = frozenset(
    f"aten::{name}"
    for line in (
        "mm addmm _addmm_activation add.Tensor add.Scalar sub.Tensor mul.Tensor mul.Scalar div.Tensor div.Scalar exp",
        "gelu silu relu sigmoid tanh pow.Tensor_Scalar rsqrt hardswish elu leaky_relu softplus mish _to_copy clone",
        "native_layer_norm _fused_rms_norm _unsafe_view mean.dim",
    )
    for name in line.split()
)

# Of so many modules in a part each is told, and of more how many there are.
_TOLD = 2

Rules = tuple[tuple[str, Transform], ...]


@dataclass(frozen=True)
class Candidate:
    """One thing that may be done to a part.

    Attributes:
        rules: transforms by path relative to the part, outer paths first; none leaves it as it is.
    """

    rules: Rules = ()

    def at(self, path: str) -> Rules:
        """The rules for the part at `path`."""
        return tuple((".".join(filter(None, (path, inside))), how) for inside, how in self.rules)

    @property
    def techniques(self) -> frozenset[str]:
        """What it is made of, as in `Config.eligible`, with ``"stream"`` for parameters that are moved."""
        return frozenset(_technique(each) for _, how in self.rules for each in chain(how))

    @property
    def unmoved(self) -> Candidate:
        """The candidate without what moves activations."""
        kept = ((inside, [each for each in chain(how) if _technique(each) != "offload"]) for inside, how in self.rules)
        return Candidate(tuple((inside, compose(*parts)) for inside, parts in kept if parts))

    def __str__(self) -> str:
        if not self.rules:
            return "as it is"
        told = []
        for (how, within), rules in itertools.groupby(self.rules, lambda rule: (rule[1], bool(rule[0]))):
            paths = [inside for inside, _ in rules]
            many = len(paths) > _TOLD
            told += (
                [f"{how!r} on {each}" for each in ([f"{len(paths)} modules in it"] if many else paths)]
                if within
                else [repr(how)]
            )
        return ", ".join(told)


AS_IT_IS = Candidate()


@dataclass(frozen=True)
class Menu:
    """What may be chosen.

    Attributes:
        techniques: the names of those that may be used, as in `Config.eligible`, with ``"stream"``.
        dtype: what `cast` computes in.
        rows: how many rows the batch has, along its first dimension.
        positions: how many each row has, along the second one; 1 where there is none.
        casts: whether the whole model is cast.
        fine: whether rows are cut into small pieces, too.
    """

    techniques: frozenset[str]
    dtype: torch.dtype
    rows: int
    casts: bool = False
    fine: bool = False
    positions: int = 1

    @classmethod
    def of(cls, techniques: Iterable[str], dtype: torch.dtype, batch: Any) -> Menu:
        """The menu for `batch`."""
        # Of a mapping those of the keyword that is passed first, which `tile` cuts.
        leaves = batches.tensors([*batch.values()] if isinstance(batch, Mapping) else batch)
        shape = next((leaf.shape for leaf in leaves if leaf.dim()), (1,))
        return cls(frozenset(techniques), dtype, shape[0], positions=shape[1] if len(shape) > 1 else 1)

    def for_part(self, part: Part, step: Trace) -> tuple[Candidate, ...]:
        """The candidates for `part`, simplest first, `AS_IT_IS` before all."""
        found = self._for_part(part, step)
        return tuple(dict.fromkeys([AS_IT_IS, *(map(self.cast_within, found) if self.casts else found)]))

    def _for_part(self, part: Part, step: Trace) -> Iterator[Candidate]:
        whole, again = "", checkpoint()
        may = self.techniques.__contains__
        may_cut = may("tile") and turns_of(step, part.path) < _MANY_TURNS
        cut = [
            child
            for child in (part.children if may_cut else ())
            if _is_row_by_row(part.module.get_submodule(child), operators_of(step, f"{part.path}.{child}".lstrip(".")))
        ]
        pieces = self._tile(self._pieces)
        together = self._together(part.module, part.path, step) if may_cut else ()
        # Pieces within a recompute are many small kernels, which the host of a card is too slow for; and blocks of such
        # and of other kinds leave its allocator holes: with them a Llama 8B at three quarters of its memory took 2.41
        # times as long as it is, and 2.07 without.
        deep = self.fine or step.hardware.device_type == "cpu"
        operators = operators_of(step, part.path)
        # What attention gives is worth keeping before all else where that is fused, and has no product that is not.
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
                if self.fine:
                    yield Candidate(((whole, again), (child, self._tile(_FINE_CHUNKS))))
                others = tuple((other, again) for other in part.children if other != child)
                if others:
                    yield Candidate((*others, (child, pieces)))
        if together and may("checkpoint"):
            yield Candidate(((whole, again), *together))
        if chunks := self._whole_chunks(part, step):
            yield from self._cut_whole(part, step)
            cut_in = partial(tile, chunks=chunks, **_dims(part.module))
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
        """The candidates for a part around those at the paths `inside`, beside what these have of their own."""
        found = self._for_group(group, [path.removeprefix(f"{group.path}.") for path in inside], step)
        return tuple(dict.fromkeys([AS_IT_IS, *(map(self.cast_within, found) if self.casts else found)]))

    def _for_group(self, group: Part, inside: Sequence[str], step: Trace) -> Iterator[Candidate]:
        whole, again = "", checkpoint()
        if "checkpoint" in self.techniques:
            yield Candidate(((whole, again),))
            # What is run again for all of them keeps what each begins with, and each is run again for its own backward.
            twice = tuple((path, again) for path in inside if len(inside) > 1)
            if twice:
                yield Candidate(((whole, again), *twice))
            for cuts in dict.fromkeys((*_stretches(group.module), *self._cuts(group, step))):
                yield Candidate(((whole, checkpoint(cuts=cuts)),))
            for ((_, pieces),) in (each.rules for each in self._cut_whole(group, step) if twice):
                yield Candidate(((whole, pieces), *twice))
        yield from self._cut_whole(group, step)

    def _cut_whole(self, part: Part, step: Trace) -> Iterator[Candidate]:
        """Pieces of all of its rows, small ones too where those are asked for."""
        chunks = self._whole_chunks(part, step)
        for each in dict.fromkeys((chunks, min(_FINE_CHUNKS, self.rows)) if self.fine and chunks else (chunks,)):
            if each:
                yield Candidate((("", tile(chunks=each, **_dims(part.module))),))

    def for_outside(self, model: nn.Module, parts: tuple[Part, ...], step: Trace) -> tuple[Candidate, ...]:
        """The candidates for what is outside of the parts: the loss head, and with it the norms of one long row."""
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
        if is_tied(model, head):  # of 16 bits its gradient is late anyway
            cuts.append(tile(chunks=_LATE_HEAD_CHUNKS, late_gradient=True))
        return tuple(Candidate(((head, how),)) for how in cuts)

    @property
    def tiles(self) -> bool:
        """Whether rows may be cut."""
        return "tile" in self.techniques

    @property
    def _is_one_row(self) -> bool:
        """Whether pieces are of positions, of a row that is longer than one piece."""
        return self.rows < _CHUNKS and self.positions > _MOST_POSITIONS

    @property
    def _pieces(self) -> int:
        """Into how many pieces a row is cut: of a long one they are no longer than any other."""
        if not self._is_one_row:
            return _CHUNKS
        return max(_CHUNKS, min(_FINE_CHUNKS, self.positions // _MOST_POSITIONS))

    def _together(self, module: nn.Module, path: str, step: Trace, fewest: int = 2) -> Rules:
        """All that works on each position alone right inside a module, cut at once where the rows are long; none where
        that are less than so many.

        Of a Llama 8B with 128K tokens each norm makes several tensors of 2 GiB for a moment.
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
        """Into how many pieces the rows of a whole part are cut; 0 if they cannot be.

        Into a share of the batch each: tried on a larger one, pieces of as many rows as here would be very many.
        """
        may = self.tiles and turns_of(step, part.path) < _MANY_TURNS and may_be_proven(operators_of(step, part.path))
        return min(_CHUNKS, self.rows // _FEWEST_ROWS) if may and self.rows >= 2 * _FEWEST_ROWS else 0

    def _cuts(self, part: Part, step: Trace) -> Iterator[tuple[Cut, ...]]:
        return cuts_of_row(part.module, part.path, step) if turns_of(step, part.path) < _MANY_TURNS else iter(())

    def _tile(self, chunks: int) -> Transform:
        # One row has nothing to cut, and its positions are rows to what works on each alone.
        return tile(chunks=chunks) if self.rows >= chunks else tile(chunks=chunks, dim=1)

    def cast_within(self, candidate: Candidate) -> Candidate:
        """The candidate in a model that is cast: in its own cast a region makes its copies again when it recomputes."""
        how = cast(compute=self.dtype)
        rules = [
            (inside, compose(each, how)) if "checkpoint" in {_technique(one) for one in chain(each)} else (inside, each)
            for inside, each in candidate.rules
        ]
        return Candidate(tuple(rules))


def _at_weights(module: nn.Module) -> Iterator[tuple[Cut, ...]]:
    """Where a row of single operations is cut, whatever these hold: behind those with a weight, whose results are kept
    then, or before them, which keeps less and runs them again; at each, every second, every fourth, or early ones."""
    row = list(module.children())
    if type(module).forward is not nn.Sequential.forward or any(map(could_be_block, row)):
        return
    weighty = [at for at, each in enumerate(row) if any(one.ndim >= 2 for one in each.parameters())]
    for places in ([at + 1 for at in weighty if at + 1 < len(row)], [at for at in weighty if at]):
        for every in _EVERY if len(weighty) > 1 else ():
            cuts = places[every - 1 :: every]
            for count in dict.fromkeys((len(cuts), 2 * len(cuts) // 3, len(cuts) // 3)):
                if count:
                    yield tuple(cuts[:count])


def _stretches(module: nn.Module) -> Iterator[tuple[Cut, ...]]:
    """Where a row of blocks is cut into stretches of several that are run again each: all of it, or the early ones."""
    if type(module).forward is nn.Sequential.forward:
        for every in _EVERY[1:]:
            cuts = range(every, len(list(module.children())), every)
            for count in dict.fromkeys((len(cuts), 2 * len(cuts) // 3, len(cuts) // 3)):
                if count:
                    yield tuple(cuts[:count])


def _dims(module: nn.Module) -> dict[str, Any]:
    """Where the rows of a module's arguments and results are, where that is not in front."""
    if not isinstance(module, nn.RNNBase):
        return {}
    rows = 0 if module.batch_first else 1
    # States have the layers in front.
    return {"in_dims": rows, "out_dims": (rows, (1, 1) if isinstance(module, nn.LSTM) else 1)}


def _technique(transform: Transform) -> str:
    return "stream" if getattr(transform, "what", None) == "params" else transform.spelling


def _is_row_by_row(module: nn.Module, operators: frozenset[str], fewest_dims: int = 2) -> bool:
    # An operator's overloads have their names behind a dot.
    names = {name.removesuffix(".default") for name in operators}
    return bool(names) and names <= _ROW_BY_ROW and any(fewest_dims <= each.ndim <= 2 for each in module.parameters())
