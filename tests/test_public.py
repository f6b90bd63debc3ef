"""The public surface: its names, what each says about itself, and what each says to bad input."""

import importlib
import re
from pathlib import Path

import pytest
import torch

import memscale as ms
from memscale import policies
from tests.support.sources import exports

# What users get, and what each folder gives to the others: a name that is added or taken away here is a decision.
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
memscale.algebra: ForwardPatch Method Numbers OfModule OwnForward Placing Plan PlanLike Transform Transformed as_plan
    attach chain compose copy_tree find_regions functional identity install is_transformed placing_in rules_by_parameter
    trains transform uninstall walk
memscale.benchmarks:
memscale.cli: main
memscale.core: Argument Assembled BudgetError COLUMNS Check ConfigError CorrectnessError DiskCache Document HISTORY Loss
    MemscaleError Misfit OpOverload PlanError PolicyFallbackNeeded Record RuntimeUnavailable SWITCHES TIERS
    TransformError Value aligned assembled_in
    available_host_bytes batches boolean budget_bytes by_name call cgroup_limit_bytes changed_error check_count
    check_loss check_tier compute_capability described device_type factory filesystem_of first_line folder_on_disk
    format_bytes format_count format_flops format_seconds format_unlike found_once from_data fsdp_groups fsdp_groups_of
    history_path http_request in_process_group in_rows in_runs integer internals is_alone is_in_memory is_of_modules
    is_own_thread joining matches misfit modules_in numbers one_at_a_time optional own_threads package pytrees
    read_or_empty respelled row_label state_folder
    scalar_loss shown simulated simulating simulation spellings
    table_lines takes_no template tensors unflatten validate version versions wrapped written
memscale.crashes: Explanation Holder explain
memscale.hardware: CARDS COLLECTIVES DIRECTIONS Direction Hardware HostSeconds Span Work assumed_links
    assumed_speeds card_name card_names collective_seconds copy_seconds cpu_name has_rate narrow_dtype host_calls
    host_seconds knows_copies nominal seconds span
memscale.history: Baseline Comparison History Remote Run TEXTS TRACKERS commit_of document_of is_address keep
    keep_measured queue_path record send
memscale.inspection: Residual Verification check_same_numbers saved_residuals verify
memscale.integrations: MixedPrecisionForward
memscale.legacy: Executor detach optimize report wrap wrapped
memscale.observability: Metrics Server check_can_serve local_rank memory_keys rank serve
memscale.optimizers: InPlace LossScale OptimizerTransform TransformedOptimizer as_plain compensate_rounding
    counts_on_host offload_states quantize_states round_stochastically step_in_backward step_in_groups transformed
    without_states
memscale.planning: AutoTuner Budget Confirmation Decision DecisionEngine Evidence Figures Frontier INTERRUPTED_SEARCH
    LEFT_FREE LargestBatch OOMPrediction OOMPredictor OOMRisk POINTS Point Progress ProvenPlan Recommendation SO_FAR
    SizeGrid SizeTrial Tuning allowed check_model parts_of planned repeated_blocks shorthands simulator
memscale.planning.evidence:
memscale.planning.parts:
memscale.planning.prediction:
memscale.planning.search:
memscale.planning.solving:
memscale.planning.trials:
memscale.planning.tuning:
memscale.policy: Artifact FEATURES StrategyContext StrategyDecision TECHNIQUES eligible everything rule select
    widenings
memscale.regions: ArgumentSpec Attributes CONSTANT Captures Content Environment NOWHERE Names Note OperatorWatch Origin
    PATIENCE_SECONDS PacksSeveral RegionEffects Replay SharedCaptures Snapshot StateSlot Streams accelerators
    assigned_globals cached_by_class closed_over code_names copying_ahead counted_states differing dispatch_modes
    floats_as_constants function_of functorch_state global_names hidden_changes holds hooks_around in_recompute
    is_stand_in is_unrecorded memory_of moved name_refused_hooks never_compiled origin_of pack_all read recomputes
    recomputing refuse_iterators refused restore running_statistics stand_for storages takes_batch_statistics uncompiled
    unrecorded unrecorded_depth wait_for_recomputes without_dynamo without_side_effects write
memscale.reports: DrawnPoint PAGES PartOfPlan Price TriedSize checked_target columns commits_chart css_class diff_text
    module_text plot_frontier plot_profile plot_sizes plot_timelines profile_text step_chart write_frontier write_html
    write_page write_sizes write_trace
memscale.runtime: AsyncOffloadConfig CopyTimeline DeviceStats Handle Hooks HostBackend HostParameter HostParameters
    Residency Runtime Saved Stats default_runtime hooks_here host_parameter_of host_parameter_on_device is_alone
    is_plain runtime_for runtimes_replaced
memscale.runtime.backends: Backend Buffer CountedBuffer Event Stream TOGETHER_BYTES TraceBackend Trims
    one_behind_the_other
memscale.runtime.engine: Engine
memscale.runtime.parameters: HostCopy Mapped MappedTensors is_movable
memscale.runtime.storage: PAGE_BYTES page_aligned_memory
memscale.server: backup invite migrate run
memscale.server.migrations:
memscale.server.templatetags:
memscale.simulation: Attribution Holding Loop MemoryProfiler NeedsValues OUTSIDE Parallel ParallelKind
  Phase Profile ProfileDiff Schedule Interval Target Trace TrainingStep analyse as_hardware attribute
  check_optimizer check_plan differences few_collections given_bytes hardware_for memory operators_of pack_weights
  profile_of queues_of record record_in_a_row runs_of shares timeline turns_of
memscale.simulation.allocator:
memscale.simulation.dispatch:
memscale.simulation.kernels:
memscale.simulation.parallel:
memscale.simulation.process:
memscale.simulation.rules:
memscale.simulation.sandbox:
memscale.simulation.schedule:
memscale.simulation.measured: AllocatorTrace measure training_roles
memscale.telemetry: Consent State Weeks consent count counted folder give_consent take_consent_back
    uncounted week_of
memscale.transforms: Cut cast checkpoint layers listeners may_be_proven name offload proven_rows tile
memscale.transforms.cast:
memscale.transforms.checkpoint: Checkpoint Checkpointed Cut checkpoint is_view layers recomputed_regions
memscale.transforms.offload:
memscale.transforms.tile:
memscale.transforms.tile.head:
"""
ROOT = Path(ms.__file__).parent
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


def test_the_folders_export_these_names():
    folders = [path.parent.relative_to(ROOT) for path in ROOT.rglob("__init__.py")]
    found = {name: importlib.import_module(name) for name in (".".join(("memscale", *each.parts)) for each in folders)}
    found["memscale.policies"] = policies
    exported = {name: sorted(exports(door)) for name, door in found.items()}
    assert exported == {name: sorted(names) for name, names in WRITTEN.items()}


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
