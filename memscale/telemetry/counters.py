"""The closed lists: what is counted, in which buckets, which question each answers, and what hangs on the answer."""

from __future__ import annotations

from dataclasses import dataclass

#: The verbs that are counted, and the commands.
CALLS = ("detach", "optimize", "plan", "predict", "transform", "wrap")
COMMANDS = ("demo", "explain", "frontier", "history", "plan", "predict", "tune")

_OF_MODELS = ("optimize", "plan", "predict", "transform", "wrap")
_WITH_OUTCOME = ("plan", "predict", "transform", "wrap")


@dataclass(frozen=True)
class Dimension:
    """One way to divide the calls. Each is counted by itself: no two of them are ever counted together.

    Attributes:
        name: as in a report.
        buckets: all there are.
        calls: the verbs that have it.
        question: what the counts answer.
        decision: what hangs on the answer.
    """

    name: str
    buckets: tuple[str, ...]
    calls: tuple[str, ...]
    question: str
    decision: str


DIMENSIONS = (
    Dimension(
        "params",
        ("<1e7", "1e7", "1e8", "1e9", "1e10", ">=1e11"),
        _OF_MODELS,
        "How large are the models, by the decade of their number of parameters?",
        "Which sizes the planner's time is measured and held to.",
    ),
    Dimension(
        "architecture",
        (
            "convnet",
            "decoder",
            "embedding",
            "encoder",
            "encoder_decoder",
            "mixture",
            "recurrent",
            "state_space",
            "other",
        ),
        _OF_MODELS,
        "Which kinds of models, told by the shapes of their parameters and not by any name?",
        "Which kinds get rules of their own, and models in the tests.",
    ),
    Dimension(
        "technique",
        (
            "cast",
            "checkpoint",
            "compensate_rounding",
            "offload",
            "offload_states",
            "quantize_states",
            "round_stochastically",
            "step_in_backward",
            "step_in_groups",
            "tile",
        ),
        ("plan", "transform", "wrap"),
        "Which transforms do plans have?",
        "Which ones are worked on, and which could go.",
    ),
    Dimension(
        "mode",
        ("aggressive", "balanced", "conservative"),
        ("optimize", "plan", "wrap"),
        "Which modes are set?",
        "Whether the default is the right one.",
    ),
    Dimension(
        "pressure",
        ("<0.5", "<0.85", "<0.95", "<1", "<1.5", "<3", ">=3"),
        ("plan", "predict", "wrap"),
        "How much more than there is does the step take, before anything is done?",
        "Which budgets plans are compared at.",
    ),
    Dimension(
        "outcome",
        (
            "fits",
            "skipped",
            "budget_error",
            "correctness_error",
            "runtime_unavailable",
            "transform_error",
            "other_error",
        ),
        _WITH_OUTCOME,
        "How do calls end?",
        "Which failures are looked into first.",
    ),
    Dimension(
        "decision_source",
        ("ml", "rule", "rule_fallback", "user_config"),
        ("plan", "wrap"),
        "Who chose the techniques that plans were made with?",
        "Whether the policy is worth its lines.",
    ),
    Dimension(
        "peak_error",
        ("over<0.1%", "over<1%", "over<5%", "over>=5%", "under<0.1%", "under<1%", "under<5%", "under>=5%"),
        ("detach",),
        "How far is a predicted peak from the one that a real step had?",
        "Which claims about accuracy stand.",
    ),
)

_BY_NAME = {dimension.name: dimension for dimension in DIMENSIONS}


def counters() -> tuple[str, ...]:
    """All names that a report can have, in order."""
    calls = [f"{call}_called" for call in CALLS] + [f"command:{name}" for name in COMMANDS]
    divided = [
        f"{call}_called/{dimension.name}:{bucket}"
        for dimension in DIMENSIONS
        for call in dimension.calls
        for bucket in dimension.buckets
    ]
    return tuple(sorted((*calls, *divided)))


def decade(parameters: int) -> str:
    """The bucket of a number of parameters.

    >>> [decade(count) for count in (10, 10**7, 7 * 10**9, 10**12)]
    ['<1e7', '1e7', '1e9', '>=1e11']
    """
    digits = len(str(max(parameters, 1))) - 1
    return "<1e7" if digits < 7 else ">=1e11" if digits > 10 else f"1e{digits}"


def below(share: float, name: str) -> str:
    """The first bucket of that list whose bound `share` is below.

    >>> [below(share, "pressure") for share in (0.2, 0.999, 1.0, 50.0)]
    ['<0.5', '<1', '<1.5', '>=3']
    """
    buckets = _BY_NAME[name].buckets
    return next((each for each in buckets if each[0] == "<" and share < float(each[1:])), buckets[-1])


def peak_error(share: float) -> str:
    """The bucket of a predicted peak that is `share` of the real one above it, or below it.

    >>> peak_error(0.002), peak_error(-0.2)
    ('over<1%', 'under>=5%')
    """
    side = "over" if share >= 0 else "under"
    percent = next((bound for bound in (0.1, 1, 5) if abs(share) * 100 < bound), None)
    return f"{side}>=5%" if percent is None else f"{side}<{percent}%"
