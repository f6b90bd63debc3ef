"""A step that never ran: what it would hold of the device, when, and for how long.

The journey of `profile(model, batch)`, in the order in which to read:

1. `step`: the training step as a value, whose making `checks` what it is made of, and `packed` where it has layers in
   few bits without numbers; and the device, a `Target`. `record` simulates the step under a plan, twice (the first
   step makes the optimizer's states). `profiler` asks for that, and for real steps where a step
   cannot be simulated (`measured/`).
2. `sandbox/`: finds what the step can reach (`step_scope`), gives what is not on the CPU `stand_ins` there, and puts
   everything back afterwards; `process/` has its patches of PyTorch (`process_state`), for its own threads alone.
3. `dispatch/`: `fake_mode` answers each operator with fake tensors. `operators` and `call_effects` know what it
   does whatever its values are: the layout of its results (`kernels/shapes`), what the kernel takes beside them
   (`kernels/`). `values` knows which values are known all the same; `in_place_sums` what happens in place where no mode
   is active. `parallel/`: collectives, and what FSDP2 and DDP keep, where the step is one process's of several.
4. `schedule/`: when each operator and each copy runs, by a clock that the offload engine's waits go by.
5. `dispatch/step_recorder` notes what each operator did, and `live_storages` when a storage is made and when the last
   tensor over it dies, in a `trace_builder`. What it returns at the end is a `trace`: immutable data.
6. Functions of a trace: `memory` gives the blocks, the peaks and the reserved bytes of the device's allocator
   (`allocator/` replays CUDA's), `schedule/schedule` the queues, `attribution` what each module holds and runs,
   `analysis` a `Profile`.
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
from memscale.simulation.dispatch.values import NeedsValues
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
