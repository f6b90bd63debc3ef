"""Host seconds of the calls in a step: of operators, views, modules and regions."""

from __future__ import annotations

from typing import NamedTuple

from memscale.hardware.call_seconds import CALLS
from memscale.hardware.device import Hardware


class HostSeconds(NamedTuple):
    """Seconds that an accelerator's host takes for one call of each kind.

    Attributes:
        operator: an operator that Python calls, up to the launch of its kernel.
        plain: an operator that Python calls without autograd, as in an optimizer.
        backward: an operator that autograd calls, with the Python of its autograd node.
        view: an operator that launches nothing.
        listed: one tensor in a list that an optimizer's operator takes.
        module: a module, with the Python between the operators of its forward.
        region: a transformed module; counted twice under saved-tensor hooks, and once more for a recompute.
        saved: the saved-tensor hooks for one tensor.
        copy: a copy to or from another tier.
        watched: a dispatch mode of memscale around an operator or a view, as policies use it.
    """

    operator: float
    plain: float
    backward: float
    view: float
    listed: float
    module: float
    region: float
    saved: float
    copy: float
    watched: float


# Seconds of a call, measured on a virtual machine with an H100 and 16 cores (torch 2.11) by benchmarks/bench_host.py:
# host-bound steps of 27 small models of the zoo, plain and with `checkpoint()`, `offload()` and both. For GPT-2 XL, T5,
# Whisper and Swin, which keep the card busy, the times were 1.2 times as long.
_DEFAULT = {"operator": 29e-6, "backward": 40e-6, "view": 4.8e-6, "module": 24e-6}
_LISTED = 0.45  # multiple of `view`, by benchmarks/bench_host.py: AdamW of 11 to 133 tensors

# region, saved, copy and watched as multiples of operator + module, by benchmarks/bench_host.py (watched: on fake CUDA
# libraries, with --processor).
_MULTIPLES = (5.7, 0.2, 4.5, 0.65)


def host_calls(hardware: Hardware) -> HostSeconds:
    """Returns the host seconds of calls for `hardware`; zeros for a CPU, whose operator times include the call."""
    if hardware.device_type == "cpu":
        return HostSeconds(**dict.fromkeys(HostSeconds.__annotations__, 0.0))
    operator, backward, view, module = (hardware.call_seconds.get(kind, _DEFAULT[kind]) for kind in CALLS)
    multiples = (each * (operator + module) for each in _MULTIPLES)
    return HostSeconds(operator, operator, backward, view, _LISTED * view, module, *multiples)
