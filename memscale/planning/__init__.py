"""Planning: finds plans that fit a step into a budget of memory, predicts peaks, and tunes batch sizes.

The path of `plan(model, batch, budget=...)` through the package, in reading order:

1. `engine`: checks the arguments, simulates the step as written (with the rates of `speeds`), runs the searches, and
   makes the evidence.
2. `parts/`: divides the model into parts by structure and by the bytes that each module keeps for backward.
   `candidates`: the transforms for each part; `globs`: a plan in few rules.
3. `trials/`: simulates steps in which many candidates are tried at once. `costs`: the bytes and seconds of each
   candidate.
4. `solving/`: chooses a candidate for each part, for the fastest step within a limit, by an integer program.
5. `search/`: simulates whole steps of such choices, for limits on a grid, and returns the fastest that fits.
   `searches`: in the model as written, in the cast model, and under strategies of the optimizer.
6. `evidence/`: the results: the plan with its evidence, as data and as text, and the frontier of plans.

`plan_cache` keeps plans on disk by their `fingerprint`. If no plan fits, `refusal` makes the error with remedies
besides the plan (`extra_remedies`), such as other optimizer strategies (`stepping`).

Two packages use the engine: `prediction/` predicts whether a step fits unchanged, `tuning/` finds the best size of a
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
