"""The ways of training a model that must not tell a transformed one from an untransformed one.

Each pattern is a generator of (name, value) pairs, all of which must be bitwise equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memscale.algebra import functional
from memscale.core import pytrees
from tests.support.checks import gradients, loss_of
from tests.support.models import Kind

Found = Iterator[tuple[str, Any]]


def forward(model: nn.Module, kind: Kind) -> tuple[Any, Any]:
    args, kwargs = kind.arguments()
    return model(*args, **kwargs), (args, kwargs)


def trained(model: nn.Module, inputs: Any) -> list[torch.Tensor]:
    return [t for t in [*pytrees.tensors(inputs), *model.parameters()] if t.requires_grad]


def step(model: nn.Module, kind: Kind) -> Found:
    output, inputs = forward(model, kind)
    yield "output", output
    loss_of(output, model).backward()
    yield "gradients", gradients(model, inputs)


def backward_twice(model: nn.Module, kind: Kind) -> Found:
    yield from step(model, kind)
    yield from step(model, kind)


def optimizer_steps(model: nn.Module, kind: Kind) -> Found:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        yield from step(model, kind)
        optimizer.step()
        optimizer.zero_grad()
    yield "parameters", dict(model.named_parameters())


def gradient_accumulation(model: nn.Module, kind: Kind) -> Found:
    """Two graphs alive at once; the younger one goes backward first."""
    first, inputs = forward(model, kind)
    loss = loss_of(first, model)
    second, _ = forward(model, kind)
    loss_of(second, model).backward()
    random.random()
    torch.rand(3)
    loss.backward()
    yield "outputs", (first, second)
    yield "gradients", gradients(model, inputs)


def retain_graph(model: nn.Module, kind: Kind) -> Found:
    output, inputs = forward(model, kind)
    loss = loss_of(output, model)
    for keep in (True, True, False):
        loss.backward(retain_graph=keep)
        yield "gradients", gradients(model, inputs)


def partial_inputs(model: nn.Module, kind: Kind) -> Found:
    """`autograd.grad` for some tensors at a time, the last ones first."""
    output, inputs = forward(model, kind)
    loss, wanted = loss_of(output, model), trained(model, inputs)
    for index in reversed(range(0, len(wanted), max(1, len(wanted) // 3))):
        yield "one gradient", torch.autograd.grad(loss, wanted[index], retain_graph=True, allow_unused=True)
    yield "all gradients", torch.autograd.grad(loss, wanted, allow_unused=True)


def double_backward(model: nn.Module, kind: Kind) -> Found:
    output, inputs = forward(model, kind)
    wanted = trained(model, inputs)
    first = torch.autograd.grad(loss_of(output, model), wanted, create_graph=True, allow_unused=True)
    yield "first", first
    penalty = torch.stack([grad.pow(2).sum().double() for grad in first if grad is not None]).sum()
    penalty.backward()
    yield "second", gradients(model, inputs)


def autocast(model: nn.Module, kind: Kind, *, cache_enabled: bool = True) -> Found:
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache_enabled):
            output, inputs = forward(model, kind)
        yield "output", output
        loss_of(output, model).backward()
        yield "gradients", gradients(model, inputs)


def autocast_without_cache(model: nn.Module, kind: Kind) -> Found:
    yield from autocast(model, kind, cache_enabled=False)


def eval_before_backward(model: nn.Module, kind: Kind) -> Found:
    output, inputs = forward(model, kind)
    model.eval()
    loss_of(output, model).backward()
    yield "gradients", gradients(model, inputs)
    yield from step(model, kind)
    model.train()
    yield from step(model, kind)


def without_gradient(model: nn.Module, kind: Kind) -> Found:
    with torch.no_grad():
        yield "output", forward(model, kind)[0]
    with torch.inference_mode():
        yield "output", forward(model, kind)[0]
    yield from step(model, kind)


class Interrupted(Exception):
    pass


def interrupted(model: nn.Module, kind: Kind) -> Found:
    """An exception in the last layer of the forward, then one in backward, then business as usual."""
    *_, last = (module for module in model.modules() if not list(module.children()))

    def interrupt(*_: Any) -> None:
        raise Interrupted

    handle = last.register_forward_pre_hook(interrupt)
    for _ in range(2):
        try:
            forward(model, kind)
        except Interrupted:
            yield "raised", "in forward"
    handle.remove()
    output, _ = forward(model, kind)
    parameter = [parameter for parameter in model.parameters() if parameter.requires_grad][-1]
    handle = parameter.register_hook(interrupt)
    try:
        loss_of(output, model).backward()
    except Interrupted:
        yield "raised", "in backward"
    handle.remove()
    model.zero_grad()
    yield from step(model, kind)


def other_weights(model: nn.Module, kind: Kind) -> Found:
    """`functional`: the gradient reaches the weights that were passed, and no others; PyTorch's leaves them behind."""
    args, kwargs = kind.arguments()
    weights = {name: (p.detach() * 0.5).requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    output = functional(model)[0](weights, *args, **kwargs)
    yield "output", output
    loss_of(output, model).backward()
    yield "gradients", {name: weight.grad for name, weight in weights.items()}
    yield from step(model, kind)


def moved_to_double(model: nn.Module, kind: Kind) -> Found:
    yield from step(model, kind)
    model.zero_grad()
    model.double()
    leaves, spec = pytrees.flatten(kind.arguments())
    args, kwargs = pytrees.unflatten(
        spec, [t.detach().double().requires_grad_(t.requires_grad) if _is_float(t) else t for t in leaves]
    )
    output = model(*args, **kwargs)
    yield "output", output
    loss_of(output, model).backward()
    yield "gradients", gradients(model, (args, kwargs))


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def under_saved_tensor_hooks(model: nn.Module, kind: Kind) -> Found:
    with torch.autograd.graph.save_on_cpu():
        yield from step(model, kind)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        output, inputs = forward(model, kind)
    loss_of(output, model).backward()
    yield "gradients", gradients(model, inputs)


ALL = (
    backward_twice,
    optimizer_steps,
    gradient_accumulation,
    retain_graph,
    partial_inputs,
    double_backward,
    autocast,
    eval_before_backward,
    without_gradient,
    interrupted,
    other_weights,
    moved_to_double,
    under_saved_tensor_hooks,
)
