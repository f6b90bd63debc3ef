"""Snapshots of what a region depends on, and replays of the region from a snapshot."""

from memscale.regions import functorch_state, hidden_changes
from memscale.regions.argument_spec import ArgumentSpec, refuse_iterators, restore
from memscale.regions.captures import NOWHERE, Captures, SharedCaptures
from memscale.regions.class_cache import cached_by_class
from memscale.regions.code import assigned_globals, closed_over, code_names, function_of, global_names
from memscale.regions.environment import Environment, accelerators
from memscale.regions.hidden_changes import (
    memory_of,
    moved,
    refused,
    running_statistics,
    storages,
    takes_batch_statistics,
)
from memscale.regions.kinds import CONSTANT, refuse_lazy
from memscale.regions.modes import dispatch_modes
from memscale.regions.randomness import restore_state, state_of
from memscale.regions.recompute_lock import PATIENCE_SECONDS, in_recompute, recompute_lock, wait_for_recomputes
from memscale.regions.replay import Replay
from memscale.regions.saved_tensors import (
    PacksSeveral,
    hooks_around,
    name_refused_hooks,
    pack_all,
    recomputes,
    recomputing,
)
from memscale.regions.side_effects import without_side_effects
from memscale.regions.snapshot import RegionEffects, Snapshot
from memscale.regions.stand_ins import Note, Origin, is_stand_in, origin_of, stand_for
from memscale.regions.state_slots import Attributes, Content, Names, StateSlot, differing, holds, read, write
from memscale.regions.streams import Streams
from memscale.regions.uncompiled import OperatorWatch, floats_as_constants, never_compiled, uncompiled, without_dynamo
from memscale.regions.unrecorded import copying_ahead, hiding, is_unrecorded, unrecorded, unrecorded_depth
