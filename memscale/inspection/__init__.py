"""What a function keeps for backward, and whether a transform changed the numbers."""

from memscale.inspection.residuals import Residual, saved_residuals
from memscale.inspection.verification import Verification, check_same_numbers, verify

__all__ = ["Residual", "Verification", "check_same_numbers", "saved_residuals", "verify"]
