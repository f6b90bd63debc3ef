"""`Comparison` of two runs of one step, and `Baseline`, a file in the repository with the runs to compare with."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from memscale.core import ConfigError
from memscale.history.export import to_json_lines
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
    def verdict(self) -> str:
        """The verdict: ``"regression"``, ``"same"``, ``"smaller"``, ``"within tolerance"``, ``"simulator changed"``.

        The last one says that different versions of memscale or PyTorch made the two runs.
        """
        if self.changed_bytes and self.before.simulator != self.after.simulator:
            return "simulator changed"
        if self.changed_bytes <= 0:
            return "smaller" if self.changed_bytes else "same"
        return "regression" if self.changed_bytes > self.tolerance_bytes else "within tolerance"

    @property
    def is_regression(self) -> bool:
        """Whether the step takes more bytes, by the same simulator."""
        return self.verdict == "regression"

    @property
    def diff(self) -> ProfileDiff:
        """The change by category and by module."""
        return self.before.profile.diff(self.after.profile)

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.after.name} on {self.after.hardware}: {self.changed_bytes:+,} bytes"]
        for word, run in (("from", self.before), ("to  ", self.after)):
            versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
            lines.append(f"  {word} {run.made}  {run.commit[:12] or '(no commit)'}  {versions}")
        if self.verdict == "simulator changed":
            lines.append("  the runs are by different versions of memscale or PyTorch: record the baseline again")
        return "\n".join([*lines, str(self.diff)] if self.changed_bytes else lines)


class Baseline:
    """A file of runs, one line of JSON each, to be kept under version control.

    >>> import tempfile, torch, memscale as ms
    >>> from memscale.history import Baseline, Comparison, Run
    >>> layer, wider = torch.nn.Linear(64, 64), torch.nn.Linear(64, 128)
    >>> runs = [Run.of(ms.profile(m, torch.ones(8, 64), loss=lambda y, _: y.sum()), "layer") for m in (layer, wider)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     baseline = Baseline(f"{folder}/memory.jsonl")
    ...     baseline.write(runs[0])
    ...     print(str(Comparison(baseline.run("layer", runs[0].hardware), runs[1])).partition(":")[0])
    regression
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def runs(self) -> list[Run]:
        """Returns all runs in the file; empty if there is no file.

        Raises:
            ConfigError: the file cannot be read, or a line is not a run.
        """
        remedy = "restore the file from version control, or remove it and record the baseline again"
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        except OSError as error:
            raise ConfigError(f"the baseline {str(self.path)!r} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the baseline {str(self.path)!r} is no text; {remedy}") from error
        found = []
        for number, line in enumerate(lines, start=1):
            try:
                found.append(Run.from_json(line))
            except ConfigError as error:
                why = "" if isinstance(error.__cause__, ValueError) else f": {error}"  # a parser's words say nothing
                raise ConfigError(
                    f"line {number} of the baseline {str(self.path)!r} is no run{why}; {remedy}"
                ) from error
        return found

    def run(self, name: str, hardware: str) -> Run | None:
        """Returns the run of this step on this device, or None."""
        return next((run for run in self.runs() if (run.name, run.hardware) == (name, hardware)), None)

    def write(self, run: Run) -> None:
        """Writes `run` to the file, in place of the run of the same step and device.

        Raises:
            ConfigError: the file cannot be read or written.
        """
        run = dataclasses.replace(run, timeline=None)  # comparisons do not use it, and it would fill a diff
        runs = {(each.name, each.hardware): each for each in (*self.runs(), run)}
        part = self.path.with_name(f"{self.path.name}.part-{os.getpid()}")
        try:
            # Sorted, so that a change touches few lines of a diff.
            part.write_text(to_json_lines([runs[step] for step in sorted(runs)]), encoding="utf-8")
            os.replace(part, self.path)  # an interruption leaves the old runs
        except OSError as error:
            raise ConfigError(
                f"the baseline {str(self.path)!r} cannot be written: {error.strerror}; pass a file in a folder that "
                "exists and is yours to write"
            ) from error
