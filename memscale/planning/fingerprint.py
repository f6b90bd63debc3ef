"""The key of the plan cache: hashes of the inputs of planning. Requests with equal hashes share a cached plan."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import os
import platform
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from memscale.config import Config
from memscale.core import batches
from memscale.hardware import Hardware
from memscale.simulation import TrainingStep

# Fields of `Config` that choose where messages go; no plan depends on these fields.
_SAYS_WHERE = ("enable_logging", "log_file", "observability_port")
_PACKAGES = ("highspy", "numpy", "optree")
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
# Attributes of a module that `_modules` describes by path, rather than as values of `vars(module)`.
_BY_PATH = ("_parameters", "_buffers", "_modules")


def fingerprint(step: TrainingStep, config: Config, hardware: Hardware) -> dict[str, str]:
    """Returns the SHA-256 hashes of the inputs of planning by name: versions, settings, model, batch, optimizer, ...

    The fingerprint reads the inputs without running the model. Python functions are hashed by bytecode, constants and
    closure: an edited comment keeps the hash, an edited statement changes the hash. Two things are left out: the values
    of tensors, and whether a nonzero float option of the optimizer (such as a learning rate) is large or small. A
    dependence of the step's memory on such a value is found by `Proofs`, which simulates every cached plan again.
    """
    model, optimizer = step.module, step.optimizer
    assert model is not None, "a function is not planned"
    leaves, spec = batches.flatten(step.batch)
    parts = {
        "versions": simulator(),
        "settings": _settings(),
        "model": list(_modules(model, _Seen())),
        "batch": (str(spec), _Seen().text(leaves)),
        "optimizer": None if optimizer is None else list(_optimizer(optimizer, model, _Seen())),
        "loss": _Seen().text(step.loss),
        "config": [
            (name, repr(value), name in config.given)
            for name, value in sorted(vars(config).items())
            if name not in (*_SAYS_WHERE, "follows")
        ],
        "hardware": [(name, repr(value)) for name, value in vars(hardware).items() if name != "free_bytes"],
    }
    return {name: hashlib.sha256(repr(part).encode()).hexdigest() for name, part in parts.items()}


class _Seen:
    """Describes values as text that is equal in every process; a repeated object is described by its first number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # keeps objects alive: a freed object's address could go to another object

    def number(self, thing: Any) -> tuple[int, bool]:
        """Returns the number of `thing`, and whether `thing` was seen for the first time."""
        known = len(self._numbers)
        number = self._numbers.setdefault(id(thing), known)
        if number == known:
            self._kept.append(thing)
        return number, number == known

    def text(self, value: Any) -> Any:
        """Returns the description of `value`, as text, lists and tuples of text."""
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, torch.Tensor):
            return self.layout(value)
        number, is_new = self.number(value)
        if not is_new:
            return f"again {number}"
        if isinstance(value, (set, frozenset)):
            return ("set", sorted(repr(self.text(each)) for each in value))
        if isinstance(value, (list, tuple)):
            return (type(value).__name__, [self.text(each) for each in value])
        if isinstance(value, Mapping):
            # Integer keys are the keys of hooks: a counter of the process, which differs between processes.
            hooks = bool(value) and all(isinstance(key, int) for key in value)
            return ("mapping", [("" if hooks else self.text(key), self.text(each)) for key, each in value.items()])
        if isinstance(value, types.CodeType):
            names = (value.co_names, value.co_varnames, value.co_freevars)
            return (value.co_code.hex(), names, [self.text(each) for each in value.co_consts])
        return self._callable(value)

    def _callable(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            if _is_of_a_library(value):
                return ("function", value.__module__, value.__qualname__)
            cells = [self.text(_content(cell)) for cell in value.__closure__ or ()]
            given = (value.__defaults__, value.__kwdefaults__)
            return ("function", self.text(value.__code__), cells, self.text(given))
        if isinstance(value, types.MethodType):
            return ("method", self.text(value.__func__), self.text(value.__self__))
        if isinstance(value, functools.partial):
            return ("partial", self.text(value.func), self.text(value.args), self.text(value.keywords))
        return ("object", self.cls(value if isinstance(value, type) else type(value)))

    def cls(self, cls: type) -> Any:
        """Returns the description of a class: its name, and the functions and constants of bases outside libraries."""
        found: list[Any] = [f"{cls.__module__}.{cls.__qualname__}"]
        for each in cls.__mro__:
            if not _is_of_a_library(each) and self.number(each)[1]:
                members = {name: inspect.unwrap(_function(member)) for name, member in vars(each).items()}
                found.append(
                    [
                        (name, self.text(member))
                        for name, member in sorted(members.items())
                        if isinstance(member, types.FunctionType)
                        or (not name.startswith("__") and isinstance(member, (bool, int, float, str)))
                    ]
                )
        return found

    def layout(self, tensor: torch.Tensor) -> Any:
        """Returns the description of a tensor: dtype, shape, device, strides and the number of its storage."""
        about = (str(tensor.dtype), tuple(tensor.shape), str(tensor.device), tensor.requires_grad)
        try:
            storage = tensor.untyped_storage()
            memory = (self._address(storage._cdata, tensor), storage.nbytes(), tensor.stride(), tensor.storage_offset())
        except (RuntimeError, NotImplementedError):  # a sparse tensor, for example, has no storage
            memory = None
        return (type(tensor).__name__, about, memory, None if tensor.grad is None else tuple(tensor.grad.shape))

    def _address(self, address: int, tensor: torch.Tensor) -> int:
        known = len(self._numbers)
        self._kept.append(tensor)
        return self._numbers.setdefault(~address, known)  # `~` keeps storages apart from ids, which are at least 0


def _modules(model: nn.Module, seen: _Seen) -> Iterator[Any]:
    for path, module in model.named_modules(remove_duplicate=False):
        number, is_new = seen.number(module)
        yield (path, number)
        if is_new:
            yield seen.cls(type(module))
            own = sorted((name, value) for name, value in vars(module).items() if name not in _BY_PATH)
            yield [(name, seen.text(value)) for name, value in own]
            for tensors in (module._parameters, module._buffers):
                yield [(name, seen.text(tensor)) for name, tensor in tensors.items()]


def _optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, seen: _Seen) -> Iterator[Any]:
    paths = {id(parameter): path for path, parameter in model.named_parameters()}
    yield seen.cls(type(optimizer))
    for group in optimizer.param_groups:
        yield [paths.get(id(parameter), "") for parameter in group["params"]]
        yield [(name, _option(value, seen)) for name, value in sorted(group.items()) if name != "params"]
    for parameter, state in optimizer.state.items():
        yield (paths.get(id(parameter), ""), [(str(name), _option(value, seen)) for name, value in state.items()])


def _option(value: Any, seen: _Seen) -> Any:
    """Returns the description of a hyper-parameter; a float is described by whether the float is 0.

    An optimizer has fewer states where the momentum, for example, is 0; other floats do not change sizes.
    """
    if isinstance(value, tuple):
        return [_option(each, seen) for each in value]
    return f"float {value != 0}" if isinstance(value, float) else seen.text(value)


def _settings() -> list[Any]:
    kinds = ("cpu", "cuda")
    attention = torch.backends.cuda
    return [
        [(torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in kinds],
        torch.is_autocast_cache_enabled(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        str(torch.get_default_dtype()),
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
        (torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        (attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled()),
        attention.cudnn_sdp_enabled(),
        [os.environ.get(name) for name in _ALLOCATOR],
    ]


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


def _is_of_a_library(thing: Any) -> bool:
    """Returns whether `thing` is defined in a library, whose version (see `simulator`) determines its code."""
    return str(thing.__module__).partition(".")[0] in ("torch", "memscale", "builtins", "collections", "abc", "typing")


def _function(member: Any) -> Any:
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty: its variable has no value yet
        return None
