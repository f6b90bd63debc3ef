"""The place of the rows in the result of each operator that computes every row by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memscale.core import pytrees


@dataclass(frozen=True)
class RowDim:
    """The place of the rows in a tensor: along `dim`, repeated `over` times, each row `each` entries long."""

    dim: int
    each: int = 1
    over: int = 1

    def at(self, dim: int) -> RowDim:
        """Returns the same place in another dimension."""
        return RowDim(dim, self.each, self.over)

    def holds(self, tensor: torch.Tensor, count: int) -> bool:
        """Whether `tensor` may have `count` rows at this place; one row may be at any dimension of size 1."""
        size = count * self.each * self.over
        return tensor.dim() > self.dim and tensor.shape[self.dim] == size and (size > 1 or tensor.shape.count(1) == 1)


@dataclass(frozen=True)
class RowCall:
    """A call of an operator: arguments by name, result, number of rows, and the dimension of the rows."""

    given: dict[str, Any]
    result: Any
    count: int
    rows: Callable[[Any], RowDim | None]

    def tensors(self) -> list[torch.Tensor]:
        return pytrees.tensors(list(self.given.values()))

    def only(self, name: str) -> tuple[torch.Tensor, RowDim] | None:
        """Returns the named argument and the place of its rows, or None if another argument has rows too."""
        tensor = self.given.get(name)
        if not isinstance(tensor, torch.Tensor) or (rows := self.rows(tensor)) is None:
            return None
        return None if any(self.rows(each) for each in self.tensors() if each is not tensor) else (tensor, rows)

    def shared(self, tensors: list[torch.Tensor]) -> RowDim | None:
        """Returns the place of the rows that `tensors` have in common, or None."""
        places = {self.rows(tensor) for tensor in tensors}
        return places.pop() if len(places) == 1 else None

    def dims(self, tensor: torch.Tensor, name: str = "dim") -> list[int] | None:
        """Returns the dimensions that an argument names, counted from the front, or None if it names all."""
        named = self.given.get(name)
        found = [named] if isinstance(named, int) else named
        return [dim % max(1, tensor.dim()) for dim in found] if found else None


#: Returns the place of the rows in the results of a call, or None if unknown. A tuple has one entry per result; None
#: in it means a result without rows, which only backward uses.
Rule = Callable[[RowCall], "RowDim | tuple[RowDim | None, ...] | None"]


def _of_one(rule: Callable[[RowCall, torch.Tensor, RowDim], RowDim | None]) -> Rule:
    """Makes a rule for operators of which only the first argument may have rows."""

    def of_one(call: RowCall) -> RowDim | None:
        found = call.only("self")
        return None if found is None else rule(call, *found)

    return of_one


def _elementwise(call: RowCall) -> RowDim | None:
    ndim = max(tensor.dim() for tensor in call.tensors())
    places = {rows.at(rows.dim - each.dim()) for each in call.tensors() if (rows := call.rows(each))}
    found = places.pop()
    if places:
        return None
    behind = found.dim
    for tensor in call.tensors():
        # A tensor of that length without rows would have to be cut as well.
        if call.rows(tensor) is None and tensor.dim() >= -behind and tensor.shape[behind] != 1:
            return None
    return found.at(ndim + behind)


def _kept(name: str = "self", *, last: int = 0) -> Rule:
    """Makes a rule for operators that leave the rows of `name` in place, outside of the `last` dimensions."""

    def rule(call: RowCall) -> RowDim | None:
        found = call.only(name)
        return found[1] if found and found[1].dim < found[0].dim() - last else None

    return rule


@_of_one
def _viewed(call: RowCall, tensor: torch.Tensor, rows: RowDim) -> RowDim | None:
    if tensor.shape[rows.dim] == 1:
        return RowDim(call.result.shape.index(1)) if 1 in call.result.shape else None
    before, outer = math.prod(tensor.shape[: rows.dim]) * rows.over, 1
    for dim, size in enumerate(call.result.shape):
        if outer * size > before:  # this dimension holds the rows
            over = before // outer
            if before % outer or size % (over * call.count):
                return None
            return RowDim(dim, size // (over * call.count), over)
        outer *= size
    return None


@_of_one
def _permuted(call: RowCall, tensor: torch.Tensor, rows: RowDim) -> RowDim | None:
    order = list(range(tensor.dim()))
    if "dims" in call.given:
        order = [dim % tensor.dim() for dim in call.given["dims"]]
    else:
        one, other = (call.given.get(name, at) % max(1, tensor.dim()) for name, at in (("dim0", 0), ("dim1", -1)))
        order[one], order[other] = order[other], order[one]
    return rows.at(order.index(rows.dim))


@_of_one
def _unsqueezed(call: RowCall, tensor: torch.Tensor, rows: RowDim) -> RowDim | None:
    return rows.at(rows.dim + (call.given["dim"] % (tensor.dim() + 1) <= rows.dim))


def _expanded(call: RowCall) -> RowDim | None:
    found = call.only("self")
    return found and found[1].at(found[1].dim + len(call.given["size"]) - found[0].dim())


@_of_one
def _without(call: RowCall, tensor: torch.Tensor, rows: RowDim) -> RowDim | None:
    """The rule of operators that remove one dimension: `select` and `unbind`."""
    dim = call.given.get("dim", 0) % tensor.dim()
    return None if dim == rows.dim else rows.at(rows.dim - (dim < rows.dim))


@_of_one
def _squeezed(call: RowCall, tensor: torch.Tensor, rows: RowDim) -> RowDim | None:
    named = call.dims(tensor)
    gone = [dim for dim in named or range(tensor.dim()) if tensor.shape[dim] == 1]
    return None if rows.dim in gone else rows.at(rows.dim - sum(dim < rows.dim for dim in gone))


def _along(name: str = "dim") -> Rule:
    """Makes a rule for operators that work along the dimensions in the argument `name` only."""

    @_of_one
    def rule(call: RowCall, tensor: torch.Tensor, rows: RowDim) -> RowDim | None:
        dims = call.dims(tensor, name)
        return rows if dims and rows.dim not in dims else None

    return rule


@_of_one
def _reduced(call: RowCall, tensor: torch.Tensor, rows: RowDim) -> RowDim | None:
    dims = call.dims(tensor)
    if not dims or rows.dim in dims:
        return None
    return rows if call.given.get("keepdim") else rows.at(rows.dim - sum(dim < rows.dim for dim in dims))


def _joined(call: RowCall) -> RowDim | None:
    tensors = call.given["tensors"]
    rows = call.shared(tensors)
    return None if rows is None or call.given.get("dim", 0) % tensors[0].dim() == rows.dim else rows


def _stacked(call: RowCall) -> RowDim | None:
    tensors = call.given["tensors"]
    rows = call.shared(tensors)
    return rows and rows.at(rows.dim + (call.given.get("dim", 0) % (tensors[0].dim() + 1) <= rows.dim))


def _first(*names: str) -> Rule:
    """Makes a rule for operators with the rows in the first dimension of the first argument present in `names`."""

    def rule(call: RowCall) -> RowDim | None:
        found = call.only(next(name for name in names if name in call.given))
        return found[1] if found and found[1].dim == 0 else None

    return rule


def _batched(call: RowCall) -> RowDim | None:
    """The rule of batched products: the rows are the batch of all operands, or the second dimension of one operand."""
    if (found := call.only("self")) and "batch1" not in call.given:
        return found[1] if found[1].dim == 1 else None
    rows = call.shared([each for each in call.tensors() if each.dim() == 3 and each.shape[0] != 1])
    return rows if rows is not None and rows.dim == 0 else None


def _normalized(call: RowCall) -> RowDim | None:
    found = call.only("input")
    if found is None:
        return None
    tensor, rows = found
    return rows if rows.dim < tensor.dim() - len(call.given["normalized_shape"]) else None


def _attention(call: RowCall) -> RowDim | None:
    if call.given.get("dropout_p"):
        return None
    rows = call.rows(call.given["query"])
    if rows is None or rows.dim or any(call.rows(call.given[name]) != rows for name in ("key", "value")):
        return None
    mask = call.given.get("attn_mask", call.given.get("attn_bias"))
    shared = mask is None or mask.dim() < 4 or mask.shape[0] == 1
    return rows if shared or call.rows(mask) == rows else None


@_of_one
def _padded(call: RowCall, tensor: torch.Tensor, rows: RowDim) -> RowDim | None:
    padded = call.given["pad"] if "pad" in call.given else call.given["padding"]  # starts with the last dimension
    at = 2 * (tensor.dim() - 1 - rows.dim)
    return None if any(padded[at : at + 2]) else rows


def _repeated(call: RowCall) -> RowDim | None:
    found = call.only("self")
    if found is None:
        return None
    times = call.given["repeats"]
    rows = found[1].at(found[1].dim + len(times) - found[0].dim())
    return rows if times[rows.dim] == 1 else None


def _by_index(call: RowCall) -> RowDim | None:
    """The rule of operators that pick from rows, or put into rows, by an index that has the rows too."""
    rows = call.shared(call.tensors())
    return None if rows is None or rows.dim == call.given["dim"] % call.given["self"].dim() else rows


def _in_front(call: RowCall) -> RowDim | None:
    """The rule of operators with the rows in the first dimension of every argument that has rows."""
    return RowDim(0) if set(filter(None, map(call.rows, call.tensors()))) == {RowDim(0)} else None


def _recurrent_on_cpu(call: RowCall) -> tuple[RowDim | None, ...] | None:
    """The rule of `mkldnn_rnn_layer`: one layer, always time first."""
    states = [call.rows(call.given[name]) for name in ("hx_", "cx_")]
    if call.rows(call.given["input"]) != RowDim(1) or states != [RowDim(0)] * 2 or call.given["batch_sizes"]:
        return None
    return RowDim(1), RowDim(0), RowDim(0), None


def _normalized_by_buffers(call: RowCall) -> tuple[RowDim | None, ...] | None:
    """The rule of BatchNorm, whose statistics are buffers in evaluation, and those of all rows in training."""
    found = None if call.given["training"] else call.only("input")
    return (found[1], None, None) if found and found[1].dim != 1 else None  # dimension 1 holds the channels


def _recurrent_on_card(call: RowCall) -> tuple[RowDim | None, ...] | None:
    """The rule of `_cudnn_rnn`: all layers; the results after the states are for backward."""
    given, place = call.given, RowDim(0 if call.given["batch_first"] else 1)
    states = [call.rows(given[name]) for name in ("hx", "cx") if given.get(name) is not None]
    if call.rows(given["input"]) != place or any(each != RowDim(1) for each in states) or given["batch_sizes"]:
        return None
    return None if given["train"] and given["dropout"] else (place, RowDim(1), RowDim(1) if len(states) > 1 else None)


_RULES: dict[str, Rule] = {
    f"aten::{name}": rule
    for names, rule in (
        ("clone _to_copy detach alias contiguous lift_fresh zeros_like ones_like empty_like full_like", _kept()),
        ("view_as_real _conj resolve_conj bucketize", _kept()),
        ("view_as_complex", _kept(last=1)),
        ("hardswish hardswish_ floor_divide _prelu_kernel", _elementwise),
        ("view _unsafe_view _reshape_alias reshape", _viewed),
        ("permute transpose transpose_ t", _permuted),
        ("unsqueeze", _unsqueezed),
        ("squeeze", _squeezed),
        ("expand", _expanded),
        ("repeat", _repeated),
        ("select unbind", _without),
        ("slice split unsafe_split split_with_sizes chunk topk sort index_select", _along()),
        ("cumsum cumprod logcumsumexp cummax cummin _fft_c2c _fft_c2r _fft_r2c", _along()),
        ("unfold", _along("dimension")),
        ("gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_", _by_index),
        ("_softmax _log_softmax _safe_softmax glu", _along()),
        ("flip roll", _along("dims")),
        ("sum mean amax amin prod var std var_mean max min logsumexp linalg_vector_norm argmax argmin", _reduced),
        ("any all median kthvalue std_mean aminmax", _reduced),
        ("cat", _joined),
        ("stack", _stacked),
        ("mm mv", _first("self")),
        ("addmm _addmm_activation", _first("mat1")),
        ("bmm baddbmm", _batched),
        ("linear", _kept("input", last=1)),
        ("convolution", _first("input")),
        ("native_group_norm", _first("input")),
        ("native_batch_norm", _normalized_by_buffers),
        ("native_layer_norm _fused_rms_norm", _normalized),
        (
            "max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d "
            "_adaptive_avg_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
            "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d pixel_shuffle pixel_unshuffle "
            "adaptive_max_pool2d adaptive_max_pool3d im2col col2im",
            _first("self"),
        ),
        ("embedding", _kept("indices")),
        ("grid_sampler_2d grid_sampler_3d _thnn_fused_lstm_cell _thnn_fused_gru_cell", _in_front),
        ("mkldnn_rnn_layer", _recurrent_on_cpu),
        ("_cudnn_rnn", _recurrent_on_card),
        ("tril triu", _kept(last=2)),
        ("constant_pad_nd", _padded),
        (" ".join(f"{how}_pad{n}d" for how in ("reflection", "replication") for n in (1, 2, 3)), _padded),
        (
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
            _attention,
        ),
    )
    for name in names.split()
}


def rule_of(op: Any) -> Rule | None:
    """Returns the rule of an operator, or None if it is not known to compute each row by itself."""
    if rule := _RULES.get(op._schema.name):
        return rule
    return _elementwise if torch.Tag.pointwise in op.tags and not draws(op) else None


def draws(op: Any) -> bool:
    """Whether the operator draws random numbers, which would differ in pieces."""
    return torch.Tag.nondeterministic_seeded in op.tags


def is_known(name: str) -> bool:
    """Whether the operator of that name, as in ``aten::add.Tensor``, has a rule or needs none."""
    base, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, base, None)
    op = getattr(packet, overload or "default", None)
    # An operator without rows in its arguments needs no rule.
    return op is not None and (rule_of(op) is not None or base in _CONSTANTS)


# Operators that make tables and masks.
_CONSTANTS = frozenset(("arange", "empty", "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "index"))
_CONSTANTS |= {"eye", "linspace", "scalar_tensor", "_weight_norm_interface"}
