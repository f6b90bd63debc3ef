"""What makes a step fit: plans for a budget, and predictions.

The journey of `plan(model, batch, budget=...)`, in the order in which to read:

1. `engine`: checks what it is given, simulates the step as it is, by which `speeds` to reckon, and says in the
   end what was decided and why.
2. `parts/`: takes the model apart by its structure and by what each module keeps for backward; `candidates`: what may
   be done to each part; `globs`: a choice said in few rules.
3. `trials/`: simulates steps in which many candidates are tried; `costs`: reads off what each holds and takes.
4. `solving/`: the fastest choice of a candidate for each part within the budget, as an integer program.
5. `search/`: simulates the steps that choices make, found on a grid of limits.
6. `evidence/`: what is returned: the plan with what was shown, as data and as text; several of them as a frontier.

`known` keeps the plans of before, under what `fingerprint` says they depend on. Where nothing fits, `refusal` says what
would lower the step `beside` a plan (`remedies`, other ways of `stepping`).

Two more use the engine: `prediction/` answers whether a step fits as it is, `tuning/` looks for the best size of a
batch.
"""

from memscale.planning.engine import (
    INTERRUPTED_SEARCH,
    LEFT_FREE,
    POINTS,
    SO_FAR,
    Budget,
    DecisionEngine,
    allowed,
    check_model,
)
from memscale.planning.evidence.curve import Frontier, Point
from memscale.planning.evidence.evidence import Decision, Evidence, Figures
from memscale.planning.evidence.proven import ProvenPlan
from memscale.planning.fingerprint import simulator
from memscale.planning.parts.blocks import repeated_blocks
from memscale.planning.prediction.grid import SizeGrid
from memscale.planning.prediction.largest import LargestBatch
from memscale.planning.prediction.prediction import OOMPrediction, OOMRisk, Recommendation
from memscale.planning.prediction.predictor import OOMPredictor
from memscale.planning.prediction.sizes import parts_of
from memscale.planning.remedies import planned, shorthands
from memscale.planning.step_simulator import Progress
from memscale.planning.tuning.tuner import AutoTuner
from memscale.planning.tuning.tuning import Confirmation, SizeTrial, Tuning

__all__ = [
    "INTERRUPTED_SEARCH",
    "LEFT_FREE",
    "POINTS",
    "SO_FAR",
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
    "Progress",
    "ProvenPlan",
    "Recommendation",
    "SizeGrid",
    "SizeTrial",
    "Tuning",
    "allowed",
    "check_model",
    "parts_of",
    "planned",
    "repeated_blocks",
    "shorthands",
    "simulator",
]
