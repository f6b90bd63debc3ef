"""Part of a file as memory: the kernel brings pages in as they are touched, and they can be sent out again."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

import numpy as np

# Copies go piece by piece, each of which leaves this process before the next: a mapping of any size takes up no more.
_PIECE_BYTES = 4 * 1024**2

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Mapping:
    """Memory that is part of a file, shared with all other mappings of it; unmapped with the last array made of it.

    Not Python's ``mmap``, which before 3.13 keeps a descriptor for each mapping: a model has more parameters, gradients
    and states than a process may have files. Nor does that let go of the interpreter while it advises.

    Args:
        descriptor: the file; it may be closed afterwards.
        offset: the first byte, a multiple of the system's page.
        nbytes: how many, at least 1. The file must have them, or touching them kills the process.

    Raises:
        OSError: the system or the filesystem cannot.

    >>> import tempfile
    >>> with tempfile.TemporaryFile() as file:
    ...     _ = file.truncate(10_000)
    ...     mapping = Mapping(file.fileno(), 0, 10_000)
    ...     mapping.bytes()[:3] = [1, 2, 3]
    ...     file.read(4)
    b'\\x01\\x02\\x03\\x00'
    """

    def __init__(self, descriptor: int, offset: int, nbytes: int) -> None:
        libc, rights = _libc(), mmap.PROT_READ | mmap.PROT_WRITE
        address = libc.mmap(None, nbytes, rights, mmap.MAP_SHARED, descriptor, offset)
        if address == ctypes.c_void_p(-1).value:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self.nbytes = nbytes
        self._address: int = address
        # An array made of this holds it.
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        # The end of the process unmaps by itself, after the last who could still read.
        weakref.finalize(self, libc.munmap, address, nbytes).atexit = False
        # Copies and optimizers go through it from front to back. Asking for each piece ahead with MADV_WILLNEED was
        # slower than nothing (1.7 and 2.3 GB/s from a cold ext4), this as fast or a little faster.
        self._advise(mmap.MADV_SEQUENTIAL, 0, nbytes)

    def bytes(self) -> Bytes:
        """The memory as an array, which keeps it."""
        return np.asarray(self)

    def read(self, into: Bytes, at: int) -> None:
        """Fill ``into`` with the bytes from ``at`` on, a multiple of the page, which leave the process again."""
        whole = self.bytes()
        for start in range(0, len(into), _PIECE_BYTES):
            part = into[start : start + _PIECE_BYTES]
            np.copyto(part, whole[at + start : at + start + len(part)])
            self._advise(mmap.MADV_DONTNEED, at + start, len(part))

    def write(self, source: Bytes, at: int) -> None:
        """Put ``source`` at ``at``, a multiple of the page, from where it leaves the process again."""
        whole = self.bytes()
        for start in range(0, len(source), _PIECE_BYTES):
            part = source[start : start + _PIECE_BYTES]
            np.copyto(whole[at + start : at + start + len(part)], part)
            self._advise(mmap.MADV_DONTNEED, at + start, len(part))

    def _advise(self, advice: int, start: int, nbytes: int) -> None:
        # "Not needed" loses nothing here: what a shared mapping lets go of stays in the file. A kernel that declines,
        # as it does where the process locked its memory, changes no byte either.
        _libc().madvise(self._address + start, nbytes, advice)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,  # off_t, wherever it has no other symbol for 64 bits
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
