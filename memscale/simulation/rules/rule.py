"""`OpRule`: the facts about an operator beyond its schema and its fake kernel.

A `Program` lists the allocations and frees of a CUDA kernel while it runs, in order. The order matters: PyTorch's
allocator gives a request the best of its free blocks, so later blocks depend on the blocks that are free at each
moment.

A `Time` is that of a CUDA kernel that differs from the roofline of its traffic and arithmetic. The factors were
measured on an H100 (torch 2.11, cuDNN 9.19; `benchmarks/bench_operators.py`): each operator alone, on uncached tensors,
and in steps of GPT-2 XL, a Llama, BERT and ViT. Kernels with one pass over their data reach 85 % of the data sheet's
bandwidth, and products 80 % of its arithmetic, as `roofline` assumes for all cards. Each function here scales the work
of another kernel: two passes double the bytes, and half the rate doubles the FLOPs.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from memscale.hardware import Work
from memscale.simulation.allocator.allocator_settings import MIN_BLOCK_BYTES
from memscale.simulation.allocator.block_pool import round_up
from memscale.simulation.rules.layouts import ResultLayout

Capability = tuple[int, int]
#: The autocast key for CPU tensors that stand for a card's, in place of CUDA's: no build of PyTorch has this device.
AUTOCAST: torch._C.DispatchKey = getattr(torch._C.DispatchKey, "AutocastIPU")  # noqa: B009  # not in PyTorch's stubs


class CardTraits(NamedTuple):
    """The traits of a card that its kernels' memory and time depend on.

    Attributes:
        capability: the compute capability, (major, minor).
        multiprocessors: the number of multiprocessors; that of an H100 if unknown.
    """

    capability: Capability
    multiprocessors: int = 132


class Result(NamedTuple):
    """The allocation of one result, number `place`, by a kernel that allocates its results at different moments."""

    place: int


#: The allocator requests of a kernel, in order: n > 0 allocates n bytes, -n frees the last block of n bytes,
#: :data:`RESULTS` allocates all results that are not allocated yet, and :class:`Result` one result. Blocks that are
#: alive at the end are freed, the last one first.
Program = tuple[int | Result, ...]
RESULTS = 0
PLAIN: Program = (RESULTS,)


def plain(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of a kernel that allocates only its results."""
    return PLAIN


Time = Callable[[Sequence[Any], Work, CardTraits], Work]

Arguments = Mapping[str, Any]
#: (arguments by name, results) -> the additions and multiplications of a call.
Flops = Callable[[Arguments, Any], int]


class Touch(enum.Enum):
    """The access of a kernel to one of its tensor arguments."""

    NOTHING = "nothing"
    READ = "read"
    WRITE = "write"
    UPDATE = "update"  # read and written
    LOOK_UP = "look up"  # read at some indices: at most as many bytes as the results or another argument have
    SCATTER = "scatter"  # updated at some indices: at most as many bytes as another argument has


def as_it_is(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
    """Returns `work` unchanged, for a kernel that reaches the usual rates."""
    return work


def never(args: Sequence[Any], card: CardTraits) -> bool:
    """Whether a call uses cuBLAS: never."""
    return False


@dataclass(frozen=True, kw_only=True)
class OpRule:
    """The facts about an operator beyond its schema and fake kernel. Each family's file names the source of its rules.

    Attributes:
        program: (arguments, results, card) -> the allocations of the kernel on a card.
        order: the indices of the results in the order in which the kernel on a card allocates them; ``()`` means the
            order of the schema.
        on_host: the indices of the results that are on the CPU although the operator runs on a card.
        results: makes results with the layouts of the kernel's, where PyTorch's fake kernel is missing or differs.
        results_on: the devices on which `results` is used.
        layout: (layout, arguments, card or None for a CPU) -> the corrected layout of the fake kernel's results.
        faked_in: the only dtype that the fake kernel takes, where the real kernel takes others.
        runs: whether the CPU kernel runs on zeros to find the layout, since no fake kernel knows it.
        fused: runs the one kernel that a card has for the operator, which a CPU composes of others.
        computed: computes values in place of the operator, where a CPU lacks the operator for some dtypes.
        composed_on: the devices on which the operator is a composition of other operators below autograd.
        deciding: the number of first arguments that decide the allocations and the results of a call; None means all.
        values: ``"reads"`` if the operator gives a value to Python, ``"lengths"`` if shapes follow from lengths among
            the arguments, ``"constant"`` if the results depend on the argument's shape only, ``"choice"`` if integer
            results decide the control flow of a model (which expert, beam or token).
        method: the tensor method of this view, since a call by the operator's name is slower.
        resizes: whether the operator changes the size of a tensor's storage.
        repeats: whether the result over a whole tensor is independent of how often a row is repeated.
        scratch: the scratch memory of the CPU kernel: ``""`` is found by a probe, ``"nothing"`` for an operator that
            moves numbers, ``"copies"`` for copies of non-contiguous arguments, ``"sums"`` for sums in a wider dtype,
            ``"converts"`` for conversions of operands of another dtype, as by element-wise operators.
        batched: the number of first arguments whose first dimension is the batch, with which scratch memory grows.
        rows: the index of the argument whose rows (some hundred at most) a 16-bit product buffers; None for no product.
        by_place: whether each element of the result is computed independently, where PyTorch has no tag for this.
        in_place: whether PyTorch writes into an argument where no dispatch mode is active, as in the formulas of
            autograd (FunctionsManual.cpp, ``areAnyTensorSubclassLike``).
        flops: the additions and multiplications of a call; None means PyTorch's formula for its FLOP counter, or 0.
        touches: the accesses to arguments, by name, which the schema does not express.
        empty: whether the results are memory that no kernel writes.
        time: (arguments, work, card) -> the work that takes a card as long as this call.
        uses_cublas: whether the kernel on a card is cuBLAS's, with a handle and a workspace.
    """

    program: Callable[[Sequence[Any], Any, CardTraits], Program] = plain
    order: tuple[int, ...] = ()
    on_host: tuple[int, ...] = ()
    results: Callable[..., Any] | None = None
    results_on: tuple[str, ...] = ("cuda",)
    layout: Callable[[ResultLayout, Sequence[Any], CardTraits | None], ResultLayout] | None = None
    faked_in: torch.dtype | None = None
    runs: bool = False
    fused: Callable[..., Any] | None = None
    computed: Callable[..., Any] | None = None
    composed_on: tuple[str, ...] = ()
    deciding: int | None = None
    values: Literal["", "reads", "lengths", "constant", "choice"] = ""
    method: Callable[..., torch.Tensor] | None = None
    resizes: bool = False
    repeats: bool = False
    scratch: Literal["", "nothing", "copies", "sums", "converts"] = ""
    batched: int = 0
    rows: int | None = None
    by_place: bool = False
    in_place: bool = False
    flops: Flops | None = None
    touches: Mapping[str, Touch] = field(default_factory=dict)
    empty: bool = False
    time: Time = as_it_is
    uses_cublas: Callable[[Sequence[Any], CardTraits], bool] = never


def most_held(program: Program) -> int:
    """Returns the most bytes of blocks that a kernel holds at once besides its results.

    >>> most_held((RESULTS, 1024, 100, -100, 2000))
    3072
    """
    held = most = 0
    for nbytes in program:
        if isinstance(nbytes, Result):
            continue
        held += round_up(nbytes, MIN_BLOCK_BYTES) if nbytes > 0 else -round_up(-nbytes, MIN_BLOCK_BYTES)
        most = max(most, held)
    return most


def taken(*nbytes: int) -> tuple[int, ...]:
    """Returns `nbytes` without zeros: an allocation of 0 bytes takes no block."""
    return tuple(size for size in nbytes if size)


def briefly(*nbytes: int) -> tuple[int, ...]:
    """Returns the program that allocates `nbytes` and frees them, the last first.

    >>> briefly(512, 0, 1024)
    (512, 1024, -1024, -512)
    """
    found = taken(*nbytes)
    return *found, *(-size for size in reversed(found))


def in_order(order: tuple[int, ...], results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns `results` in the order in which a kernel allocates them; results that `order` lacks come last.

    >>> x = torch.empty(8, device="meta")
    >>> dropped, mask = torch.ops.aten.native_dropout.default(x, 0.5, True)
    >>> [y.dtype for y in in_order((1, 0), [dropped, mask])]
    [torch.bool, torch.float32]
    """
    first = [results[at] for at in order if at < len(results)]
    return first + [result for result in results if all(result is not one for one in first)]


def copied(tensor: torch.Tensor) -> int:
    """Returns the bytes that ``tensor.contiguous()`` allocates."""
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.itemsize


def copy_after(args: Sequence[Any], results: Any, card: CardTraits) -> Program:
    """Returns the program of a kernel that allocates its results and then a contiguous copy of its first argument.

    Source: ``host_softmax`` in aten/src/ATen/native/cuda/SoftMax.cu; UpSampleNearest2d.cu, col2im and others.
    """
    return RESULTS, *taken(copied(args[0]))


def without_autocast() -> AbstractContextManager[Any]:
    """Returns a context below the autocast of a simulated card."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    guard: AbstractContextManager[Any] = torch._C._ForceDispatchKeyGuard(included, excluded | _AUTOCAST)
    return guard


_AUTOCAST = torch._C.DispatchKeySet(AUTOCAST)

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def has_channels_last(tensor: torch.Tensor) -> bool:
    """Whether ``suggest_memory_format`` is channels last for `tensor`, which has no gaps."""
    kept = CHANNELS_LAST.get(tensor.dim())
    return kept is not None and tensor.is_contiguous(memory_format=kept) and not tensor.is_contiguous()


def is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


# Passes (16 bits, 32 bits) of element-wise kernels with operands that are expanded or permuted against the result, and
# of a copy of columns into rows, where each memory transaction carries unused elements.
_OF_OTHER_LAYOUT, _OF_COLUMNS = (2.1, 1.5), (5.7, 3.0)
# The longest row in elements that one warp holds: a softmax over such rows is one pass.
_SHORT_ROW = 1024
_SHARE_OF_PLAIN_32 = 0.95  # the share of the rate that float32 products without tensor cores reach on Hopper
# (elements, share): the share of the rate for 16-bit rows that begin at no multiple of so many elements, on Hopper.
_UNALIGNED = ((8, 0.3), (2, 0.16))
# The extra launches of a sum over rows, which runs in two rounds, and the least input bytes for two rounds.
_LAUNCHES_OF_COLUMNS, _LEAST_BYTES = 3, 1 << 20


def in_halves(work: Work) -> bool:
    """Whether the arithmetic is in 16 bits."""
    return work.dtype in ("bfloat16", "float16")


def passes(halves: float, wide: float) -> Time:
    """Returns the time of a kernel with `halves` passes over its data in 16 bits, and `wide` passes in 32 bits."""
    return lambda args, work, card: _longer(work, halves if in_halves(work) else wide)


def passes_by_width(halves: tuple[float, float], wide: tuple[float, float]) -> Time:
    """Returns the time of a norm: each pair is (passes of wide rows, extra passes of rows of one element)."""

    def time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
        of_wide, of_one = halves if in_halves(work) else wide
        return _longer(work, of_wide + of_one / max(1, args[0].shape[-1]))

    return time


def passes_of_rows(halves: float, wide: float) -> Time:
    """Returns the time of a softmax: one pass over short rows, else as `passes`."""
    usual = passes(halves, wide)

    def time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
        rows = args[0]
        is_short = rows.dim() and rows.stride(-1) == 1 and rows.shape[-1] <= _SHORT_ROW
        return work if is_short else usual(args, work, card)

    return time


def by_layouts(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
    """Returns the work of an element-wise kernel, with more passes where its operands' layouts differ."""
    operands = [each for each in args if isinstance(each, torch.Tensor) and each.numel() > 1]
    if not operands:
        return work
    whole = max(operands, key=torch.Tensor.numel)
    alike = all(each.shape == whole.shape and each.stride() == whole.stride() for each in operands)
    return work if alike and _is_dense(whole) else _longer(work, _OF_OTHER_LAYOUT[not in_halves(work)])


def of_clone(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
    """Returns the work of a copy to a contiguous tensor, with more passes for a non-contiguous source."""
    source = args[0]
    if source.numel() <= 1 or source.is_contiguous():
        return work
    times = _OF_OTHER_LAYOUT if source.stride(-1) in (0, 1) else _OF_COLUMNS
    return _longer(work, times[not in_halves(work)])


def share(before: float, since: float, wide: float = 1.0, *, tokens: tuple[int, int] | None = None) -> Time:
    """Returns the time of a kernel that reaches a share of the rate of products.

    Args:
        before: the share in 16 bits on cards before Hopper (FlashAttention-2's paper has 73 % and 63 % of an A100's
            peak, where products reach 80 to 85 %).
        since: the share in 16 bits since Hopper, where kernels written for Ampere leave half of the tensor cores idle.
        wide: the share in 32 bits.
        tokens: (index of an argument, block): the kernel pads the tokens of the argument to whole blocks.
    """

    def time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
        reached = (since if since_hopper(card) else before) if in_halves(work) else wide
        return shared(work, reached * (1.0 if tokens is None else whole_share(args[tokens[0]], tokens[1])))

    return time


def product(left: int) -> Time:
    """Returns the time of a matrix product of the arguments number `left` and ``left + 1``.

    >>> factors = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((64, 1600), (1600, 50257))]
    >>> product(0)(factors, Work(16_000, 0, "bfloat16"), CardTraits((9, 0))).flops
    100000
    """

    def time(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
        if not since_hopper(card):
            return work
        rows, columns = args[left : left + 2]
        # Half of the result is written after the computation.
        late = rows.shape[:-1].numel() * columns.shape[-1] * rows.itemsize // 2
        wide = _SHARE_OF_PLAIN_32 if work.dtype == "float32" else 1.0
        return shared(work, _aligned_share((rows, columns)) if in_halves(work) else wide)._replace(extra_bytes=late)

    return time


def of_columns(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
    """Returns the work of a sum, with more launches for one over rows.

    >>> table = torch.empty(25_216, 768, dtype=torch.bfloat16, device="meta")
    >>> work = Work(0, table.nbytes, "bfloat16")
    >>> [of_columns((table, [dim]), work, CardTraits((9, 0))).launches for dim in (0, 1)]
    [3, 0]
    """
    return work._replace(launches=_LAUNCHES_OF_COLUMNS) if work.nbytes > _LEAST_BYTES and _is_over_rows(args) else work


def since_hopper(card: CardTraits) -> bool:
    """Whether `card` has tensor cores of Hopper or newer."""
    return card.capability >= (9, 0)


def shared(work: Work, share: float) -> Work:
    """Returns `work` with its FLOPs divided by `share`, the share of the rate that a kernel reaches."""
    return work if share == 1.0 else work._replace(flops=round(work.flops / share))


def _longer(work: Work, passes: float) -> Work:
    return work if passes == 1.0 else work._replace(nbytes=round(work.nbytes * passes))


def _is_over_rows(args: Sequence[Any]) -> bool:
    """Whether a reduction keeps the innermost dimension, the one with the smallest stride."""
    source, dims = args[0], args[1] if len(args) > 1 else None
    along = [dim for dim in range(source.dim()) if source.shape[dim] > 1]
    if not dims or not along:
        return False
    innermost = min(along, key=source.stride)
    return innermost not in [dim % source.dim() for dim in dims]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has no gaps and no overlaps, in any order of its dimensions."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


def whole_share(query: torch.Tensor, block: int) -> float:
    """Returns the share of attention's padded (query, key) pairs that are real, with tokens padded to whole blocks."""
    tokens = query.shape[-2]
    return float((tokens / (-(-tokens // block) * block)) ** 2)


def _aligned_share(factors: Sequence[torch.Tensor]) -> float:
    rows = [max(factor.stride()[-2:]) for factor in factors if min(factor.shape[-2:]) > 1]
    rows.append(factors[1].shape[-1])  # the row of the result
    return min((left for multiple, left in _UNALIGNED if any(row % multiple for row in rows)), default=1.0)
