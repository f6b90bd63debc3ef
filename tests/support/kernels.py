"""What a simulated kernel of a card holds, for the tests of those kernels."""

from memscale.simulation.kernels.cuda_programs import cuda_program
from memscale.simulation.kernels.programs import most_held


def scratch_bytes(op, args, outputs, capability, **options):
    """The most that the kernel of `op` holds beside its inputs and outputs, as the allocator counts it."""
    return most_held(cuda_program(op, args, outputs, capability, **options))
