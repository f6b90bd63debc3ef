"""`Mapping`: a part of a file as memory, whose pages can be released one by one."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

import numpy as np

# Copies go piece by piece, and each piece is released before the next, so that a mapping never fills the RAM.
_PIECE_BYTES = 4 * 1024**2

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Mapping:
    """Memory that is part of a file, shared with all other mappings of it; unmapped with the last array made of it.

    Python's ``mmap`` keeps a file descriptor for each mapping before 3.13, and a model has more parameters, gradients
    and states than a process may have files. It also holds the interpreter lock during `madvise`.

    Args:
        descriptor: the file; it may be closed afterwards.
        offset: the first byte, a multiple of the system's page size.
        nbytes: the size, at least 1. The file must have that many bytes, or touching them kills the process.

    Raises:
        OSError: the system or the filesystem refuses.

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
        # An array made of this object keeps it alive.
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}
        # At exit the system unmaps the memory, after the last thread that could read it.
        weakref.finalize(self, libc.munmap, address, nbytes).atexit = False
        # Copies and optimizers read it from front to back. MADV_WILLNEED for each piece was slower than no advice (1.7
        # against 2.3 GB/s from a cold ext4); MADV_SEQUENTIAL is as fast or slightly faster.
        self._advise(mmap.MADV_SEQUENTIAL, 0, nbytes)

    def bytes(self) -> Bytes:
        """Returns the memory as a uint8 array, which keeps the mapping alive."""
        return np.asarray(self)

    def read(self, into: Bytes, at: int) -> None:
        """Copies the bytes from ``at`` on, a multiple of the page, to ``into``, and releases their pages."""
        whole = self.bytes()
        for start in range(0, len(into), _PIECE_BYTES):
            part = into[start : start + _PIECE_BYTES]
            np.copyto(part, whole[at + start : at + start + len(part)])
            self._advise(mmap.MADV_DONTNEED, at + start, len(part))

    def write(self, source: Bytes, at: int) -> None:
        """Copies ``source`` to ``at``, a multiple of the page, and releases the pages."""
        whole = self.bytes()
        for start in range(0, len(source), _PIECE_BYTES):
            part = source[start : start + _PIECE_BYTES]
            np.copyto(whole[at + start : at + start + len(part)], part)
            self._advise(mmap.MADV_DONTNEED, at + start, len(part))

    def _advise(self, advice: int, start: int, nbytes: int) -> None:
        # MADV_DONTNEED loses nothing: the pages of a shared mapping stay in the file. If the kernel refuses, as it does
        # for locked memory, no byte changes either.
        _libc().madvise(self._address + start, nbytes, advice)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,  # off_t: 64 bits on every system where `mmap` is its symbol
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
