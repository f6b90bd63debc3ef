"""Operators that make, move, choose or read numbers and compute nothing: views, constants, copies, joins."""

from __future__ import annotations

import torch

from memscale.simulation.rules.rule import OpRule
from memscale.simulation.rules.times import by_layouts, of_clone, passes

_OF_SHAPE = OpRule(values="constant")
_CHOICE = OpRule(values="choice")
_BY_PLACE = OpRule(by_place=True)

RULES = {
    **{f"aten.{name}": OpRule(method=getattr(torch.Tensor, name.partition(".")[0])) for name in (
        "detach", "expand", "permute", "select.int", "t", "transpose.int", "unsqueeze", "view",
    )},
    **{f"aten.{name}": _OF_SHAPE for name in ("ones_like", "new_ones", "new_zeros", "new_full")},
    **{f"aten.{name}": OpRule(values="constant", by_place=True) for name in ("zeros_like", "full_like")},
    **{f"aten.{name}": _CHOICE for name in ("topk", "argsort", "multinomial")},
    **{f"aten.{name}": _BY_PLACE for name in (
        "arange", "empty", "flip", "full", "gather", "index_select", "lift_fresh_copy", "ones", "rand", "randint",
        "randn", "scalar_tensor", "select_scatter", "slice_scatter", "_unsafe_index", "zeros",
    )},
    **{f"aten.{name}": OpRule(scratch="nothing") for name in ("fill_", "zero_", "_unsafe_view", "unsafe_split")},
    "aten.sort": OpRule(values="choice", time=passes(9.5, 9.5)),
    "aten._local_scalar_dense": OpRule(values="reads"),
    "aten.equal": OpRule(values="reads"),
    "aten._to_copy": OpRule(scratch="nothing", by_place=True, time=passes(1.5, 1.5)),
    "aten.clone": OpRule(scratch="nothing", time=of_clone),
    "aten.copy_": OpRule(scratch="nothing", time=by_layouts),
    "aten.constant_pad_nd": OpRule(scratch="nothing", by_place=True),
    "aten.cat": OpRule(scratch="converts"),
    "aten.stack": OpRule(scratch="converts"),
}  # fmt: skip
