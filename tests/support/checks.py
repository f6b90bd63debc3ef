"""What the suites assert, as functions: a mutant test calls them on a broken memscale and expects them to fail."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memscale as ms
from memscale.core import pytrees
from tests.support.models import Kind

Evidence = dict[str, Any]
Pattern = Callable[[nn.Module, Kind], Iterator[tuple[str, Any]]]


# ---------------------------------------------------------------------------------------------------- comparing


def bits(value: Any) -> Any:
    """`value` with each tensor as its type, shape and a digest, so that `==` is bit for bit (NaN and -0.0 too).

    Not the bytes themselves: where they differ, pytest on a CI machine (`CI` is set) looks for hours for how.
    """
    leaves, spec = pytrees.flatten(value)
    return [_leaf_bits(leaf) for leaf in leaves], str(spec)


def _leaf_bits(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    whole = leaf.detach().contiguous().reshape(-1)
    digest = hashlib.blake2b(whole.view(torch.uint8).numpy(), digest_size=16).hexdigest()
    return str(leaf.dtype), tuple(leaf.shape), leaf.requires_grad, digest


def generators() -> Any:
    kind, *state = np.random.get_state()
    return bits(torch.get_rng_state()), random.getstate(), kind, state[0].tobytes(), state[1:]


def side_effects(model: nn.Module) -> Evidence:
    """Buffers, and the attributes that a forward may change: numbers, strings, lists, tensors."""
    found = {f"buffer {name}": bits(buffer) for name, buffer in model.named_buffers()}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            if isinstance(value, (int, float, str, list, torch.Tensor)) and not key.startswith("_"):
                found[f"attribute {path}.{key}"] = bits(value)
    return found


def gradients(model: nn.Module, inputs: Any = ()) -> Evidence:
    found = {f"gradient of {name}": bits(parameter.grad) for name, parameter in model.named_parameters()}
    tensors = pytrees.tensors(inputs)
    return found | {f"gradient of input {i}": bits(t.grad) for i, t in enumerate(tensors) if t.requires_grad}


def loss_of(output: Any, model: nn.Module) -> torch.Tensor:
    """A scalar to which every output, and every auxiliary loss, contributes with weights of its own."""
    tensors = [tensor for tensor in pytrees.tensors(output) if tensor.requires_grad]
    tensors += [m.auxiliary for m in model.modules() if isinstance(getattr(m, "auxiliary", None), torch.Tensor)]
    weights = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).round(decimals=1).reshape(t.shape) for t in tensors]
    return torch.stack([(t * w).sum().double() for t, w in zip(tensors, weights, strict=True)]).sum()


def difference(expected: Evidence, actual: Evidence) -> list[str]:
    return [key for key in {**expected, **actual} if expected.get(key) != actual.get(key)]


# --------------------------------------------------------------------------------------------------- semantics


def evidence(model: nn.Module, kind: Kind, pattern: Pattern) -> Evidence:
    """All that a training pattern leaves behind, from the same random state each time."""
    seed()
    found: Evidence = {}
    for step, (name, value) in enumerate(pattern(model, kind)):
        found[f"{step}: {name}"] = bits(value)
    return {**found, **gradients(model), **side_effects(model), "generators": generators()}


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)


def make(kind: Kind) -> nn.Module:
    torch.manual_seed(3)
    return kind.make()


@functools.lru_cache(maxsize=1)  # cases come pattern by pattern
def untransformed(kind: Kind, pattern: Pattern) -> Evidence:
    try:
        return evidence(make(kind), kind, pattern)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"oneDNN has no such operator for this CPU, such as an LSTM in bfloat16: {error}")


def check_same(kind: Kind, pattern: Pattern, plan: Any) -> None:
    """The transformed model leaves behind, bit for bit, what the untransformed one does."""
    expected = untransformed(kind, pattern)
    model = make(kind)
    actual = evidence(ms.transform(model, plan), kind, pattern)
    assert difference(expected, actual) == []
    assert gradients(model) == {key: actual[key] for key in gradients(model)}, "the parameters are shared"


# ------------------------------------------------------------------------------------------------- structure


def fingerprint(model: nn.Module) -> Any:
    """Every object that a module tree holds, by identity, and the version of every tensor."""
    modules = [
        (id(module), {key: _identities(value) for key, value in module.__dict__.items()}) for module in model.modules()
    ]
    return modules, [tensor._version for tensor in [*model.parameters(), *model.buffers()]], generators()


def _identities(value: Any) -> Any:
    if isinstance(value, dict):
        return id(value), [(key, id(item)) for key, item in value.items()]
    return (id(value), [id(item) for item in value]) if isinstance(value, (list, set)) else id(value)


def check_argument_untouched(model: nn.Module, plan: Any) -> None:
    before = fingerprint(model)
    ms.transform(model, plan)
    assert fingerprint(model) == before


def check_trees_independent(kind: Kind, plan: Any) -> None:
    """While `functional_call` runs the new tree, the old one holds its own parameters."""
    model = make(kind)
    fit = ms.transform(model, plan)
    own = dict(model.named_parameters())
    seen: list[bool] = []
    *_, last = fit.modules()
    last.register_forward_pre_hook(lambda *_: seen.append(all(p is own[name] for name, p in model.named_parameters())))
    args, kwargs = kind.arguments()
    torch.func.functional_call(fit, {name: p.detach() for name, p in own.items()}, args, kwargs)
    assert seen
    assert all(seen)
