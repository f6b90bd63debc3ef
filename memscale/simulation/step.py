"""A training step (model, batch, optimizer, loss, loop, parallel) and its device as frozen values.

The checks raise errors for steps that cannot be simulated, and return notes about models.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memscale.core import (
    ConfigError,
    Loss,
    batches,
    call,
    check_count,
    check_loss,
    check_switch,
    format_bytes,
    scalar_loss,
    shown,
)
from memscale.hardware import Hardware
from memscale.optimizers import TransformedOptimizer
from memscale.simulation.kernels.kernels import Kernels
from memscale.simulation.kernels.shapes import is_sparse
from memscale.simulation.measured.part_times import PartTimes
from memscale.simulation.parallel.sharded import mesh_of
from memscale.simulation.parallel.spec import Parallel, ParallelKind
from memscale.simulation.rules.few_bits import packed
from memscale.simulation.sandbox.compiled_modules import CompiledModules, compiled_of


@dataclass(frozen=True)
class Loop:
    """The user's training loop around the model.

    Args:
        accumulate: forward and backward passes for each optimizer step.
        keeps_output: whether the loop keeps the model's output and its loss until the next ones replace them, as
            ``output = model(x)`` does; otherwise the output dies before backward, and the loss before the update, as in
            ``loss(model(x)).backward()``.
    """

    accumulate: int = 1
    keeps_output: bool = True

    @property
    def passes(self) -> int:
        """The passes that show an update's memory: all passes after the second one take as much as the second."""
        return min(self.accumulate, 2)

    def __str__(self) -> str:
        if self.keeps_output:
            return "output = model(x) keeps the model's output until the next output replaces it"
        return (
            "loss(model(x)).backward() frees the model's output before backward; for output = model(x) pass "
            "keeps_output=True"
        )


@dataclass(frozen=True, eq=False)
class TrainingStep:
    """A training step: forward, loss, backward, optimizer, and the release of the gradients.

    `of` makes a step from the keywords of the public functions and checks them; `on` adds the batch.

    >>> step = TrainingStep.of(nn.Linear(8, 8), loss=lambda y, _: y.sum()).on(torch.ones(2, 8))
    >>> step.loop, step.parallel
    (Loop(accumulate=1, keeps_output=True), None)

    Attributes:
        model: a module, or a function without arguments that runs one step.
        batch: the batch that the module is called with; None for a function, and before `on`.
        optimizer: the optimizer of the model; None ends the step after backward.
        loss: ``loss(output, batch)``; None takes ``output.loss``.
        loop: the user's loop around the model.
        parallel: the parallel spec for a plain model; None trains the model as written.
    """

    model: nn.Module | Callable[[], object]
    batch: Any = None
    optimizer: torch.optim.Optimizer | None = None
    loss: Loss | None = None
    loop: Loop = Loop()
    parallel: Parallel | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module | Callable[[], object],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        loss: Loss | None = None,
        accumulate: int = 1,
        keeps_output: bool = True,
        parallel: ParallelKind | None = None,
        world: int | None = None,
        shard: Iterable[str] | str | None = None,
        tensor: int | None = None,
        caller: str = "profile",
    ) -> TrainingStep:
        """Returns the step that the arguments of `caller` describe, without its batch; arguments as in `profile`.

        Raises:
            ConfigError: an argument is invalid, or contradicts another one.
        """
        spec = Parallel.of(model, parallel, world, shard, tensor, caller=caller)
        if not isinstance(model, nn.Module):
            if not callable(model):
                raise ConfigError(
                    f"profile(model=...) takes a torch.nn.Module or a function that runs one step, got "
                    f"{type(model).__name__}; pass the model itself"
                )
            if not keeps_output:
                raise ConfigError(
                    "profile(keeps_output=False) is about the loop around a module; a function is its own loop"
                )
        check_count(f"{caller}(accumulate={accumulate!r})", accumulate)
        check_switch(f"{caller}(keeps_output={keeps_output!r})", keeps_output)
        check_traceable(model)
        if isinstance(model, nn.Module):
            model = packed(model)
        check_optimizer(model, optimizer)
        check_loss(loss)
        return cls(model, None, optimizer, loss, Loop(accumulate, keeps_output), spec)

    def on(self, batch: Any) -> TrainingStep:
        """Returns the step with `batch`.

        Raises:
            ConfigError: the model cannot be called with `batch`, or has no parameter that requires a gradient.
        """
        check_call(self.model, batch)
        return dataclasses.replace(self, batch=batch)

    @property
    def module(self) -> nn.Module | None:
        """The model if it is a module; None for a function."""
        return self.model if isinstance(self.model, nn.Module) else None

    @property
    def is_distributed(self) -> bool:
        """Whether the user's code has sharded or replicated the model over processes."""
        return self.parallel is None and Parallel.of_distributed(self.model) is not None

    def function(self, kept: list[Any], *, drops: bool = True) -> Callable[[], object]:
        """Returns the step as a function without arguments.

        Args:
            kept: the list that holds the output and its loss until the next ones, with ``loop.keeps_output``.
            drops: whether the step sets the gradients to None at its end.
        """
        if not isinstance(self.model, nn.Module):
            return self.model
        model, batch, optimizer, loss, loop = self.model, self.batch, self.optimizer, self.loss, self.loop
        passes = optimizer.backward_passes if isinstance(optimizer, TransformedOptimizer) else 1

        def step() -> None:
            for _ in range(loop.accumulate):
                output = call(model, batch)
                if loop.keeps_output:
                    kept[:1] = [output]
                found = scalar_loss(output, batch, loss)
                if loop.keeps_output:
                    kept[:] = [output, found]
                del output
                for left in reversed(range(passes)):
                    found.backward(retain_graph=left > 0)
                del found
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if drops:
                model.zero_grad(set_to_none=True)

        return step


@dataclass(frozen=True, eq=False)
class Target:
    """A device, with its kernels and measured times, which all simulations for this target share.

    >>> Target.of(Hardware("box", "cpu", 2**34)).hardware.name
    'box'
    """

    hardware: Hardware
    kernels: Kernels
    times: PartTimes | None = None

    @classmethod
    def of(cls, hardware: Hardware, *, probe: bool = False) -> Target:
        """Returns the target for `hardware`; with `probe`, kernels run for real to be measured."""
        check_switch(f"profile(probe={probe!r})", probe)
        is_timed = probe and hardware.device_type == "cpu"
        return cls(hardware, Kernels(hardware, probe=probe), PartTimes() if is_timed else None)


def hardware_for(model: Any, hardware: Hardware | str | None) -> Hardware:
    """Returns the hardware of a ``hardware=`` argument, as `as_hardware`; None means the device of `model`."""
    return as_hardware(hardware, _device_type(model) if hardware is None else "")


def as_hardware(hardware: Any, device_type: str) -> Hardware:
    """Returns the hardware of a ``hardware=`` argument: a `Hardware`, the name of a card, or None for this machine's.

    Raises:
        ConfigError: `hardware` has another type, or no card has this name.
    """
    if hardware is None:
        return Hardware.detect(None if device_type == "meta" else device_type)
    if isinstance(hardware, str):
        return Hardware.detect("cpu") if hardware == "cpu" else _named(hardware)
    if isinstance(hardware, Hardware):
        return hardware
    raise ConfigError(
        f"hardware={hardware!r} must be a memscale.Hardware, the name of a card such as 'h100', 'cpu', or None for "
        "the device at hand"
    )


_named = functools.cache(Hardware.named)


def _device_type(model: Any) -> str:
    if isinstance(model, nn.Module):
        if any(mesh.device_type == "cuda" for mesh in map(mesh_of, model.modules()) if mesh is not None):
            return "cuda"  # with CPUOffloadPolicy the shards are on the CPU, and the computation is on the card
        for parameter in model.parameters():
            return parameter.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_traceable(model: Any) -> None:
    """Raises ConfigError for a model with scripted modules (their forward runs in C++) or with lazy parameters."""
    if isinstance(model, nn.Module) and any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise ConfigError(
            f"this is a {type(model).__name__}, which holds scripted modules: their forward runs in "
            "C++ and cannot be followed; pass the Python module that was scripted or traced"
        )
    lazy = [name for name, each in model.named_parameters() if is_lazy(each)] if isinstance(model, nn.Module) else []
    if lazy:
        raise ConfigError(
            f"the model's parameter {lazy[0]!r} has no shape yet, since its module is lazy; run a batch "
            "through the model first"
        )


def about_compiled(modules: Iterable[nn.Module], graphs: CompiledModules | None) -> tuple[str, ...]:
    """Returns notes on compiled modules: how many are simulated as graphs, and how many as written, and why."""
    compiled, followed = len(compiled_of(modules)), 0 if graphs is None else len(graphs.followed)

    def those(count: int) -> str:
        return f"{count} module{'s are' if count > 1 else ' is'} compiled, and simulated as "

    found = []
    if followed:
        found.append(
            f"{those(followed)}the graphs that AOTAutograd hands to a compiler, in fused kernels: its peak is within "
            "3 % of inductor's, with convolutions up to 7 % above; a graph break or max-autotune takes other memory"
        )
    if compiled > followed:
        why = "" if graphs is None or not graphs.reasons else f" ({next(iter(graphs.reasons))})"
        found.append(
            f"{those(compiled - followed)}written{why}: a graph frees a tensor after its last use and chooses what it "
            "keeps for backward, so a real step may take less, or more"
        )
    return tuple(found)


def check_call(model: Any, batch: Any) -> None:
    """Raises ConfigError for a batch that does not fit the model, a layout without fixed sizes, or nothing to train."""
    if not isinstance(model, nn.Module):
        if batch is not None:
            raise ConfigError("profile(step, batch) takes a batch for a module only; a function holds its own batch")
        return
    batches.check_call(model, batch)
    for tensor in (*batches.tensors(batch), *model.buffers()):
        if tensor.layout is not torch.strided and not is_sparse(tensor):
            raise ConfigError(
                f"the step has a tensor of layout {tensor.layout} and shape {list(tensor.shape)}, whose size depends "
                "on its values, so that its memory is unknown; profile and plan with a dense or a sparse tensor (COO, "
                "CSR) in its place"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        none_at_all = not any(True for _ in model.parameters())
        lacks, remedy = (
            ("parameters", "pass what trains")
            if none_at_all
            else ("parameter that requires a gradient", "call requires_grad_() on what should train")
        )
        raise ConfigError(f"this {type(model).__name__} has no {lacks}, so there is no training step; {remedy}")


def check_optimizer(model: Any, optimizer: Any) -> None:
    """Raises ConfigError for an `optimizer` of another type or model, or whose ``step`` requires arguments."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={shown(optimizer)} must be a torch.optim.Optimizer or None; pass the optimizer itself, "
            "made of the model's parameters"
        )
    if not isinstance(model, nn.Module):
        return
    own = {id(parameter) for parameter in model.parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if updated and not any(id(parameter) in own for parameter in updated):
        raise ConfigError(
            f"the optimizer updates {len(updated)} parameters and none of them is the model's, which has {len(own)}; "
            "build it on this model's parameters"
        )
    # The signature of the class: a scheduler wraps `step` of the instance, and the wrapper's signature has `self`.
    _, *given = inspect.signature(type(optimizer).step).parameters.items()
    needed = ", ".join(name for name, parameter in given if _is_required(parameter))
    if needed:
        raise ConfigError(
            f"{type(optimizer).__name__}.step needs {needed}, which the usual step of profile(model, batch) does not "
            f"give; profile a function that does one step of your loop, as in profile(lambda: optimizer.step({needed}))"
        )


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def about_key_values(outputs: Iterable[Any]) -> tuple[str, ...]:
    """Returns a note on the bytes of key-value caches in `outputs`, which models of transformers return by default.

    >>> keys = torch.ones(2, 512)
    >>> about_key_values([{"logits": keys}]), about_key_values([{"past_key_values": ((keys, keys),)}])[0][:48]
    ((), 'the output keeps 4.00 KiB of keys and values, wh')
    """
    caches = [output.get("past_key_values") for output in outputs if isinstance(output, dict)]
    nbytes = sum(_cached_bytes(cache) for cache in caches if cache is not None)
    if not nbytes:
        return ()
    return (
        f"the output keeps {format_bytes(nbytes)} of keys and values, which training does not read: "
        "model.config.use_cache = False frees them",
    )


def _cached_bytes(cache: Any) -> int:
    """Returns the bytes of the tensors in a key-value cache of any version of transformers."""
    found: dict[int, int] = {}
    to_see: list[Any] = [cache]
    while to_see:
        each = to_see.pop()
        if isinstance(each, torch.Tensor):
            found[id(each)] = each.nbytes
        elif isinstance(each, (list, tuple)):
            to_see.extend(each)
        elif "cache" in type(each).__module__:
            to_see.extend(vars(each).values())
    return sum(found.values())
