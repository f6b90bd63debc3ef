"""Lists the tensors that a function saves for backward, and verifies the numbers of a transformed model."""

from memscale.inspection.residuals import Residual, saved_residuals
from memscale.inspection.verification import Verification, check_same_numbers, verify
