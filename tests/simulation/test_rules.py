"""What is known of operators stands in `memscale/simulation/rules`, and no other table has operators for keys."""

import ast
import sys
import warnings
from pathlib import Path

import pytest
import torch

import memscale as ms
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.rule import OpRule

ROOT = Path(ms.__file__).parent
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# Of devices and of networks, which some operators are called like.
NO_OPERATORS = {"cpu", "cuda", "lstm"}


def _is_operator(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.isidentifier() and hasattr(torch.ops.aten, node.value) and node.value not in NO_OPERATORS
    return ast.unparse(node).startswith(("aten.", "torch.ops.aten."))


def _keys(node):
    """The keys of a table, or the members of a set, as far as they are written out."""
    match node:
        case ast.Dict():
            yield from (key for key in node.keys if key is not None)
        case ast.Set() | ast.Tuple():
            yield from node.elts
        case ast.Call(args=[first, *_]):
            yield from _keys(first)


def tables():
    """By file, the names of the tables of which all keys are operators of ATen, or their names."""
    found = {}
    for path in sorted([*(ROOT / "simulation").rglob("*.py"), *(ROOT / "hardware").rglob("*.py")]):
        for node in ast.parse(path.read_text()).body if path.parent.name != "rules" else ():
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                keys = list(_keys(node.value))
                if keys and all(map(_is_operator, keys)):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    found.setdefault(str(path.relative_to(ROOT)), set()).add(ast.unparse(target))
    return found


def test_no_other_table_has_operators_for_keys():
    assert tables() == {}


# Operators in the steps of `benchmarks/_zoo*.py` without a rule, by how what is assumed of each holds: on a card the
# results are all that is allocated, in the order of the schema; the time is that of one pass over operands and results.
WITHOUT_A_RULE = {
    "true by PyTorch's tag: the kernel goes element by element": """
        abs addcdiv_ addcmul_ bitwise_and.Tensor clamp_ clamp_min cos elu eq.Scalar exp floor ge.Scalar ge.Tensor gelu
        gelu_backward gt.Scalar gt.Tensor le.Tensor leaky_relu lerp_.Scalar log lt.Scalar minimum
        native_dropout_backward
        ne.Scalar neg pow.Tensor_Scalar pow_.Scalar relu relu_ rsqrt rsqrt_ sigmoid sigmoid_backward silu silu_backward
        sin softplus sqrt tanh tanh_backward threshold_backward
    """,
    "true by its kernel, which goes element by element without a tag that says so": """
        _foreach_addcmul.Scalar _foreach_clamp_min_.Scalar _foreach_maximum_.List _foreach_mul.List _foreach_rsqrt_
        _foreach_sqrt_ _prelu_kernel _prelu_kernel_backward elu_backward floor_divide hardswish hardswish_backward
        leaky_relu_backward masked_fill_.Scalar repeat softplus_backward triu
    """,
    "of the bytes by its kernel, of the time not measured": """
        _weight_norm_interface _weight_norm_interface_backward avg_pool3d avg_pool3d_backward
    """,
    "a number of the program becomes a tensor: nothing runs": "lift_fresh",
}


def cases():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from _zoo import ZOO
    finally:
        sys.path.remove(str(BENCHMARKS))
    return ZOO


def without_a_rule(case):
    """The overloads without a rule in a step of `case` in bfloat16 on an H100."""
    model, batch = case.make("bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models that warn of themselves
        profiler = ms.MemoryProfiler(model, optimizer=case.optimizer(model), loss=case.loss, hardware="h100")
        names = {op.name for op in profiler.simulated(batch).ops}
    return {name.removeprefix("aten::") for name in names if rule_of(overload(name)) == OpRule()}


def overload(name):
    library, _, rest = name.partition("::")
    packet, _, kind = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, library), packet), kind or "default")


NAMED = {name for names in WITHOUT_A_RULE.values() for name in names.split()}


def test_those_named_with_the_tag_have_it_and_no_others():
    tagged = {name for name in NAMED if torch.Tag.pointwise in overload(f"aten::{name}").tags}
    assert tagged == set(next(iter(WITHOUT_A_RULE.values())).split())


@pytest.mark.parametrize("name", ["gpt2", "convnet", "mlp-adafactor-foreach"])
def test_an_operator_without_a_rule_is_named(name):
    assert without_a_rule(cases()[name]) <= NAMED


@pytest.mark.deep
def test_every_operator_of_the_zoo_has_a_rule_or_is_named():
    assert set().union(*map(without_a_rule, cases().values())) == NAMED
