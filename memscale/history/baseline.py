"""`Baseline`: a file in the repository with one run per step and device, against which later runs are compared."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from memscale.core import ConfigError
from memscale.history.export import to_json_lines
from memscale.history.run import Run


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
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the baseline {str(self.path)!r} cannot be read: {error}") from error
        runs = []
        for number, line in enumerate(lines, start=1):
            try:
                runs.append(Run.from_json(line))
            except ConfigError as error:
                raise ConfigError(f"line {number} of the baseline {str(self.path)!r}: {error}") from error
        return runs

    def run(self, name: str, hardware: str) -> Run | None:
        """Returns the run of this step on this device, or None."""
        return next((run for run in self.runs() if (run.name, run.hardware) == (name, hardware)), None)

    def write(self, run: Run) -> None:
        """Writes `run` to the file, in place of the run of the same step and device.

        Raises:
            ConfigError: the file cannot be read or written.
        """
        run = dataclasses.replace(run, timeline=None)  # comparisons do not use it, and it would fill a diff
        others = [each for each in self.runs() if (each.name, each.hardware) != (run.name, run.hardware)]
        ordered = sorted(
            [*others, run], key=lambda each: (each.name, each.hardware)
        )  # sorted, so that a change touches few lines of a diff
        part = self.path.with_name(f"{self.path.name}.part-{os.getpid()}")
        try:
            part.write_text(to_json_lines(ordered), encoding="utf-8")
            os.replace(part, self.path)
        except OSError as error:
            raise ConfigError(
                f"the baseline {str(self.path)!r} cannot be written: {error.strerror}; pass a file in a folder that "
                "exists and is yours to write"
            ) from error
