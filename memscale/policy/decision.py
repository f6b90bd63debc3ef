"""`StrategyDecision`: what a policy chose, why, and what became of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from memscale.config import Config, OptimizationMode
from memscale.core import ConfigError, Document
from memscale.policy.context import SWITCHES, eligible
from memscale.runtime import AsyncOffloadConfig

_DOCUMENT = Document("strategy_decision", version=1, writer="StrategyDecision.to_json()", error=ConfigError)


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
