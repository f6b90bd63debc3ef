"""`Comparison`: two runs of one step, what changed, and whether it is a regression."""

from __future__ import annotations

import dataclasses

from memscale.history.run import Run
from memscale.simulation import ProfileDiff

_PEAKS = ("peak_bytes", "first_step_peak_bytes", "reserved_peak_bytes")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The difference of `after` from `before`; prints as a verdict and a table of the changes.

    Predictions are deterministic, so every difference is real if the same simulator made both runs.

    Attributes:
        before: the earlier run.
        after: the later run.
        tolerance_bytes: the largest increase, in bytes, that is no regression.
    """

    before: Run
    after: Run
    tolerance_bytes: int = 0

    @property
    def changes(self) -> dict[str, int]:
        """The change of each peak in bytes, by name. Reserved bytes come in whole pages and hide small changes."""
        pairs = {name: [getattr(run.profile, name) for run in (self.before, self.after)] for name in _PEAKS}
        return {name: after - before for name, (before, after) in pairs.items() if None not in (before, after)}

    @property
    def changed_bytes(self) -> int:
        """The largest increase in bytes; if nothing increased, the largest decrease (negative), or 0."""
        return max(self.changes.values(), key=lambda nbytes: (max(nbytes, 0), -nbytes))

    @property
    def simulator_changed(self) -> bool:
        """Whether the two runs were made by different versions of memscale or PyTorch."""
        return self.before.simulator != self.after.simulator

    @property
    def is_regression(self) -> bool:
        """Whether the step takes more bytes, by the same simulator."""
        return self.changed_bytes > self.tolerance_bytes and not self.simulator_changed

    @property
    def verdict(self) -> str:
        """The verdict: ``"regression"``, ``"same"``, ``"smaller"``, ``"within tolerance"``, ``"simulator changed"``."""
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
