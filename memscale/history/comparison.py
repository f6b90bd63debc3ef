"""Two runs of one step side by side: what changed, and whether the code under test is to blame."""

from __future__ import annotations

import dataclasses

from memscale.history.run import Run
from memscale.simulation import ProfileDiff

_PEAKS = ("peak_bytes", "first_step_peak_bytes", "reserved_peak_bytes")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How `after` differs from `before`. Prints as a verdict and the table of what changed.

    Predictions are deterministic, so any change is a change, provided that one simulator made both.

    Attributes:
        tolerance_bytes: how much more is no regression.
    """

    before: Run
    after: Run
    tolerance_bytes: int = 0

    @property
    def changes(self) -> dict[str, int]:
        """The change of each peak, by its name in `Profile`: reserved bytes come in pages, and hide small ones."""
        pairs = {name: [getattr(run.profile, name) for run in (self.before, self.after)] for name in _PEAKS}
        return {name: after - before for name, (before, after) in pairs.items() if None not in (before, after)}

    @property
    def changed_bytes(self) -> int:
        """The largest of them that is more; where none is, the largest that is less, or 0."""
        return max(self.changes.values(), key=lambda nbytes: (max(nbytes, 0), -nbytes))

    @property
    def simulator_changed(self) -> bool:
        """Whether another memscale, or another PyTorch, made the one than the other: no word on the code under test."""
        return self.before.simulator != self.after.simulator

    @property
    def is_regression(self) -> bool:
        """Whether the step takes more, by the same simulator."""
        return self.changed_bytes > self.tolerance_bytes and not self.simulator_changed

    @property
    def verdict(self) -> str:
        """One of ``"regression"``, ``"same"``, ``"smaller"``, ``"within tolerance"``, ``"simulator changed"``."""
        if self.changed_bytes and self.simulator_changed:
            return "simulator changed"
        if self.changed_bytes <= 0:
            return "smaller" if self.changed_bytes else "same"
        return "regression" if self.is_regression else "within tolerance"

    @property
    def diff(self) -> ProfileDiff:
        """The change by category and by module."""
        return self.before.profile.diff(self.after.profile)

    def __str__(self) -> str:
        before, after = self.before, self.after
        head = f"{self.verdict}: {after.name} on {after.hardware}: {self.changed_bytes:+,} bytes"
        lines = [head, f"  from {_origin(before)}", f"  to   {_origin(after)}"]
        if self.verdict == "simulator changed":
            lines.append("  another memscale or PyTorch predicts otherwise: record the baseline again with this one")
        if self.changed_bytes:
            lines.append(str(self.diff))
        return "\n".join(lines)


def _origin(run: Run) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    return f"{run.made}  {run.commit[:12] or '(no commit)'}  {versions}"
