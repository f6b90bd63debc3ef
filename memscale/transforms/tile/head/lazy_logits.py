"""`LazyLogits`: lazy logits, ``hidden @ weight.T`` that is computed only when it is used.

A `LazyLogits` has a shape and a dtype and no memory. Operators that commute with a projection of the last dimension
(casts, scaling, reshaping and slicing of the leading dimensions) are applied to the hidden states instead.
`F.cross_entropy` takes the hidden states and computes the loss piece by piece (`tiled_loss`). Every other use computes
the logits first.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from memscale.core import CorrectnessError, TransformError, pytrees, version
from memscale.transforms.tile.head.loss import Step
from memscale.transforms.tile.head.projection import Projection, Tiling
from memscale.transforms.tile.head.tiled_loss import cross_entropy


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The steps from a projection to its lazy logits.

    Attributes:
        projection: the projection.
        hidden: the hidden states of the rows, shape ``[*leading, in_features]``.
        steps: the pointwise functions that were applied to the logits (casts, scaling), in order.
        parent: the lazy logits from which these were derived. To compute these, the parent is computed first, so that
            views share memory and copies do not.
        step: the function that derived them from `parent`.
        tracked: whether every step was taken with gradients enabled.
        classes_second: whether the class dimension was moved to position 1, as `F.cross_entropy` needs for 3-D input.
    """

    projection: Projection
    hidden: torch.Tensor
    steps: tuple[Step, ...] = ()
    parent: LazyLogits | None = None
    step: Step | None = None
    tracked: bool = True
    classes_second: bool = False


class LazyLogits(torch.Tensor):
    """Lazy logits. Every use other than those listed above computes them, once, and continues with the result."""

    recipe: Recipe
    _made: torch.Tensor | None

    @staticmethod
    def __new__(cls, recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype) -> LazyLogits:
        lazy: LazyLogits = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=recipe.hidden.device)
        lazy.__dict__["recipe"] = recipe
        lazy.__dict__["_made"] = None
        recipe.projection.lazy.append(weakref.ref(lazy))
        return lazy

    @property
    def requires_a_gradient(self) -> bool:
        """The value of `requires_grad`."""
        recipe: Recipe = self.__dict__["recipe"]
        return recipe.tracked and recipe.projection.requires_grad

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == T.requires_grad.__get__:  # `==`, because every access makes a new object
            return LazyLogits.requires_a_gradient.__get__(args[0])
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {key: value for key, value in kwargs.items() if key != "input"}
        leaves = _all(args, kwargs)
        for lazy in leaves:
            _refuse_adopted(lazy)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and not first.__dict__["recipe"].projection.computed:
            follow = _FOLLOW.get(func)
            result = follow(first, func, args, kwargs) if follow is not None else NotImplemented
            if result is not NotImplemented:
                return result
        if _changes_in_place(func, kwargs):
            # Lazy logits derived earlier must keep the old values, or see the change if they are views.
            for lazy in leaves:
                for relative in [reference() for reference in lazy.__dict__["recipe"].projection.lazy]:
                    if relative is not None:
                        materialize(relative)
        args, kwargs = pytrees.map_only(LazyLogits, materialize, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Only code that bypasses `__torch_function__` gets here, such as C++.
        raise TransformError(
            f"{func} was given the lazy logits of a tiled output projection in a way that hides their use from "
            "PyTorch; pass logits.clone() to make them real first, or do not tile the projection"
        )


def defer(fn: Callable[..., Any], hidden: torch.Tensor, tiling: Tiling) -> LazyLogits:
    """Returns ``fn(hidden)`` as lazy logits; `fn` must be a projection of the last dimension (`is_projection`)."""
    projection = Projection(fn, hidden, tiling)
    return _make(Recipe(projection, hidden), (*hidden.shape[:-1], projection.width), projection.dtype)


def _make(recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype) -> LazyLogits:
    if not (recipe.tracked and recipe.projection.requires_grad):
        return LazyLogits(recipe, shape, dtype)
    made: LazyLogits = _Tripwire.apply(  # type: ignore[no-untyped-call]
        recipe, shape, dtype, recipe.hidden, *recipe.projection.captured
    )
    return made


class _Tripwire(torch.autograd.Function):
    """Makes lazy logits. Backward raises, because a gradient here was computed for the lazy object itself."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Recipe, shape: tuple[int, ...], dtype: torch.dtype, *inputs: torch.Tensor
    ) -> LazyLogits:
        return LazyLogits(recipe, shape, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise TransformError(_HIDDEN)


_HIDDEN = (
    "the lazy logits of a tiled output projection went through a torch.autograd.Function, which hides their use "
    "from PyTorch; pass it logits.clone() to make them real first, or do not tile the projection"
)


def _refuse_adopted(lazy: LazyLogits) -> None:
    """Raises `TransformError` if an autograd function has returned `lazy` as its own result."""
    with torch._C.DisableTorchFunctionSubclass():
        node = lazy.grad_fn
    if node is not None and type(node) is not _Tripwire._backward_cls:
        raise TransformError(_HIDDEN)


def materialize(lazy: LazyLogits) -> torch.Tensor:
    """Returns the real tensor of lazy logits, the same object every time.

    Raises:
        CorrectnessError: the logits from which these were derived were changed in place since.
    """
    attributes = lazy.__dict__
    if attributes["_made"] is None:
        recipe: Recipe = attributes["recipe"]
        if recipe.parent is None or recipe.step is None:
            attributes["_made"] = recipe.projection.value()
        else:
            value = materialize(recipe.parent)
            if version(value) != recipe.parent.__dict__["_made_version"]:
                raise CorrectnessError(
                    "the logits of a tiled output projection were changed in place, through an alias such as "
                    "logits.detach(), after other logits had been made from them; use those first, or change a clone"
                )
            func, args, kwargs = recipe.step
            with recipe.projection.as_when_called(grad=recipe.tracked and recipe.projection._grad_enabled):
                attributes["_made"] = func(value, *args, **kwargs)
        attributes["_made_version"] = version(materialize(lazy))
    return attributes["_made"]  # type: ignore[no-any-return]


def _changes_in_place(func: Any, kwargs: Any) -> bool:
    name = getattr(func, "__name__", "")
    inner = name.strip("_")
    operator = name.startswith("__") and (inner in ("setitem", "set") or inner in _IN_PLACE)
    return operator or (name.endswith("_") and not name.startswith("_")) or kwargs.get("out") is not None


def _all(args: Any, kwargs: Any) -> list[LazyLogits]:
    return [leaf for leaf in pytrees.flatten((args, kwargs))[0] if isinstance(leaf, LazyLogits)]


def _derive(source: LazyLogits, step: Step, *, hidden: torch.Tensor | None = None, **changes: Any) -> LazyLogits:
    func, *arguments = step
    # Cloned, because the step is run later than the caller expects.
    arguments = pytrees.map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), arguments)
    recipe = dataclasses.replace(
        source.recipe,
        hidden=source.recipe.hidden if hidden is None else hidden,
        parent=source,
        step=(func, *arguments),
        tracked=source.recipe.tracked and torch.is_grad_enabled(),
        **{key: value for key, value in changes.items() if key in ("steps", "classes_second")},
    )
    width = source.shape[1] if source.recipe.classes_second else source.shape[-1]
    leading = recipe.hidden.shape[:-1]
    shape = (leading[0], width, *leading[1:]) if recipe.classes_second else (*leading, width)
    return _make(recipe, shape, changes.get("dtype", source.dtype))


def _pointwise(source: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """Follows a cast, or arithmetic with numbers or with a constant that is the same for every row, such as a bias."""
    if source.recipe.classes_second or any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return NotImplemented
    rest = []
    for value in args[1:]:
        if isinstance(value, torch.Tensor):
            same_for_all = value.numel() == 1 or value.numel() == value.shape[-1] == source.shape[-1]
            if isinstance(value, LazyLogits) or value.requires_grad or not same_for_all or value.dim() > source.dim():
                return NotImplemented
            # Zero-dimensional tensors do not take part in type promotion, one-element tensors do.
            value = value.detach().reshape((1, -1) if value.dim() else ()).clone()
        rest.append(value)
    sample = func(torch.empty(0, source.shape[-1], dtype=source.dtype, device=source.device), *rest, **kwargs)
    if not isinstance(sample, torch.Tensor) or sample.device != source.device or not sample.is_floating_point():
        return NotImplemented
    steps = (*source.recipe.steps, (func, tuple(rest), kwargs))
    return _derive(source, (func, args[1:], kwargs), steps=steps, dtype=sample.dtype)


def _reshape(source: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """Follows a view, reshape or flatten that leaves the class dimension last."""
    result = func(torch.empty(source.shape, dtype=source.dtype, device="meta"), *args[1:], **kwargs)
    if source.recipe.classes_second or result.dtype != source.dtype or result.shape[-1:] != source.shape[-1:]:
        return NotImplemented
    hidden = source.recipe.hidden.reshape(*result.shape[:-1], source.recipe.hidden.shape[-1])
    return _derive(source, (torch.Tensor.reshape, (tuple(result.shape),), {}), hidden=hidden)


def _index(source: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """Follows indexing of the leading dimensions: the same index selects the same rows of the hidden states."""
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    if not index or not all(isinstance(entry, _ENTRIES) for entry in index):
        return NotImplemented
    consumed = sum(_dims_of(entry) for entry in index)
    elided = any(entry is Ellipsis for entry in index)
    whole_classes = isinstance(index[-1], slice) and index[-1] == slice(None)
    untouched = consumed < source.dim() and (not elided or index[-1] is Ellipsis)
    if source.recipe.classes_second or not (untouched or (whole_classes and (elided or consumed == source.dim()))):
        return NotImplemented
    return _derive(source, (torch.Tensor.__getitem__, (args[1],), {}), hidden=source.recipe.hidden[args[1]])


_ENTRIES = (int, slice, torch.Tensor, type(None), type(...))  # lists and NumPy masks consume an unclear number of dims


def _dims_of(entry: Any) -> int:
    if entry is None or entry is Ellipsis or isinstance(entry, bool):
        return 0
    return entry.dim() if isinstance(entry, torch.Tensor) and entry.dtype in (torch.bool, torch.uint8) else 1


def _move_classes(source: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    """Follows ``[batch, length, classes]`` to ``[batch, classes, length]``, as `F.cross_entropy` takes sequences."""
    if source.dim() != 3 or source.recipe.classes_second:
        return NotImplemented
    order = func(torch.empty(1, 2, 3, device="meta"), *args[1:], **kwargs).shape
    if order != (1, 3, 2):
        return NotImplemented
    return _derive(source, (func, args[1:], kwargs), classes_second=True)


def _cross_entropy(source: LazyLogits, func: Any, args: Any, kwargs: Any) -> Any:
    recipe = source.recipe
    if not (source.dim() == 2 or recipe.classes_second):
        return NotImplemented
    with torch.set_grad_enabled(torch.is_grad_enabled() and recipe.tracked):
        return cross_entropy(recipe.projection, recipe.steps, recipe.hidden, source.shape, *args[1:], **kwargs)


_IN_PLACE = {"iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor"}
T: Any = torch.Tensor  # the type stubs do not know `__get__` of attributes
_FOLLOW: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((T.float, T.half, T.bfloat16, T.double, T.to, T.type, T.contiguous), _pointwise),
    **dict.fromkeys((T.mul, T.__mul__, T.__rmul__, T.div, T.__truediv__, torch.mul, torch.div), _pointwise),
    **dict.fromkeys((T.add, T.__add__, T.__radd__, T.sub, T.__sub__, torch.add, torch.sub), _pointwise),
    **dict.fromkeys((T.tanh, torch.tanh), _pointwise),
    **dict.fromkeys((T.view, T.reshape, torch.reshape, T.flatten, torch.flatten), _reshape),
    **dict.fromkeys((T.transpose, torch.transpose, T.permute, torch.permute, T.swapaxes, T.mT.__get__), _move_classes),
    T.__getitem__: _index,
    F.cross_entropy: _cross_entropy,
}
_METADATA = {
    T.shape.__get__,
    T.dtype.__get__,
    T.device.__get__,
    T.layout.__get__,
    T.ndim.__get__,
    T.nbytes.__get__,
    T.is_cuda.__get__,
    T.is_meta.__get__,
    T.is_sparse.__get__,
    T.is_nested.__get__,
    T.is_quantized.__get__,
    T.__len__,
    T.size,
    T.dim,
    T.ndimension,
    T.numel,
    T.nelement,
    T.element_size,
    T.is_floating_point,
    T.is_complex,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
