"""What would make a step fit: blocks, candidates, predictions."""

from memscale.planning.blocks import repeated_blocks
from memscale.planning.largest import LargestBatch
from memscale.planning.prediction import OOMPrediction, OOMRisk, taken_bytes
from memscale.planning.predictor import Budget, OOMPredictor, parts_of
from memscale.planning.remedies import planned, shorthands

__all__ = [
    "Budget",
    "LargestBatch",
    "OOMPrediction",
    "OOMPredictor",
    "OOMRisk",
    "parts_of",
    "planned",
    "repeated_blocks",
    "shorthands",
    "taken_bytes",
]
