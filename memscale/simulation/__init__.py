"""Simulation: the bytes, the operators and the times of a training step, found without running the step.

The path of `profile(model, batch)` through the package, in reading order:

1. `step`: the training step as a value (`TrainingStep`), and the device (`Target`); `rules/few_bits` packs quantized
   layers on meta. `record` simulates the step under a plan, twice: the first step makes the optimizer's states. Real
   steps run where a step cannot be simulated (`measured/`).
2. `sandbox/`: finds the objects that the step can reach and gives tensors fake contents (`step_scope`), and restores
   all objects afterwards. `process/` patches PyTorch, for the simulation's threads alone.
3. `dispatch/`: `fake_mode` returns fake tensors from each operator. `operators` holds what is independent of values:
   the layouts of results (`kernels/shapes`) and the memory of the kernels (`kernels/`). `step_values` tracks known
   values. `parallel/`: collectives, and the state that FSDP2 and DDP keep of a model.
4. `schedule/`: the times of operators and copies, by the clock that the offload engine waits on. `timeline` gives the
   events of a trace to the clock of other hardware.
5. `dispatch/step_recorder` records the effects of each operator, and `live_storages` the births and deaths of storages,
   in a `trace_builder`, which returns the `trace`: immutable data.
6. Functions of a trace: `analysis` replays it in the device's allocator (`allocator/` is CUDA's) and makes the
   `Profile`, `schedule/schedule` lists the queues, `attribution` sums bytes and seconds by module.
7. `results`: the `Profile`, frozen data; `reports` prints and draws it.
"""

from memscale.simulation.analysis import analyse, memory
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
from memscale.simulation.parallel.spec import Parallel, ParallelKind
from memscale.simulation.process.process_state import few_collections
from memscale.simulation.record import MemoryProfiler, check_plan, profile_of, record, record_in_a_row
from memscale.simulation.results import Holding, Profile, ProfileDiff, differences
from memscale.simulation.rules.few_bits import pack_weights
from memscale.simulation.schedule.clock import timeline
from memscale.simulation.schedule.schedule import Schedule, queues_of
from memscale.simulation.step import Loop, Target, TrainingStep, as_hardware, check_optimizer, hardware_for
from memscale.simulation.trace import Phase, Trace
