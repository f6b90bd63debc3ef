"""What `import memscale` loads: nothing of PyTorch or of its own, until a name is asked for."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memscale as ms
from memscale.core import internals

LATER = (
    "algebra",
    "core",
    "regions",
    "runtime",
    "transforms",
    "config",
    "optimizers",
    "simulation",
    "planning",
    "reports",
    "hardware",
    "inspection",
    "legacy",
    "cli",
)
LATER = (*LATER, "observability", "crashes")
FOUND = """
import gc, importlib, sys
import torch
if gc.get_count()[2] > gc.get_threshold()[2]:  # one is due already: torch 2.14 on Python 3.13
    gc.collect()
full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if info["generation"] == 2 else None)
import memscale as ms
print(full, gc.isenabled())
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("memscale.")}))
assert set(ms.__all__) <= set(dir(ms)), set(ms.__all__) - set(dir(ms))
ms.LossScale, ms.Profile, ms.wrap
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("memscale.")}))
print(*sorted({name.split(".")[0] for name in sys.modules}))
profile = ms.profile(torch.nn.Linear(8, 8), torch.ones(4, 8), loss=lambda y, _: y.sum())
assert ms.Profile.from_json(profile.to_json()).diff(profile).peak_bytes == 0
reports = "memscale.reports" in sys.modules
assert str(profile).startswith("peak ")
print(reports, "memscale.reports" in sys.modules)
gc.disable()
importlib.reload(ms)
print(gc.isenabled())
"""


READ = """
from memscale.algebra import Plan
print(Plan.from_json(arguments))
"""
COMMANDS = """
import contextlib, io, sys
from memscale.cli import main
for words in arguments.splitlines():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        status = main(words.split())
    folders = {".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("memscale.")}
    print(status, "torch" in sys.modules, *sorted(folders))
"""
WITHOUT = """
import json, torch
from importlib import import_module
names, *uses = arguments.splitlines()
holders = []
for name in json.loads(names):
    path, found = name.split("."), torch
    for index, part in enumerate(path[1:-1], 2):
        found = getattr(found, part, None) or import_module(".".join(path[:index]))
    holders.append((found, path[-1]))
for found, last in holders:
    if last in vars(found):
        delattr(found, last)
import memscale as ms
for use in uses:
    try:
        eval(use)
        print("works")
    except ms.RuntimeUnavailable as error:
        print(error)
"""
FORKED = """
import json, os, sys, traceback
for before, source, arguments in json.loads(sys.argv[1]):
    if before:
        import torch  # three seconds, once for all programs behind it
    print("---", flush=True)
    child = os.fork()
    if not child:
        status = 1
        try:
            exec(source, {"arguments": arguments})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
"""
PLAN = ms.Plan(
    [
        ("a", ms.compose(ms.checkpoint(policy=ms.policies.nothing_saveable), ms.offload())),
        ("", ms.step_in_backward()),
    ]
)
AT_ONCE = ("--help", "--version", "pln")
PRIVATE = [
    each.name
    for each in internals.INTERNALS
    if not any(part in each.name for part in (".ops.", ".Tensor.", "_dynamo", "_inductor"))
]
USES = ("ms.checkpoint()", "ms.offload()", "ms.tile(chunks=2)", "ms.cast()", "ms.profile", "ms.wrap", "ms.plan")
WRONG = [f"{name} --nope" for name in ("plan", "frontier", "predict", "tune", "explain", "demo", "telemetry")]


@pytest.fixture(scope="module")
def programs():
    """What programs print that are the first in their process to import memscale, all but one after PyTorch."""
    asked = [
        (False, COMMANDS, AT_ONCE),
        (True, FOUND, ()),
        (True, READ, [PLAN.to_json()]),
        (True, COMMANDS, WRONG),
        (True, WITHOUT, [json.dumps(PRIVATE), *USES]),
    ]
    given = json.dumps([(before, source, "\n".join(arguments)) for before, source, arguments in asked])
    run = subprocess.run([sys.executable, "-W", "error", "-c", FORKED, given], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    _, *printed = run.stdout.split("---\n")
    return dict(zip(("at once", "found", "read", "wrong", "without"), printed, strict=True))


@pytest.fixture(scope="module")
def loaded(programs):
    """What is loaded after the import, after two names that need more, and after a profile.

    Then `memscale` is imported once more, without a collector.
    """
    return [line.split() for line in programs["found"].splitlines()]


@pytest.mark.parametrize("folder", LATER)
def test_the_import_leaves_for_later_what_a_training_run_does_not_need(loaded, folder):
    _, at_once, asked, *_ = loaded
    assert folder not in at_once
    assert folder in asked or folder in ("reports", "cli", "crashes")  # wrap prints no report


def test_the_command_that_serves_loads_no_pytorch_and_the_drawing_of_charts_does_not():
    code = "import sys, memscale.cli, memscale.reports; memscale.reports.step_chart; "
    code += "print(memscale.cli.main(['server', 'run', '--listen', 'x'])); "
    code += "print({'torch', 'django', 'jinja2', 'matplotlib'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["2", "set()"]


def test_a_plan_that_is_read_first_of_all_may_name_any_transform(programs):
    assert programs["read"].strip() == str(PLAN)


def test_nothing_loads_the_libraries_that_memscale_fits_into(loaded):
    others = {"accelerate", "lightning", "peft", "prometheus_client", "pytorch_lightning", "torchtitan", "transformers"}
    assert not others & set(loaded[3])


def test_a_profile_loads_the_reports_when_it_is_printed(loaded):
    """The simulation stands below them."""
    assert loaded[4] == ["False", "True"]


def test_type_checkers_see_the_same_modules():
    found = {}
    for node in ast.parse(Path(ms.__file__).read_text()).body:
        if isinstance(node, ast.If):
            for each in node.body:
                found.update({alias.name: each.module for alias in each.names})
    assert found.pop("policies") == "memscale"  # a file of names
    assert found == ms._LOADED_WHEN_ASKED
    assert ms.policies is importlib.import_module("memscale.policies")


def test_a_name_is_the_same_object_each_time():
    assert ms.wrap is ms.wrap
    assert ms.wrap is importlib.import_module(ms._LOADED_WHEN_ASKED["wrap"]).wrap


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'memscale' has no attribute 'rap'"):
        _ = ms.rap


def test_no_full_collection_runs_and_the_collector_is_left_as_it_was(loaded):
    assert loaded[0] == ["[]", "True"]
    assert loaded[5] == ["False"]


def test_help_and_a_wrong_option_load_no_planner(programs):
    at_once, wrong = ([line.split() for line in programs[which].splitlines()] for which in ("at once", "wrong"))
    assert [each[:2] for each in at_once] == [["0", "False"], ["0", "False"], ["2", "False"]]
    assert [status for status, *_ in wrong] == ["2"] * len(WRONG)
    assert not {f"memscale.{each}" for each in ("planning", "simulation", "transforms", "runtime")} & set(wrong[-1])


def test_without_private_names_of_pytorch_memscale_is_imported_and_each_part_says_what_it_lacks(programs):
    found = programs["without"].splitlines()
    assert len(found) == len(USES)
    for line in found:
        assert line.startswith(f"memscale {ms.__version__} cannot do this with torch {torch.__version__} (")
        assert "torch._C._functorch.get_interpreter_stack (the running transforms of torch.func)" in line
