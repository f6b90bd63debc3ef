"""`Run`: one recorded prediction of a training step, with its versions, its plan and what was measured."""

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
_MOST_COLUMNS = 160  # columns of a stored timeline
_GIT_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Run:
    """A prediction of one step of one model on one device, as an immutable value with a JSON form.

    Attributes:
        id: 16 hexadecimal digits; they sort by the time at which the runs were made.
        name: the step; runs of one name on one device can be compared.
        made: the time in UTC, such as ``"2026-11-22T10:00:00Z"``.
        profile: the prediction, without its timeline and schedule.
        plan: the JSON of the applied plan, or ``""``.
        commit: the commit of the repository around the working directory, with ``"+"`` if files were changed since;
            ``""`` outside of a repository.
        versions: of memscale, torch and python.
        simulator: a hash of memscale's code and of the packages that predictions depend on.
        decision_source: ``"planner"`` for a plan with evidence, the source of its `StrategyDecision` if a policy made
            one, else ``"user"``.
        measured: measured figures of the same step, by name, such as ``{"peak_bytes": 8_589_934_592}``.
        model: a hash of the classes of modules and of the shapes and dtypes of parameters and buffers, without their
            values; ``""`` if the run was made without the model.
        shapes: the shapes and dtypes of the batch's tensors.
        config: the config as Python, or ``""`` for the default.
        budget_bytes: the budget of the plan, or None if unknown.
        timeline: live bytes by category over the step, with the few columns of a small picture. It takes no part in
            comparisons, and is None in a baseline's file.
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
        """Returns a run with the present time, commit and versions.

        >>> import torch, memscale as ms
        >>> from memscale.history import Run
        >>> layer = torch.nn.Linear(64, 64)
        >>> run = Run.of(ms.profile(layer, torch.ones(8, 64), loss=lambda y, _: y.sum()), "layer batch=8")
        >>> run == Run.from_json(run.to_json()), run.profile.peak_bytes
        (True, 39176)

        Args:
            profile: the profile of the step, with the plan applied.
            name: the step's name; it should say what decides the step, such as the batch size.
            plan: the applied plan.
            measured: see `Run`.
            model: the model, for `Run.model`.
            batch: the batch, for `Run.shapes`.
            config: the config, for `Run.config`.

        Raises:
            ConfigError: the name is empty, or has more than one line.
            PlanError: the plan has no JSON form.
        """
        if not isinstance(name, str) or not name.strip() or len(name.splitlines()) != 1:
            raise ConfigError(f"a run's name is {name!r}, and must be one line of text; say what the step is of")
        now, proven = time.time_ns(), plan if isinstance(plan, ProvenPlan) else None
        source = "user" if proven is None else proven.decision.decision_source
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
            decision_source="planner" if source == "user_config" else source,
            measured=dict(measured or {}),
            model=_hash_of(model) if isinstance(model, nn.Module) else "",
            shapes=tuple(_shape_of(tensor) for tensor in tensors(batch)[:_MOST_SHAPES]),
            config="" if config is None or not config.given else repr(config),
            budget_bytes=None if proven is None else proven.evidence.budget_bytes,
            timeline=_timeline_of(profile),
        )

    @property
    def hardware(self) -> str:
        """The name of the device."""
        return self.profile.hardware.name

    @property
    def plan_hash(self) -> str:
        """`Plan.hash` of the plan, or ``""``."""
        return Plan.from_json(self.plan).hash if self.plan else ""

    @property
    def verdict(self) -> str:
        """``"fits"`` if the device has the predicted and the measured bytes of the step, else ``"does not fit"``."""
        taken = max(self.profile.taken_bytes, self.measured.get("peak_bytes", 0))
        return "fits" if taken <= self.profile.hardware.usable_bytes else "does not fit"

    def to_json(self) -> str:
        """Returns the run as JSON text, with a schema version."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _DOCUMENT.write(fields | {"profile": json.loads(self.profile.to_json())})

    @classmethod
    def from_json(cls, text: str) -> Run:
        """Returns the run that `to_json` wrote.

        Raises:
            ConfigError: the text is not JSON, has another schema version, or lacks a field.
        """
        data = _DOCUMENT.read(text)
        with _DOCUMENT.parts():
            # Fields that older documents lack get their defaults.
            shapes = tuple(data.get("shapes", ()))
            return cls(**data | {"profile": Profile.from_json(json.dumps(data["profile"])), "shapes": shapes})

    def summary(self) -> dict[str, Any]:
        """Returns the run's figures by name, as one row of a table."""
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
    from memscale.reports import columns  # imported late: most programs record no run

    timeline = profile.timeline
    live = columns(timeline.position, timeline.live_bytes, count=_MOST_COLUMNS)
    return {
        "unit": timeline.unit,
        "end": float(timeline.position[-1]),
        "phases": [[name, begin] for name, begin in timeline.phases],
        "live": {category: values.tolist() for category, values in live.items() if values.any()},
    }


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
    """Returns the commit that a git reference names in the working directory, or ``""``."""
    return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}")


@functools.cache  # once per process, because git would slow every run down
def _commit_here() -> str:
    found = commit_of("HEAD")
    return f"{found}+" if found and _git("status", "--porcelain", "--untracked-files=no") else found


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):  # git is missing, or the disk does not answer
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
