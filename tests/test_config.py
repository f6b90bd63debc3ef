"""Config: every field's type and range, what the mode decides, and that a config stays a value."""

import copy
import dataclasses
import inspect
import pickle

import pytest

from memscale.config import Config, OptimizationMode
from memscale.core.errors import ConfigError
from memscale.runtime.offload_config import AsyncOffloadConfig

DEFAULTS = {
    "mode": OptimizationMode.BALANCED,
    "enable_checkpointing": True,
    "enable_offloading": True,
    "enable_tiling": False,
    "use_mixed_precision": False,
    "use_8bit_optimizer": False,
    "max_cpu_offload_gb": None,
    "target_gpu_utilization": 0.85,
    "force_optimize": False,
    "use_static_profiling": True,
    "use_empirical_fallback": True,
    "warmup_steps": 2,
    "enable_logging": True,
    "log_file": None,
    "observability_port": None,
    "verify_correctness": False,
    "async_offload": False,
    "async_config": None,
    "auto_policy": False,
}
SWITCHES = [name for name, value in DEFAULTS.items() if isinstance(value, bool)]
OPEN = {
    "mode",
    "enable_checkpointing",
    "enable_offloading",
    "enable_tiling",
    "async_offload",
}  # follow from the others
BAD = {
    "mode": ["fast", "", 1, True],
    "max_cpu_offload_gb": [-1, -0.5, "8", True, float("nan"), float("inf"), [4]],
    "target_gpu_utilization": [0, 0.0, 1.01, -1, "0.8", True, None, float("nan")],
    "warmup_steps": [-1, 1.5, "2", True, None],
    "log_file": ["", "  ", 3, b"log", True],
    "observability_port": [-1, 65536, 80.0, "80", True],
    "async_config": [{}, True, "x", AsyncOffloadConfig],
    **{name: [0, 1, "yes", 1.0, *([] if name in OPEN else [None])] for name in SWITCHES},
}
BAD_ASYNC = {
    "pool_bytes": [0, -1, 1.5, "1GiB", True],
    "prefetch_depth": [-1, 0.5, True],
    "min_bytes": [-1, 2.0, False],
    "streams": [0, 17, 1.0, True],
}


def cases(table):
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in table.items() for value in values]


def test_the_fields_and_their_defaults():
    found = {field.name: field.default for field in dataclasses.fields(Config)}
    assert found == {name: None if name in OPEN else value for name, value in DEFAULTS.items()}
    assert dataclasses.asdict(Config()) == DEFAULTS
    assert list(inspect.signature(Config).parameters) == [*DEFAULTS, "follows"]


def test_none_leaves_a_field_open():
    assert Config(**dict.fromkeys(OPEN)) == Config()
    assert Config(**dict.fromkeys(OPEN)).given == frozenset()
    assert Config(enable_tiling=False).given == {"enable_tiling"}
    assert dataclasses.replace(Config(), mode="aggressive").enable_tiling is True
    assert dataclasses.replace(Config(enable_tiling=False), mode="aggressive").enable_tiling is False


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_a_bad_field_is_named_with_its_value_and_the_remedy(name, value):
    with pytest.raises(ConfigError) as caught:
        Config(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"Config({name}={value!r}) must ")
    assert "; " in message
    assert "\n" not in message


@pytest.mark.parametrize(("name", "value"), cases(BAD_ASYNC))
def test_a_bad_async_field_is_named(name, value):
    with pytest.raises(ConfigError) as caught:
        AsyncOffloadConfig(**{name: value})
    assert str(caught.value).startswith(f"AsyncOffloadConfig({name}={value!r}) must ")


def test_all_bad_fields_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        Config(**{name: values[0] for name, values in BAD.items()})
    named = [line.split("(")[1].split("=")[0] for line in str(caught.value).splitlines()]
    assert named == list(DEFAULTS)


def test_an_unknown_field_is_refused():
    with pytest.raises(ConfigError, match=r"Config\(tiling_factor=2\) is no field of it; its fields are mode"):
        Config(tiling_factor=2)


@pytest.mark.parametrize("spelling", ["AGGRESSIVE", "aggressive", "Aggressive", OptimizationMode.AGGRESSIVE])
def test_the_mode_by_name_value_or_member(spelling):
    assert Config(mode=spelling).mode is OptimizationMode.AGGRESSIVE


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("conservative", {"checkpoint"}),
        ("balanced", {"checkpoint", "offload"}),
        ("aggressive", {"checkpoint", "offload", "tile"}),
    ],
)
def test_what_a_mode_makes_eligible(mode, names):
    assert Config(mode=mode).eligible() == names


@pytest.mark.parametrize("mode", OptimizationMode)
@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize(
    ("switch", "name"),
    [("enable_checkpointing", "checkpoint"), ("enable_offloading", "offload"), ("enable_tiling", "tile")],
)
def test_the_caller_wins_over_the_mode(mode, switch, name, on):
    config = Config(mode=mode, **{switch: on})
    assert (name in config.eligible()) is on
    assert config.eligible() - {name} == Config(mode=mode).eligible() - {name}


def test_inexact_transforms_are_eligible_only_on_request():
    assert Config(use_mixed_precision=True, use_8bit_optimizer=True).eligible() == {
        "checkpoint",
        "offload",
        "cast",
        "quantize_states",
    }


def test_a_config_is_a_frozen_value():
    config = Config(mode="aggressive", enable_offloading=False, async_config=AsyncOffloadConfig(streams=1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.warmup_steps = 1
    for same in (eval(repr(config)), pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert same == config
        assert hash(same) == hash(config)
        assert same.given == config.given == {"mode", "enable_offloading", "async_config"}
    assert config != Config(mode="aggressive")
    assert repr(Config()) == "Config()"
    assert Config(OptimizationMode.AGGRESSIVE).given == {"mode"}


def test_replace_keeps_what_the_caller_set_and_lets_the_rest_follow_the_mode():
    config = Config(mode="aggressive", enable_offloading=False)
    calm = dataclasses.replace(config, mode="conservative")
    assert calm == Config(mode="conservative", enable_offloading=False)
    assert calm.eligible() == {"checkpoint"}
    untiled = dataclasses.replace(config, enable_tiling=False)
    assert untiled.eligible() == {"checkpoint"}
    assert untiled.given == {"mode", "enable_offloading", "enable_tiling"}
    assert dataclasses.replace(config).given == config.given
    assert config.eligible() == {"checkpoint", "tile"}
    same = dataclasses.replace(Config(), enable_tiling=False)  # as it is already
    assert (same, same.eligible(), same.given) == (Config(), Config().eligible(), frozenset())
