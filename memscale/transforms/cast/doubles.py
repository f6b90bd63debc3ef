"""Modules that stand in for others while a compiler traces a region.

A compiler follows writes to objects that were made while it traces, and refuses others inside of a checkpoint. So the
region runs on doubles: new modules of the same classes over the cast state, which share all else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memscale.core import Assembled, TransformError
from memscale.transforms.cast.between import Adapted
from memscale.transforms.cast.converted import Converted
from memscale.transforms.cast.precision import Survey, is_castable

_OWN = ("_parameters", "_buffers", "_modules", "forward")


class Doubles:
    """The doubles of the modules of a region.

    Args:
        found: the modules, by what is done with them.
        copies: of the state of those that are cast.
        dtype: of the copies.
        compute: of what the others are given and return.
        natural: in which a kept module without any state computes.
    """

    def __init__(
        self, found: Survey, copies: Converted, dtype: torch.dtype, compute: torch.dtype, natural: torch.dtype | None
    ) -> None:
        self._found = found
        self._copies = copies
        self._dtype = dtype
        self._compute = compute
        self._natural = natural
        self._cast = set(found.cast)
        self._made: dict[nn.Module, nn.Module] = {}
        self._put: dict[nn.Module, dict[str, Any]] = {}  # cast attributes of doubles
        self._between: dict[nn.Module, torch.dtype | None] = {module: own or natural for module, own in found.kept}
        self._between.update(dict.fromkeys(found.inner))

    def rebind(self, part: Any) -> Any:
        """`part`, which is a module or a function made of modules, over the doubles."""
        if isinstance(part, nn.Module):
            return self._double(part)
        return part if part is None else part.reassembled(self.rebind)

    def _double(self, module: nn.Module) -> nn.Module:
        if module in self._made:
            return self._made[module]
        if module not in self._between and module not in self._cast:
            return module
        double = object.__new__(type(module))
        self._made[module] = double
        double.__dict__.update(module.__dict__)
        self._put[module] = {}
        forward = module.__dict__.get("forward")
        if module in self._between:
            # Its forward is that of the module itself: below it, nothing is cast.
            double.__dict__["forward"] = Adapted(module, forward, self._between[module], self._compute)
            return double
        if isinstance(forward, Assembled):
            double.__dict__["forward"] = self.rebind(forward)
        self._put[module] = {key: self._of(value) for key, value in module.__dict__.items() if is_castable(value)}
        double.__dict__.update(self._put[module])
        for mapping in ("_parameters", "_buffers"):
            double.__dict__[mapping] = {name: self._of(value) for name, value in module.__dict__[mapping].items()}
        double.__dict__["_modules"] = {name: self.rebind(child) for name, child in module._modules.items()}
        return double

    def _of(self, value: torch.Tensor | None) -> torch.Tensor | None:
        return self._copies.of(value, self._dtype) if value is not None and is_castable(value) else value

    def give_back(self) -> None:
        """After the run: attributes that it set on doubles go to the modules themselves.

        Raises:
            TransformError: it has put other parameters or buffers into a double.
        """
        for module, double in self._made.items():
            if module in self._cast:
                self._refuse_replaced(module, double)
            put = self._put[module]
            for key, value in double.__dict__.items():
                if key not in _OWN and value is not module.__dict__.get(key) and value is not put.get(key):
                    module.__dict__[key] = value

    def _refuse_replaced(self, module: nn.Module, ran: nn.Module) -> None:
        for mapping in ("_parameters", "_buffers"):
            then, now = module.__dict__[mapping], ran.__dict__[mapping]
            for name in [*then, *now]:
                if name not in now or name not in then or now[name] is not self._of(then[name]):
                    raise TransformError(
                        f"a cast region under torch.compile replaces {name!r} of a {type(module).__name__}, and the "
                        "new value would be lost; name the path of its module in keep, or change it outside of it"
                    )
