"""The names of `memscale.core` that need PyTorch; `memscale.core` imports them on first use."""

from memscale.core import batches, internals, pytrees
from memscale.core.assembled import Assembled, assembled_in, is_of_modules, modules_in
from memscale.core.batches import Loss, call, check_loss, scalar_loss
from memscale.core.distributed import fsdp_groups, fsdp_groups_of, in_process_group
from memscale.core.experiments import found_once
from memscale.core.internals import OpOverload
from memscale.core.pytrees import tensors, unflatten
from memscale.core.simulating import (
    compute_capability,
    device_type,
    is_alone,
    is_own_thread,
    joining,
    one_at_a_time,
    own_threads,
    simulated,
    simulating,
    simulation,
)
from memscale.core.values import Value, factory, first_line, from_data, spellings
from memscale.core.versions import changed_error, described, version, versions
