"""`Adapted`: converts the inputs and outputs of submodules that keep their own precision inside a cast region."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memscale.core import Assembled, TransformError
from memscale.transforms.cast.containers import Containers
from memscale.transforms.cast.converted import Converted, unchecked
from memscale.transforms.cast.precision import Survey, cast_floating


class Adapted(Assembled):
    """The forward, during one call, of a submodule that keeps its own precision inside a cast region.

    Args:
        module: the submodule.
        forward: the forward set on its instance, or None if it has its class's forward.
        inside: the dtype to which its floating inputs are cast; None leaves them.
        outside: the dtype to which its floating outputs are cast.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any] | None, inside: torch.dtype | None, outside: torch.dtype
    ) -> None:
        self.module = module
        self.forward = forward
        self.inside = inside
        self.outside = outside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.inside is None:
            return cast_floating(self._run(args, kwargs), lambda tensor: tensor.to(self.outside))
        inside, copies = self.inside, Converted()
        containers = Containers(lambda tensor: copies.of(tensor, inside))
        try:
            args, kwargs = containers.lend(args), {key: containers.lend(value) for key, value in kwargs.items()}
            result = self._run(args, kwargs)
        finally:
            containers.take_back(copies.original, self.outside)
        containers.refuse_changed_copies()
        if changed := [] if torch.compiler.is_compiling() else copies.changed():
            raise TransformError(
                f"a {type(self.module).__name__}, which keeps its own precision in a cast region, changed an "
                f"argument {list(changed[0].shape)} in place, which was a copy in {inside}; clone it first"
            )
        return cast_floating(result, lambda tensor: tensor.to(self.outside))

    def _run(self, args: Any, kwargs: Any) -> Any:
        if self.forward is not None:
            return self.forward(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def parts(self) -> tuple[Any, ...]:
        return (self.module, self.forward)


@contextmanager
def adapted(found: Survey, compute: torch.dtype, natural: torch.dtype | None) -> Iterator[None]:
    """Within the body, the submodules that keep their precision have an `Adapted` forward."""
    between = [(module, dtype or natural) for module, dtype in found.kept]
    between += [(module, None) for module in found.inner]
    before = [module.__dict__.get("forward") for module, _ in between]
    put = [Adapted(module, own, inside, compute) for (module, inside), own in zip(between, before, strict=True)]
    try:
        unchecked(_set_forwards, [module for module, _ in between], put)
        yield
    finally:
        unchecked(_set_forwards, [module for module, _ in between], before)


def _set_forwards(modules: list[nn.Module], forwards: Sequence[Callable[..., Any] | None]) -> None:
    for module, forward in zip(modules, forwards, strict=True):
        if forward is not None:
            module.__dict__["forward"] = forward
        else:
            module.__dict__.pop("forward", None)
            if torch.compiler.is_compiling():
                torch._dynamo.comptime.comptime(_forget_forward)


def _forget_forward(context: Any) -> None:
    """Runs inside the compiler: torch 2.12 would delete the `forward` of `module` again in every call."""
    translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    module = translator.symbolic_locals["module"].realize()
    translator.output.side_effects.store_attr_mutations.get(module, {}).pop("forward", None)
