"""Checkpoint policies as data: see `memscale.checkpoint`.

Values: `nothing_saveable`, `everything_saveable`, `dots_saveable`, `dots_with_no_batch_dims_saveable`.
Factories: `save_only_these_names`, `save_any_names_but_these`, `save_and_offload_only_these_names`,
`save_from_both_policies`. For a policy of your own: `Policy`, `Site`, and the verdicts `Save`, `Recompute`, `Move`.
"""

from memscale.transforms.checkpoint import (
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

__all__ = [
    "Move",
    "Policy",
    "Recompute",
    "Save",
    "Site",
    "Verdict",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_from_both_policies",
    "save_only_these_names",
]
