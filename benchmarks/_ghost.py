"""The allocator's truth of a card without the card: real steps of the CUDA build of PyTorch on fake libraries.

`python _ghost.py` is the process that runs them, with the Python of `make ghost`. It reads lines of JSON, and answers
each from a fork of its own: the step finds an allocator that nothing has used, and nobody waits for imports.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FAKES = HERE.parent / "tests" / "ghost"
# What decides a comparison: without `results/`, which a run writes itself.
SOURCES = (
    HERE.parent / "memscale",
    FAKES,
    *(HERE / f"{name}.py" for name in ("_ghost", "_truth", "_zoo", "_zoo_torch", "bench_predict")),
)
CARDS = ("h100", "a100-80", "rtx-4090", "t4")
ALLOCATORS = ("", "expandable_segments:True")


RNN_WORKSPACE = 8 << 20


@dataclasses.dataclass(frozen=True)
class Combination:
    """A step of the zoo, on a card, with an allocator's settings."""

    case: str
    dtype: str
    variant: str
    optimizer: str
    card: str
    allocator: str

    @property
    def place(self) -> tuple[str, str]:
        """What a process is started for."""
        return self.card, self.allocator

    def __str__(self) -> str:
        return "/".join(filter(None, dataclasses.astuple(self)))


def covering(combinations: Iterable[Combination]) -> list[Combination]:
    """Few of them, in which every two settings that occur together at all still do."""
    rest = list(combinations)
    random.Random(0).shuffle(rest)
    seen: set[Any] = set()
    chosen = []
    for combination in rest:
        pairs = set(itertools.combinations(enumerate(dataclasses.astuple(combination)), 2))
        if not pairs <= seen:
            seen |= pairs
            chosen.append(combination)
    return sorted(chosen, key=lambda one: (one.card, one.allocator, one.case))


class Ghost:
    """A process that runs steps for one card and one setting of the allocator."""

    def __init__(self, python: str, card: str, allocator: str) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith("GHOST_")} | {
            "PYTHONPATH": os.pathsep.join(map(str, (FAKES / "fake_cupy", FAKES, HERE, HERE.parent))),
            "GHOST_CARD": card,
            "GHOST_COPY": "65536",  # copies of bulk are nobody's business here
            "GHOST_CUDNN_CONV": "1",
            "GHOST_CUDNN_RNN_WORK": str(RNN_WORKSPACE),
            "GHOST_CUDNN_DROPOUT": str(dropout_states(card)),
            "OMP_NUM_THREADS": "1",
            "PYTORCH_ALLOC_CONF": allocator,
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [python, __file__],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, combination: Combination) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(combination)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The fields of a `Truth`, or {"failure": why}."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"failure": "the process of the fake libraries ended"}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def dropout_states(card: str) -> int:
    """What cuDNN's generators take, by the rule that was measured on one card."""
    from memscale import Hardware
    from memscale.simulation.rules.recurrences import dropout_states_bytes

    return dropout_states_bytes(Hardware.named(card).multiprocessors or 0)


def as_fake_libraries() -> None:
    """Let predictions here take what the fake libraries take where only cuDNN knows: then the order shows."""
    from memscale.simulation.rules import recurrences
    from memscale.simulation.rules.cudnn_workspaces import Convolution

    def workspace(self: Convolution, capability: tuple[int, int], multiprocessors: int = 0) -> int:
        if self.groups == self.image.size(1) > 1:
            return 0
        return sum(each.numel() * each.itemsize for each in (self.image, self.kernel, self.result))

    Convolution.result_bytes = Convolution.image_bytes = Convolution.weight_bytes = workspace  # type: ignore[method-assign]
    recurrences.workspace_bytes = lambda call, *, backward=False: RNN_WORKSPACE


def at_once(card: str) -> Any:
    """The card with a link whose speed nobody knows: copies take no time in a prediction then, as on fake libraries."""
    from memscale import Hardware

    return dataclasses.replace(
        Hardware.named(card), host_to_device_bytes_per_second=None, device_to_host_bytes_per_second=None
    )


def places(combinations: Sequence[Combination]) -> Iterator[tuple[tuple[str, str], list[Combination]]]:
    for place, group in itertools.groupby(combinations, key=lambda combination: combination.place):
        yield place, list(group)


def _serve() -> None:
    import warnings

    import torch
    import transformers
    import values
    from _truth import COMPILED, described, real_step

    from memscale.runtime.backends.cuda import CudaEvent

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    values.not_packed()
    values.float_masks_are_of_ones()
    values.regions_compare_buffers()
    # Copies are done at once here, and a runtime that measured that would keep less than `prefetch_depth` on the card;
    # a profile is of the most that it may keep. With no times it goes by the depth, too.
    CudaEvent.span = lambda self: None  # type: ignore[method-assign]
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            combination = Combination(**json.loads(line))
            if combination.variant == COMPILED:
                values.compiled_kernels_do_nothing()
            try:
                found = dataclasses.asdict(
                    real_step(case_of(combination), combination.dtype, combination.variant, "cuda")
                )
            except Exception as error:
                found = {"failure": described(error)}
            print(json.dumps(found), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"failure": f"the step ended the process with status {status}"}), flush=True)


def case_of(combination: Combination) -> Any:
    """The case of the zoo, with the optimizer's loop that is asked for."""
    from _zoo import ZOO

    case = ZOO[combination.case]
    return case if combination.optimizer == "default" else case.with_loop(combination.optimizer)


if __name__ == "__main__":
    _serve()
