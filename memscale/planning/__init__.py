"""What makes a step fit: plans for a budget, and predictions.

The journey of `plan(model, batch, budget=...)`, in the order in which to read:

1. `entry`, `engine`: checks what it is given, simulates the step as it is, by which `speeds` to reckon, and says in the
   end what was decided and why.
2. `parts` (over `blocks` and `heads`): takes the model apart by its structure and by what each module keeps for
   backward.
3. `candidates`: what may be done to each part.
4. `trials`: simulates steps in which many candidates are tried; `costs`: reads off what each holds and takes.
5. `solver`: the fastest choice of a candidate for each part within the budget, as an integer program (`program`), or
   made of that one's divided choice by `exchanges`.
6. `search`: simulates the steps that choices make, found on a `ladder` of limits; `halving` of it, or `shrinking`.
7. `globs`: says the choice in few rules; `proven`: the plan with its `evidence`, which `explanation` tells as text;
   `curve`: several of them, as a frontier.

Plans of before are kept by `known`, under what `fingerprint` says they depend on.

`tuner` (with `sizes`, `rates`, `confirmation`) looks for the best size of a batch, and returns a `tuning`.

`predictor` (with `prediction`, `recommending`, `remedies`, `largest`, `grid`) answers whether a step fits as it is.
"""

from memscale.planning.blocks import repeated_blocks
from memscale.planning.curve import Frontier, Point
from memscale.planning.engine import Budget, DecisionEngine
from memscale.planning.entry import frontier, plan
from memscale.planning.evidence import Decision, Evidence, Figures
from memscale.planning.fingerprint import simulator
from memscale.planning.grid import SizeGrid
from memscale.planning.largest import LargestBatch
from memscale.planning.prediction import OOMPrediction, OOMRisk, taken_bytes
from memscale.planning.predictor import OOMPredictor
from memscale.planning.proven import ProvenPlan
from memscale.planning.remedies import planned, shorthands
from memscale.planning.sizes import parts_of
from memscale.planning.tuner import AutoTuner
from memscale.planning.tuning import Confirmation, SizeTrial, Tuning

__all__ = [
    "AutoTuner",
    "Budget",
    "Confirmation",
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
    "SizeGrid",
    "SizeTrial",
    "Tuning",
    "frontier",
    "parts_of",
    "plan",
    "planned",
    "repeated_blocks",
    "shorthands",
    "simulator",
    "taken_bytes",
]
