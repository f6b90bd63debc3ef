"""The closed schema of what clients send, and the conversion of runs and plans to database rows.

`memscale.history.remote` writes this form. Unlisted fields, texts that are too long or have control characters, and
numbers that are not finite are rejected; pages are made from these fields only.
"""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from django.db import transaction
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from memscale.server.access import Access
from memscale.server.models import Document, Measurement, Plan, Project, Run
from memscale.server.problems import Problem

MOST_BYTES = 256 << 10
_MOST_COLUMNS = 240
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\ud800-\udfff]")


def _printable(text: str) -> str:
    if _UNPRINTABLE.search(text):
        raise ValueError("has control characters or half of a surrogate pair")
    return text


_Printable = AfterValidator(_printable)
Line = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\n]*\S[^\n]*$"), _Printable]
Word = Annotated[str, Field(max_length=80), _Printable]
Named = Annotated[str, Field(min_length=1, max_length=80), _Printable]
Path = Annotated[str, Field(max_length=300), _Printable]
Text = Annotated[str, Field(max_length=2000), _Printable]
Commit = Annotated[str, Field(pattern=r"^([0-9a-f]{40,63}\+?)?$")]
Hash = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
Bytes = Annotated[int, Field(ge=-(1 << 60), le=1 << 60)]
Size = Annotated[int, Field(ge=0, le=1 << 60)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Measured = Annotated[dict[Named, Real], Field(max_length=64)]
Sizes = Annotated[dict[Word, Bytes], Field(max_length=32)]


class Closed(BaseModel):
    """A schema that rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=False)


class Hardware(Closed):
    """The device that a prediction is for."""

    name: Named
    device_type: Word
    memory_bytes: Size
    usable_bytes: Size


class Holding(Closed):
    """One storage that is alive at the peak."""

    nbytes: Size
    category: Word
    path: Path
    op: Path
    phase: Word
    shape: Annotated[list[Size], Field(max_length=16)]
    dtype: Word


class Timeline(Closed):
    """Live bytes over the step by category, in equal columns that each show their highest moment."""

    unit: Literal["seconds", "operators"]
    end: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    phases: Annotated[list[tuple[Word, Real]], Field(max_length=64)]
    live: Annotated[dict[Word, Annotated[list[Size], Field(max_length=_MOST_COLUMNS)]], Field(max_length=32)]

    @model_validator(mode="after")
    def _of_one_length(self) -> Timeline:
        if len({len(values) for values in self.live.values()}) > 1:
            raise ValueError("all categories must have equally many columns")
        return self


class Predicted(Closed):
    """The figures of the simulated step."""

    peak_bytes: Size
    first_step_peak_bytes: Size
    reserved_peak_bytes: Size | None
    step_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    flops: Annotated[int, Field(ge=0, le=1 << 62)]
    moment: Annotated[list[Path], Field(min_length=3, max_length=3)]
    by_category: Sizes
    by_module: Annotated[dict[Path, Sizes], Field(max_length=1000)]
    by_tier: Sizes
    exposed_seconds: Annotated[dict[Word, Real], Field(max_length=32)]
    holdings: Annotated[list[Holding], Field(max_length=20)]
    notes: Annotated[list[Text], Field(max_length=50)]


class Rule(Closed):
    """One line of a plan: a path pattern and a transform as data."""

    path: Path
    transform: dict[str, JsonValue]


class RunDocument(Closed):
    """A run: the prediction for a training step, its origin, and measurements."""

    memscale_run_document: Literal[1]
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    name: Line
    made: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]
    hardware: Hardware
    predicted: Predicted
    measured: Measured = Field(default_factory=dict)
    timeline: Timeline | None = None
    plan: Annotated[list[Rule], Field(max_length=2000)] | None = None
    budget_bytes: Size | None = None
    model: Hash = ""
    shapes: Annotated[list[Word], Field(max_length=16)] = Field(default_factory=list)
    config: Text = ""
    commit: Commit = ""
    versions: Annotated[dict[Word, Word], Field(max_length=16)] = Field(default_factory=dict)
    simulator: Hash = ""
    decision_source: Word = ""

    @model_validator(mode="after")
    def _made_in_time(self) -> RunDocument:
        self.made_at  # noqa: B018  # raises for a date such as the 31st of February
        return self

    @property
    def made_at(self) -> datetime:
        """The time at which the run was made."""
        return datetime.strptime(self.made, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)

    @property
    def taken_bytes(self) -> int:
        """The device memory of the step: the bytes that its allocator reserves, if it has a caching allocator."""
        predicted = self.predicted
        if predicted.reserved_peak_bytes is not None:
            return predicted.reserved_peak_bytes
        return max(predicted.peak_bytes, predicted.first_step_peak_bytes)


def plan_hash(rules: Any) -> str:
    """Returns the hash that `memscale.Plan.hash` gives for the same rules."""
    text = json.dumps(rules, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def keep(access: Access, project: Project, sent: RunDocument) -> bool:
    """Stores a run once; returns whether it is new. The run is on disk when the transaction ends.

    A run that is sent again may add measurements; nothing else of it may differ.

    Raises:
        Problem: 413 for a document above the limit, 409 for a different document with the same id.
    """
    fixed = sent.model_dump(mode="json", exclude={"measured"})
    text = json.dumps(fixed, separators=(",", ":"), sort_keys=True)
    if len(text) > MOST_BYTES:
        rule, remedy = f"a run has at most {MOST_BYTES:,} bytes", "send fewer modules or notes"
        raise Problem(413, f"the run has {len(text):,} bytes", rule, remedy)
    with transaction.atomic():
        run, new = Run.objects.get_or_create(project=project, uid=sent.id, defaults=_row(access, sent, fixed))
        if new:
            Document.objects.create(run=run, text=text)
        elif json.loads(run.document.text) != fixed:
            rule = "a run is not changed but for its measurements"
            raise Problem(409, f"the run {sent.id} is here with other figures", rule, "send it under a new id")
        if sent.measured:
            Measurement.objects.bulk_create(
                [Measurement(run=run, name=name, value=value) for name, value in sent.measured.items()],
                update_conflicts=True,
                unique_fields=["run", "name"],
                update_fields=["value"],
            )
            if not new:
                Run.objects.filter(pk=run.pk).update(measured_bytes=_measured_bytes(sent))
    return bool(new)


def _row(access: Access, sent: RunDocument, fixed: dict[str, Any]) -> dict[str, Any]:
    plan = None
    if sent.plan is not None:
        rules = fixed["plan"]
        plan, _ = Plan.objects.get_or_create(
            team=access.team, hash=plan_hash(rules), defaults={"document": json.dumps(rules)}
        )
    return {
        "name": sent.name,
        "card": sent.hardware.name,
        "model": sent.model,
        "commit": sent.commit,
        "made": sent.made_at,
        "sent_by": access.user,
        "plan": plan,
        "budget_bytes": sent.budget_bytes,
        "usable_bytes": sent.hardware.usable_bytes,
        "taken_bytes": sent.taken_bytes,
        "peak_bytes": sent.predicted.peak_bytes,
        "measured_bytes": _measured_bytes(sent),
        "step_seconds": sent.predicted.step_seconds,
    }


def _measured_bytes(sent: RunDocument) -> int | None:
    peak = sent.measured.get("peak_bytes")
    return None if peak is None or not 0 <= peak < 1 << 60 else int(peak)


def document_of(run: Run) -> dict[str, Any]:
    """Returns the run as it was sent, with later measurements."""
    measured = {each.name: each.value for each in run.measurements.all()}
    return {**json.loads(run.document.text), "measured": measured}
