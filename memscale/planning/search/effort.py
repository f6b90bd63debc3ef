"""`Effort`: how many steps a search simulates. Many of a step with few operators, which are simulated fast; few of a
long step.
"""

from __future__ import annotations

from typing import NamedTuple

#: The most simulated steps for one budget and one set of techniques, and those left for corrections of the result:
#: benchmarks/bench_simulate.py --plan counts them.
ROUNDS, _CORRECTIONS = 5, 2
# The most simulated steps for one budget; more of a step that has at most so many operators:
# benchmarks/bench_simulate.py --plan counts them, and benchmarks/bench_plan.py has the share of the budget that is
# used. With 5,000 in place of 8,000 GPT-2 is planned in two thirds of the time, and steps of small Llamas and Gemmas at
# 80 % of their memory on an H100 take up to 11 % longer.
_STEPS, _FEW_OPERATORS = 8, 8_000
# The most simulations that look for a faster choice with as few bytes: benchmarks/bench_plan.py, seconds at the
# smallest budget.
_LOOKS = 3
# The most operators to simulate, and the fewest simulations in any case: a step of very many operators (eighty sharded
# blocks, a Python loop over time) takes 5 to 10 s to simulate: benchmarks/bench_simulate.py --plan --only llama-405b.
# The limit counts operators: seconds would make plans depend on the machine.
_MOST_OPERATORS, _FEWEST = 50_000, 3


class Effort(NamedTuple):
    """How many steps of a model are simulated for one answer.

    Attributes:
        trials: the most rounds of trial steps.
        steps: about the most simulated choices for a budget.
        rounds: the most choices for the smallest plan.
        looks: the most looks for a faster plan that is as small.
        corrections: the most corrections of the result, of two sets of techniques in turn.
        is_short: whether the step has so few operators that many choices are simulated for each budget.
        is_long: whether it has so many that few are: uniform choices first, no groups of parts, and no descent.
    """

    trials: int
    steps: int
    rounds: int
    looks: int
    corrections: int
    is_short: bool
    is_long: bool

    @property
    def before_corrections(self) -> int:
        """Returns how many of `steps` are simulated before the corrections begin."""
        return max(1, self.steps - _CORRECTIONS)

    @classmethod
    def of(cls, operators: int) -> Effort:
        """Returns the effort for a step of so many operators.

        >>> Effort.of(500).steps, Effort.of(5_000).steps, Effort.of(20_000).steps
        (16, 8, 3)
        """
        count = max(1, operators)
        trials = max(_FEWEST, _MOST_OPERATORS // count)
        steps = min(trials, max(_STEPS, _FEW_OPERATORS // count))
        if trials < ROUNDS:
            return cls(trials, steps, 1, 0, 1, is_short=False, is_long=True)
        is_short = steps > _STEPS
        corrections = 2 * (ROUNDS if is_short else _CORRECTIONS)
        return cls(trials, steps, ROUNDS, _LOOKS, corrections, is_short=is_short, is_long=False)
