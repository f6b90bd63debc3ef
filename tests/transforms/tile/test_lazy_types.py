"""LazyLogits logits have the type that the real ones would have, after whatever arithmetic."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memscale import tile
from memscale.transforms.tile.head.lazy_logits import LazyLogits
from tests.support.coverings import in_turn

ROWS, WIDTH, CLASSES = 12, 8, 50
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SCALARS = {"int": 3, "float": 1.3, "bool": True}
SHAPES = {"[]": (), "[1]": (1,), "[1, 1]": (1, 1), "[classes]": (CLASSES,), "[1, classes]": (1, CLASSES)}
CONSTANTS = {
    f"{str(dtype).removeprefix('torch.')}{name}": torch.full(shape, 2, dtype=dtype)
    for dtype in (*DTYPES, torch.int64, torch.int8, torch.bool)
    for name, shape in SHAPES.items()
}
OPERATORS = {
    "mul": operator.mul,
    "div": operator.truediv,
    "add": operator.add,
    "sub": operator.sub,
    "torch.mul": torch.mul,
    "torch.add, alpha": lambda a, b: torch.add(a, b, alpha=2),
    "floored": lambda a, b: torch.div(a, b, rounding_mode="floor"),
}


def head(dtype):
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES).to(dtype)


def loss(logits, target):
    return F.cross_entropy(logits, target)


@pytest.mark.parametrize(("dtype", "constant"), in_turn(DTYPES, [*SCALARS, *CONSTANTS]))
def test_arithmetic_promotes_as_without_tile(dtype, constant):
    value = SCALARS.get(constant, CONSTANTS.get(constant))
    layer = head(dtype)
    fit = tile(chunks=3)(layer)
    x, target = torch.randn(ROWS, WIDTH, dtype=dtype), torch.arange(ROWS)
    for name, apply in OPERATORS.items():
        try:
            expected = apply(layer(x), value)
        except RuntimeError as error:  # subtraction of a bool
            with pytest.raises(RuntimeError, match=str(error)[:20]):
                apply(fit(x), value)
            continue
        actual = apply(fit(x), value)
        assert type(actual) is LazyLogits, name
        assert actual.dtype == expected.dtype, name
        assert loss(actual, target).dtype == loss(expected, target).dtype, name
        assert not actual.recipe.projection.computed, name
        assert torch.equal(actual + 0, expected + 0), name
    # And of numbers on the left.
    assert (value * fit(x)).dtype == (value * layer(x)).dtype
    assert (value + fit(x)).dtype == (value + layer(x)).dtype


@pytest.mark.parametrize("leading", [(ROWS,), (3, 4)], ids=str)
def test_one_element_is_no_scalar_for_any_number_of_rows(leading):
    layer = head(torch.bfloat16)
    x = torch.randn(*leading, WIDTH).bfloat16()
    for chained in (lambda z: z * torch.tensor([1.3]), lambda z: z * torch.tensor(1.3) * torch.tensor([1.3]) + 1):
        expected, actual = chained(layer(x)), chained(tile(chunks=2)(layer)(x))
        assert actual.dtype == expected.dtype == torch.float32
        assert torch.equal(actual + 0, expected)


def test_a_head_by_classes_takes_a_constant_of_one_element_for_every_block():
    """A 16-bit head whose weight gradient is made block by block of classes: each block takes the one element."""
    layer = head(torch.bfloat16)
    x, target = torch.randn(ROWS, WIDTH).bfloat16(), torch.arange(ROWS)

    def gradients(fn, factor):
        return torch.autograd.grad(loss(fn(x) * factor, target), [*layer.parameters()])

    one, row = torch.tensor([1.3]), torch.full((CLASSES,), 1.3)
    expected = gradients(layer, one)
    fit = tile(chunks=4)(layer)
    for factor in (one, row):
        for grad, other in zip(gradients(fit, factor), expected, strict=True):
            torch.testing.assert_close(grad, other, rtol=2**-7, atol=2**-10)


def test_a_head_of_one_class():
    layer = nn.Linear(WIDTH, 1).bfloat16()
    x = torch.randn(ROWS, WIDTH).bfloat16()
    for value in (torch.tensor([1.5]), torch.tensor(1.5), torch.tensor([[1.5]])):
        expected, actual = layer(x) * value, tile(chunks=4)(layer)(x) * value
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual + 0, expected)
        assert F.cross_entropy(actual, torch.zeros(ROWS).long()) == 0
