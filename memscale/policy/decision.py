"""`select`: chooses the techniques to plan with first, by a trained artifact if one is requested, else by rules."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from memscale.config import Config
from memscale.core import SWITCHES, PolicyFallbackNeeded
from memscale.policy.artifact import Artifact
from memscale.policy.context import TECHNIQUES, StrategyContext, eligible
from memscale.runtime import AsyncOffloadConfig

VARIABLE = "MEMSCALE_POLICY"

_ONE = 1024
_CUT = 0.75  # the share of the largest tensor outside of the blocks that `tile` frees
_FEW = 0.2  # the share of the activations that is cheap to recompute


@dataclasses.dataclass(frozen=True)
class StrategyDecision:
    """The techniques that a plan was made with; prints as one line, and `explain` gives details.

    >>> import memscale as ms
    >>> from memscale.policy import select
    >>> decision = select(None, ms.Config(auto_policy=True))
    >>> print(decision)
    all eligible techniques (checkpoint, tile, offload), by rule_fallback: no_profile

    Attributes:
        techniques: their names; empty if the step fits untransformed.
        decision_source: ``"ml"`` if an artifact answered; ``"rule"`` if the rules did; ``"rule_fallback"`` if an
            artifact was requested and could not answer, or there was no profile; ``"user_config"`` if the config is
            used as given.
        confidence: the artifact's, from 0 to 1; 1 for the rules.
        reason: one or two words.
        widened: whether the planner needed more than `techniques`: ``"no"``, ``"rules"`` (those of the rules as well)
            or ``"all"`` eligible ones.
        artifact: the sha256 of the requested artifact, or ``""``.
        config: the config to plan with: the caller's, with the switches of the techniques set.
    """

    techniques: tuple[str, ...]
    decision_source: str
    confidence: float
    reason: str
    widened: str
    artifact: str
    config: Config

    def to_data(self) -> dict[str, Any]:
        """Returns the decision as JSON data, as a plan stores it."""
        fields: dict[str, Any] = {name: getattr(self.config, name) for name in sorted(self.config.given)}
        if fields.get("async_config") is not None:
            fields["async_config"] = dataclasses.asdict(fields["async_config"])
        if "mode" in fields:
            fields["mode"] = self.config.mode.value  # type: ignore[union-attr]
        return {**vars(self), "techniques": list(self.techniques), "config": fields}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> StrategyDecision:
        """Returns the decision that `to_data` made."""
        fields = dict(data["config"])
        if fields.get("async_config") is not None:
            fields["async_config"] = AsyncOffloadConfig(**fields["async_config"])
        given = {name: value for name, value in data.items() if name != "mode"}  # which version 0.2 wrote
        return cls(**given | {"techniques": tuple(data["techniques"]), "config": Config(**fields)})

    def explain(self) -> str:
        """Returns a few lines about what was chosen and why."""
        lines = [f"policy: {self}"]
        if self.artifact:
            answer = f"{self.confidence:.0%} sure" if self.decision_source == "ml" else "without an answer"
            lines.append(f"  artifact {self.artifact[:12]}: {answer}")
        if self.widened != "no":
            more = "the rules' techniques, too" if self.widened == "rules" else "all eligible techniques"
            lines.append(f"  planned with {more}, since these techniques alone cost time or did not fit")
        return "\n".join(lines)

    def __str__(self) -> str:
        named = ", ".join(self.techniques)
        if not self.techniques:
            named = "no technique"
        elif self.reason != "few" and self.decision_source != "ml":
            named = f"all eligible techniques ({named})"
        return f"{named}, by {self.decision_source}: {self.reason}"


def select(context: StrategyContext | None, config: Config, *, planner: str = "") -> StrategyDecision:
    """Returns the techniques to plan a step with first: by the artifact in ``$MEMSCALE_POLICY``, else by the rules.

    The planner tries more techniques if these turn out too slow or too few; see `widenings`.

    >>> import torch, memscale as ms
    >>> from memscale.policy import select
    >>> profile = ms.profile(torch.nn.Linear(64, 256), torch.ones(512, 64), loss=lambda y, _: y.sum(), hardware="t4")
    >>> config = ms.Config(auto_policy=True)
    >>> context = ms.StrategyContext.of(profile, profile.hardware, 1.0, config)
    >>> print(select(context, config))
    no technique, by rule: the step fits

    Args:
        context: the context of the step, or None if unknown.
        config: the caller's config; left unchanged.
        planner: the fingerprint of the calling planner.
    """
    if not config.auto_policy or (context is not None and not context.is_accelerator):
        given = tuple(name for name in TECHNIQUES if getattr(config, SWITCHES[name]))
        return _decided(config, given, "user_config", "a CPU" if config.auto_policy else "as it was given")
    if context is None:
        return _decided(config, eligible(config), "rule_fallback", "no_profile")
    if context.pressure <= _ONE:
        return _decided(config, (), "rule", "the step fits")
    ruled, sha256 = rule(context), ""
    if not (path := os.environ.get(VARIABLE)):
        return _decided(config, ruled, "rule", "few" if ruled != context.eligible else "nothing less is known to do")
    try:
        artifact = Artifact.read(path, planner)
        sha256 = artifact.sha256
        voted, confidence = artifact.vote(context)
        return _decided(config, voted, "ml", "few", confidence / 100, sha256)
    except PolicyFallbackNeeded as needed:
        return _decided(config, ruled, "rule_fallback", str(needed), artifact=sha256)


def rule(context: StrategyContext) -> tuple[str, ...]:
    """Returns the techniques to try first: all eligible ones, unless tiling alone or recomputing alone is enough.

    Tiling is enough if the excess is at most the part of the largest tensor outside of the blocks, mostly logits, that
    `tile` frees. Recomputing is enough if the excess is at most the share of activations that is cheap to recompute.
    Offloading alone is enough in so few cases that there is no rule for it.
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
    """Yields the configs to plan with, in turn, until a plan is good enough; each allows all that the one before does.

    More techniques never make the fastest plan slower, as far as the planner finds the best one. So whatever was
    decided, even by a malicious artifact, the last config is as good as planning without a policy, and the one before
    it as the rules.
    """
    seen: set[tuple[str, ...]] = set()
    rules = tuple(name for name in TECHNIQUES if name in {*decision.techniques, *rule(context)})
    for widened, techniques in (("no", decision.techniques), ("rules", rules), ("all", context.eligible)):
        if techniques not in seen:
            seen.add(techniques)
            yield widened, planned_with(config, techniques)


def _decided(
    config: Config, techniques: tuple[str, ...], source: str, reason: str, confidence: float = 1.0, artifact: str = ""
) -> StrategyDecision:
    with_them = config if source == "user_config" else planned_with(config, techniques)
    return StrategyDecision(techniques, source, confidence, reason, "no", artifact, with_them)


def planned_with(config: Config, techniques: tuple[str, ...]) -> Config:
    """Returns the config with `techniques` on and the others off; switches that the caller set keep their values."""
    switches = {SWITCHES[name]: name in techniques for name in TECHNIQUES if SWITCHES[name] not in config.given}
    if config.async_offload:
        switches.pop("enable_offloading", None)
    return dataclasses.replace(config, **switches)  # type: ignore[arg-type]


def everything(config: Config) -> Config:
    """Returns the config with all techniques on that a policy may use."""
    return planned_with(config, eligible(config))
