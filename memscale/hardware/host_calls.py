"""Host seconds of the calls in a step: of operators, views, modules and regions."""

from __future__ import annotations

from typing import NamedTuple

from memscale.hardware.call_seconds import CALLS
from memscale.hardware.device import Hardware


class HostSeconds(NamedTuple):
    """Host seconds of one call of each kind. On a CPU, the seconds beyond those of the operator itself.

    Attributes:
        operator: an operator that Python calls, up to the launch of its kernel.
        plain: an operator that Python calls without autograd, as in an optimizer.
        backward: an operator that autograd calls, with its share of the node around it.
        view: an operator that launches nothing.
        listed: one tensor in a list that an optimizer's operator takes.
        module: a module, with its share of the Python between operators in its forward.
        region: a transformed module; twice if its forward runs under saved-tensor hooks, and again for a recompute.
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


# Measured on a virtual machine with an H100 and 16 cores (torch 2.11) by benchmarks/bench_host.py: host-bound steps of
# 27 small models of the zoo, plain and with `checkpoint()`, `offload()` and both. For GPT-2 XL, T5, Whisper and Swin,
# which keep the card busy, the times were 1.2 times as long.
_DEFAULT = {"operator": 29e-6, "backward": 40e-6, "view": 4.8e-6, "module": 24e-6}
_LISTED = 0.45  # as a multiple of `view`: AdamW of 11 to 133 tensors

# region, saved, copy and watched as multiples of operator + module. For cards from the same steps (watched: on fake
# CUDA libraries). For CPUs, where operator and module are shorter, from GPT-2 and a copy; watched took 18 of 18 µs.
_OF_CARDS, _OF_CPUS = (5.7, 0.2, 4.5, 0.65), (6.5, 0.4, 3.4, 1.0)


def host_calls(hardware: Hardware) -> HostSeconds:
    """Returns the host seconds of calls for `hardware`; zeros for a CPU that was not measured."""
    is_host = hardware.device_type == "cpu"
    default = dict.fromkeys(CALLS, 0.0) if is_host else _DEFAULT
    operator, backward, view, module = (hardware.call_seconds.get(kind, default[kind]) for kind in CALLS)
    plain = view if is_host else operator  # on a CPU `launch_seconds` includes the operator itself
    listed = 0.0 if is_host else _LISTED * view  # on a CPU each tensor is an operator of its own
    times = _OF_CPUS if is_host else _OF_CARDS
    return HostSeconds(operator, plain, backward, view, listed, module, *(each * (operator + module) for each in times))
