"""Predictions that were kept: what a step took, commit by commit, and whether it takes more now."""

from memscale.history.baseline import Baseline
from memscale.history.comparison import Comparison
from memscale.history.database import History
from memscale.history.export import TEXTS, TRACKERS, to_csv, to_json_lines
from memscale.history.recording import keep, keep_measured, record
from memscale.history.run import Run, commit_of

__all__ = [
    "TEXTS",
    "TRACKERS",
    "Baseline",
    "Comparison",
    "History",
    "Run",
    "commit_of",
    "keep",
    "keep_measured",
    "record",
    "to_csv",
    "to_json_lines",
]
