"""Where code lives, and who may import whom: the imports of the package itself, read from its source."""

import ast
from pathlib import Path

import pytest

import memscale

ROOT = Path(memscale.__file__).parent
MODULES = {".".join(("memscale", *path.relative_to(ROOT).with_suffix("").parts)): path for path in ROOT.rglob("*.py")}

# A module imports from its own layer and from those above it in this list. A name stands for itself and all below it.
LAYERS = (
    ("_errors", "_units", "_config", "_tree", "_value", "_blocks", "_paths", "_simulating", "_host_memory"),
    ("_transform", "_functional"),
    ("transforms", "optimizers", "policies", "runtime"),
    ("_plan",),
    ("_apply",),
    ("profiling",),
    ("planning",),
    (
        "_verify",
        "_same_numbers",
        "_estimate",
        "_executor",
        "_offloading",
        "_legacy",
        "policy",
        "integrations",
        "observability",
    ),
    ("cli",),
    ("__init__",),
)


def layer(module):
    part = module.removeprefix("memscale").strip(".").split(".")[0] or "__init__"
    found = [index for index, layer in enumerate(LAYERS) if part in layer]
    assert found, f"{module} is in no layer; add {part!r} to LAYERS"
    return found[0]


def imports(path):
    """The modules that a file imports, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield full if full in MODULES or f"{full}.__init__" in MODULES else node.module


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_point_one_way(module):
    ours = [name for name in imports(MODULES[module]) if name.split(".")[0] == "memscale"]
    # The command line is a user of the package like any other.
    ours = [name for name in ours if not (module.startswith("memscale.cli") and name == "memscale")]
    assert [name for name in ours if layer(name) > layer(module)] == []


def test_the_rule_would_notice():
    assert layer("memscale._plan") < layer("memscale._apply") < layer("memscale")
    assert {"memscale._plan", "memscale._transform"} <= set(imports(MODULES["memscale._apply"]))


def test_cupy_is_imported_by_the_cuda_runtime_only():
    users = [module for module, path in MODULES.items() if any(n.split(".")[0] == "cupy" for n in imports(path))]
    assert [module for module in users if not module.startswith("memscale.runtime._cuda")] == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_files_stay_small(module):
    assert len(MODULES[module].read_text().splitlines()) <= 400


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_are_private_and_named_for_what_they_hold(module):
    *packages, name = module.removeprefix("memscale.").split(".")
    assert name.startswith("_") or (name == "policies" and not packages)
    assert not {"manager", "handler", "helper", "utils", "misc"} & set(name.strip("_").split("_"))
