"""`SlabFile`: an unnamed file that only this process can reach, read and written without the page cache."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from memscale.core import MemscaleError, RuntimeUnavailable, folder_on_disk, is_in_memory
from memscale.runtime.storage.arena import PAGE_BYTES, page_aligned_memory
from memscale.runtime.storage.mapping import Mapping

_STAGING_BYTES = 2 * 1024**2
_MOST_STALLS = 8
# Alignments of memory that the kernel moves without a copy, tried in turn. PyTorch's CPU allocator aligns to 64, which
# most disks accept; older kernels and other disks need a sector or a page.
_ALIGNMENTS = (64, 512, PAGE_BYTES)
# Error codes of filesystems without direct access, unnamed files or preallocation.
_UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR, errno.ENOENT)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskTierError(MemscaleError, RuntimeError):
    """The disk failed. After a failed write the caller still has the source; after a failed read the bytes are lost."""


class DiskTierFull(DiskTierError):
    """The disk, or its cap, has no room. No bytes are lost."""


class FileIO:
    """The system calls of a slab file; tests override one to make it fail."""

    def open(self, directory: str) -> int:
        """Opens a new unnamed file that only this user can read and write; returns its descriptor."""
        unnamed = getattr(os, "O_TMPFILE", 0)
        if unnamed:
            try:
                return os.open(directory, unnamed | os.O_RDWR | os.O_EXCL, 0o600)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
        descriptor, path = tempfile.mkstemp(dir=directory)
        os.unlink(path)
        return descriptor

    def make_direct(self, descriptor: int) -> None:
        """Makes reads and writes bypass the page cache; raises OSError if the system or the filesystem cannot."""
        if not hasattr(os, "O_DIRECT"):
            raise OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT")
        self._set_flags(descriptor, lambda flags: flags | os.O_DIRECT)

    def make_buffered(self, descriptor: int) -> None:
        """Undoes `make_direct`."""
        if hasattr(os, "O_DIRECT"):
            self._set_flags(descriptor, lambda flags: flags & ~os.O_DIRECT)

    def _set_flags(self, descriptor: int, change: Callable[[int], int]) -> None:
        import fcntl  # missing on Windows, where `SlabFile` has raised before

        fcntl.fcntl(descriptor, fcntl.F_SETFL, change(fcntl.fcntl(descriptor, fcntl.F_GETFL)))

    def preallocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Allocates the blocks of a part of the file now, so that writing to it cannot find the disk full."""
        os.posix_fallocate(descriptor, offset, nbytes)

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Writes from ``buffers`` in turn; returns the bytes written, which may be fewer."""
        return os.pwritev(descriptor, buffers, offset)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Reads into ``buffers`` in turn; returns the bytes read, which may be fewer."""
        return os.preadv(descriptor, buffers, offset)

    def map(self, descriptor: int, offset: int, nbytes: int) -> Mapping:
        """Maps a part of the file into memory."""
        return Mapping(descriptor, offset, nbytes)


class _Piece(NamedTuple):
    """A system call: the offset, the memory, and the part of the tensor that goes through staging memory.

    Attributes:
        offset: the first byte in the file.
        buffers: the memory to read from or write to.
        part: the part of the tensor that `staged` stands for; empty if none.
        staged: page-aligned memory of the same size as `part`.
    """

    offset: int
    buffers: list[memoryview]
    part: memoryview
    staged: memoryview


class SlabFile:
    """An unnamed file with preallocated blocks, which the system deletes when the process ends for any reason.

    Args:
        directory: the directory; None is the first temporary directory that is not in RAM.
        size_bytes: the first size, a multiple of the page.
        io: the system calls.

    Raises:
        DiskTierFull: the filesystem has too little room.
        DiskTierError: the filesystem failed.
        RuntimeUnavailable: the system or the directory does not allow such a file, or no temporary directory is on
            disk.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, size_bytes: int, io: FileIO) -> None:
        if not hasattr(os, "preadv"):
            raise RuntimeUnavailable("offloading to disk needs os.preadv, which this system lacks; use another tier")
        self.directory = folder_on_disk() if directory is None else os.fspath(directory)
        self._io = io
        self._own = threading.local()
        self.size_bytes = 0
        self._with_blocks_bytes = 0  # the file has its blocks up to this byte
        self._alignment = PAGE_BYTES
        try:
            self._descriptor = io.open(self.directory)
        except OSError as error:
            raise RuntimeUnavailable(
                f"no file can be made in {self.directory!r} ({error.strerror}); pass a directory that you can write to"
            ) from error
        # Transfers hold this object, so the descriptor is closed after the last of them and never reused too early.
        close = weakref.finalize(self, os.close, self._descriptor)
        try:
            self.extend(size_bytes)
            self.direct = self._make_direct()
        except BaseException:
            close()
            raise
        if directory is not None and is_in_memory(self.directory):
            warnings.warn(
                f"{self.directory!r} is in RAM, so offloading to it frees nothing; pass a directory on a disk",
                stacklevel=3,
            )

    def extend(self, nbytes: int) -> None:
        """Extends the file by `nbytes`.

        Raises:
            DiskTierFull: the filesystem has too little room; the file is unchanged.
            DiskTierError: the filesystem failed.
        """
        try:
            self._io.preallocate(self._descriptor, self.size_bytes, nbytes)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise self._failure(error, nbytes, "added to") from error
            os.ftruncate(self._descriptor, self.size_bytes + nbytes)
        else:
            if self._with_blocks_bytes == self.size_bytes:
                self._with_blocks_bytes += nbytes
        self.size_bytes += nbytes

    def map(self, offset: int, nbytes: int) -> Mapping:
        """Maps a part of the file, in whole pages, into memory.

        Raises:
            RuntimeUnavailable: the part has no preallocated blocks, or the system does not map it.
        """
        what = f"{nbytes} bytes of the slab file in {self.directory!r} cannot be used in place"
        # Writing to a page without a block on a full disk is no error but a signal, which ends the process.
        if offset + nbytes > self._with_blocks_bytes:
            raise RuntimeUnavailable(
                f"{what}: the filesystem does not preallocate blocks for them, so a full disk would end the process; "
                f"pass a directory on another filesystem, or use another tier"
            )
        try:
            return self._io.map(self._descriptor, offset, nbytes)
        except OSError as error:
            raise RuntimeUnavailable(
                f"{what} ({error.strerror}); raise vm.max_map_count where the process has that many mappings, pass a "
                f"directory on another filesystem, or use another tier"
            ) from error

    def write(self, source: torch.Tensor, offset: int) -> None:
        """Writes a uint8 tensor at ``offset``, a multiple of the page; the rest of its last page is then undefined.

        Raises:
            DiskTierFull: the disk is full.
            DiskTierError: the disk failed.
        """
        for piece in self._pieces(source, offset):
            _copy(piece.part, piece.staged)
            self._move(self._io.write, piece, "written to")

    def read(self, target: torch.Tensor, offset: int) -> None:
        """Fills a uint8 tensor from ``offset``, a multiple of the page.

        Raises:
            DiskTierError: the disk failed.
        """
        for piece in self._pieces(target, offset):
            self._move(self._io.read, piece, "read from")
            _copy(piece.staged, piece.part)

    def _pieces(self, tensor: torch.Tensor, offset: int) -> Iterator[_Piece]:
        data, nothing = bytes_of(tensor), memoryview(bytearray())
        if not self.direct:
            yield _Piece(offset, [data], nothing, nothing)
        elif tensor.data_ptr() % self._alignment == 0:
            # Whole pages move directly between memory and disk; the rest goes through one staging page in the same
            # call.
            whole = len(data) // PAGE_BYTES * PAGE_BYTES
            part = data[whole:]
            page = self._staging()[: PAGE_BYTES if part else 0]
            yield _Piece(offset, [data[:whole], page], part, page[: len(part)])
        else:
            # The kernel refuses memory with this alignment, so all of it goes through staging memory.
            for start in range(0, len(data), _STAGING_BYTES):
                part = data[start : start + _STAGING_BYTES]
                pages = self._staging()[: -(-len(part) // PAGE_BYTES) * PAGE_BYTES]
                yield _Piece(offset + start, [pages], part, pages[: len(part)])

    def _move(self, call: Callable[..., int], piece: _Piece, what: str) -> None:
        """Repeats the call until all has moved: the system may stop early (2 GiB a call, signals, full disks)."""
        unit = PAGE_BYTES if self.direct else 1
        total, done, stalls = sum(map(len, piece.buffers)), 0, 0
        while done < total:
            try:
                moved = call(self._descriptor, _after(piece.buffers, done), piece.offset + done)
            except OSError as error:
                raise self._failure(error, total, what) from error
            # Direct access continues from whole pages only, so a page that moved in part is moved again.
            stalls = stalls + 1 if moved < unit else 0
            if moved == 0 or stalls > _MOST_STALLS:
                stalled = OSError(errno.EIO, f"the system moves no more than {done} of them")
                raise self._failure(stalled, total, what)
            done = min(total, done + moved // unit * unit)

    def _failure(self, error: OSError, nbytes: int, what: str) -> DiskTierError:
        kind = DiskTierFull if error.errno in _FULL else DiskTierError
        return kind(f"{nbytes} bytes could not be {what} the slab file in {self.directory!r}: {error.strerror}")

    def _staging(self) -> memoryview:
        """Returns page-aligned staging memory of this thread."""
        if not hasattr(self._own, "staging"):
            self._own.staging = bytes_of(page_aligned_memory(_STAGING_BYTES))
        staging: memoryview = self._own.staging
        return staging

    def _make_direct(self) -> bool:
        """Turns direct access on, and finds the alignment of memory that it needs; returns whether it works."""
        try:
            self._io.make_direct(self._descriptor)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise self._failure(error, 0, "written to") from error
            return False
        for alignment in _ALIGNMENTS:
            try:
                self._io.write(self._descriptor, [self._staging()[alignment : alignment + PAGE_BYTES]], 0)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise self._failure(error, PAGE_BYTES, "written to") from error
            else:
                self._alignment = alignment
                return True
        # Some filesystems accept the flag and then refuse every transfer.
        self._io.make_buffered(self._descriptor)
        return False


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous uint8 CPU tensor."""
    return tensor.reshape(-1).numpy().data


def _copy(source: memoryview, target: memoryview) -> None:
    # NumPy releases the interpreter lock during the copy; a memoryview would hold it and stop the training loop.
    np.copyto(np.asarray(target), np.asarray(source))


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """Returns the rest of ``buffers`` after their first ``done`` bytes."""
    left = []
    for buffer in buffers:
        if done < len(buffer):
            left.append(buffer[done:])
        done = max(0, done - len(buffer))
    return left
