"""What the host takes for the calls that a step is made of: those of operators, of views, of modules, of regions."""

from __future__ import annotations

from typing import NamedTuple

from memscale.hardware.call_seconds import CALLS
from memscale.hardware.device import Hardware


class HostSeconds(NamedTuple):
    """What the host takes for one call, in seconds. On a CPU, above what an operator takes by itself.

    Attributes:
        operator: of an operator that Python calls, up to the launch of its kernel.
        plain: of one that Python calls and autograd takes no note of, as an optimizer's.
        backward: of one that autograd calls, with its share of the node around it.
        view: of an operator that launches nothing.
        listed: of each tensor of the lists that an operator of an optimizer takes.
        module: of a module, with its share of what its forward does between operators.
        region: of a transformed module, and again where its forward runs under saved-tensor hooks, recomputes too.
        saved: of such hooks for a tensor.
        copy: of a copy to or from another tier.
        watched: of a dispatch mode of memscale that looks at an operator or a view, as policies do.
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


# What a virtual machine with an H100 and 16 cores took (torch 2.11). Steps of 27 small models of the zoo, which its
# host holds up, as they are and with `checkpoint()`, `offload()` and both, give the ratios
# (benchmarks/bench_host.py); GPT-2 XL, T5, Whisper and Swin, whose host is slower beside a busy card, took 1.2 of the
# times.
_DEFAULT = {"operator": 29e-6, "backward": 40e-6, "view": 4.8e-6, "module": 24e-6}
_LISTED = 0.45  # of a view: AdamW of 11 to 133 tensors

# In the time of an operator and a module: of regions, hooks, copies, and looks. Beside a card in the same steps; a look
# on fake CUDA libraries. On a CPU, where these two are shorter: of GPT-2, a copy there, and 18 µs of 18 for a look.
_OF_CARDS, _OF_CPUS = (5.7, 0.2, 4.5, 0.65), (6.5, 0.4, 3.4, 1.0)


def host_calls(hardware: Hardware) -> HostSeconds:
    """What the host of `hardware` takes for calls; of a CPU that was not measured nothing is known, and counts."""
    is_host = hardware.device_type == "cpu"
    default = dict.fromkeys(CALLS, 0.0) if is_host else _DEFAULT
    operator, backward, view, module = (hardware.call_seconds.get(kind, default[kind]) for kind in CALLS)
    plain = view if is_host else operator  # of a CPU the operator by itself is in `launch_seconds`
    listed = 0.0 if is_host else _LISTED * view  # of a CPU they are operators of their own
    times = _OF_CPUS if is_host else _OF_CARDS
    return HostSeconds(operator, plain, backward, view, listed, module, *(each * (operator + module) for each in times))
