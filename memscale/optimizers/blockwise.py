"""Block-wise 8-bit quantization: one code per number, and the largest magnitude of each block, as in bitsandbytes.

On an accelerator the kernels of bitsandbytes do the work. Their CPU kernel (0.50.2) does not round to the nearest code
for numbers below a thousandth of the block's largest (an exact zero becomes 2.1e-5), so on a CPU a lookup table indexed
by the bits of the number in bfloat16 is used instead.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memscale.core import RuntimeUnavailable, device_type, simulating

#: The suffix of the state that holds the largest magnitude of each block of a moment.
LARGEST = ".largest"


def codes_in(states: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the quantized moments among `states`, by name; a moment that the caller has assigned has no codes."""
    found = {name: value for name, value in states.items() if f"{name}{LARGEST}" in states}
    return {name: value for name, value in found.items() if value.dtype == torch.uint8}


def kernels() -> Any:
    """Returns the namespace of bitsandbytes' operators, `torch.ops.bitsandbytes`.

    Raises:
        RuntimeUnavailable: bitsandbytes is not installed, or its libraries do not load.
    """
    try:
        if sys.modules.get("bitsandbytes.functional") is None:  # an import statement on each call would be slow
            with _quiet():
                import bitsandbytes.functional  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:  # the last two: its shared libraries do not load
        raise RuntimeUnavailable(
            f"quantize_states() needs bitsandbytes, which cannot be loaded ({type(error).__name__}: {error}); "
            "pip install 'memscale-transforms[bnb]', or leave this transform out"
        ) from error
    return torch.ops.bitsandbytes


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the warning of bitsandbytes about optional kernels that are missing; none of them is used here."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def in_stream_order(tensor: torch.Tensor) -> Iterator[None]:
    """Runs the body, a kernel of bitsandbytes that runs on the default stream, in order with the current stream.

    bitsandbytes 0.50.2 passes the current stream to some of its kernels only. PyTorch's other streams do not wait for
    the default stream by themselves.
    """
    if device_type(tensor) != "cuda" or simulating():
        yield
        return
    current = torch.cuda.current_stream(tensor.device)
    if current.cuda_stream == 0:
        yield
        return
    default = torch.cuda.default_stream(tensor.device)
    default.wait_stream(current)
    yield
    current.wait_stream(default)


def prepare(device: torch.device) -> None:
    """Fills the caches of `codes_of` and `_table` for `device`; a simulation would fill them without values."""
    for signed in (True, False):
        codes_of(device, signed)
        _table(signed)


def quantized(values: torch.Tensor, block: int, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes `values` and returns `(codes, largest)`.

    Args:
        values: shape [n], floating point.
        block: how many consecutive numbers share a largest magnitude.
        signed: False for a state that is never negative, such as a second moment. Optimizers divide by such a state, so
            there a number other than zero never gets the code of zero.

    Returns:
        uint8 codes of shape [n], and float32 magnitudes of shape [ceil(n / block)].
    """
    if device_type(values) != "cpu":
        with in_stream_order(values):
            found, largest = kernels().quantize_blockwise(values, codes_of(values.device, signed), block)
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
    """Returns the numbers of shape [n] and type `dtype` that `codes` and `largest` stand for."""
    made: torch.Tensor = kernels().dequantize_blockwise(codes, largest, codes_of(codes.device, signed), block, dtype)
    return made


def _by_table(rows: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    is_half, rows = rows.dtype != torch.float32, rows.float()
    largest = rows.abs().amax(1)
    shares = (rows / torch.where(largest == 0, 1.0, largest)[:, None]).view(-1)
    bits = shares.to(torch.bfloat16).view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    table, ends = _table(signed)
    codes = table.index_select(0, bits)
    if is_half:  # round to the nearest code exactly, so that a restored number in half precision gets its code again
        place = codes.to(torch.int32)
        above, below = shares > ends[1:].index_select(0, place), shares <= ends.index_select(0, place)
        codes.add_(above.view(torch.uint8)).sub_(below.view(torch.uint8))
    return codes, largest


@functools.lru_cache(maxsize=32)
def codes_of(device: torch.device, signed: bool) -> torch.Tensor:
    """Returns the number of each of the 256 codes, as a share of its block's largest magnitude."""
    kernels()
    from bitsandbytes import functional

    named: Any = functional
    codes: torch.Tensor = named.create_dynamic_map(signed).clone()
    if signed:
        # bitsandbytes' map starts at -0.993; with it a restored number would get another code the second time.
        codes[0] = -1.0
    return codes.to(device)


@functools.lru_cache(maxsize=2)
def _table(signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the code of each bfloat16, indexed by its bits, and the 257 ends of the intervals of the 256 codes."""
    codes = codes_of(torch.device("cpu"), signed)
    between = (codes[1:] + codes[:-1]) / 2
    if not signed:
        between[0] = 0.0
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    outside = between.new_tensor([torch.inf])
    return torch.bucketize(every, between).to(torch.uint8), torch.cat([-outside, between, outside])
