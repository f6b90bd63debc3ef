"""Simulation: the bytes, the operators and the times of a training step, found without running the step.

The path of `profile(model, batch)` through the package, in reading order:

1. `step`: the training step as a value (`TrainingStep`), and the device (`Target`). `checks` validates the step, and
   `packed` packs quantized layers on meta. `record` simulates the step under a plan, twice: the first step makes the
   optimizer's states. `profiler` runs real steps where a step cannot be simulated (`measured/`).
2. `sandbox/`: finds the objects that the step can reach (`step_scope`), replaces tensors off the CPU by `stand_ins`,
   and restores all objects afterwards. `process/` patches PyTorch, for the simulation's threads alone.
3. `dispatch/`: `fake_mode` returns fake tensors from each operator. `operators` holds what is independent of values:
   the layouts of results (`kernels/shapes`) and the memory of the kernels (`kernels/`). `values` tracks known values;
   `in_place_sums` finds sums that PyTorch makes in place. `parallel/`: collectives, and the state that FSDP2 and DDP
   keep of a model.
4. `schedule/`: the times of operators and copies, by the clock that the offload engine waits on.
5. `dispatch/step_recorder` records the effects of each operator, and `live_storages` the births and deaths of storages,
   in a `trace_builder`, which returns the `trace`: immutable data.
6. Functions of a trace: `memory` replays it in the device's allocator (`allocator/` is CUDA's), `schedule/schedule`
   lists the queues, `attribution` sums bytes and seconds by module, `analysis` makes the `Profile`.
7. `results`: the `Profile`, frozen data; `reports` prints and draws it.
"""

from memscale.simulation.analysis import analyse
from memscale.simulation.attribution import (
    OUTSIDE,
    Attribution,
    Interval,
    attribute,
    given_bytes,
    operators_of,
    runs_of,
    shares,
    turns_of,
)
from memscale.simulation.dispatch.lazy_values import NeedsValues
from memscale.simulation.memory import memory
from memscale.simulation.packed import pack_weights
from memscale.simulation.parallel.spec import Parallel, ParallelKind
from memscale.simulation.process.garbage import few_collections
from memscale.simulation.profiler import MemoryProfiler, profile_of
from memscale.simulation.record import check_plan, record, record_in_a_row
from memscale.simulation.results import Holding, Profile, ProfileDiff, differences
from memscale.simulation.schedule.schedule import Schedule, queues_of
from memscale.simulation.step import Loop, Target, TrainingStep, as_hardware, hardware_for
from memscale.simulation.trace import Phase, Trace
