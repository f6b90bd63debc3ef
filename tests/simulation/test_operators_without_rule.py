"""Operators of the zoo's models that have no rule, and what the simulation assumes of a call of theirs on a card."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

import memscale as ms
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.rule import OpRule

pytest.importorskip("transformers")
_BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

#: Their kernels write nothing, and take no time.
NO_KERNEL = "empty_like lift_fresh new_empty new_empty_strided"
#: Their kernels allocate their results only, and pass once over arguments and results; arithmetic takes no time.
ONE_PASS = """
    _foreach_addcmul _foreach_clamp_min_ _foreach_maximum_ _foreach_mul _foreach_rsqrt_ _foreach_sqrt_ _fused_adam_
    _prelu_kernel _prelu_kernel_backward _weight_norm_interface _weight_norm_interface_backward abs addcdiv_
    addcmul_ avg_pool3d avg_pool3d_backward bitwise_and clamp_ clamp_min cos elu elu_backward eq exp floor
    floor_divide ge gelu gelu_backward gt hardswish hardswish_backward le leaky_relu leaky_relu_backward lerp_ log
    lt masked_fill_ minimum native_dropout_backward ne neg pow pow_ relu relu_ repeat rsqrt rsqrt_ sigmoid
    sigmoid_backward silu silu_backward sin softplus softplus_backward sqrt tanh tanh_backward threshold_backward
    triu
"""


def _calls(name):
    """The calls of operators without a rule in a step of one model of the zoo on a card."""
    if str(_BENCHMARKS) not in sys.path:
        sys.path.insert(0, str(_BENCHMARKS))
    from _zoo import ZOO

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of models that warn of themselves
        with torch.device("meta"):
            model, batch = ZOO[name].make("bf16")
        optimizer = ZOO[name].optimizer(model)
        profiler = ms.MemoryProfiler(model, loss=ZOO[name].loss, optimizer=optimizer, hardware="h100")
        called = profiler.simulated(batch).ops
    return [each for each in called if rule_of(_operator(each.name)) == OpRule()]


def _operator(name):
    """The operator that a trace calls ``"aten::add.Tensor"``."""
    namespace, _, full = name.partition("::")
    packet, _, overload = full.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def _check(name):
    known = dict.fromkeys(NO_KERNEL.split(), 0) | dict.fromkeys(ONE_PASS.split(), 1)
    calls = [(call.name.partition("::")[2].partition(".")[0], call) for call in _calls(name)]
    assert {packet for packet, _ in calls} <= known.keys(), "give it a rule, or list it with what is assumed"
    assert not [call for packet, call in calls if known[packet] == 0 and (call.nbytes or call.flops)]
    assert not [call for packet, call in calls if known[packet] == 1 and call.flops]
    return {packet for packet, _ in calls}


@pytest.mark.parametrize("name", ["depthwise", "mlp-adafactor-foreach"])
def test_operators_without_a_rule_are_listed(name):
    assert _check(name)


@pytest.mark.deep
def test_operators_of_all_models_without_a_rule_are_listed_and_no_others():
    from _zoo import ZOO

    assert set().union(*map(_check, ZOO)) == {*NO_KERNEL.split(), *ONE_PASS.split()}
