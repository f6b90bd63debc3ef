"""Numbers in 8 bits: a code for each, and the largest magnitude of each block of them, as bitsandbytes has them.

Its kernels serve where they round to the nearest code. That for CPUs (0.50.2) does not below a thousandth of a block's
largest: it makes 2.1e-5 of an exact zero. There a table takes its place, by the bits of the number in bfloat16.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memscale.core import RuntimeUnavailable, device_type


def kernels() -> Any:
    """The operators of bitsandbytes.

    Raises:
        RuntimeUnavailable: it is not installed, or does not load.
    """
    try:
        if sys.modules.get("bitsandbytes.functional") is None:  # an import, for each piece, would not be quick
            with _quiet():
                import bitsandbytes.functional  # noqa: F401
    except Exception as error:  # of its libraries, too
        raise RuntimeUnavailable(
            f"quantize_states() needs bitsandbytes, which cannot be loaded ({type(error).__name__}: {error}); "
            "pip install 'memscale-transforms[bnb]', or leave this transform out"
        ) from error
    return torch.ops.bitsandbytes


@contextmanager
def _quiet() -> Iterator[None]:
    """bitsandbytes warns of what it did not download: a kernel for something else."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def prepare(device: torch.device) -> None:
    """Make what is needed on `device` and on the CPU: inside of a simulation it would have no values."""
    for signed in (True, False):
        _codes(device, signed)
        _table(signed)


def quantized(values: torch.Tensor, block: int, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A code for each of `values`, which are flat, and the largest magnitude of each block.

    What is not zero does not become zero where numbers have no sign: they are divided by.
    """
    if device_type(values) != "cpu":
        found, largest = kernels().quantize_blockwise(values, _codes(values.device, signed), block)
        if not signed:
            torch.maximum(found, (values > 0).view(torch.uint8), out=found)
        return found, largest
    whole = values.numel() // block * block
    rows = [values[:whole].view(-1, block), values[whole:].view(1, -1)]
    parts = [_by_table(part, signed) for part in rows if part.numel()]
    if len(parts) == 1:
        return parts[0]
    (codes, largest), (last_codes, last) = parts
    return torch.cat([codes, last_codes]), torch.cat([largest, last])


def restored(
    codes: torch.Tensor, largest: torch.Tensor, block: int, dtype: torch.dtype, *, signed: bool
) -> torch.Tensor:
    """The numbers that these are, flat."""
    made: torch.Tensor = kernels().dequantize_blockwise(codes, largest, _codes(codes.device, signed), block, dtype)
    return made


def _by_table(rows: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    is_half, rows = rows.dtype != torch.float32, rows.float()
    largest = rows.abs().amax(1)
    shares = (rows / torch.where(largest == 0, 1.0, largest)[:, None]).view(-1)
    bits = shares.to(torch.bfloat16).view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    table, ends = _table(signed)
    codes = table.index_select(0, bits)
    if is_half:  # the nearest code, so that a number which was restored, and rounded, has its code again
        place = codes.to(torch.int32)
        above, below = shares > ends[1:].index_select(0, place), shares <= ends.index_select(0, place)
        codes.add_(above.view(torch.uint8)).sub_(below.view(torch.uint8))
    return codes, largest


@functools.lru_cache(maxsize=32)
def _codes(device: torch.device, signed: bool) -> torch.Tensor:
    """The number that each code is for, as a share of its block's largest."""
    kernels()
    from bitsandbytes import functional

    named: Any = functional
    codes: torch.Tensor = named.create_dynamic_map(signed).clone()
    if signed:
        # It ends at -0.993: what has been restored would have another code the second time.
        codes[0] = -1.0
    return codes.to(device)


@functools.lru_cache(maxsize=2)
def _table(signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The code of each number in bfloat16, by its bits; and, by the code, above which number it is the nearest."""
    codes = _codes(torch.device("cpu"), signed)
    between = (codes[1:] + codes[:-1]) / 2
    if not signed:
        between[0] = 0.0
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    outside = between.new_tensor([torch.inf])
    return torch.bucketize(every, between).to(torch.uint8), torch.cat([-outside, between, outside])
