"""A step that never ran: what it would hold of the device, when, and for how long.

The journey of `profile(model, batch)`, in the order in which to read:

1. `step`: the training step as a value, whose making `checks` what it is made of, and `packed` where it
   has layers in few bits without numbers; `target`: the device. `record`
   simulates the step under a plan, twice (the first step makes the optimizer's states). `profiler` asks for that, and
   for real steps where a step cannot be simulated (`measured/`).
2. `sandbox/`: finds what the step can reach (`step_scope`), gives what is not on the CPU `stand_ins` there, and puts
   everything back afterwards (`process_state`).
3. `dispatch/`: `hollow_mode` answers each operator with `hollow` tensors. `operators` and `call_effects` know what it
   does whatever its values are: the layout of its results (`kernels/shapes`), what the kernel takes beside them
   (`kernels/`). `values` knows which values are known all the same; `in_place_sums` what happens in place where no mode
   is active. `parallel/`: collectives, and what FSDP2 and DDP keep, where the step is one process's of several.
4. `schedule/`: when each operator and each copy runs, by a clock that the offload engine's waits go by.
5. `dispatch/books` enters what each operator did, and `live_storages` notices when a storage is made and when the last
   tensor over it dies, in the `ledger`: births and deaths as data.
6. `analysis`: turns the ledger into peaks, by category and module, with the sizes that the device's allocator gives
   (`allocator/` replays CUDA's).
   `simulated_step` keeps the same books for whoever plans: `attribution` takes them apart by modules and
   intervals.
7. `results`: the `Profile`, frozen data; `reports` prints and draws it.
"""

from memscale.simulation.attribution import OUTSIDE, Attribution, Interval
from memscale.simulation.dispatch.values import NeedsValues
from memscale.simulation.ledger import Ledger, Phase
from memscale.simulation.packed import pack_weights
from memscale.simulation.parallel.spec import Parallel, ParallelKind
from memscale.simulation.profiler import MemoryProfiler, profile_of
from memscale.simulation.record import check_plan, record, record_in_a_row
from memscale.simulation.results import Holding, Profile, ProfileDiff, differences
from memscale.simulation.sandbox.garbage import few_collections
from memscale.simulation.schedule.schedule import Schedule, queues_of
from memscale.simulation.simulated_step import SimulatedStep
from memscale.simulation.step import Loop, TrainingStep
from memscale.simulation.target import Target, as_hardware, hardware_for

__all__ = [
    "OUTSIDE",
    "Attribution",
    "Holding",
    "Interval",
    "Ledger",
    "Loop",
    "MemoryProfiler",
    "NeedsValues",
    "Parallel",
    "ParallelKind",
    "Phase",
    "Profile",
    "ProfileDiff",
    "Schedule",
    "SimulatedStep",
    "Target",
    "TrainingStep",
    "as_hardware",
    "check_plan",
    "differences",
    "few_collections",
    "hardware_for",
    "pack_weights",
    "profile_of",
    "queues_of",
    "record",
    "record_in_a_row",
]
