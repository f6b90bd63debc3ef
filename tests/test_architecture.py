"""Where code lives, and who may import whom: the imports of the package itself, read from its source."""

import ast
import functools
import importlib
import re
from collections import defaultdict
from pathlib import Path

import pytest

import memscale
from tests.support.sources import exports, nodes_of, parsed

ROOT = Path(memscale.__file__).parent


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("memscale", *parts)).removesuffix(".__init__")


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}

# A file imports from its own folder and from those above it in this list.
FLOORS = (
    ("core",),
    ("telemetry",),
    ("algebra", "regions", "runtime", "hardware"),
    ("transforms", "optimizers", "policies", "config"),
    ("simulation",),
    ("policy",),
    ("planning", "inspection", "reports", "observability"),
    ("history", "testing", "crashes"),
    ("legacy", "verbs"),
    ("integrations",),
    ("server", "benchmarks"),
    ("cli",),
    ("", "__main__"),  # memscale/__init__: the public names
)

# The command line and the benchmarks are users of the package like any other.
USERS = ("memscale.cli", "memscale.benchmarks")

# The step up that stays: a profile that is asked to print or to draw itself loads the reports, when it is asked. It is
# no part of a circle at run time, since nothing above the simulation has to be loaded to load the simulation.
LOADED_WHEN_ASKED = {("memscale.simulation.results", "memscale.reports")}


@functools.cache
def floor(module):
    part = module.removeprefix("memscale").strip(".").split(".")[0]
    found = [index for index, floor in enumerate(FLOORS) if part in floor]
    assert found, f"{module} is on no floor; add {part!r} to FLOORS"
    return found[0]


@functools.cache
def statements(path):
    """The import statements of a file, those inside functions and those for type checkers only included."""
    return [node for node in nodes_of(path) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(path):
    """The modules that a file imports."""
    for node in statements(path):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield full if full in MODULES else node.module


@functools.cache
def ours(module):
    return sorted({name for name in imports(MODULES[module]) if name.split(".")[0] == "memscale"})


def circles():
    """Groups of files that import each other, directly or by way of others; a folder's door is no file of a circle."""
    reached = {
        module: {name for name in ours(module) if name in MODULES and (module, name) not in LOADED_WHEN_ASKED}
        for module in MODULES
    }
    changed = True
    while changed:
        changed = False
        for names in reached.values():
            more = set().union(*(reached[name] for name in names)) - names if names else set()
            changed = changed or bool(more)
            names |= more
    return {frozenset(n for n in names if module in reached[n]) for module, names in reached.items() if module in names}


def test_imports_point_one_way():
    steps = {(module, name) for module in MODULES for name in ours(module)} - LOADED_WHEN_ASKED
    steps -= {(module, "memscale") for module in MODULES if module.startswith(USERS)}
    assert {(module, name) for module, name in steps if floor(name) > floor(module)} == set()


def test_no_files_import_each_other():
    assert sorted(map(sorted, circles())) == []


# A folder of the simulation imports from those before it: how a step is run stands above what an operator does.
SIMULATION = ("allocator", "process", "schedule", "rules", "kernels", "parallel", "dispatch", "sandbox", "measured")


def test_the_folders_of_the_simulation_stand_one_on_the_other():
    def place(module):
        return next((at for at, each in enumerate(SIMULATION) if f"{module}.".startswith(f"{top}.{each}.")), None)

    top = "memscale.simulation"
    assert {path.parent.name for path in (ROOT / "simulation").glob("*/__init__.py")} == set(SIMULATION)
    steps = [(module, name) for module in MODULES for name in ours(module) if None not in (place(module), place(name))]
    assert {place(name) < place(module) for module, name in steps if place(name) != place(module)} == {True}


def test_the_rules_would_notice():
    assert floor("memscale.core.errors") < floor("memscale.algebra.apply") < floor("memscale")
    assert {"memscale.algebra.plan", "memscale.algebra.composition"} <= set(ours("memscale.algebra.apply"))


TRANSFORMS = ("cast", "checkpoint", "offload", "tile")

# (a folder, one that it does not know, or knows by its door only)
APART = (
    ("regions", "runtime", ""),
    ("regions", "algebra", ""),
    ("transforms.checkpoint", "runtime", "memscale.runtime"),  # policies that move
    ("transforms.tile", "transforms.checkpoint", "memscale.transforms.checkpoint"),
    *((f"transforms.{one}", f"transforms.{other}", "") for one in TRANSFORMS for other in TRANSFORMS if one != other),
)
APART = {apart[:2]: apart for apart in reversed(APART)}.values()  # the first of two on the same folders counts


@pytest.mark.parametrize(("folder", "other", "door"), APART)
def test_one_can_be_read_without_the_other(folder, other, door):
    files = [module for module in MODULES if f"{module}.".startswith(f"memscale.{folder}.")]
    found = {(file, name) for file in files for name in ours(file) if f"{name}.".startswith(f"memscale.{other}.")}
    assert {(file, name) for file, name in found if name != door} == set()


def test_cupy_is_imported_by_the_cuda_backend_only():
    users = [module for module, path in MODULES.items() if any(n.split(".")[0] == "cupy" for n in imports(path))]
    assert set(users) <= {"memscale.runtime.backends.cuda"}


def test_names_say_what_is_in_a_file():
    names = {module: module.rpartition(".")[2] for module in MODULES}
    assert {module for module, name in names.items() if name.startswith("_") and name != "__main__"} == set()
    vague = {"manager", "handler", "helper", "utils", "misc"}
    assert {module for module, name in names.items() if vague & set(name.split("_"))} == set()


# In each folder: the factory of a transform, its public functions, and what ``python -m`` runs.
OF_A_FOLDER = {"__init__", "__main__", "factory", "verbs"}


def test_files_of_different_folders_have_different_names():
    places = defaultdict(set)
    for module, path in MODULES.items():
        if path.stem not in OF_A_FOLDER and folder(module) != "cli":  # a command has the name of what it is about
            places[path.stem].add(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def doors_used(module):
    """What a file imports from other folders, as (door or file, name)."""
    for node in statements(MODULES[module]):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module in MODULES
            and folder(node.module) in FOLDERS - {folder(module)}
        ):
            yield from ((node.module, name.name) for name in node.names)


def folder(module):
    return module.partition(".")[2].partition(".")[0]


FOLDERS = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}


def test_other_folders_are_entered_by_their_door():
    used = {(module, *each) for module in set(MODULES) - {"memscale"} for each in doors_used(module)}
    files = {each for each in used if MODULES[each[1]].name != "__init__.py"}
    assert files == set(), "these are files; their folders' doors are what others import from"
    unknown = {(module, door, name) for module, door, name in used if f"{door}.{name}" not in MODULES}
    assert {each for each in unknown if each[2] not in exports(importlib.import_module(each[1]))} == set()


PAGE = ROOT.parent / "docs" / "architecture.md"
PLACES = (ROOT, ROOT / "runtime" / "backends", ROOT.parent)  # what the names on the page begin from


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not installed with the package")
def test_the_page_on_architecture_names_files_that_exist_and_every_folder():
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_/]+(?:/|\.py))`", text))
    assert [name for name in named if not any((folder / name).exists() for folder in PLACES)] == []
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert {name for name in folders if f" {name}/ " not in text} == set()


def test_the_page_on_what_must_never_happen_names_tests_that_exist():
    tests = Path(__file__).parent
    named = re.findall(r"`([a-z_/]+\.py)`", (tests / "README.md").read_text(encoding="utf-8"))
    assert len(named) > 10
    assert [name for name in named if not (tests / name).exists()] == []


# The command that measures a number, or the plans of which change with it; a document; or neither, with a reason.
RESTS_ON = re.compile(r"benchmarks/(bench_\w+\.py)|\bSource: |\b([Aa]ssumed|[Bb]y choice)\b")

# What no benchmark measures and no document says: lengths of texts, bounds of work, and machines that nobody measured.
# The list only shrinks.
UNMEASURED = {
    "hardware.calibrate": {"_COPY_BYTES", "_LEAST_SECONDS", "_TINY_OPS, _COPIES_AHEAD"},
    "hardware.copies": {
        "_DISK_READ_BYTES_PER_SECOND",
        "_DISK_WRITE_BYTES_PER_SECOND",
        "_HOST_BYTES_PER_SECOND",
        "_HOST_OPERATOR_SECONDS",
        "_PAGEABLE_BYTES_PER_SECOND",
    },
    "planning.engine": {"LEFT_FREE"},
    "planning.evidence.curve": {"_FEW"},
    "planning.gains": {"_WORTH_TELLING"},
    "planning.parts.candidates": {"_MOST_NAMED"},
    "planning.parts.globs": {"_MOST_NUMBERS"},
    "planning.prediction.prediction": {"_ROWS"},
    "planning.prediction.recommending": {"_LEAST"},
    "planning.refusal": {"_SHOWN"},
    "planning.remedies": {"_MOST_NAMED"},
    "planning.solving.local_search": {"_MOST_SWAPS"},
    "planning.speeds": {"_NOMINAL_BANDWIDTH", "_NOMINAL_FLOPS", "_PROBE_BYTES"},
    "planning.stepping": {"LEAST_GAIN"},
    "planning.trials.trial_rows": {"_TAIL"},
    "planning.tuning.confirmation": {"_SHARE"},
    "planning.tuning.tuner": {"_CONFIRMATIONS", "_MOST"},
    "simulation.schedule.clock": {"_MOST_PRICED, _MOST_PRICES", "_MOST_QUEUED"},
    "simulation.schedule.schedule": {"_COPIES", "_DEPTHS", "_WORTH"},
}


def named_numbers(path):
    """Yields the name and the comment of each named number of a file: the comment at its line, or above its group."""
    lines = path.read_text().splitlines()
    for node in parsed(path).body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target).strip("()")
        values = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
        is_table = isinstance(node.value, ast.Call) and "Document(" in ast.unparse(node.value)
        if name != name.upper() or is_table or not {int, float} & set(map(type, values)):
            continue
        if any(isinstance(each, str) and " " in each for each in values):  # names its own source, as a card does
            continue
        above = node.lineno - 1
        while lines[above - 1].strip() and not lines[above - 1].startswith("#"):
            above -= 1
        begin = above
        while lines[begin - 1].startswith("#"):
            begin -= 1
        ends = lines[node.end_lineno - 1].partition("#")[2]
        yield name, " ".join([*(line.lstrip("#: ") for line in lines[begin:above]), ends])


MODELS = [
    path for name in ("hardware", "planning", "simulation/schedule") for path in sorted((ROOT / name).rglob("*.py"))
]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: name_of(path).removeprefix("memscale."))
def test_a_number_names_the_command_that_measures_it_or_its_source(path):
    found = {name: RESTS_ON.search(comment) for name, comment in named_numbers(path)}
    assert {name for name, rests_on in found.items() if rests_on is None} == set()
    commands = {rests_on[1] for rests_on in found.values() if rests_on[1]}
    assert {command for command in commands if not (ROOT.parent / "benchmarks" / command).exists()} == set()
    unmeasured = {name for name, rests_on in found.items() if rests_on[2]}
    assert unmeasured == UNMEASURED.get(name_of(path).removeprefix("memscale."), set())


def silent(path):
    """Lines at which any error whatever is caught, by whoever raises none and says at that line not why."""
    text = path.read_text()
    for node in nodes_of(path):
        is_handler = isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name)
        broad = is_handler and node.type.id in ("Exception", "BaseException")
        broad = broad or (isinstance(node, ast.withitem) and re.search(r"suppress\(Exception", ast.unparse(node)))
        line = node.lineno if is_handler else node.context_expr.lineno if broad else 0
        raises = broad and any(isinstance(each, ast.Raise) for each in ast.walk(node))
        if broad and not raises and "#" not in "".join(text.splitlines()[line - 1 : line + 1]):
            yield f"{name_of(path)}:{line}"


def test_who_catches_any_error_raises_another_or_says_whose_it_is():
    assert {line for path in MODULES.values() for line in silent(path)} == set()


# Public classes of two folders with one name, for two things: a list that only shrinks. Rows and forms of the server
# are named as what they are of.
SHARED_NAMES = {"MemScaleCallback"}


def test_a_public_class_has_a_name_of_its_own():
    owners = {}
    for name, path in MODULES.items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_" and not name.startswith("memscale.server"):
                owners.setdefault(node.name, []).append(name)
    assert {name for name, where in owners.items() if len(where) > 1} == SHARED_NAMES


# Words of our own that a reader of PyTorch's documentation does not know.
RETIRED = re.compile(
    r"\b(stand-in libraries|hollow tensors?|couriers?|errands?|strands?|soundings?|ladders?|rungs?|"
    r"ledgers?|donors?|splic(ed|ing)|postponed|foreseen?|rewind)\b"
)
PAGES = [
    *(ROOT.parent / "docs").glob("*.md"),
    *(path for path in ROOT.parent.glob("*.md") if path.name != "CHANGELOG.md"),
    *Path(__file__).parent.rglob("*.md"),
]
OUTSIDE = [
    path
    for folder in ("tests", "benchmarks")
    for path in (ROOT.parent / folder).rglob("*.py")
    if path != Path(__file__)  # which lists the words
]


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)
def test_a_page_has_the_words_of_the_field(page):
    text = page.read_text(encoding="utf-8").lower()
    assert [found[0] for found in RETIRED.finditer(text)] == []
    assert "stand-ins" not in text, "say fake CUDA libraries; in code, a stand-in is a tensor"


def test_prose_in_code_has_the_words_of_the_field():
    paths = [*MODULES.values(), *OUTSIDE]
    found = {str(path): [word[0] for word in RETIRED.finditer(path.read_text().lower())] for path in paths}
    assert {path: words for path, words in found.items() if words} == {}


# Words that the code has dropped, without a last "s".
RETIRED_NAMES = {
    "beside", "book", "courier", "deferred", "donor", "entitle", "errand", "exchange", "foresee", "foreseen", "habit",
    "hollow", "ladder", "lane", "ledger", "postponed", "remembered", "rewind", "rung", "sounding", "splice", "splicing",
    "station", "strand", "stretche", "there", "thrifty", "told",
}  # fmt: skip


def _names_given(tree):
    """What a module names itself: functions, classes, parameters, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def _singular(word):
    return word if word == "besides" else word.removesuffix("s")


def _retired(names):
    names = set(names)
    words = {given: {_singular(word.lower()) for word in re.findall("[A-Z]?[a-z]+", given)} for given in names}
    return {given for given in names if words[given] & RETIRED_NAMES}


def test_names_have_the_words_of_the_field():
    found = {str(path): _retired({path.stem, *_names_given(parsed(path))}) for path in MODULES.values()}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_words_would_be_noticed():
    assert RETIRED.findall("one strand of the ledger") != []
    planted = ast.parse("class LaneRungs:\n    def strand(self, courier):\n        self.told = donors = lanes_of(1)")
    assert _retired(set(_names_given(planted))) == {"LaneRungs", "strand", "courier", "told", "donors"}
