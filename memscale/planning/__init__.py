"""What would make a step fit: blocks, candidates, predictions."""

from memscale.planning.blocks import repeated_blocks
from memscale.planning.curve import Frontier, Point
from memscale.planning.engine import Budget, DecisionEngine, frontier, plan
from memscale.planning.evidence import Decision, Evidence, Figures, ProvenPlan
from memscale.planning.largest import LargestBatch
from memscale.planning.prediction import OOMPrediction, OOMRisk, taken_bytes
from memscale.planning.predictor import OOMPredictor, parts_of
from memscale.planning.remedies import planned, shorthands

__all__ = [
    "Budget",
    "Decision",
    "DecisionEngine",
    "Evidence",
    "Figures",
    "Frontier",
    "LargestBatch",
    "OOMPrediction",
    "OOMPredictor",
    "OOMRisk",
    "Point",
    "ProvenPlan",
    "frontier",
    "parts_of",
    "plan",
    "planned",
    "repeated_blocks",
    "shorthands",
    "taken_bytes",
]
