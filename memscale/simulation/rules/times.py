"""How long kernels of a card take where that is not what a roofline says of their traffic and arithmetic.

Measured on an H100 (torch 2.11, cuDNN 9.19; `benchmarks/bench_operators.py`): each operator alone, on tensors that no
cache holds, and in steps of GPT-2 XL, a Llama, BERT and ViT. Kernels that go over their numbers once reach 85 % of the
data sheet's bandwidth, and products 80 % of its arithmetic, as `roofline` has it for all cards; the others take so many
times as long: what a kernel goes over twice counts twice, and half a rate doubles the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from memscale.hardware import Work
from memscale.simulation.rules.rule import CardTraits, Time

# Of element-wise kernels whose operands do not lie as their results: they are repeated along a dimension or permuted.
# A copy of columns into rows is slower still: each number comes with others that nobody wants.
_OF_OTHER_LAYOUT, _OF_COLUMNS = (2.1, 1.5), (5.7, 3.0)
# Of rows that one warp holds, as those of attention's scores mostly are, a softmax is one pass.
_SHORT_ROW = 1024
_SHARE_OF_PLAIN_32 = 0.95  # of Hopper's float32 without tensor cores
# Rows of 16-bit numbers that begin at no multiple of 16 bytes, or of 4, are nothing for Hopper's cores.
_UNALIGNED = ((8, 0.3), (2, 0.16))
# A sum over rows leaves few columns, and goes in two rounds: it takes as long as so many more launches.
_LAUNCHES_OF_COLUMNS, _LEAST_BYTES = 3, 1 << 20


def in_halves(work: Work) -> bool:
    """Whether the arithmetic is in 16 bits."""
    return work.dtype in ("bfloat16", "float16")


def passes(halves: float, wide: float) -> Time:
    """Of a kernel that goes over its numbers so often, with the time lost on the way: in 16 bits, and in 32."""
    return lambda args, work, card: _longer(work, halves if in_halves(work) else wide)


def passes_by_width(halves: tuple[float, float], wide: tuple[float, float]) -> Time:
    """The same of a norm, and what more it is of a row of one number: narrow rows are slower."""

    def time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
        of_wide, of_one = halves if in_halves(work) else wide
        return _longer(work, of_wide + of_one / max(1, args[0].shape[-1]))

    return time


def passes_of_rows(halves: float, wide: float) -> Time:
    """The same of a softmax."""
    usual = passes(halves, wide)

    def time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
        rows = args[0]
        is_short = rows.dim() and rows.stride(-1) == 1 and rows.shape[-1] <= _SHORT_ROW
        return work if is_short else usual(args, work, card)

    return time


def by_layouts(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
    """Of an element-wise kernel."""
    operands = [each for each in args if isinstance(each, torch.Tensor) and each.numel() > 1]
    if not operands:
        return work
    whole = max(operands, key=torch.Tensor.numel)
    alike = all(each.shape == whole.shape and each.stride() == whole.stride() for each in operands)
    return work if alike and _is_dense(whole) else _longer(work, _OF_OTHER_LAYOUT[not in_halves(work)])


def of_clone(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
    """Of a copy that lies in a row."""
    source = args[0]
    if source.numel() <= 1 or source.is_contiguous():
        return work
    times = _OF_OTHER_LAYOUT if source.stride(-1) in (0, 1) else _OF_COLUMNS
    return _longer(work, times[not in_halves(work)])


def share(before: float, since: float, wide: float = 1.0, *, tokens: tuple[int, int] | None = None) -> Time:
    """Of a kernel that reaches such a share of a product's rate: in 16 bits on cards before Hopper and since, in 32.

    Kernels written for Ampere leave half of Hopper's tensor cores idle. Before it: FlashAttention-2's paper has 73 %
    and 63 % of an A100's peak, products 80 to 85 %. `tokens`: an argument, whose rows go in blocks of so many.
    """

    def time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
        reached = (since if since_hopper(card) else before) if in_halves(work) else wide
        return shared(work, reached * (1.0 if tokens is None else whole_share(args[tokens[0]], tokens[1])))

    return time


def product(left: int) -> Time:
    """Of a product of the arguments `left` and the one after it.

    >>> factors = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((64, 1600), (1600, 50257))]
    >>> product(0)(factors, Work(16_000, 0, "bfloat16"), CardTraits((9, 0)))
    Work(flops=100000, nbytes=0, dtype='bfloat16')
    """

    def time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
        if not since_hopper(card):
            return work
        if in_halves(work):
            return shared(work, _aligned_share(args[left : left + 2]))
        return shared(work, _SHARE_OF_PLAIN_32 if work.dtype == "float32" else 1.0)

    return time


def half_of_result(left: int) -> Callable[[Sequence[Any], Work, CardTraits], tuple[int, int]]:
    """Half of what a product writes, which goes out when it has computed.

    What the products of five models took, of 768 to 14336 numbers in a row, is met within 6 % in the median with it,
    and those of 768 without it within 10.
    """

    def extra(args: Sequence[Any], work: Work, card: CardTraits) -> tuple[int, int]:
        rows, columns = args[left : left + 2]
        return 0, rows.shape[:-1].numel() * columns.shape[-1] * rows.itemsize // 2 if since_hopper(card) else 0

    return extra


def of_columns(args: Sequence[Any], work: Work, card: CardTraits) -> tuple[int, int]:
    """The rounds of a sum over rows.

    >>> table = torch.empty(25_216, 768, dtype=torch.bfloat16, device="meta")
    >>> work = Work(0, table.nbytes, "bfloat16")
    >>> of_columns((table, [0]), work, CardTraits((9, 0))), of_columns((table, [1]), work, CardTraits((9, 0)))
    ((3, 0), (0, 0))
    """
    return (_LAUNCHES_OF_COLUMNS if work.nbytes > _LEAST_BYTES and _is_over_rows(args) else 0), 0


def since_hopper(card: CardTraits) -> bool:
    """Whether tensor cores are those of Hopper or newer."""
    return card.capability >= (9, 0)


def shared(work: Work, share: float) -> Work:
    """`work` at a share of its rate."""
    return work if share == 1.0 else replace(work, flops=round(work.flops / share))


def _longer(work: Work, passes: float) -> Work:
    return work if passes == 1.0 else replace(work, nbytes=round(work.nbytes * passes))


def _is_over_rows(args: Sequence[Any]) -> bool:
    """Whether a reduction leaves the dimension whose numbers lie one after the other."""
    source, dims = args[0], args[1] if len(args) > 1 else None
    along = [dim for dim in range(source.dim()) if source.shape[dim] > 1]
    if not dims or not along:
        return False
    innermost = min(along, key=source.stride)
    return innermost not in [dim % source.dim() for dim in dims]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the numbers of `tensor` lie one after the other, in whatever order of its dimensions."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


def whole_share(query: torch.Tensor, block: int) -> float:
    """The share of its blocks of tokens that attention has tokens for, along queries and keys."""
    tokens = query.shape[-2]
    return float((tokens / (-(-tokens // block) * block)) ** 2)


def _aligned_share(factors: Sequence[torch.Tensor]) -> float:
    rows = [max(factor.stride()[-2:]) for factor in factors if min(factor.shape[-2:]) > 1]
    rows.append(factors[1].shape[-1])  # of the product
    return min((left for multiple, left in _UNALIGNED if any(row % multiple for row in rows)), default=1.0)
