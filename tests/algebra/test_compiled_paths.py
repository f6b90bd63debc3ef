"""Paths of a compiled model: rules are written, and plans are printed, without the wrapper of `torch.compile`."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.algebra.apply import find_regions
from memscale.core import row_label
from memscale.planning.parts.globs import with_globs


def blocks():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3)))


def paths_of(model, rules):
    at = {id(module): path for path, module in model.named_modules()}
    return sorted(at[id(module)] for module, _ in find_regions(model, ms.Plan(rules)))


@pytest.mark.parametrize(("pattern", "expected"), [("*", ["0", "1", "2"]), ("*.0", ["0.0", "1.0", "2.0"]), ("", [""])])
def test_a_rule_for_a_model_is_one_for_the_compiled_model(pattern, expected):
    model = blocks()
    compiled = torch.compile(model, backend="eager")
    assert paths_of(model, {pattern: ms.checkpoint()}) == expected
    inner = [f"_orig_mod.{path}" if path else "" for path in expected]
    assert paths_of(compiled, {pattern: ms.checkpoint()}) == inner
    assert paths_of(compiled, {f"_orig_mod.{pattern}" if pattern else "": ms.checkpoint()}) == inner


def test_a_rule_for_a_compiled_block_is_one_region():
    model = nn.Sequential(*(torch.compile(block, backend="eager") for block in blocks()))
    assert paths_of(model, {"*": ms.checkpoint()}) == ["0", "1", "2"]
    assert paths_of(model, {"*.2": ms.checkpoint()}) == ["0._orig_mod.2", "1._orig_mod.2", "2._orig_mod.2"]


def test_a_plan_for_a_compiled_model_is_written_like_the_models():
    compiled = torch.compile(blocks(), backend="eager")
    every = ms.Plan({f"_orig_mod.{at}": ms.checkpoint() for at in range(3)})
    assert with_globs(every, compiled) == ms.Plan({"*": ms.checkpoint()})
    assert row_label(["_orig_mod.0", "_orig_mod.1", "_orig_mod.2"]) == "0 to 2"
