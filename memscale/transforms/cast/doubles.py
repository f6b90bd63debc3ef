"""`Doubles`: copies of a region's modules that run in their place while a compiler traces the region.

A compiler can follow writes to objects that were made during the trace; inside a checkpoint it refuses all other
writes. The region therefore runs on new modules of the same classes, which hold the cast state and share all else.
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
    """The copies of the modules of a region.

    Args:
        found: the modules, sorted by what a cast does with them.
        copies: makes the copies of their state.
        dtype: the dtype of the cast state.
        compute: the dtype of the region's activations.
        natural: the dtype in which a kept module without state computes.
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
        self._put: dict[nn.Module, dict[str, Any]] = {}  # the cast attributes of each double
        self._between: dict[nn.Module, torch.dtype | None] = {module: own or natural for module, own in found.kept}
        self._between.update(dict.fromkeys(found.inner))

    def rebind(self, part: Any) -> Any:
        """Returns `part`, a module or a function made of modules, with doubles in place of its modules."""
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
            # The double calls the forward of the original module, so nothing below it is cast.
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
        """After the run, copies attributes that the region set on doubles to the original modules.

        Raises:
            TransformError: the region has replaced a parameter or buffer of a double.
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
