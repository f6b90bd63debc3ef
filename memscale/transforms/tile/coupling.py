"""Operators that couple rows for certain, numbers over the rows, and rows by number: what `rowwise` refuses to mix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memscale.transforms.tile.row_rules import RowCall, RowDim, rule_of


def couples(op: Any, call: RowCall) -> bool:
    """Whether the rows of a result depend on other rows, for certain: a softmax along the rows, attention among them.

    An operator without a rule here, or whose rows a rule cannot place, may couple rows as well.
    """
    rule = _COUPLING.get(op._schema.name)
    return rule is not None and rule(call)


def reduces(op: Any, call: RowCall) -> bool:
    """Whether the result is computed over the rows, and has none: a sum, a maximum, a product along the rows."""
    name = op._schema.name.removeprefix("aten::")
    if name in _PRODUCTS:
        (one, left), (other, right) = _operands(call)
        return (left is not None and left.dim == one.dim() - 1) or (right is not None and right.dim == other.dim() - 2)
    if name == "mv":
        return (rows := call.rows(call.given["self"])) is not None and rows.dim == 1
    if name in _SUMMED:
        return any((rows := call.rows(call.given[each])) is not None and rows.dim == 0 for each in _SUMMED[name])
    if name not in _REDUCTIONS or "other" in call.given or (found := call.only("self")) is None:
        return False
    dims = call.dims(found[0])
    return dims is None or found[1].dim in dims


def passes_on(op: Any) -> bool:
    """Whether the numbers of the result depend on those of the arguments, by a rule.

    `squeeze_` has no rule of its own: `matmul` of a vector ends with it.
    """
    name = op._schema.name
    return name == "aten::squeeze_" or (rule_of(op) is not None and not name.endswith("_like"))


@dataclass(frozen=True)
class SomeRows:
    """The place of the rows in what was computed from some of them, by their number: ``x[1:]``, ``x[0]``.

    Attributes:
        begin, end: the first row, and the row behind the last; fractions where a view merges other dimensions.
        step: every which row counts.
    """

    begin: float
    end: float
    step: int = 1


def is_row_view(op: Any, call: RowCall) -> bool:
    """Whether the results are some of the rows, by their number, of a tensor that does not hold integers.

    The first row of integers, such as positions, often equals the others, and code for one sample takes the only row.
    """
    name, found = op._schema.name.removeprefix("aten::"), call.only("self")
    if call.count < 2 or name not in _ROW_VIEWS or found is None:
        return False
    if not (found[0].is_floating_point() or found[0].is_complex()):
        return False
    return bool(call.given.get("dim", 0) % found[0].dim() == found[1].dim)


def rows_of_view(call: RowCall, result: torch.Tensor) -> RowDim | SomeRows | None:
    """Returns which rows the view `result` of `is_row_view` holds: all, some, or none that are known."""
    found = call.only("self")
    assert found is not None, "is_row_view asked for it"
    (tensor, rows), period = found, call.count * found[1].each
    step, kept = tensor.stride(rows.dim), result.dim() == tensor.dim()
    size = result.shape[rows.dim] if kept else 1
    if not step or not size:  # rows that are one row repeated, or no row
        return None
    begin = (result.storage_offset() - tensor.storage_offset()) // step
    apart = result.stride(rows.dim) // step if size > 1 else 1
    if apart == 1 and kept and begin % period == 0 and size % period == 0:
        return RowDim(rows.dim, rows.each, size // period)
    begin %= period
    return SomeRows(begin / rows.each, (begin + (size - 1) * apart + 1) / rows.each, apart)


def are_in_order(places: Sequence[Any], count: int) -> bool:
    """Whether these are parts of `count` rows that follow each other, and together are all of them."""
    at = 0.0
    for place in places:
        if not isinstance(place, SomeRows) or place.step != 1 or place.begin != at:
            return False
        at = place.end
    return at == count


# Operators whose results are views of parts of `self` along `dim`.
_ROW_VIEWS = frozenset(("select", "unbind", "slice", "split", "unsafe_split", "split_with_sizes"))

# The operands of products; `addmm` has a `self` besides, which it adds.
_PRODUCTS = {
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
}
# `any` and `all` are left out: models ask by them for infinities, which they then clip in every row.
_REDUCTIONS = frozenset(("sum", "mean", "amax", "amin", "prod", "var", "std", "var_mean", "std_mean", "max", "min"))
_REDUCTIONS |= {"logsumexp", "linalg_vector_norm", "median", "kthvalue", "mode", "aminmax", "count_nonzero", "trace"}
_REDUCTIONS |= {"argmax", "argmin", "histc", "bincount", "nansum", "nanmedian"}
# The operands over whose first dimension an operator sums.
_SUMMED = {"dot": ("self", "tensor"), "vdot": ("self", "other"), "addbmm": ("batch1", "batch2")}


def _operands(call: RowCall) -> tuple[tuple[torch.Tensor, RowDim | None], ...]:
    names = next(names for names in _PRODUCTS.values() if all(name in call.given for name in names))
    return tuple((call.given[name], call.rows(call.given[name])) for name in names)


def _multiplied(call: RowCall) -> bool:
    """A product of rows with rows: every row meets every other."""
    (one, left), (other, right) = _operands(call)
    return left is not None and right is not None and (left.dim, right.dim) == (one.dim() - 2, other.dim() - 1)


def _worked_along(name: str) -> Callable[[RowCall], bool]:
    def rule(call: RowCall) -> bool:
        found = call.only("self")
        if found is None:
            return False
        dims = call.dims(found[0], name)
        return dims is None or found[1].dim in dims

    return rule


def _shifted(call: RowCall) -> bool:
    """Padding that takes rows away at one end, as a shift by one row does."""
    if (found := call.only("self")) is None:
        return False
    at = 2 * (found[0].dim() - 1 - found[1].dim)
    return any(size < 0 for size in call.given["pad"][at : at + 2])


def _within(last: int) -> Callable[[RowCall], bool]:
    """Makes a rule for operators that work within the `last` dimensions, such as those of a matrix."""

    def rule(call: RowCall) -> bool:
        found = call.only("A" if "A" in call.given else "self")
        return found is not None and found[1].dim >= found[0].dim() - last

    return rule


def _on_diagonal(call: RowCall) -> bool:
    found = call.only("self")
    return found is not None and found[1].dim in {call.given[name] % found[0].dim() for name in ("dim1", "dim2")}


def _limited(call: RowCall) -> bool:
    """A limit on the norms of all parts along another dimension."""
    found = call.only("self")
    return found is not None and found[1].dim != call.given["dim"] % found[0].dim()


def _attended(call: RowCall) -> bool:
    key = call.given["key"]
    return (rows := call.rows(key)) is not None and rows.dim == key.dim() - 2


def _convolved(call: RowCall) -> bool:
    """A convolution along the rows whose windows overlap."""
    if (found := call.only("input")) is None or (at := found[1].dim - 2) < 0:
        return False
    return bool(call.given["weight"].shape[at + 2] > call.given["stride"][min(at, len(call.given["stride"]) - 1)])


def _pooled(call: RowCall) -> bool:
    """A pooling along the rows whose windows overlap."""
    if (found := call.only("self")) is None or (at := found[1].dim - 2) < 0:
        return False
    kernel, stride = call.given["kernel_size"], call.given.get("stride") or call.given["kernel_size"]
    return bool(kernel[min(at, len(kernel) - 1)] > stride[min(at, len(stride) - 1)])


def _resized(call: RowCall) -> bool:
    """An interpolation along the rows, or a pooling to a given size."""
    found = call.only("self")
    return found is not None and found[1].dim >= 2


def _in_windows(call: RowCall) -> bool:
    found = call.only("self")
    along = found is not None and found[1].dim == call.given["dimension"] % found[0].dim()
    return along and bool(call.given["size"] > call.given["step"])


def _in_pairs(call: RowCall) -> bool:
    """The distances of rows from rows."""
    places = [(each, call.rows(each)) for each in (call.given["x1"], call.given["x2"])]
    return all(rows is not None and rows.dim == each.dim() - 2 for each, rows in places)


def _normalized_over(call: RowCall) -> bool:
    found = call.only("input")
    if found is None or "normalized_shape" not in call.given:
        return found is not None and found[1].dim > 1  # the statistics of groups are over all dimensions but the first
    return found[1].dim >= found[0].dim() - len(call.given["normalized_shape"])


def _stepped(call: RowCall) -> bool:
    """A recurrent layer along the rows. The layer of a CPU gets the steps first in any case."""
    rows = call.rows(call.given["input"])
    return rows is not None and rows.dim == (1 if call.given.get("batch_first") and "weight" in call.given else 0)


_COUPLING: dict[str, Callable[[RowCall], bool]] = {
    f"aten::{name}": rule
    for names, rule in (
        ("_softmax _log_softmax _safe_softmax sort topk cumsum cumprod", _worked_along("dim")),
        ("logcumsumexp cummax cummin _fft_c2c _fft_c2r _fft_r2c", _worked_along("dim")),
        ("flip roll rot90", _worked_along("dims")),
        ("diagonal", _on_diagonal),
        ("renorm renorm_", _limited),
        ("put put_", lambda call: call.only("self") is not None),
        (
            "triu tril _linalg_svd linalg_qr _linalg_eigh _linalg_eigvals linalg_eig linalg_cholesky_ex linalg_inv_ex "
            "_linalg_solve_ex _linalg_det _linalg_slogdet linalg_lu_factor_ex linalg_matrix_exp",
            _within(2),
        ),
        (" ".join(_PRODUCTS), _multiplied),
        ("convolution", _convolved),
        ("constant_pad_nd", _shifted),
        ("max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d", _pooled),
        (
            "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d upsample_linear1d "
            "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d",
            _resized,
        ),
        ("unfold", _in_windows),
        ("_cdist_forward _euclidean_dist", _in_pairs),
        ("native_group_norm native_layer_norm _fused_rms_norm", _normalized_over),
        ("mkldnn_rnn_layer _cudnn_rnn", _stepped),
        (
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
            _attended,
        ),
    )
    for name in names.split()
}
