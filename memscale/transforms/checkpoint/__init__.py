"""`checkpoint`: keep a region's inputs, recompute the rest; and the policies that keep more."""

from memscale.transforms.checkpoint.factory import Checkpoint, Checkpointed, checkpoint
from memscale.transforms.checkpoint.policies import (
    Move,
    Policy,
    Recompute,
    Save,
    Site,
    Verdict,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_from_both_policies,
    save_only_these_names,
)
from memscale.transforms.checkpoint.selective import is_view

__all__ = [
    "Checkpoint",
    "Checkpointed",
    "Move",
    "Policy",
    "Recompute",
    "Save",
    "Site",
    "Verdict",
    "checkpoint",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "is_view",
    "nothing_saveable",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_from_both_policies",
    "save_only_these_names",
]
