"""Recorded runs: predicted and measured figures of training steps, by commit, and comparisons with a baseline."""

from memscale.history.baseline import Baseline, Comparison
from memscale.history.database import History
from memscale.history.export import TEXTS, TRACKERS
from memscale.history.recording import is_address, keep, keep_measured, queue_path, record
from memscale.history.remote import Remote, document_of, send
from memscale.history.run import Run, commit_of
