"""Golden rows: what simulated steps of about 40 models are, in one file that any version of the code can be held to.

`python -m tests.simulation.golden.golden` writes `golden.json` anew; with names of models it compares those with the
file and prints what differs. A row holds public figures of a `Profile` only, so that it outlives a rewrite of the
simulation. The parts of a row:

    peak, first, reserved    bytes: of a step, of the first one, of the CUDA allocator
    seconds, exposed         of a step, and what the device waits for, by cause
    categories, phases       bytes at the peak by category, and the most that each phase holds
    tiers                    the most bytes on each memory tier below the device
    events                   digest of the bytes, categories and order of all allocations and deaths of a step
    schedule                 digest of the operators, copies and collectives of a step and their order
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import memscale as ms
from memscale.core import matches
from memscale.planning.parts.blocks import repeated_blocks
from tests.support import models

FILE = pathlib.Path(__file__).with_name("golden.json")
_BENCHMARKS = pathlib.Path(__file__).parents[3] / "benchmarks"

_H100 = ms.Hardware.named("h100")
# So slow that the device and its link, not the host, decide when anything happens.
_SLOW = dataclasses.replace(
    _H100,
    name="slow card",
    flops_per_second={dtype: rate / 100 for dtype, rate in _H100.flops_per_second.items()},
    **{
        f"{field}_bytes_per_second": getattr(_H100, f"{field}_bytes_per_second") / 100
        for field in ("bandwidth", "host_to_device", "device_to_host")
    },
)

#: A CPU of which bytes alone are known, a card, one card of eight under FSDP2, and a slow card.
TARGETS: dict[str, dict[str, Any]] = {
    "cpu": {"hardware": ms.Hardware("cpu", "cpu", 2**36)},
    "h100": {"hardware": _H100},
    "fsdp2": {"hardware": _H100, "parallel": "fsdp2", "world": 8},
    "slow": {"hardware": _SLOW},
}
VARIANTS = ("plain", "kept", "checkpoint", "offload", "streamed", "compiled")
#: What a slow card adds nothing to, and what FSDP2 refuses.
_LEFT_OUT = {("slow", variant) for variant in VARIANTS if variant not in ("offload", "streamed")} | {
    ("fsdp2", "streamed")
}

_ZOO = [
    "gpt2",
    "gpt2-accumulate",
    "llama",
    "llama-tied",
    "llama-eager",
    "llama-lora",
    "gemma2",
    "phi3",
    "qwen3",
    "mixtral",
    "qwen3-moe",
    "patchtst",
    "mamba",
    "bert",
    "distilbert",
    "t5",
    "bart",
    "vit",
    "swin",
    "convnext",
    "resnet",
    "whisper",
    "wav2vec2",
    "convnet",
    "unet",
    "depthwise",
    "conv3d",
    "conv1d",
    "diffusion",
    "autoencoder",
    "lstm",
    "lstm-packed",
    "gru",
    "transformer",
    "gpt-sdpa",
    "gpt-softmax",
    "embedding-bag",
    "mlp",
    "mlp-sgd-momentum",
    "mlp-adam-fused",
    "mlp-adafactor",
]
# A compiler takes seconds for each of these, so a few stand for all.
_COMPILED = frozenset({"gpt2", "llama", "mlp", "convnet", "blocks"})


@dataclass(frozen=True)
class Subject:
    """A model to simulate: how to build it with its batch, in a dtype, and the step around it."""

    build: Callable[[torch.dtype], tuple[nn.Module, Any]]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Any
    accumulate: int = 1


def subjects() -> dict[str, Subject]:
    """The models by name, in order."""
    found = {name: _of_zoo(name) for name in _ZOO}
    for name, (make, batch) in _OWN.items():
        found[name] = Subject(partial(_own, make, batch), _adamw, _mean_square)
    return found


def names() -> list[str]:
    """The names of `subjects`."""
    return [*_ZOO, *_OWN]


def _of_zoo(name: str) -> Subject:
    if str(_BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(_BENCHMARKS))
    from _zoo import ZOO

    case = ZOO[name]
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    return Subject(lambda dtype: case.make(names[dtype]), case.optimizer, case.loss, case.accumulate)


def _own(make: Callable[[], nn.Module], batch: tuple[int, ...], dtype: torch.dtype) -> tuple[nn.Module, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().to(dtype), torch.randn(*batch, dtype=dtype)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)


def _mean_square(output: Any, batch: Any) -> torch.Tensor:
    first = next(each for each in _tensors(output))
    return F.mse_loss(first.float(), torch.zeros_like(first, dtype=torch.float32))


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (tuple, list)):
        for each in output:
            yield from _tensors(each)


_OWN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "blocks": (lambda: nn.Sequential(*[models.Block(128, norm=True) for _ in range(6)]), (64, 32, 128)),
    "dropouts": (lambda: nn.Sequential(*[models.TransformerBlock(96, heads=4) for _ in range(4)]), (8, 64, 96)),
    "counters": (lambda: nn.Sequential(*[models.ConvBlock(32) for _ in range(4)]), (8, 32, 28, 28)),
    "in-place": (lambda: nn.Sequential(*[models.InPlace() for _ in range(3)]), (512, 4)),
}


def rows(name: str, subject: Subject, wanted: Callable[[str], bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a model whose keys are wanted, by key: ``"gpt2 h100 checkpoint"``."""
    for target in TARGETS:
        for variant in VARIANTS:
            key = f"{name} {target} {variant}"
            skipped = (target, variant) in _LEFT_OUT or (variant == "compiled" and name not in _COMPILED)
            if not skipped and wanted(key):
                yield key, _row(subject, target, variant)


def _row(subject: Subject, target: str, variant: str) -> dict[str, Any]:
    model, batch = subject.build(torch.float32 if target == "cpu" else torch.bfloat16)
    patterns = repeated_blocks(model) or tuple(
        path for path, child in model.named_children() if next(child.parameters(), None) is not None
    )
    transforms = {
        "checkpoint": ms.checkpoint(),
        "offload": ms.offload(min_bytes=1 << 14),
        "streamed": ms.offload(what="params", min_bytes=0),
    }
    if variant == "compiled":
        for path, module in model.named_modules():
            if any(matches(pattern, path) for pattern in patterns):
                module.compile()
    plan = dict.fromkeys(patterns, transforms[variant]) if variant in transforms else None
    try:
        profile = ms.profile(
            model,
            batch,
            optimizer=subject.optimizer(model),
            loss=subject.loss,
            accumulate=subject.accumulate,
            keeps_output=variant == "kept",
            plan=plan,
            **TARGETS[target],
        )
    except ms.MemscaleError as error:
        return {"refused": type(error).__name__}
    return row_of(profile)


def row_of(profile: ms.Profile) -> dict[str, Any]:
    """The public figures of a profile that a golden row holds."""
    found = {
        "method": profile.method,
        "peak": profile.peak_bytes,
        "first": profile.first_step_peak_bytes,
        "reserved": profile.reserved_peak_bytes,
        "seconds": _rounded(profile.step_seconds),
        "exposed": {cause: _rounded(seconds) for cause, seconds in profile.exposed_seconds.items()},
        "categories": dict(profile.by_category),
        "phases": _by_phase(profile),
        "tiers": dict(profile.by_tier),
        "events": _digest(profile.changes),
    }
    if profile.schedule is not None:
        schedule = profile.schedule
        found["schedule"] = _digest(
            [each[:4] for each in schedule.operators],
            sorted(each[:3] for each in schedule.copies),
            [each[:3] for each in schedule.collectives],
        )
    return {key: value for key, value in found.items() if value not in (None, {}) and (key, value) != _USUAL}


_USUAL = ("method", "static")


def _by_phase(profile: ms.Profile) -> dict[str, int]:
    """The most that each phase holds; where operators have no time, phases begin by their numbers."""
    timeline = profile.timeline
    found: dict[str, int] = {}
    begins = [position for _, position in timeline.phases]
    for (name, begin), end in zip(timeline.phases, [*begins[1:], float("inf")], strict=True):
        inside = (timeline.position > begin) & (timeline.position <= end)
        found[name] = max(found.get(name, 0), int(timeline.total_bytes[inside].max(initial=0)))
    return found


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.6g}")


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def machine() -> dict[str, str]:
    """What rows of a CPU depend on besides the code; those of a card depend on PyTorch alone."""
    import transformers

    return {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The number of threads decides the scratch memory of some CPU kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def differences(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The parts in which two rows differ: what was expected and what was found."""
    keys = sorted({*expected, *found})
    return {key: (expected.get(key), found.get(key)) for key in keys if expected.get(key) != found.get(key)}


def load() -> dict[str, Any]:
    """The file: `machine` and `rows`."""
    return dict(json.loads(FILE.read_text()))


def main(only: list[str]) -> int:
    """Write the file, or compare the models that are named with it."""
    before = load()["rows"] if FILE.exists() else {}
    found: dict[str, Any] = {}
    moved = 0
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = subjects()
        for name in (each for each in every if not only or each in only):
            for key, row in rows(name, every[name], lambda key: True):
                found[key] = row
                if key in before and (changed := differences(before[key], row)):
                    moved += 1
                    print(key, changed, flush=True)
    if only:
        return int(moved > 0)
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(found[key], sort_keys=True)}" for key in sorted(found))
    FILE.write_text(f'{{"machine": {json.dumps(machine(), sort_keys=True)}, "rows": {{\n{lines}\n}}}}\n')
    print(f"{len(found)} rows, {moved} of them moved")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
