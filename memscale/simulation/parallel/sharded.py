"""The state that FSDP2 and DDP keep about a model: prepared for a simulated step, and restored after it.

`propagating` makes DTensors propagate shardings with fake tensors, and once for each kind of tensor.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memscale.core import ConfigError, fsdp_groups, fsdp_groups_of
from memscale.regions import StateSlot, read, write
from memscale.simulation.parallel.collectives import SimulatedStreams
from memscale.simulation.process.process_state import all_patched, patched

_FSDP2 = "torch.distributed.fsdp._fully_shard"
_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_DEEPSPEED = "deepspeed."
_MESHES = {"cpu", "cuda"}
_REMOTE = "torch.distributed.nn"
_MAKERS = (_FSDP1, _DEEPSPEED, _REMOTE)
# Modules of FSDP2 that call `_get_device_handle` for a device's streams.
_ASK_FOR_STREAMS = ("_fsdp_collectives", "_fsdp_param_group", "_fsdp_state")
_CONTAINERS = (dict, list, set, deque)
# FSDP2 registers these hooks at the first forward call; state_dict() and load_state_dict() run FSDP2's code then.
_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class Sharded:
    """The modules of a step that FSDP2 or DDP has distributed.

    Args:
        replicas: the modules of DDP.
        states: the states of FSDP2.
        on_card: whether the simulated device has memory of its own.

    Attributes:
        tensors: the sharded parameters of this rank, also where a forward has left gathered parameters in the modules.
        offloaded: the parameters whose shards stay in host memory, by `CPUOffloadPolicy`.
        pins: whether the offloaded shards are in pinned memory.

    Raises:
        ConfigError: a module is distributed in a way that one process cannot simulate.
    """

    def __init__(self, replicas: Sequence[Any], states: list[Any], *, on_card: bool) -> None:
        self._replicas = replicas
        self._states = states
        groups = [group for state in self._states for group in fsdp_groups(state)]
        self._parameters: list[Any] = [parameter for group in groups for parameter in group.fsdp_params]
        self.tensors = [parameter.sharded_param for parameter in self._parameters]
        kinds = {state.mesh.device_type for group in groups if (state := group.mesh_info) is not None}
        if other := sorted(kinds - _MESHES):
            raise ConfigError(
                f"the model is sharded over a mesh of {other[0]!r} devices, whose streams are not simulated; shard it "
                "over init_device_mesh('cpu', ...), or on meta, and say hardware=..."
            )
        offloaded = [parameter for parameter in self._parameters if on_card and parameter.offload_to_cpu]
        shards = (each._sharded_local_tensor for each in offloaded)
        if (own := next((each for each in shards if hasattr(each, "__tensor_flatten__")), None)) is not None:
            raise ConfigError(
                f"the model is sharded with CPUOffloadPolicy, and a shard is a {type(own).__name__}, whose copies are "
                "its own: profile it with hardware='cpu', or without the policy"
            )
        self.offloaded = [parameter.sharded_param for parameter in offloaded]
        self.pins = any(parameter.pin_memory for parameter in offloaded)

    @classmethod
    def among(cls, modules: Sequence[nn.Module], *, on_card: bool) -> Sharded | None:
        """Returns the distributed modules of a step that reaches `modules`; None if none is distributed.

        Raises:
            ConfigError: a module is distributed in a way that one process cannot simulate.
        """
        for module in modules:
            check_followed(module)
        replicas = [module for module in modules if isinstance(module, nn.parallel.DistributedDataParallel)]
        states = _fsdp_states(modules)
        return cls(replicas, states, on_card=on_card) if replicas or states else None

    def sent_at_first(self) -> Iterator[int]:
        """Yield the bytes of each flat buffer in which DDP's constructor broadcasts rank 0's parameters and buffers."""
        for replica in self._replicas:
            pieces: dict[torch.dtype, list[int]] = {}
            for tensor in (*replica.module.parameters(), *replica.module.buffers()):
                piece = pieces.setdefault(tensor.dtype, [])
                piece.append(tensor.nbytes)
                if sum(piece) >= replica.broadcast_bucket_size:
                    yield from _put_together(pieces.pop(tensor.dtype))
            for piece in pieces.values():
                yield from _put_together(piece)

    @contextmanager
    def on_streams(self, streams: SimulatedStreams) -> Iterator[None]:
        """Makes FSDP2 take its streams and events from `streams`; `as_it_was` restores the objects that FSDP2 keeps."""
        for state in self._states:
            state._device_handle = streams
            for group in fsdp_groups(state):
                group.device_handle = streams
                for owner in (group, group.comm_ctx):
                    for name, value in list(vars(owner).items()):
                        if name.endswith("_stream") and value is not None:
                            setattr(owner, name, streams.Stream())
                if hasattr(group.comm_ctx, "device_handle"):
                    group.comm_ctx.device_handle = streams
        modules = (sys.modules[f"{_FSDP2}.{name}"] for name in _ASK_FOR_STREAMS)
        with all_patched((module, "_get_device_handle", lambda *_, **__: streams) for module in modules):
            yield

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Restores FSDP2's state after the body; DDP's Python state is restored with the attributes of its module."""
        places: list[tuple[StateSlot, Any]] = []
        _add(self._states, places, set())
        for parameter in self._parameters:
            module = parameter._module_info.module
            places += [(hooks, read(hooks)) for name in _HOOKS if (hooks := module.__dict__.get(name)) is not None]
        locals_of = [(tensor, tensor._local_tensor) for tensor in self.tensors]
        try:
            yield
        finally:
            for tensor, local in locals_of:
                tensor._local_tensor = local
            for place, content in places:
                write(place, content)

    def begin(self) -> None:
        """Resets FSDP2's and DDP's state to that before a first step, so that later buffers are the simulation's."""
        for state in self._states:
            for group in fsdp_groups(state):
                for parameter in group.fsdp_params:
                    # FSDP2 frees a gathered parameter by resizing its storage, and would resize the caller's.
                    parameter._setattr_on_modules(parameter.sharded_param)
                    parameter.sharded_state = type(parameter.sharded_state).SHARDED
                    parameter.all_gather_outputs = []
                    parameter.__dict__.pop("_unsharded_param", None)
                    if "unsharded_accumulated_grad" in vars(parameter):  # else a property of the gathered parameter
                        parameter.unsharded_accumulated_grad = None
                group._sharded_state = type(group._sharded_state).SHARDED
                group._reset_sharded_params = False  # the shards have other storages in the simulation
                group._all_gather_result = group._partial_reduce_output = None
        for replica in self._replicas:
            _renew(replica)


def _put_together(piece: list[int]) -> Iterator[int]:
    if len(piece) > 1:  # a single tensor is sent from its own storage, without a flat buffer
        yield sum(piece)


def check_followed(module: nn.Module) -> None:
    """Raises ConfigError for a module of FSDP1, DeepSpeed or another process, which one process cannot simulate."""
    kind: Any = type(module)
    name, maker = kind.__name__, _maker(kind)
    if maker == _FSDP1:
        raise ConfigError(
            f"a {name} is of FSDP1, which puts all parameters of a unit into one flat tensor in C++ and Python that "
            "cannot be followed; shard the model with FSDP2: fully_shard(block) for each block, then fully_shard(model)"
        )
    if maker == _DEEPSPEED or any(hasattr(each, "ds_id") for each in module._parameters.values()):
        raise ConfigError(
            f"{name} is DeepSpeed's (ZeRO), which partitions parameters by hooks that cannot be followed; for what "
            "ZeRO-3 does, profile the plain model with parallel='fsdp2', world=..."
        )
    if maker == _REMOTE:
        raise ConfigError(
            f"a {name} computes in another process; a simulation is of one: profile the module that is there"
        )


@functools.cache
def _maker(cls: type) -> str:
    """Returns the package of `_MAKERS` that a class or one of its base classes is of; "" if none."""
    modules = [base.__module__ for base in cls.__mro__]
    return next((maker for maker in _MAKERS if any(each.startswith(maker) for each in modules)), "")


def _fsdp_states(modules: Sequence[nn.Module]) -> list[Any]:
    if f"{_FSDP2}._fsdp_state" not in sys.modules:
        return []  # no module can be sharded, and the import takes a second
    state_of: Callable[[nn.Module], Any] = sys.modules[f"{_FSDP2}._fsdp_state"]._get_module_fsdp_state
    found = {id(state): state for module in modules if (state := state_of(module)) is not None}
    return list(found.values())


def mesh_of(module: nn.Module) -> Any:
    """Returns the mesh over which FSDP2 has sharded this module's own group; None if FSDP2 has not sharded it."""
    return next((group.mesh_info.mesh for group in fsdp_groups_of(module)), None)


def _add(thing: Any, places: list[tuple[StateSlot, Any]], seen: set[int]) -> None:
    """Adds to `places` the attributes of FSDP2's objects and the containers in these, with their contents."""
    if id(thing) in seen:
        return
    if isinstance(thing, _CONTAINERS):
        seen.add(id(thing))
        content = read(thing)
        places.append((thing, content))
        for part in content.values() if isinstance(content, dict) else content:
            _add(part, places, seen)
    elif isinstance(thing, tuple):
        for part in thing:
            _add(part, places, seen)
    elif type(thing).__module__.startswith(_FSDP2) and not isinstance(thing, (nn.Module, torch.Tensor)):
        _add(getattr(thing, "__dict__", ()), places, seen)


def _remembers(state: Any) -> bool:
    """Whether a call of a communication hook may change the hook's `state`."""
    if isinstance(state, torch.distributed.ProcessGroup):
        return False
    fields = getattr(state, "__dict__", None) or getattr(type(state), "__slots__", ())  # PowerSGD's are in slots
    return isinstance(state, _CONTAINERS) or bool(fields)


def _renew(replica: Any) -> None:
    """Gives a DDP module a new reducer, whose buckets are in the simulation.

    The module's own reducer is in C++, waits for gradients of the caller's parameters, and records the order in which
    gradients arrive; that order cannot be restored.
    """
    hooks = replica._comm_hooks
    if any(_remembers(state) for _, state in hooks):
        raise ConfigError(
            "the DistributedDataParallel has a communication hook with a state of its own, which a simulated step "
            "would change (PowerSGD's); profile before register_comm_hook, and add the bytes of the hook's state"
        )
    parameters, sparse = replica._build_params_for_reducer()
    names = replica._build_debug_param_to_name_mapping(parameters)
    replica._ddp_init_helper(parameters, sparse, names, replica.static_graph)
    replica._has_rebuilt_buckets = False
    if replica.static_graph:
        replica.reducer._set_static_graph()
        replica.logger._set_static_graph()
    distributed: Any = torch.distributed
    for hook, state in hooks:
        distributed._register_comm_hook(replica.reducer, state, hook)


_DTENSOR = "torch.distributed.tensor._sharding_prop"


@contextmanager
def propagating() -> Iterator[None]:
    """Makes DTensors propagate shapes outside the simulation's dispatch mode."""
    if _DTENSOR not in sys.modules:
        yield
        return
    propagator, name = sys.modules[_DTENSOR].ShardingPropagator, "_propagate_tensor_meta_non_cached"
    propagate = getattr(propagator, name)

    def apart(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return propagate(self, schema)

    with patched(propagator, name, apart):
        yield
