"""What to plan with: `select` decides, by an artifact where one is asked for, else by the rules."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any, Literal

from memscale.config import Config, OptimizationMode
from memscale.core import ConfigError, Document, PolicyFallbackNeeded
from memscale.policy.artifact import Artifact
from memscale.policy.context import SWITCHES, TECHNIQUES, StrategyContext, eligible
from memscale.runtime import AsyncOffloadConfig

_DOCUMENT = Document("strategy_decision", version=1, writer="StrategyDecision.to_json()", error=ConfigError)

VARIABLE = "MEMSCALE_POLICY"

Using = Literal["auto", "ml", "rule"]
_USING = ("auto", "ml", "rule")

_ONE = 1024
_CUT = 0.75  # of the largest tensor outside of the blocks, what `tile` frees of it
_FEW = 0.2  # of the activations: what is cheapest to compute again


@dataclasses.dataclass(frozen=True)
class StrategyDecision:
    """The techniques that a plan was made with. Prints as one line; `explain` says more.

    >>> import memscale as ms
    >>> from memscale.policy import StrategyDecision, select
    >>> decision = select(None, ms.Config(auto_policy=True))
    >>> print(decision)
    all eligible techniques (checkpoint, tile, offload), by rule_fallback: no_profile
    >>> StrategyDecision.from_json(decision.to_json()) == decision
    True

    Attributes:
        mode: the mode that they belong to.
        techniques: their names; empty where the step fits as it is.
        decision_source: ``"ml"``, an artifact answered; ``"rule"``, the rules did; ``"rule_fallback"``, an artifact was
            asked for and could not answer, or there was nothing to decide by; ``"user_config"``, the config is used
            exactly as it was given.
        confidence: of the artifact, from 0 to 1; 1 of the rules.
        reason: in a word or two.
        widened: whether the planner needed more than `techniques`: ``"no"``, ``"rules"`` (those of the rules too) or
            ``"all"`` that are eligible.
        artifact: the sha256 of the artifact that was asked, ``""`` if none was.
        config: what was planned with: the caller's, with the switches of the techniques set.
    """

    mode: OptimizationMode
    techniques: tuple[str, ...]
    decision_source: str
    confidence: float
    reason: str
    widened: str
    artifact: str
    config: Config

    def to_json(self) -> str:
        """The decision as JSON text."""
        return _DOCUMENT.write(self.to_data())

    def to_data(self) -> dict[str, Any]:
        """The decision as JSON data."""
        fields: dict[str, Any] = {name: getattr(self.config, name) for name in sorted(self.config.given)}
        if fields.get("async_config") is not None:
            fields["async_config"] = dataclasses.asdict(fields["async_config"])
        if "mode" in fields:
            fields["mode"] = self.config.mode.value  # type: ignore[union-attr]
        return {**vars(self), "mode": self.mode.value, "techniques": list(self.techniques), "config": fields}

    @classmethod
    def from_json(cls, text: str) -> StrategyDecision:
        """The decision that `to_json` wrote.

        Raises:
            ConfigError: the text is not JSON, is of another schema version, or lacks a field.
        """
        return cls.from_data(_DOCUMENT.read(text))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> StrategyDecision:
        """The decision that `to_data` made."""
        with _DOCUMENT.parts():
            fields = dict(data["config"])
            if fields.get("async_config") is not None:
                fields["async_config"] = AsyncOffloadConfig(**fields["async_config"])
            return cls(
                **{
                    **data,
                    "mode": OptimizationMode(data["mode"]),
                    "techniques": tuple(data["techniques"]),
                    "config": Config(**fields),
                }
            )

    def explain(self) -> str:
        """What was chosen and why, in a few lines."""
        lines = [f"policy: {self}"]
        if self.artifact:
            said = f"is {self.confidence:.0%} sure" if self.decision_source == "ml" else "could not say"
            lines.append(f"  asked: the artifact {self.artifact[:12]}, which {said}")
        if self.widened != "no":
            beside = "those of the rules beside them" if self.widened == "rules" else "all that are eligible"
            lines.append(f"  that lost time or did not fit, so that the plan was made with {beside}")
        return "\n".join(lines)

    def __str__(self) -> str:
        named = ", ".join(self.techniques)
        if not self.techniques:
            named = "no technique"
        elif self.reason != "few" and self.decision_source != "ml":
            named = f"all eligible techniques ({named})"
        return f"{named}, by {self.decision_source}: {self.reason}"


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
        artifact = Artifact.read(path, planner)
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


def planned_with(config: Config, techniques: tuple[str, ...]) -> Config:
    """The config with these techniques on and the others off; a switch that the caller set keeps what it was set to."""
    switches = {switch: name in techniques for name, switch in SWITCHES.items() if switch not in config.given}
    if config.async_offload:
        switches.pop("enable_offloading", None)
    return dataclasses.replace(config, **switches)  # type: ignore[arg-type]


def everything(config: Config) -> Config:
    """The config with all on that a policy may use."""
    return planned_with(config, eligible(config))


def mode_of(config: Config) -> OptimizationMode:
    """The mode that contains what is on."""
    if config.enable_tiling:
        return OptimizationMode.AGGRESSIVE
    return OptimizationMode.BALANCED if config.enable_offloading else OptimizationMode.CONSERVATIVE
