"""Recorded runs: predicted and measured figures of training steps, by commit, and comparisons with a baseline."""

from memscale.history.baseline import Baseline, Comparison
from memscale.history.database import History
from memscale.history.export import TEXTS, TRACKERS
from memscale.history.recording import keep, keep_measured, record
from memscale.history.remote import Remote, document_of
from memscale.history.run import Run, commit_of
from memscale.history.sending import is_address, queue_path, send

__all__ = [
    "TEXTS",
    "TRACKERS",
    "Baseline",
    "Comparison",
    "History",
    "Remote",
    "Run",
    "commit_of",
    "document_of",
    "is_address",
    "keep",
    "keep_measured",
    "queue_path",
    "record",
    "send",
]
