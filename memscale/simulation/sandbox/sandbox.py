"""The sandbox of a simulated step: prepares the caller's own objects, and restores their exact state afterwards."""

from __future__ import annotations

import contextvars
import importlib
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from memscale.algebra import placing_in
from memscale.core import batches, own_threads, simulation
from memscale.core import tensors as tensors_of
from memscale.optimizers import TransformedOptimizer, counts_on_host
from memscale.regions import without_side_effects
from memscale.runtime import host_parameter_of, runtimes_replaced
from memscale.simulation.dispatch.fake_mode import FakeMode
from memscale.simulation.dispatch.live_storages import LiveStorages
from memscale.simulation.dispatch.trace_builder import Course, StorageRecord
from memscale.simulation.kernels.kernels import Kernels
from memscale.simulation.kernels.shapes import is_sparse
from memscale.simulation.parallel.collectives import SimulatedStreams
from memscale.simulation.parallel.sharded import Sharded, propagating
from memscale.simulation.process.draws import Draws
from memscale.simulation.process.fake_storages import FakeStorages
from memscale.simulation.process.process_state import begin_alike, patched, process_kept
from memscale.simulation.rules.few_bits import quantization_tensors
from memscale.simulation.rules.recurrences import flattened_bytes, weights_of
from memscale.simulation.sandbox.compiled_modules import CompiledModules, compiled_of
from memscale.simulation.sandbox.device_spoofing import DeviceSpoofing
from memscale.simulation.sandbox.interceptions import (
    BackwardThread,
    calls_followed,
    optimizers_followed,
    reads_checked,
    threads_followed,
)
from memscale.simulation.sandbox.left_behind import LeftBehind
from memscale.simulation.sandbox.runtimes import CountingRuntimes, host_bytes, offloaded_shards
from memscale.simulation.sandbox.step_scope import StepScope, contents_kept, on_cpu, with_storages
from memscale.simulation.schedule.clock import Clock

# The number of buckets that DDP has in flight while it is built: max_in_flight in torch/csrc/distributed/c10d/comm.cpp.
_PIECES_AT_ONCE = 2


class Simulation:
    """A context in which the caller's step runs without computing, and without lasting changes.

    On entry, parameters on ``meta`` or on a GPU get fake CPU contents. On exit all objects that the step can reach have
    their former state: contents, gradients, version counters, optimizer state, attributes, random states.

    Args:
        step: one pass of the loop.
        model: the trained module; modules have their paths in it as names. None names modules by class.
        optimizer, batch: the optimizer and the batch of the step.
        kernels: the kernels of the simulated device.
        spoofs: whether the step's own code sees the simulated device.
        draws: the random numbers that the step draws.
    """

    def __init__(
        self,
        step: Callable[[], object],
        model: nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        batch: Any,
        *,
        kernels: Kernels,
        spoofs: bool = True,
        draws: Draws = Draws.SEEDED,
    ) -> None:
        self._draws = draws
        self._spoofs = spoofs and kernels.is_cuda
        self.spoofing: DeviceSpoofing | None = None
        self.compiled: CompiledModules | None = None
        self._thread: BackwardThread | None = None
        self.scope = StepScope(model, optimizer, step, batch)
        self._sharded = Sharded.among(self.scope.modules, on_card=kernels.is_cuda)
        shards = [] if self._sharded is None else self._sharded.tensors
        given = batches.tensors(batch)
        inputs = with_storages(given)
        scales = [tensor for module in self.scope.modules for tensor in quantization_tensors(module).values()]
        reached = [*(tensor for _, _, tensor in self.scope.tensors), *shards, *scales, *inputs]
        self._leaves = list({id(tensor): tensor for tensor in reached}.values())
        self._tensors = with_storages(self._leaves)
        self._meets_sparse = any(map(is_sparse, [*given, *self._leaves]))
        self._inputs = inputs
        # Beside a model on meta, tensors of its own code are real, such as a weight norm's; other meta tensors are
        # unused.
        self._own = [] if model is None else with_storages([*model.parameters(), *model.buffers()])
        self._kernels = kernels
        self.clock = Clock(kernels.hardware)
        self._stack = ExitStack()
        self._paths = _module_paths(model, self.scope.modules)
        order = {key: at for at, key in enumerate(self._paths)}
        # In the order of the tree; modules outside of it come last.
        self._modules = sorted(self.scope.modules, key=lambda module: order.get(id(module), len(order)))
        self._placing = [(module, region) for module in self.scope.modules for region in placing_in(module)]
        self._contents: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._aliases: Counter[int] = Counter()  # aliases by storage
        self._variables = contextvars.Context()  # context variables, which a step may set
        self.mode: FakeMode
        self.runtimes: CountingRuntimes

    def __enter__(self) -> Simulation:
        stack = self._stack
        try:
            stack.enter_context(own_threads())
            self._variables = contextvars.copy_context()
            stack.enter_context(process_kept())
            if torch.get_default_device().type == "meta":  # left over from building the model on meta
                stack.enter_context(torch.device("cpu"))
            stack.enter_context(without_side_effects(self.scope, self._leaves, self._tensors, computes=False))
            stack.callback(self.scope.put_back_classes)
            begin_alike()
            if self._sharded is not None:
                stack.enter_context(self._sharded.as_it_was())
            fakes = FakeStorages()
            inputs = [*self._inputs, *self._own]
            given = stack.enter_context(on_cpu(self._leaves, self._tensors, inputs, fakes))
            self._contents = stack.enter_context(contents_kept(self._tensors))
            self._aliases.update(alias.untyped_storage()._cdata for _, alias in self._contents)
            self.mode = FakeMode(self._kernels, self._residents(), self.clock, self._draws)
            self.mode.meets_sparse = self._meets_sparse
            self.mode.storages.given = given
            stack.callback(self.mode.storages.end)
            stack.callback(self.mode.recorder.collections.end)
            self.runtimes = CountingRuntimes(self.mode, self.clock, self._aliases)
            stack.enter_context(optimizers_followed(self._before_optimizer, self._after_optimizer))
            stack.enter_context(calls_followed(self.mode.recorder, self._paths))
            stack.enter_context(threads_followed(self.mode))
            # Compiled functions run as Python: a compiled function has inlined the calls that the simulation
            # intercepts.
            compiler: Any = importlib.import_module("torch._dynamo.eval_frame")
            stack.enter_context(patched(compiler, "_callback_from_stance", lambda callback: None))
            stack.enter_context(self.mode.randomness.installed(counts=self._kernels.device_type == "cpu"))
            if self._kernels.is_cuda and (compiled := compiled_of(self.scope.modules)):
                self.compiled = CompiledModules(self.mode.recorder, self._kernels.programs)
                stack.enter_context(self.compiled.installed(compiled))
            self._record_residents()
            offloaded = [] if self._sharded is None else with_storages(self._sharded.offloaded)
            for tensor in offloaded:
                self.mode.storages.mark_offloaded(tensor)
            stack.enter_context(reads_checked(self.mode))
            if self._kernels.is_cuda:
                self._thread = BackwardThread(self.mode.recorder)
                stack.enter_context(self._thread.installed())
            device_type: Callable[[torch.Tensor], str]
            device_type = partial(_device_type, self.mode.storages, self._kernels.device_type)
            capability, choices = self._kernels.capability, self.mode.choices
            stack.enter_context(
                simulation(self._kernels.device_type, device_type, capability, choices, self.mode.randomness)
            )
            stack.enter_context(runtimes_replaced(self.runtimes.in_place_of))
            if self._spoofs:
                self.spoofing = DeviceSpoofing(
                    self._kernels.hardware, self._kernels.capability, lambda tensor: device_type(tensor) == "cuda"
                )
                stack.enter_context(self.spoofing.given())
            stack.enter_context(propagating())
            if self._sharded is not None and self._kernels.device_type != "cpu":  # a CPU has no streams
                stack.enter_context(self._sharded.on_streams(SimulatedStreams(self.clock)))
                if offloaded:
                    stack.enter_context(offloaded_shards(self.mode, self.clock, pins=self._sharded.pins))
            stack.enter_context(self.mode)
            if self._sharded is not None:
                self._sharded.begin()
            self._place_streamed()
            stack.enter_context(self._kernels.chosen(self._is_below))
        except BaseException:
            stack.close()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        left = LeftBehind(self.mode.storages)
        self.mode.recorder.graphs.end()
        self._stack.close()
        self._contents.clear()  # releases the caller's storages
        self._variables = contextvars.Context()
        if error is not None:
            _let_go_of_frames(error)
        left.clear(refuses=error is None)

    def step(self, step: Callable[[], object]) -> None:
        """Runs `step` and records it as one step."""
        self.mode.builder.begin_step()
        self.clock.begin_step()
        self.mode.recorder.course = Course()
        self.mode.values.begin_step()
        if self._thread is not None:
            self._thread.begin_step()
        self._variables.run(step)
        self.mode.recorder.graphs.let_go()
        self.clock.end_step()
        self.mark_gradients()
        self._forget_former_contents()
        for tensor in self.scope.replaced(self._tensors):
            self.mode.storages.gone(tensor.untyped_storage())

    def let_go(self, kept: list[Any]) -> None:
        """Drops the values that the loop keeps from step to step.

        The counting runtimes, which free the tensors that the graph of these values saved, must be active. The frees
        belong to no step, and are removed from the events.
        """
        builder = self.mode.builder
        count = len(builder.events)
        kept.clear()
        self.mode.recorder.graphs.let_go()
        del builder.events[count:], builder.event_ops[count:]

    def _forget_former_contents(self) -> None:
        for tensor, alias in self._contents:
            # The tensor has new contents; only the simulation still holds the former contents.
            if tensor.untyped_storage()._cdata != alias.untyped_storage()._cdata:
                self.mode.storages.gone(alias.untyped_storage())

    def _place_streamed(self) -> None:
        """Places streamed parameters on the host before the step, as in every step but the first.

        The order is that of `Module.to`: the device memory of one region is free when the next region moves.
        """
        builder = self.mode.builder
        for module, region in self._placing:
            parts = with_storages([*module.parameters(), *module.buffers()])
            last = max((self.mode.storages.number(part) for part in parts), default=-1)
            begin = len(builder.events)
            region.place(list(module.parameters()), torch.device("cpu"))
            self._forget_former_contents()
            at = builder.events.index(last + 1) + 1 if last >= 0 else begin
            for column in (builder.events, builder.event_ops):
                column[at:] = [*column[begin:], *column[at:begin]]
        for optimizer in self.scope.optimizers:
            for tensor in optimizer.below() if isinstance(optimizer, TransformedOptimizer) else ():
                self.mode.storages.mark_offloaded(tensor)
        # Optimizer states are on the tier of their parameter. On a CPU, the RAM is the device.
        for optimizer in self.scope.optimizers if self._kernels.device_type != "cpu" else ():
            for group in filter(counts_on_host, optimizer.param_groups):
                for parameter in group["params"]:
                    # Adagrad's states exist before the step.
                    if torch.is_tensor(count := optimizer.state.get(parameter, {}).get("step")):
                        self.mode.storages.mark_offloaded(count)
            for parameter, state in optimizer.state.items():
                if self._is_below(parameter):
                    for tensor in _tensors_of_state(state):
                        self.mode.storages.mark_offloaded(tensor)

    def _is_below(self, parameter: torch.Tensor) -> bool:
        """Whether `parameter` is below the device: a region streams the parameter, or FSDP2 offloads its shard."""
        if host_parameter_of(parameter, self.runtimes.by_storage) is not None:
            return True
        return any(map(self.mode.storages.is_offloaded, with_storages([parameter])))

    def below(self) -> dict[str, int]:
        """Returns the most bytes that each tier below the device held."""
        found = self.runtimes.high_water_bytes()
        if self._sharded is not None and self._sharded.offloaded:
            for tier, nbytes in host_bytes(self.mode.builder, pins=self._sharded.pins).items():
                found[tier] = found.get(tier, 0) + nbytes
        return found

    def mark_gradients(self) -> None:
        """Records the present ``.grad`` tensors of all reached parameters in the category "gradient"."""
        storages = self.mode.storages
        for tensor in self._leaves:
            if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
                for part in with_storages([tensor.grad]):
                    storages.mark(part, "gradient", storages.record(with_storages([tensor])[0]).path)

    def _record_residents(self) -> None:
        """Records the storages from before the step.

        The order is that of `Module.to`, since the neighbours of a storage decide where free memory arises later.
        """
        storages, seen = self.mode.storages, set[int]()
        flattens = self._kernels.is_cuda and not self._placing
        for module in self._modules:
            for part, tensors in _children_first(module, seen):
                for tensor in with_storages(tensors):
                    if not tensor.is_meta:
                        storages.record(tensor)
                if flattens and isinstance(part, nn.RNNBase) and (nbytes := flattened_bytes(part)):
                    storages.put_together(weights_of(part), nbytes)
        for tensor in self._tensors:
            if not tensor.is_meta:
                storages.record(tensor)
        if self._sharded is None or not self._kernels.is_cuda:
            return
        builder, sent = self.mode.builder, deque[int]()
        for nbytes in self._sharded.sent_at_first():
            if len(sent) == _PIECES_AT_ONCE:
                builder.death(sent.popleft())
            sent.append(builder.birth(StorageRecord(nbytes, -1, "temporary")))
        for number in sent:
            builder.death(number)

    def _residents(self) -> dict[int, tuple[str, str]]:
        """Returns the category and the name of each storage from before the step, by address."""
        found: dict[int, tuple[str, str]] = {}

        def enter(tensor: torch.Tensor | None, category: str, name: str) -> None:
            for part in with_storages([] if tensor is None else [tensor]):
                found.setdefault(part.untyped_storage()._cdata, (category, name))

        # In the order of the module tree, so that a tied weight has its name in `named_parameters`.
        for module in self._modules:
            prefix = f"{path}." if (path := self._paths.get(id(module), "")) else ""
            for name, parameter in module._parameters.items():
                enter(parameter, "parameter", prefix + name)
            for name, buffer in {**module._buffers, **quantization_tensors(module)}.items():
                enter(buffer, "buffer", prefix + name)
        for optimizer in self.scope.optimizers:
            for state in optimizer.state.values():
                for tensor in _tensors_of_state(state):
                    enter(tensor, "optimizer state", "")
        for tensor in self._inputs:
            enter(tensor, "input", "")
        for tensor in self._leaves:
            if tensor.requires_grad and tensor.is_leaf:
                enter(tensor, "parameter", "")
        return found

    # -- hooks: where the step is --------------------------------------------------------------------------------------

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.mark_gradients()
        self.mode.recorder.course.optimizing = True
        # An optimizer that evaluates the loss itself, such as LBFGS, decides by the loss how often to evaluate it.
        self.mode.searching = any(map(callable, (*args[1:], *kwargs.values())))

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        self.mode.recorder.course.optimizing = self.mode.searching = False
        for parameter, state in optimizer.state.items():
            path = self.mode.storages.record(with_storages([parameter])[0]).path
            for tensor in _tensors_of_state(state):
                self.mode.storages.mark(tensor, "optimizer state", path)


def _tensors_of_state(state: Any) -> list[torch.Tensor]:
    return with_storages(tensors_of(dict(state) if isinstance(state, dict) else state))


def _device_type(storages: LiveStorages, simulated: str, tensor: torch.Tensor) -> str:
    """Returns the device type that code sees for `tensor`: the simulated one, ``"cpu"`` if offloaded, or ``"meta"``."""
    if tensor.is_meta:
        return "meta"
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return "cpu" if plain and storages.is_offloaded(tensor) else simulated


def _let_go_of_frames(raised: BaseException) -> None:
    """Clears the frames of an error's traceback, which hold tensors and guards of the step.

    A tensor whose printing fails leaves a guard in a frame of PyTorch that turns `torch.func` off for the thread.
    """
    seen: set[int] = set()
    error: BaseException | None = raised
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[tuple[nn.Module, list[torch.Tensor]]]:
    if id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            yield from _children_first(child, seen)
        yield module, [each for each in (*module._parameters.values(), *module._buffers.values()) if each is not None]


def _module_paths(model: nn.Module | None, modules: list[nn.Module]) -> dict[int, str]:
    """Returns id of a module -> its name.

    The name is the path in `model`; for a module outside, the class of the outermost module and the path from there.
    """
    paths = {} if model is None else {id(module): path for path, module in model.named_modules()}
    children = {id(child) for module in modules for child in module._modules.values() if child is not None}
    roots = [module for module in modules if id(module) not in children and id(module) not in paths]
    for root in roots:
        prefix = "" if model is None and len(roots) == 1 else type(root).__name__
        for path, module in root.named_modules(prefix=prefix):
            paths.setdefault(id(module), path)
    return paths
