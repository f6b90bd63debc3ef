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
        module: of a module, with its share of what its forward does between operators.
        region: of a transformed module, and again where its forward runs under saved-tensor hooks, recomputes too.
        saved: of such hooks for a tensor.
        copy: of a copy to or from another tier.
        watched: of a mode of ours that looks at an operator or a view, as policies that see labels do.
        chosen: of a watch for a few operators, as policies of products have around a region.
    """

    operator: float
    plain: float
    backward: float
    view: float
    module: float
    region: float
    saved: float
    copy: float
    watched: float
    chosen: float


# What a virtual machine with an H100 and 16 cores took (torch 2.11): the steps of Hugging Face's GPT-2 XL, ViT and T5
# that its host held up, predicted with these at 0.70 to 1.03 of their time (before at 0.48 to 0.74, with 8 µs an
# operator and nothing else). Their ratios are those of the host's time of four such models, forward and backward, on
# the stand-in libraries, which they meet within 7 %; a launch took 5 µs more there.
_DEFAULT = {"operator": 19e-6, "backward": 19e-6, "view": 4.4e-6, "module": 40e-6}

# In the time of an operator and a module, of those models with `checkpoint()` on the stand-ins; a copy on that machine.
_REGION, _SAVED, _COPY = 6.5, 0.4, 3.4
# Likewise, of a small GPT-2 on a CPU: 18 µs of 18, and 250 to 410 for a region of one to five kept results.
_WATCHED, _CHOSEN = 1.0, 16.0


def host_calls(hardware: Hardware) -> HostSeconds:
    """What the host of `hardware` takes for calls; of a CPU that was not measured nothing is known, and counts."""
    is_host = hardware.device_type == "cpu"
    default = dict.fromkeys(CALLS, 0.0) if is_host else _DEFAULT
    operator, backward, view, module = (hardware.call_seconds.get(kind, default[kind]) for kind in CALLS)
    plain = view if is_host else operator  # of a CPU the operator by itself is in `launch_seconds`
    times = (_REGION, _SAVED, _COPY, _WATCHED, _CHOSEN)
    return HostSeconds(operator, plain, backward, view, module, *(each * (operator + module) for each in times))
