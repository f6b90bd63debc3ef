"""`checkpoint` inside `torch.func` transforms: the region becomes one `autograd.Function` with explicit inputs.

`torch.func` refuses saved-tensor hooks, but differentiates and vectorises an `autograd.Function` that has a vmap rule.
Such a function has gradients only for explicit inputs. So all tensors that the region captures (parameters from
`functional_call`, closure variables, buffers) are inputs too, and are written into their state slots while the region
runs. Using a captured tensor that the search missed raises an error, since its gradient would be lost silently.

A tensor that the region leaves behind (in a list or object among the arguments, in an object that the region returns,
on a module) is one more output. It is written back to the same place after the run, so that it has a gradient there.

Inside such a region, inner regions run untransformed, and a recompute runs the whole region: early stopping and
policies need saved-tensor hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from memscale.core import CorrectnessError, TransformError, internals, pytrees, version
from memscale.regions import (
    ArgumentSpec,
    Captures,
    Content,
    Environment,
    StateSlot,
    accelerators,
    functorch_state,
    holds,
    is_unrecorded,
    read,
    refuse_iterators,
    restore,
    unrecorded_depth,
    write,
)

_functorch = internals.functorch


def run(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns ``fn(*args, **kwargs)``, computed as one recomputed function of the arguments and captured tensors."""
    call = _Call(fn, args, kwargs)
    outputs = _Region.apply(call, *call.inputs)  # type: ignore[no-untyped-call]
    return call.finish(outputs)


class _Call:
    """One call of a region: the captures, the position of each explicit input, and the tensors left behind."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.fn = fn
        self.captures = Captures(fn, follows=True)
        refuse_iterators(pytrees.flatten((args, kwargs))[0])
        self.call = ArgumentSpec(args, kwargs, self.captures, hold=True)
        self.environment: Environment | None = None
        # Each distinct tensor is one input, so tied weights get one summed gradient.
        self.inputs: list[torch.Tensor] = []
        positions: dict[int, int] = {}

        def position_of(tensor: torch.Tensor) -> int:
            if id(tensor) not in positions:
                positions[id(tensor)] = len(self.inputs)
                self.inputs.append(tensor)
            return positions[id(tensor)]

        self.arguments = [position_of(tensor) for tensor in self.call.tensors]
        self.captured = [
            (at, key, position_of(tensor))
            for at, key, tensor in self.captures.tensors
            if not isinstance(self.captures.slots[at], tuple)  # a tuple cannot be written to
        ]
        buffers = [module._buffers for module in self.captures.modules]
        self.buffers = {
            position
            for at, _, position in self.captured
            if any(self.captures.slots[at] is mapping for mapping in buffers)
        }
        # Autograd saves the inputs, and backward needs the values from before the region's changes. So the inputs are
        # copies of the buffers of modules in training mode, and `finish` copies the new values into the buffers.
        self.targets = list(self.inputs)
        training = {id(t) for module in self.captures.modules if module.training for t in module._buffers.values()}
        for position in self.buffers:
            if id(self.inputs[position]) in training:
                self.inputs[position] = self.inputs[position].clone()
        self.silent = {
            id(buffer)
            for module in self.captures.modules
            if isinstance(module, internals.NormBase) and module.training
            for buffer in module._buffers.values()
        }
        self.out_spec: Any = None
        self.out_leaves: list[Any] = []
        self.mutated: list[int] = []
        self.assigned: list[tuple[StateSlot, Any]] = []
        self.returned_inputs: dict[int, int] = {}  # autograd refuses an input as an output
        # The arguments and returned objects after the run, and the source of each tensor there: an input or an output.
        self.left: ArgumentSpec | None = None
        self.sources: list[tuple[bool, int]] = []
        self.made: list[int] = []
        self.left_count = 0

    def execute(self, inputs: tuple[torch.Tensor, ...], *, first: bool) -> tuple[torch.Tensor, ...]:
        """Runs the region on `inputs`. Returns the tensor outputs, the changed buffers and the tensors left behind."""
        working = self._own(inputs)
        before = [version(tensor) for tensor in working]
        values = [working[position] for position in self.arguments]
        with (
            self._substituted(working, keep_changes=first) as put,
            ExitStack() as stack,
            _Guard(working if first else None),
        ):
            present: list[Any] = []
            stack.callback(restore, present)
            args, kwargs = self.call.rebuild(values, present)
            if self.environment is None:
                result = self.fn(*args, **kwargs)
            else:
                result = self.environment.context.copy().run(self.fn, *args, **kwargs)
            assigned = self._assigned(put)
            out_leaves, out_spec = pytrees.flatten(result)
            others = [leaf for leaf in out_leaves if not isinstance(leaf, torch.Tensor)]
            left = ArgumentSpec((args, kwargs, others), {}, Captures(self.fn, follows=True), hold=True)
        mutated = [
            index
            for index, tensor in enumerate(working)
            if version(tensor) != before[index] or (index in self.buffers and id(self.targets[index]) in self.silent)
        ]
        if other := [index for index in mutated if index not in self.buffers]:
            raise TransformError(
                f"checkpoint inside torch.func: the region changes an input of shape {list(inputs[other[0]].shape)}"
                f"{self._owner(other[0])} in place, which no recompute repeats there; clone the input first"
            )
        inside = {id(tensor): index for index, tensor in enumerate(working)}
        if first:
            self.out_spec = out_spec
            self.out_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in out_leaves]
            self.returned_inputs = {i: inside[id(leaf)] for i, leaf in enumerate(out_leaves) if id(leaf) in inside}
            self.tensor_outputs = [
                i
                for i, leaf in enumerate(out_leaves)
                if isinstance(leaf, torch.Tensor) and i not in self.returned_inputs
            ]
            self.mutated = mutated
            self.assigned = [(slot, key) for slot, key, _ in assigned]
        outputs: list[torch.Tensor] = [out_leaves[i] for i in self.tensor_outputs]
        outputs += [working[index] for index in mutated]
        outputs += [tensor for _, _, tensor in assigned]
        if first:
            self._find_sources(left, inside, outputs)
        elif len(left.order) != self.left_count:
            raise CorrectnessError(
                f"the recompute differs from the run: the region left {len(left.order)} tensors in its arguments "
                f"and in objects that it returned, and the run had left {self.left_count}. A checkpointed region "
                "must do the same at every run with the same inputs"
            )
        return (*outputs, *[left.tensors[left.order[occurrence]] for occurrence in self.made])

    def _own(self, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Returns `inputs` as objects of their own, with the attributes that they have outside; buffers are copied.

        `torch.func` wraps one tensor as two, such as the `x` of `grad(f)(x)` as argument and in a closure. In the
        region both are the unwrapped tensor, and a result that is that tensor would belong to the wrong one.
        """
        taken = {id(tensor) for tensor, outside in zip(inputs, self.targets, strict=True) if tensor is outside}
        working = []
        for index, (tensor, outside) in enumerate(zip(inputs, self.targets, strict=True)):
            is_parameter = isinstance(outside, nn.Parameter)
            if index in self.buffers:
                tensor = tensor.clone()
            elif tensor is not outside and (id(tensor) in taken or outside.__dict__ or is_parameter):
                tensor = torch.ops.aten.alias(tensor)
                tensor.__dict__.update(outside.__dict__, **({"_is_param": True} if is_parameter else {}))
            taken.add(id(tensor))
            working.append(tensor)
        return working

    def _find_sources(self, left: ArgumentSpec, inside: dict[int, int], outputs: list[torch.Tensor]) -> None:
        """Finds the source of each tensor that the region left behind; a tensor without a source is one more output.

        These outputs are identified by their order in the walk, since identities differ in a rerun: `x.to(x.device)` is
        `x` in the run, and another tensor inside torch.func.
        """
        known = {id(tensor): (True, index) for index, tensor in reversed([*enumerate(outputs)])}
        known.update({key: (False, index) for key, index in inside.items()})
        self.made = []
        for occurrence, index in enumerate(left.order):
            if (key := id(left.tensors[index])) not in known:
                known[key] = (True, len(outputs) + len(self.made))
                self.made.append(occurrence)
        self.left, self.left_count = left, len(left.order)
        self.sources = [known[id(tensor)] for tensor in left.tensors]

    def _owner(self, index: int) -> str:
        """Returns " (held by a CLASS)" for the object among the arguments that holds input `index`; "" without one."""
        owner = self.call.owner(self.arguments.index(index)) if index in self.arguments else None
        return "" if owner is None else f" (held by a {owner})"

    def finish(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """Writes the changes of the region to the tensors outside, and returns the region's result."""
        assert self.left is not None
        remaining = iter(outputs)
        leaves = list(self.out_leaves)
        for index in self.tensor_outputs:
            leaves[index] = next(remaining)
        for index, position in self.returned_inputs.items():
            leaves[index] = self.targets[position]
        with torch.no_grad():
            for index in self.mutated:
                self.targets[index].copy_(next(remaining))
        for slot, key in self.assigned:
            content = read(slot)
            content[key] = next(remaining)
            write(slot, content)
        tensors = [outputs[index] if is_output else self.targets[index] for is_output, index in self.sources]
        self.left.rebuild(tensors, [])
        # By now the graph of the tensors left behind holds this object. References from here to these tensors would be
        # a cycle through C++, which Python's collector does not see.
        self.left, self.out_leaves = None, []
        self.call.release()
        return pytrees.unflatten(self.out_spec, leaves)

    @contextmanager
    def _substituted(self, working: list[torch.Tensor], *, keep_changes: bool) -> Iterator[dict[int, Content]]:
        """Runs the body with `working` in place of the captured tensors, and all other state as in the first run."""
        captures = self.captures
        before = [read(slot) for slot in captures.slots]
        contents: list[Content] = [content.copy() for content in captures.contents]
        for at, key, position in self.captured:
            contents[at][key] = working[position]
        touched = {at for at, _, _ in self.captured}
        try:
            for index, slot in enumerate(captures.slots):
                if index in touched or not holds(slot, contents[index]):
                    write(slot, contents[index])
            with functorch_state.region():
                yield {index: contents[index] for index in touched}
        finally:
            for index, slot in reversed(list(enumerate(captures.slots))):  # two slots may share an object
                content = before[index]
                if keep_changes:
                    content = read(slot)
                    for captured, key, position in self.captured:
                        if captured == index and _get(content, key) is working[position]:
                            content[key] = captures.contents[index][key]
                if not holds(slot, content):
                    write(slot, content)

    def _assigned(self, put: dict[int, Content]) -> list[tuple[StateSlot, Any, torch.Tensor]]:
        """Returns the tensors that the region stored in a slot, such as an auxiliary loss kept on a module."""
        found = []
        for index, slot in enumerate(self.captures.slots):
            content = put.get(index, self.captures.contents[index])
            now = read(slot)
            for key, value in now.items() if isinstance(now, dict) else enumerate(now):
                if isinstance(value, torch.Tensor) and _get(content, key) is not value:
                    found.append((slot, key, value))
        return found


def _get(content: Content, key: Any) -> Any:
    if isinstance(content, dict):
        return content.get(key)
    return content[key] if key < len(content) else None


class _Region(torch.autograd.Function):
    """The recomputed function. Autograd saves the inputs and checks their versions."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: _Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call.environment = Environment(accelerators(inputs), host_random=True, generators=call.captures.generators)
        outputs = call.execute(inputs, first=True)
        call.environment.conclude()
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call, *tensors = inputs
        ctx.call = call
        ctx.differentiable = [tensor.is_floating_point() or tensor.is_complex() for tensor in output]
        ctx.mark_non_differentiable(*[t for t, yes in zip(output, ctx.differentiable, strict=True) if not yes])
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)  # batch_norm in eval mode refuses a tangent of its buffers, also of zeros

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        # The backward of a `vjp` may run when that `vjp` has ended, inside of other transforms.
        inputs = tuple(map(_functorch.unwrap_if_dead, ctx.saved_tensors))
        wanted = [index for index in range(len(inputs)) if ctx.needs_input_grad[index + 1]]
        with ctx.call.environment.reinstate():
            outputs, vjp, *_ = torch.func.vjp(_rerun(ctx, inputs, wanted), *[inputs[index] for index in wanted])
        given = [grad for grad, yes in zip(grads, ctx.differentiable, strict=True) if yes]
        found = vjp(tuple(torch.zeros_like(y) if g is None else g for y, g in zip(outputs, given, strict=True)))
        result: list[Any] = [None] * len(ctx.needs_input_grad)
        for index, grad in zip(wanted, found, strict=True):
            result[index + 1] = grad
        return tuple(result)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[torch.Tensor | None, ...]:
        if not any(ctx.differentiable):  # such as in a region that returns its argument
            return tuple(None for _ in ctx.differentiable)
        inputs = tuple(map(_functorch.unwrap_if_dead, ctx.saved_tensors))
        wanted = [index for index in range(len(inputs)) if tangents[index + 1] is not None]
        with ctx.call.environment.reinstate():
            found = torch.func.jvp(
                _rerun(ctx, inputs, wanted),
                tuple(inputs[index] for index in wanted),
                tuple(tangents[index + 1] for index in wanted),
            )[1]
        remaining = iter(found)
        return tuple(next(remaining) if yes else None for yes in ctx.differentiable)


def _rerun(ctx: Any, inputs: tuple[torch.Tensor, ...], wanted: list[int]) -> Callable[..., Any]:
    """Returns the region as a function from its `wanted` inputs to its differentiable outputs."""

    def run_again(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        full = list(map(_unwrapped, inputs, ctx.call.targets))
        for index, value in zip(wanted, values, strict=True):
            full[index] = value
        outputs = ctx.call.execute(tuple(full), first=False)
        return tuple(output for output, yes in zip(outputs, ctx.differentiable, strict=True) if yes)

    return run_again


def _unwrapped(tensor: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
    """Returns `outside`, with its class and `requires_grad`, if `tensor` wraps `outside` without a gradient."""
    inner = tensor
    while inner is not outside and _functorch.is_functorch_wrapped_tensor(inner):
        inner = _functorch.get_unwrapped(inner)
    is_whole = inner.dim() == tensor.dim()  # a batched tensor shows a dimension less
    return outside if inner is outside and is_whole else tensor


class _Guard(TorchFunctionMode):
    """Raises when a region under `torch.func` uses a tensor that is neither an input nor computed from inputs.

    Such a tensor belongs to a transform level outside the region: its gradient, or its batch dimension, would be lost
    without an error.
    """

    def __init__(self, inputs: list[torch.Tensor] | None) -> None:
        super().__init__()
        self._known = None if inputs is None else {id(tensor): tensor for tensor in inputs}
        self._depth = unrecorded_depth()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_unrecorded(self._depth):  # a watch inside the region looks at tensors without their wrappers
            return func(*args, **kwargs)
        stack = _functorch.get_interpreter_stack()
        level = stack[-1].level() if stack else 0
        for tensor in pytrees.tensors((args, kwargs)):
            foreign = _functorch.is_functorch_wrapped_tensor(tensor) and _functorch.maybe_get_level(tensor) > level
            # Autograd is off in the first run, so only a tensor from outside the region can require a gradient.
            loses = self._known is not None and tensor.requires_grad and id(tensor) not in self._known
            if foreign or (loses and not torch.is_grad_enabled()):
                raise TransformError(
                    f"checkpoint inside torch.func: the region uses a tensor of shape {list(tensor.shape)} in "
                    f"{getattr(func, '__name__', func)} that it reached in a way memscale cannot follow, so its "
                    "gradient would be lost; pass it to the region as an argument"
                )
        if self._known is not None and not stack and func in _DROPOUTS:
            result = _dropped(func, *args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if self._known is not None and not torch.is_grad_enabled():
            # A view of an input requires a gradient even though autograd is off.
            self._known.update({id(tensor): tensor for tensor in pytrees.tensors(result) if tensor.requires_grad})
        return result


_DROPOUTS = frozenset(
    {F.dropout, F.alpha_dropout, torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_}
)


def _dropped(func: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns the dropout of `input`, in a run outside of all levels, with the mask that the recompute draws.

    PyTorch 2.10 to 2.14 draws the mask in the order of the tensor's memory, but at a level of `torch.func`, where the
    recompute runs, in the order of the dimensions.
    """
    whole = input.contiguous()
    result: torch.Tensor = func(whole, *args, **kwargs)
    if whole is input:
        return result
    if result is whole and not version(whole):  # in eval mode
        return input
    return (input if result is whole else torch.empty_like(input)).copy_(result)
