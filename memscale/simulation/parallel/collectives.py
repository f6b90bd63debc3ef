"""What a collective does in a simulated step: nothing is sent, and every process is taken to do what this one does."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from memscale.core import ConfigError
from memscale.simulation.kernels.shapes import results_of

#: The namespace of the operators that `torch.distributed` calls for its process groups.
NAMESPACE = "c10d"
# Functional ones return new tensors, as other operators do; waiting for one gives the tensor itself.
_WAITS = {"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"}
_WRITES_NOTHING = {"c10d::barrier", "c10d::monitored_barrier_", "c10d::send"}
_SUM = 0  # ReduceOp.SUM, as operators are given it
_ENGINE = "_engine_run_backward"  # the function of torch that calls the engine of autograd


class Collective(NamedTuple):
    """A call of a collective.

    Attributes:
        written: the tensors that it writes to.
        given: those that it reads; in place, they are the same.
        factor: what a sum over the processes is of one's part; 1 if it is no sum.
    """

    written: list[torch.Tensor]
    given: list[torch.Tensor]
    factor: int

    def compute(self) -> None:
        """Do what it does where all processes have the same."""
        for at, tensor in enumerate(self.written):
            source = self.given[min(at, len(self.given) - 1)].flatten()
            times = -(-tensor.numel() // max(1, source.numel()))
            tensor.copy_(source.repeat(times)[: tensor.numel()].view(tensor.shape) * self.factor)


def is_wait(op: Any) -> bool:
    """Whether `op` waits for the result of a functional collective, and returns it."""
    return op.name() in _WAITS


def collective(op: Any, args: Any) -> Collective:
    """The call of an operator of `NAMESPACE`.

    Raises:
        ConfigError: it takes from another process what only that one has.
    """
    name = op.name()
    if name.startswith("c10d::recv"):
        raise ConfigError(
            f"the step goes through {name}, which takes what another process has computed, as stages of a pipeline do; "
            "profile the module of one stage by itself, with a batch of what it is sent"
        )
    written = [] if name in _WRITES_NOTHING else results_of(args[0])
    given = results_of(args[1]) if len(args) > 1 else []
    return Collective(written, given or written, _factor(args))


def _factor(args: Any) -> int:
    given: list[Any] = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
    objects = {arg._type().name(): arg for arg in given}
    if "ReduceOp" not in objects or objects["ReduceOp"].op() != _SUM:
        return 1
    return dist.ProcessGroup.unbox(objects["ProcessGroup"]).size()


class Works:
    """What collectives return beside tensors: work that is done at once.

    Attributes:
        of: the names of the collectives that were called.
    """

    def __init__(self) -> None:
        self.of: dict[str, None] = {}
        # C++ keeps the work and not its object in Python, without which it would wait for ever.
        self._of_reducer: list[_Done] = []

    def returned(self, op: Any, args: Any, written: list[torch.Tensor]) -> Any:
        """What this call of `op` returns."""
        self.of[op.name()] = None
        returned = [args[0] if "Tensor" in str(value.type) else self._work(written) for value in op._schema.returns]
        return returned[0] if len(returned) == 1 else tuple(returned)

    def notes(self, *, on_card: bool) -> list[str]:
        """What is not known of the step because of them."""
        if not self.of or not on_card:
            return []
        return [
            f"between processes the step sends ({', '.join(self.of)}), whose time is not in its seconds; what NCCL "
            "takes for itself, and what the allocator keeps apart for the streams of FSDP2, is not in its bytes"
        ]

    def _work(self, written: list[torch.Tensor]) -> Any:
        if torch._C._current_graph_task_id() == -1 or not _from_engine():
            self._of_reducer.clear()
            return torch._C._distributed_c10d.FakeWork().boxed()
        # DDP's reducer takes a bucket's result from the future, and a fake work has none.
        self._of_reducer.append(_Done(written))
        return self._of_reducer[-1].boxed()


def _from_engine() -> bool:
    """Whether C++ in the engine of autograd calls, which is a reducer, and no hook in Python."""
    frame = sys._getframe(1)
    inside = frame.f_globals["__name__"].rpartition(".")[0].rpartition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        frame = frame.f_back
    return frame.f_code.co_name == _ENGINE


class _Done(dist.Work):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, *_: Any) -> bool:
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        self._tensors = []  # a bucket is to die when its reducer lets it go
        return future
