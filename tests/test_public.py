"""The public surface: its names, what each says about itself, and what each says to bad input."""

import re
from pathlib import Path

import pytest
import torch

import memscale as ms
from memscale import policies
from tests.support.sources import exports

# What users get: a name that is added or taken away here is a decision.
DOORS = """
memscale:
    AsyncOffloadConfig AutoTuner BudgetError Config ConfigError CorrectnessError DecisionEngine Executor Explanation
    Frontier Hardware LossScale MemoryProfiler MemscaleError OOMPrediction OOMPredictor OOMRisk OptimizationMode Plan
    PlanError PolicyFallbackNeeded Profile Residual RuntimeUnavailable StrategyContext StrategyDecision Transform
    TransformError Tuning Verification cast checkpoint compensate_rounding compose detach explain frontier functional
    identity measure name offload offload_states optimize plan policies profile quantize_states report
    round_stochastically saved_residuals step_in_backward step_in_groups tile transform verify wrap
memscale.policies:
    Move Policy Recompute Save Site Verdict attention_saveable dots_saveable dots_with_no_batch_dims_saveable
    everything_saveable nothing_saveable save_and_offload_only_these_names save_any_names_but_these
    save_from_both_policies save_only_these_names
"""
WRITTEN = {
    door: names.split()
    for door, _, names in (line.partition(":") for line in re.sub(r"\n +", " ", DOORS).strip().splitlines())
}
NAMES, POLICIES = WRITTEN["memscale"], WRITTEN["memscale.policies"]
DOCS = Path(__file__).parents[1] / "docs"

# Errors show themselves where they are raised, and `identity` is a value.
ERRORS = [name for name in NAMES if isinstance(getattr(ms, name), type) and issubclass(getattr(ms, name), Exception)]
SHOWN = [name for name in NAMES if callable(getattr(ms, name)) and name not in {"identity", *ERRORS}]


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_documented(name):
    assert (getattr(ms, name).__doc__ or "").strip()


@pytest.mark.parametrize("name", SHOWN)
def test_each_function_and_class_shows_an_example(name):
    assert ">>> " in getattr(ms, name).__doc__


@pytest.mark.parametrize("name", [name for name in POLICIES if name.startswith("save_")] + ["Policy"])
def test_each_policy_factory_shows_an_example(name):
    assert ">>> " in getattr(policies, name).__doc__


@pytest.mark.skipif(not DOCS.exists(), reason="the documentation pages are not written yet")
@pytest.mark.parametrize("name", NAMES + [f"policies.{name}" for name in POLICIES if name[0].islower()])
def test_each_name_is_on_a_page_of_the_documentation(name):
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert name.removeprefix("policies.") in text


def test_errors_are_ours_and_also_what_python_calls_them():
    for name in ERRORS:
        assert issubclass(getattr(ms, name), ms.MemscaleError)
        assert issubclass(getattr(ms, name), (ValueError, RuntimeError)) or name == "MemscaleError"


BAD = {
    "checkpoint: not a policy": (lambda: ms.checkpoint(policy=3), r"checkpoint\(policy=\.\.\.\): a policy is .*got 3"),
    "checkpoint: a factory": (
        lambda: ms.checkpoint(policy=policies.save_only_these_names),
        r"a policy is a value .*; call it first",
    ),
    "compose: not a transform": (lambda: ms.compose(3), r"compose\(\) takes transforms .*got 3 at position 0"),
    "compose: a factory": (lambda: ms.compose(ms.identity, ms.checkpoint), r"at position 1; call the factory"),
    "name: empty": (lambda: ms.name(torch.ones(1), ""), r"the label is a non-empty string, got ''"),
    "name: the other way round": (lambda: ms.name("x", torch.ones(1)), r"got a tensor; write name\(x, 'hidden'\)"),
    "name: no tensor": (lambda: ms.name([1], "a"), r"labels a tensor, got list for label 'a'"),
    "names: none": (lambda: policies.save_only_these_names(), r"save_only_these_names: give at least 1 name"),
    "names: empty": (lambda: policies.save_only_these_names(""), r"a name is a non-empty string .*got ''"),
    "offload: none": (lambda: policies.save_and_offload_only_these_names(), r"give at least 1 name"),
    "offload: both": (
        lambda: policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["a", "b"], names_which_can_be_offloaded=["b"]
        ),
        r"\['b'\] cannot be both saved and offloaded",
    ),
    "offload: one string": (
        lambda: policies.save_and_offload_only_these_names(names_which_can_be_offloaded="ab"),
        r"as separate strings, got 'ab'",
    ),
    "offload: tier": (
        lambda: policies.save_and_offload_only_these_names(names_which_can_be_saved=["a"], tier=""),
        r"tier=\.\.\.\) must be the name of a memory tier, one of 'auto', 'pinned', 'pageable', 'disk', got ''",
    ),
    "offload(): what": (lambda: ms.offload(what="grads"), r"offload\(what='grads'\) must be 'activations'"),
    "offload(): tier": (lambda: ms.offload(tier="nvme"), r"offload\(tier=\.\.\.\) must be the name of .* got 'nvme'"),
    "offload(): bytes": (lambda: ms.offload(min_bytes=-1), r"offload\(min_bytes=-1\) must be an int of at least 0"),
    "both: no policy": (
        lambda: policies.save_from_both_policies(policies.dots_saveable, None),
        r"save_from_both_policies: a policy is .*got None",
    ),
}


# What a user types: a command or an option that is taken away here is a decision, with a line in CHANGELOG.md.
COMMANDS = """
demo: batch budget device layers out seq steps width
predict: accumulate amp at-most batch budget double-quant dtype fits gpu hf html json kbit keeps-output largest lora
    optimizer parallel plan plot price quant recommend seconds seq shard tensor tokens world
plan: accumulate allow allow-rounding amp auto batch budget double-quant dtype forbid gpu hf host html json kbit
    keeps-output lora mode optimizer parallel plot price python quant seconds seq shard stepping tensor tokens world
frontier: accumulate allow allow-rounding amp batch double-quant dtype forbid gpu hf host html json kbit keeps-output
    lora mode optimizer parallel plot points price quant seconds seq shard stepping tensor tokens world
tune: accumulate allow allow-rounding amp at-least at-most batch budget confirm double-quant dtype forbid gpu hf host
    html json kbit keeps-output lora mode objective optimizer parallel plot price python quant seconds seq shard
    stepping tensor tokens world
cards: json
explain: amp batch budget dtype gpu hf html optimizer seq
plan-pull: from out
history check: accumulate amp baseline batch double-quant dtype gpu hf json kbit keeps-output lora optimizer plan quant
    seq tolerance update
history compare:
history export: to
history list: last
history push: dry-run to
history show:
server backup:
server migrate:
server run: listen public-url
server user invite: role team
telemetry clean:
telemetry local:
telemetry off:
telemetry on: endpoint
telemetry send: dry-run
telemetry show: week
telemetry status:
"""


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_factories_refuse_what_they_cannot_use(make, message):
    with pytest.raises(ms.ConfigError, match=message):
        make()


def test_a_transform_maps_functions_only():
    for transform in (ms.checkpoint(), ms.offload(), ms.identity, ms.compose(ms.checkpoint(), ms.checkpoint())):
        with pytest.raises(ms.TransformError, match="maps a function to a function, got int 3"):
            transform(3)


def test_users_get_these_names():
    found = {"memscale": ms, "memscale.policies": policies}
    assert {name: sorted(exports(door)) for name, door in found.items()} == {
        name: sorted(names) for name, names in WRITTEN.items()
    }


def test_the_command_line_has_these_commands_and_options():
    typer = pytest.importorskip("typer")
    from memscale.cli.app import command_line

    def options(command, path):
        if subcommands := getattr(command, "commands", None):
            for name, each in subcommands.items():
                yield from options(each, f"{path} {name}")
        else:
            given = (max(each.opts, key=len) for each in command.params if each.param_type_name == "option")
            yield path, sorted(each.removeprefix("--") for each in given if each != "--help")

    written = dict(line.split(":") for line in COMMANDS.replace("\n    ", " ").strip().splitlines())
    found = {}
    for name in dict.fromkeys(path.split(" ")[0] for path in written):
        found |= options(typer.main.get_command(command_line(name)).commands[name], name)
    assert found == {path: names.split() for path, names in written.items()}
