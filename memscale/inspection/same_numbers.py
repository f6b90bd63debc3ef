"""The proof behind ``Config(verify_correctness=True)``: one step before and after, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from memscale.core import CorrectnessError
from memscale.inspection.verification import compare, results_of_step


def check_same_numbers(model: nn.Module, apply: Callable[[], None], undo: Callable[[], None], batch: Any) -> None:
    """Run a step of ``model`` on ``batch`` before and after ``apply()``; both must give the same bits.

    Outputs, gradients, buffers and the random state count; the model and the random state stay as they were.
    On a difference ``undo()`` runs first.

    Raises:
        CorrectnessError: something differs; the message names it.
    """
    plain = results_of_step(model, batch)
    apply()
    found = compare(plain, results_of_step(model, batch))
    if found.exact:
        return
    undo()
    # Atomic adds on a GPU differ from run to run. That is not the plan's doing, and another remedy.
    if not compare(plain, results_of_step(model, batch)).exact:
        raise CorrectnessError(
            f"two plain steps of this {type(model).__name__} differ from each other: nothing can be proved; "
            f"call torch.use_deterministic_algorithms(True) or turn verify_correctness off"
        )
    raise CorrectnessError(
        f"the wrapped step differs from the plain one in {', '.join(d.name for d in found.different)}; "
        "the model is left unwrapped. "
        "Its forward may depend on state out of memscale's sight (a file, a clock, another random generator)"
    )
