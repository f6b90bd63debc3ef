"""Notes about what a plan leaves: the logits that a tiled loss head would free, and the output that the loop keeps."""

from __future__ import annotations

from torch import nn

from memscale.algebra import Plan
from memscale.core import format_bytes
from memscale.hardware import Hardware
from memscale.planning.remedies import shorthands, summary
from memscale.planning.search.found import Proven
from memscale.simulation import Loop, Profile

# Share of a step's bytes from which a note is worth its line. By choice.
_WORTH_TELLING = 0.05
# Categories of tensors that a step makes, and that no later step needs.
_MADE = ("activation", "temporary")


def logits_of_head(model: nn.Module, hardware: Hardware, found: Proven) -> str:
    """Returns the note about the logits at the peak of an exact plan, which a tiled loss head divides; "" if few.

    Args:
        model: the model.
        hardware: the device of the step.
        found: the exact plan, with the figures of its step.
    """
    rules = shorthands(model, hardware).get("tile", {})
    for path, how in rules.items() if not found.plan.of_optimizers() else ():
        head = model.get_submodule(path)
        assert isinstance(head, nn.Linear), "a loss head is a linear layer"
        words = head.out_features
        logits = sum(
            each.nbytes for each in found.profile.holdings if each.category in _MADE and each.shape[-1:] == (words,)
        )
        if logits >= _WORTH_TELLING * found.taken_bytes:
            tiled = summary(Plan({path: how}))
            return (
                f"logits take {format_bytes(logits)} of the peak; exact=False (--allow-rounding) allows {tiled}, "
                "which holds a part of the logits at a time and sums in another order"
            )
    return ""


def kept_output(profile: Profile, loop: Loop) -> str:
    """Returns the note about the output that the loop keeps behind the step, in bytes; "" if the loop frees it."""
    if not loop.keeps_output:
        return ""
    kept_bytes = sum(int(profile.timeline.live_bytes[each][-1]) for each in _MADE)
    return f"; loss(model(x)) would hold up to {format_bytes(kept_bytes)} less"
