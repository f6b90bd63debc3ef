"""A recorded run: what was predicted of a training step, with what, and what it then took."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.config import Config
from memscale.core import ConfigError, Document, tensors
from memscale.planning import ProvenPlan, simulator
from memscale.simulation import Profile

_DOCUMENT = Document("run", version=1, writer="Run.to_json()", error=ConfigError)
_MOST_HOLDINGS = 20
_MOST_SHAPES = 16
_MOST_COLUMNS = 160  # of a timeline
_GIT_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Run:
    """What is known of one step of one model on one device. A value: it prints, compares and goes through JSON.

    Attributes:
        id: 16 hexadecimal digits; runs sort by them in the order in which they were made.
        name: what was predicted: runs of one name on one device can be compared.
        made: when, in UTC, as in ``"2026-11-22T10:00:00Z"``.
        profile: what was predicted, without its timeline and its schedule.
        plan: the JSON of the plan that was applied, ``""`` without one.
        commit: of the repository around the working directory, with ``"+"`` where files were changed since; ``""``
            outside of one.
        versions: of memscale, torch and python.
        simulator: a hash of memscale's own code and of the packages that a prediction depends on.
        decision_source: ``"planner"`` for a plan with evidence, that of its `StrategyDecision` where a policy made one,
            else ``"user"``.
        measured: what was measured of the same step, by name, such as ``{"peak_bytes": 8_589_934_592}``.
        model: a hash of the modules' classes and of the shapes and dtypes of parameters and buffers, ``""`` unless the
            run was told of the model; nothing of their values.
        shapes: of the batch's tensors, with their dtypes.
        config: as Python, ``""`` for the usual one.
        budget_bytes: what the plan was made for, None where that is not known.
        timeline: live bytes by category over the step, as few columns as a small picture has; no part of what runs are
            compared by, and None in a baseline's file.
    """

    id: str
    name: str
    made: str
    profile: Profile
    plan: str
    commit: str
    versions: Mapping[str, str]
    simulator: str
    decision_source: str
    measured: Mapping[str, float]
    model: str = ""
    shapes: tuple[str, ...] = ()
    config: str = ""
    budget_bytes: int | None = None
    timeline: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        profile: Profile,
        name: str,
        *,
        plan: Plan | None = None,
        measured: Mapping[str, float] | None = None,
        model: object = None,
        batch: Any = None,
        config: Config | None = None,
    ) -> Run:
        """A run made now.

        >>> import torch, memscale as ms
        >>> from memscale.history import Run
        >>> layer = torch.nn.Linear(64, 64)
        >>> run = Run.of(ms.profile(layer, torch.ones(8, 64), loss=lambda y, _: y.sum()), "layer batch=8")
        >>> run == Run.from_json(run.to_json()), run.profile.peak_bytes
        (True, 39176)

        Args:
            profile: of the step, with the plan applied.
            name: what it is a profile of; say in it what else decides the step, such as the batch's size.
            plan: what was applied.
            measured: see `Run`.
            model, batch, config: what the step is of, which the run then tells more of.

        Raises:
            ConfigError: the name is empty, or has more than one line.
            PlanError: the plan has no JSON form.
        """
        if not isinstance(name, str) or not name.strip() or len(name.splitlines()) != 1:
            raise ConfigError(f"a run's name is {name!r}, and must be one line of text; say what the step is of")
        now = time.time_ns()
        return cls(
            id=f"{now // 1000:013x}{os.urandom(2).hex()[:3]}",
            name=name,
            made=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now // 1_000_000_000)),
            profile=dataclasses.replace(
                profile, changes=(), positions=(), schedule=None, holdings=profile.holdings[:_MOST_HOLDINGS]
            ),
            plan="" if plan is None else Plan.to_json(plan),
            commit=_commit_here(),
            versions={
                "memscale": sys.modules["memscale"].__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            simulator=hashlib.sha256(repr(simulator()).encode()).hexdigest(),
            decision_source=_source_of(plan),
            measured=dict(measured or {}),
            model=_hash_of(model) if isinstance(model, nn.Module) else "",
            shapes=tuple(_shape_of(tensor) for tensor in tensors(batch)[:_MOST_SHAPES]),
            config="" if config is None or not config.given else repr(config),
            budget_bytes=plan.evidence.budget_bytes if isinstance(plan, ProvenPlan) else None,
            timeline=_timeline_of(profile),
        )

    @property
    def hardware(self) -> str:
        """The name of the device."""
        return self.profile.hardware.name

    @property
    def plan_hash(self) -> str:
        """`Plan.hash` of the plan, ``""`` without one."""
        return Plan.from_json(self.plan).hash if self.plan else ""

    @property
    def verdict(self) -> str:
        """``"fits"`` if the device has what the step takes, as predicted and as measured, else ``"does not fit"``."""
        taken = max(self.profile.taken_bytes, self.measured.get("peak_bytes", 0))
        return "fits" if taken <= self.profile.hardware.usable_bytes else "does not fit"

    def to_json(self) -> str:
        """The run as JSON text, with a schema version."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _DOCUMENT.write(fields | {"profile": json.loads(self.profile.to_json())})

    @classmethod
    def from_json(cls, text: str) -> Run:
        """The run that `to_json` wrote.

        Raises:
            ConfigError: the text is not JSON, is of another schema version, or lacks a field.
        """
        data = _DOCUMENT.read(text)
        with _DOCUMENT.parts():
            # What runs were not told of at first has its default.
            shapes = tuple(data.get("shapes", ()))
            return cls(**data | {"profile": Profile.from_json(json.dumps(data["profile"])), "shapes": shapes})

    def summary(self) -> dict[str, Any]:
        """The run's figures by name, as one row of a table."""
        profile = self.profile
        return {
            "id": self.id,
            "made": self.made,
            "name": self.name,
            "hardware": self.hardware,
            "plan": self.plan_hash[:12],
            "commit": self.commit[:12],
            "model": self.model[:12],
            "shapes": ", ".join(self.shapes),
            "config": self.config,
            "verdict": self.verdict,
            "peak_bytes": profile.peak_bytes,
            "reserved_peak_bytes": profile.reserved_peak_bytes,
            "step_seconds": profile.step_seconds,
            "decision_source": self.decision_source,
            **{f"measured_{name}": value for name, value in self.measured.items()},
        }


def _timeline_of(profile: Profile) -> dict[str, Any] | None:
    if not profile.changes:
        return None
    from memscale.reports import columns  # loaded with the first run that is made

    timeline = profile.timeline
    live = columns(timeline.position, timeline.live_bytes, count=_MOST_COLUMNS).live_bytes
    return {
        "unit": timeline.unit,
        "end": float(timeline.position[-1]),
        "phases": [[name, begin] for name, begin in timeline.phases],
        "live": {category: values.tolist() for category, values in live.items() if values.any()},
    }


def _source_of(plan: Plan | None) -> str:
    if not isinstance(plan, ProvenPlan):
        return "user"
    return "planner" if plan.decision.decision_source == "user_config" else plan.decision.decision_source


def _hash_of(model: nn.Module) -> str:
    found = hashlib.sha256()
    for path, module in model.named_modules():
        found.update(f"{path} {type(module).__qualname__}\n".encode())
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.update(f"{path} {_shape_of(tensor)} {tensor.requires_grad}\n".encode())
    return found.hexdigest()


def _shape_of(tensor: torch.Tensor) -> str:
    return f"{'x'.join(map(str, tensor.shape))} {str(tensor.dtype).removeprefix('torch.')}"


def commit_of(reference: str) -> str:
    """The commit that a git reference means in the working directory, ``""`` if none."""
    return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}")


@functools.cache  # of a process, which asking git would slow down at each run
def _commit_here() -> str:
    found = commit_of("HEAD")
    return f"{found}+" if found and _git("status", "--porcelain", "--untracked-files=no") else found


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a repository on a disk that does not answer
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
