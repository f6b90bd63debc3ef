"""`OpRule`: the facts about an operator beyond its schema and its fake kernel.

A `Program` lists the allocations and frees of a CUDA kernel while it runs, in order. The order matters: PyTorch's
allocator gives a request the best of its free blocks, so later blocks depend on the blocks that are free at each
moment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from memscale.hardware import Work
from memscale.simulation.allocator.block_pool import round_up
from memscale.simulation.allocator.settings import MIN_BLOCK_BYTES
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


def as_it_is(args: Sequence[Any], work: Work, card: CardTraits) -> Work:
    """Returns `work` unchanged, for a kernel that reaches the usual rates."""
    return work


def nothing(args: Sequence[Any], work: Work, card: CardTraits) -> tuple[int, int]:
    """Returns no extra launches and no extra bytes."""
    return 0, 0


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
        computed: computes values in place of the operator, where a CPU lacks the operator for some dtypes.
        composed_on: the devices on which the operator is a composition of other operators below autograd.
        deciding: the number of first arguments that decide the allocations and the results of a call; None means all.
        values: ``"reads"`` if the operator gives a value to Python, ``"lengths"`` if shapes follow from lengths among
            the arguments, ``"constant"`` if the results depend on the argument's shape only, ``"choice"`` if integer
            results decide the control flow of a model (which expert, beam or token).
        method: the tensor method of this view, since a call by the operator's name is slower.
        repeats: whether the result over a whole tensor is independent of how often a row is repeated.
        scratch: the scratch memory of the CPU kernel: ``""`` is found by a probe, ``"nothing"`` for an operator that
            moves numbers, ``"copies"`` for copies of non-contiguous arguments, ``"sums"`` for sums in a wider dtype,
            ``"converts"`` for conversions of operands of another dtype, as by element-wise operators.
        batched: the number of first arguments whose first dimension is the batch, with which scratch memory grows.
        rows: the index of the argument whose rows (some hundred at most) a 16-bit product buffers; None for no product.
        by_place: whether each element of the result is computed independently, where PyTorch has no tag for this.
        in_place: whether PyTorch writes into an argument where no dispatch mode is active, as in the formulas of
            autograd (FunctionsManual.cpp, ``areAnyTensorSubclassLike``).
        time: (arguments, work, card) -> the work that takes a card as long as this call.
        extra: (arguments, work, card) -> (extra launches, extra bytes to move).
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
    computed: Callable[..., Any] | None = None
    composed_on: tuple[str, ...] = ()
    deciding: int | None = None
    values: Literal["", "reads", "lengths", "constant", "choice"] = ""
    method: Callable[..., torch.Tensor] | None = None
    repeats: bool = False
    scratch: Literal["", "nothing", "copies", "sums", "converts"] = ""
    batched: int = 0
    rows: int | None = None
    by_place: bool = False
    in_place: bool = False
    time: Time = as_it_is
    extra: Callable[[Sequence[Any], Work, CardTraits], tuple[int, int]] = nothing
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


CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def has_channels_last(tensor: torch.Tensor) -> bool:
    """Whether ``suggest_memory_format`` is channels last for `tensor`, which has no gaps."""
    kept = CHANNELS_LAST.get(tensor.dim())
    return kept is not None and tensor.is_contiguous(memory_format=kept) and not tensor.is_contiguous()


def is_deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
