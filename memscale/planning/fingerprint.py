"""The key of the plan cache: hashes of the inputs of planning. Requests with equal hashes share a cached plan."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memscale.config import Config
from memscale.core import batches
from memscale.hardware import Hardware
from memscale.simulation import Trace, TrainingStep

# Fields of `Config` that choose where messages go; no plan depends on these fields.
_SAYS_WHERE = ("enable_logging", "log_file", "observability_port")
_PACKAGES = ("highspy", "numpy", "optree")


def fingerprint(step: TrainingStep, written: Trace, config: Config, hardware: Hardware) -> dict[str, str]:
    """Returns the SHA-256 hashes of the inputs of planning by name.

    The trace of the step as written stands for the code of model and loss, and for the settings of the process. What
    code does only under a transform is not in the key: `Proofs` simulates every cached plan again.

    Args:
        step: the training step.
        written: the trace of the step as written.
        config, hardware: the arguments of the plan.
    """
    assert step.module is not None, "a function is not planned"
    leaves, spec = batches.flatten(step.batch)
    parts = {
        "versions": simulator(),
        "step": written.digest(),
        "model": _structure(step.module),
        "batch": (str(spec), [_layout(each) if isinstance(each, torch.Tensor) else repr(each) for each in leaves]),
        "optimizer": None if step.optimizer is None else _options(step.optimizer),
        "config": [
            (name, repr(value), name in config.given)
            for name, value in sorted(vars(config).items())
            if name not in (*_SAYS_WHERE, "follows")
        ],
        "hardware": [(name, repr(value)) for name, value in vars(hardware).items() if name != "free_bytes"],
    }
    return {name: hashlib.sha256(repr(part).encode()).hexdigest() for name, part in parts.items()}


def _structure(model: nn.Module) -> list[Any]:
    """Returns the modules and tensors of a model by path; a shared one has the number of its first path."""
    numbers: dict[int, int] = {}
    modules = model.named_modules(remove_duplicate=False)
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [
        *((path, str(type(each)), numbers.setdefault(id(each), len(numbers))) for path, each in modules),
        *((path, _layout(each), numbers.setdefault(id(each), len(numbers))) for path, each in tensors),
    ]


def _options(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the class and the options of an optimizer. Of a float only matters whether it is 0.

    An optimizer has fewer states where the momentum, for example, is 0; other floats do not change sizes.
    """
    groups = [[(name, each) for name, each in group.items() if name != "params"] for group in optimizer.param_groups]
    flat = [(name, each if isinstance(each, tuple) else (each,)) for group in groups for name, each in group]
    options = [
        (name, [each != 0 if isinstance(each, float) else repr(each) for each in values]) for name, values in flat
    ]
    return [str(type(optimizer)), [len(group["params"]) for group in optimizer.param_groups], options]


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tuple(tensor.shape), strides, str(tensor.dtype), str(tensor.device), tensor.requires_grad


@functools.cache
def simulator() -> list[Any]:
    """Returns the identity of the simulator: a hash of memscale's code, and the versions of PyTorch and other packages.

    A prediction depends on the simulator as much as on the model.
    """
    return [
        _code_in(Path(__file__).parents[1]),
        (torch.__version__, torch.version.git_version, torch.version.cuda),
        [importlib.metadata.version(name) for name in _PACKAGES],
        (platform.python_version(), platform.machine()),
    ]


@functools.cache
def planner() -> str:
    """Returns a hash of the planner's code: a policy is valid for the planner that the policy was fitted to."""
    return _code_in(Path(__file__).parent)


def _code_in(folder: Path) -> str:
    """Returns the SHA-256 hash of all Python files below `folder`."""
    own = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        own.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return own.hexdigest()
