"""`StrategyContext`: what a policy sees of a step: ratios of its bytes and seconds to the device's, as integers."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict

from memscale.config import Config
from memscale.core import SWITCHES, ConfigError, budget_bytes
from memscale.hardware import DIRECTIONS, Hardware, copy_seconds, knows_copies
from memscale.simulation import Profile

_ONE = 1024  # the integer for a ratio of 1; integers compare alike on every platform
_MOST = 1 << 40
_PROBE_BYTES = 1 << 30

#: The techniques that a policy chooses among, in the order of sets. None of them changes the numbers; techniques that
#: do (`cast`, 8-bit states) are used only on the caller's request.
TECHNIQUES = ("checkpoint", "tile", "offload")

_STATIC = ("parameter", "gradient", "optimizer state")
_SHARES = {"parameter": "parameter", "gradient": "gradient", "state": "optimizer state", "activation": "activation"}
_NUMBERED = re.compile(r"^((?:[^.]*[^.\d][^.]*\.)*)(\d+)(?:\.|$)")


@dataclasses.dataclass(frozen=True)
class StrategyContext:
    """A step on a device under a budget, in numbers without units, and without names of models or cards.

    All numbers except the last two are ratios in units of 1/1024, capped at 2**40.

    >>> import torch, memscale as ms
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    >>> profile = ms.profile(model, torch.ones(512, 64), loss=lambda y, _: y.sum(), hardware="t4")
    >>> context = ms.StrategyContext.of(profile, profile.hardware, "1MiB", ms.Config())
    >>> context.pressure > 1024, context.blocks // 1024, context.eligible
    (True, 4, ('checkpoint', 'tile', 'offload'))

    Attributes:
        pressure: bytes of the step over the budget.
        static_over_budget: parameters, highest gradients and optimizer states over the budget.
        excess_over_activations: bytes of the step beyond the budget over the highest activations.
        parameter_share: parameters over the peak.
        gradient_share: gradients over the peak.
        state_share: optimizer states over the peak.
        activation_share: activations over the peak.
        other_share: the rest over the peak.
        reserved_over_allocated: bytes reserved by the allocator over bytes allocated.
        largest_over_budget: the largest single tensor at the peak over the budget.
        outside_over_budget: the largest tensor outside of the repeated blocks, without parameters, over the budget.
        blocks: the number of repeated blocks.
        block_seconds_share: the time of the repeated blocks over the step's time.
        forward_share: the time of forward over the step's time.
        optimizer_share: the time of the optimizer over the step's time.
        link_window: activations over the bytes that the link copies in the time of forward; 0 without a link.
        excess_window: bytes beyond the budget over the same; 0 without a link.
        host_over_activations: the host memory for offloading over the activations; the cap if unlimited.
        machine_balance: operations per second of the device over its bytes per second.
        intensity_share: the step's operations over those possible in the step's time.
        has_link: 1 if copies to the host are possible and their speed is known, else 0.
        is_accelerator: 1 or 0.
        eligible: the techniques that the config leaves to the policy.
    """

    pressure: int
    static_over_budget: int
    excess_over_activations: int
    parameter_share: int
    gradient_share: int
    state_share: int
    activation_share: int
    other_share: int
    reserved_over_allocated: int
    largest_over_budget: int
    outside_over_budget: int
    blocks: int
    block_seconds_share: int
    forward_share: int
    optimizer_share: int
    link_window: int
    excess_window: int
    host_over_activations: int
    machine_balance: int
    intensity_share: int
    has_link: int
    is_accelerator: int
    eligible: tuple[str, ...]

    @classmethod
    def of(cls, profile: Profile, hardware: Hardware, budget: int | float | str, config: Config) -> StrategyContext:
        """Returns the context of the step in `profile`, a step without a plan.

        Args:
            profile: the profile, with its timeline.
            hardware: the device to plan for.
            budget: as in `memscale.plan`.
            config: the allowed techniques.

        Raises:
            ConfigError: the budget is invalid, or the profile has no timeline.
        """
        limit = budget_bytes(budget, hardware.usable_bytes)
        if not profile.changes:
            raise ConfigError("this profile has no timeline; make a new one with memscale.profile")
        live = {name: int(each.max()) for name, each in profile.timeline.live_bytes.items()}
        peak = profile.peak_bytes
        at_peak = {name: profile.by_category.get(category, 0) for name, category in _SHARES.items()}
        at_peak["other"] = peak - sum(at_peak.values())
        taken = peak if profile.reserved_peak_bytes is None else profile.reserved_peak_bytes
        activations, excess = live.get("activation", 0), max(taken - limit, 0)
        seconds = profile.step_seconds or 0.0
        begins = dict(profile.phases) if profile.position_unit == "seconds" else {}
        forward = begins.get("backward", 0.0) - begins.get("forward", 0.0)
        prefix, count, block_seconds = _blocks(profile)
        transient = [each for each in profile.holdings if each.category not in _STATIC]
        outside = [each.nbytes for each in transient if not _is_in(each.path, prefix)]
        link = _link_bytes_per_second(hardware)
        rate = max(hardware.flops_per_second.values(), default=0.0)
        return cls(
            pressure=_ratio(taken, limit),
            static_over_budget=_ratio(sum(live.get(name, 0) for name in _STATIC), limit),
            excess_over_activations=_ratio(excess, activations),
            **{f"{name}_share": _ratio(nbytes, peak) for name, nbytes in at_peak.items()},
            reserved_over_allocated=_ratio(taken, peak),
            largest_over_budget=_ratio(max((each.nbytes for each in profile.holdings), default=0), limit),
            outside_over_budget=_ratio(max(outside, default=0), limit),
            blocks=_ratio(count, 1),
            block_seconds_share=_ratio(block_seconds, seconds),
            forward_share=_ratio(forward, seconds),
            optimizer_share=_ratio(seconds - begins.get("optimizer", seconds), seconds),
            link_window=_ratio(activations, link * forward) if link else 0,
            excess_window=_ratio(excess, link * forward) if link else 0,
            host_over_activations=_MOST if config.host_bytes is None else _ratio(config.host_bytes, activations),
            machine_balance=_ratio(rate, hardware.bandwidth_bytes_per_second or 0.0),
            intensity_share=_ratio(profile.flops, rate * seconds),
            has_link=int(link > 0),
            is_accelerator=int(hardware.device_type != "cpu"),
            eligible=eligible(config),
        )

    def __str__(self) -> str:
        rows = [f"{name:<24} {value / _ONE:.4g}" for name, value in self.features().items()]
        return "\n".join([*rows, f"{'eligible':<24} {', '.join(self.eligible)}"])

    def features(self) -> dict[str, int]:
        """Returns all numbers by name, without `eligible`."""
        return {name: getattr(self, name) for name in FEATURES}


FEATURES = tuple(field.name for field in dataclasses.fields(StrategyContext) if field.name != "eligible")


def eligible(config: Config) -> tuple[str, ...]:
    """Returns the techniques that a policy may use: switches and modes that the caller set are respected."""
    held = "mode" in config.given
    return tuple(
        name for name in TECHNIQUES if getattr(config, SWITCHES[name]) or not (held or SWITCHES[name] in config.given)
    )


def _ratio(part: float, whole: float) -> int:
    return min(_MOST, max(0, round(_ONE * part / whole))) if whole > 0 else _MOST if part > 0 else 0


def _blocks(profile: Profile) -> tuple[str, int, float]:
    """Returns the family of numbered modules with the most time: its path prefix, size and seconds."""
    seconds: dict[str, float] = defaultdict(float)
    numbers: dict[str, set[str]] = defaultdict(set)
    for path, each in profile.seconds_by_module.items():
        if found := _NUMBERED.match(path):
            seconds[found[1]] += each
            numbers[found[1]].add(found[2])
    repeated = (prefix for prefix in seconds if len(numbers[prefix]) > 1)
    prefix = max(repeated, key=lambda each: (seconds[each], each), default="\0")  # the default is in no path
    return prefix, len(numbers[prefix]), seconds[prefix]


def _is_in(path: str, prefix: str) -> bool:
    found = _NUMBERED.match(path)
    return found is not None and found[1] == prefix


def _link_bytes_per_second(hardware: Hardware) -> float:
    if hardware.device_type == "cpu" or not knows_copies(hardware):
        return 0.0
    return min(_PROBE_BYTES / copy_seconds(_PROBE_BYTES, "pinned", way, hardware) for way in DIRECTIONS)
