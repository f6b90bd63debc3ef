"""The disk tier against the raw O_DIRECT rate of the same disk, and torch.save/torch.load.

Every contender moves the same tensors, the saved activations of transformer blocks by size, out and in again; rounds
are interleaved, rates are medians. "raw" is the same number of threads that call pwritev and preadv on a preallocated
file in pieces of 16 MiB. torch.save is followed by fsync and by dropping the file from the page cache, so that all
move the bytes to the disk and from it.

    python benchmarks/bench_disk.py [--directory DIR] [--rounds 5] [--mib 512]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from memscale.runtime.storage.arena import PAGE_BYTES, page_aligned_memory
from memscale.runtime.storage.disk import DiskSlab
from memscale.runtime.storage.slab_file import FileIO, bytes_of

MIB = 1024**2
PIECE_BYTES = 16 * MIB
# In KiB, what one block saves at 1024 tokens of width 2048: hidden states, statistics, keys and values, the MLP.
SIZES_KIB = (4096, 4, 4096, 4096, 1024, 1024, 4096, 64, 4096, 4, 4096, 14336, 14336, 14336, 14336)
Pass = Callable[[], None]


def tensors(total_bytes: int, shift: int = 0) -> list[torch.Tensor]:
    """Tensors that start ``shift`` bytes into a page; 64 is where PyTorch's own large ones start."""
    found: list[torch.Tensor] = []
    while sum(tensor.nbytes for tensor in found) < total_bytes:
        nbytes = SIZES_KIB[len(found) % len(SIZES_KIB)] * 1024
        found.append(page_aligned_memory(shift + nbytes)[shift:].random_(256))
    return found


def raw(directory: str, total_bytes: int, threads: int) -> tuple[Pass, Pass]:
    io = FileIO()
    descriptor = io.open(directory)
    io.preallocate(descriptor, 0, total_bytes)
    io.make_direct(descriptor)
    memory = bytes_of(page_aligned_memory(total_bytes).random_(256))
    pool = ThreadPoolExecutor(threads)

    def move(call: Callable[..., int]) -> None:
        def piece(start: int) -> None:
            part = memory[start : start + PIECE_BYTES]
            assert call(descriptor, [part], start) == len(part)

        list(pool.map(piece, range(0, total_bytes, PIECE_BYTES)))

    return lambda: move(os.pwritev), lambda: move(os.preadv)


def slab(directory: str, sources: list[torch.Tensor], threads: int) -> tuple[Pass, Pass]:
    room = sum(-(-source.nbytes // PAGE_BYTES) * PAGE_BYTES for source in sources)
    disk = DiskSlab(directory, cap_bytes=room, threads=threads)
    assert disk.direct, f"{directory} takes no O_DIRECT, so there is no raw rate to compare with"
    extents = [disk.reserve(source.nbytes) for source in sources]
    targets = sources  # read back in place: the values are the same

    def write() -> None:
        for future in [disk.write(source, extent) for source, extent in zip(sources, extents, strict=True)]:
            future.result()

    def read() -> None:
        for future in [disk.read(extent, target) for target, extent in zip(targets, extents, strict=True)]:
            future.result()

    return write, read


def files(directory: str, sources: list[torch.Tensor]) -> tuple[Pass, Pass]:
    names = [os.path.join(directory, f"{index}.pt") for index in range(len(sources))]

    def write() -> None:
        for name, source in zip(names, sources, strict=True):
            with open(name, "wb") as file:
                torch.save(source, file)
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read() -> None:
        for name in names:
            torch.load(name)

    return write, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        sources = tensors(options.mib * MIB)
        total_bytes = sum(source.nbytes for source in sources)
        passes = {
            "raw O_DIRECT": raw(directory, total_bytes // PAGE_BYTES * PAGE_BYTES, options.threads),
            "disk slab": slab(directory, sources, options.threads),
            "from memory of torch": slab(directory, tensors(options.mib * MIB, 64), options.threads),
            "from odd addresses": slab(directory, tensors(options.mib * MIB, 1), options.threads),
            "torch.save, torch.load": files(directory, sources),
        }
        print(
            f"torch {torch.__version__}, {len(sources)} tensors, {total_bytes / MIB:.0f} MiB, {options.threads} threads"
            f", medians of {options.rounds} interleaved rounds"
        )
        rates: dict[str, list[list[float]]] = {who: [[], []] for who in passes}
        for turn in range(options.rounds + 1):
            for who, directions in passes.items():
                for direction, move in enumerate(directions):
                    start = time.perf_counter()
                    move()
                    if turn:  # the first round gives the files their blocks
                        rates[who][direction].append(total_bytes / (time.perf_counter() - start))
        print(f"{'':24} {'write':>12} {'of raw':>8} {'read':>12} {'of raw':>8}")
        base = [statistics.median(rate) for rate in rates["raw O_DIRECT"]]
        for who in passes:
            out, back = (statistics.median(rates[who][direction]) for direction in range(2))
            print(f"{who:24} {out / MIB:6.0f} MiB/s {out / base[0]:7.0%} {back / MIB:7.0f} MiB/s {back / base[1]:7.0%}")


if __name__ == "__main__":
    main()
