"""`select`: what to plan with, by an artifact where one is asked for, else by the rules."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Literal

from memscale.config import Config
from memscale.core import ConfigError, PolicyFallbackNeeded
from memscale.policy.artifact import Artifact
from memscale.policy.context import SWITCHES, TECHNIQUES, StrategyContext, eligible
from memscale.policy.decision import StrategyDecision, mode_of, planned_with

VARIABLE = "MEMSCALE_POLICY"

Using = Literal["auto", "ml", "rule"]
_USING = ("auto", "ml", "rule")

_ONE = 1024
_CUT = 0.75  # of the largest tensor outside of the blocks, what `tile` frees of it
_FEW = 0.2  # of the activations: what is cheapest to compute again


def select(
    context: StrategyContext | None, config: Config, *, using: Using = "auto", planner: str = ""
) -> StrategyDecision:
    """The techniques to plan a step with, first.

    The planner then makes sure of it, whatever was decided here; see `widenings`.

    >>> import torch, memscale as ms
    >>> from memscale.policy import select
    >>> profile = ms.profile(torch.nn.Linear(64, 256), torch.ones(512, 64), loss=lambda y, _: y.sum(), hardware="t4")
    >>> config = ms.Config(auto_policy=True)
    >>> context = ms.StrategyContext.of(profile, profile.hardware, 1.0, config)
    >>> print(select(context, config))
    no technique, by rule: the step fits

    Args:
        context: of the step; None where it is not known.
        config: the caller's, which stays as it is.
        using: ``"rule"`` asks the rules, ``"ml"`` the artifact of ``$MEMSCALE_POLICY``; ``"auto"`` does where that is
            set, and else asks the rules, for none that was trained did better (docs/policy.md).
        planner: the fingerprint of the planner that asks.

    Raises:
        ConfigError: `using` is none of these.
    """
    if using not in _USING:
        raise ConfigError(f"select(using={using!r}) must be one of {', '.join(map(repr, _USING))}")
    if not config.auto_policy or (context is not None and not context.is_accelerator):
        given = tuple(name for name in TECHNIQUES if getattr(config, SWITCHES[name]))
        return _decided(config, given, "user_config", "a CPU" if config.auto_policy else "as it was given")
    if context is None:
        return _decided(config, eligible(config), "rule_fallback", "no_profile")
    if context.pressure <= _ONE:
        return _decided(config, (), "rule", "the step fits")
    path = os.environ.get(VARIABLE, "")
    sha256 = ""
    if using == "rule" or (using == "auto" and not path):
        found = rule(context)
        return _decided(config, found, "rule", "few" if found != context.eligible else "nothing less is known to do")
    try:
        artifact = _artifact(path, _stamp(path), planner)
        sha256 = artifact.sha256
        found, confidence = artifact.vote(context)
        return _decided(config, found, "ml", "few", confidence / 100, sha256)
    except PolicyFallbackNeeded as needed:
        reason = str(needed)
    except Exception as error:  # whatever else an artifact provokes
        reason = f"error:{type(error).__name__}"
    found = rule(context)
    return _decided(config, found, "rule_fallback", reason, 1.0, sha256)


def rule(context: StrategyContext) -> tuple[str, ...]:
    """The techniques to try first: all that are eligible, unless cutting alone or recomputing alone will do.

    Cutting will where what must go is no more than the largest tensor outside of the blocks, mostly logits, which
    `tile` never makes whole; recomputing where it is no more than the few activations that are next to nothing to
    compute again. Copies hide that well in so few steps that there is no rule for them.
    """
    excess = context.pressure - _ONE
    if excess <= 0:
        return ()
    if "tile" in context.eligible and excess <= _CUT * context.outside_over_budget:
        return ("tile",)
    if "checkpoint" in context.eligible and context.excess_over_activations <= _FEW * _ONE:
        return ("checkpoint",)
    return context.eligible


def widenings(decision: StrategyDecision, context: StrategyContext, config: Config) -> Iterator[tuple[str, Config]]:
    """What to plan with, one after the other, until a plan is good enough; each is all that the one before it is.

    More techniques never make the fastest plan slower, as far as a planner's choices are the best. So whatever was
    decided, also by an artifact that somebody made to lie, the last of these is as good as no policy at all, and the
    one before it as good as the rules.
    """
    seen: set[tuple[str, ...]] = set()
    rules = tuple(name for name in TECHNIQUES if name in {*decision.techniques, *rule(context)})
    for widened, techniques in (("no", decision.techniques), ("rules", rules), ("all", context.eligible)):
        if widened == "rules" and decision.decision_source != "ml":
            continue
        if techniques not in seen:
            seen.add(techniques)
            yield widened, planned_with(config, techniques)


def _decided(
    config: Config, techniques: tuple[str, ...], source: str, reason: str, confidence: float = 1.0, artifact: str = ""
) -> StrategyDecision:
    with_them = config if source == "user_config" else planned_with(config, techniques)
    return StrategyDecision(mode_of(with_them), techniques, source, confidence, reason, "no", artifact, with_them)


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        raise PolicyFallbackNeeded("no_artifact") from None
    return found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=4)
def _artifact(path: str, stamp: tuple[int, int], planner: str) -> Artifact:
    return Artifact.read(path, planner)
