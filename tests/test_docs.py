"""Every Python block of the README and the docs runs, and prints what the docs say that it prints.

Blocks that plan for seconds are run by `make docs`, as CI does, and `make test-deep`.
"""

import io
import re
import sys
import types
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from memscale.core import internals

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A Python block, and the text block right after it when there is one: what the Python block prints.
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\s*^```text\n(?P<output>.*?)^```\n)?", re.MULTILINE | re.DOTALL)

# The numbers of a page are those of these releases; by others a step may take a few bytes or a rounding more or less.
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
AS_PINNED = all(f"{name}=={version(name).partition('+')[0]}" in PINS for name in ("torch", "transformers"))


# What a page says of a compiler that can do more, or chooses for a model that other releases build otherwise.
OTHERWISE = {
    "cast.md": internals.TORCH_VERSION < (2, 12),
    "tutorial.md": version("transformers").startswith("4."),  # its GPT-2 keeps a mask for each layer
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_short(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (130 if page.name == "README.md" else 200)
    assert lines[0].startswith("# ")


# Commands for whoever runs a server, how the planner searches, tables of measurements: no Python.
WITHOUT_PYTHON = {"server-team.md", "planner.md", "benchmarks.md", "benchmarks-predictions.md"}


SLOW = {
    *("lora.md", "planning.md", "predict.md", "many-cards.md", "tune.md", "integrations.md", "tutorial.md"),
    *("crashes.md", "optimizers.md", "policy.md", "wrap.md", "step-time.md", "profile.md"),
}


def shown(text):
    return text if AS_PINNED else re.sub(r"\d+(\.\d+)?", "#", text)


# The compiler's own imports, at the first torch.compile of a process.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=pytest.mark.deep if page.name in SLOW else ()) for page in PAGES],
)
def test_the_blocks_of_a_page_run_in_order_and_print_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # log files and pictures
    namespace = types.ModuleType(f"docs_{page.stem}")  # registered, so that classes of a page can be pickled
    monkeypatch.setitem(sys.modules, namespace.__name__, namespace)
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    assert bool(blocks) != (page.name in WITHOUT_PYTHON), f"{page.name} has no Python block"
    torch.manual_seed(0)
    try:
        for block in blocks:
            line = text.count("\n", 0, block.start("code"))
            code = compile("\n" * line + block["code"], str(page), "exec")
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(code, namespace.__dict__)
            if block["output"] is not None and not OTHERWISE.get(page.name):
                assert shown(printed.getvalue()) == shown(block["output"]), f"{page.name}, the block at line {line + 1}"
    finally:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


def test_every_page_is_in_the_navigation():
    navigation = re.findall(r":\s*(\S+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(navigation) == sorted(page.name for page in PAGES if page.name != "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_of_the_project_lead_somewhere(page):
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_no_page_installs_the_distribution_that_is_not_ours():
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        assert not re.search(r"install[^\n]*\s['\"]?memscale(?![-\w])", page.read_text(encoding="utf-8")), page.name


def test_the_reference_has_every_public_name():
    import memscale

    documented = set(
        re.findall(r"^::: memscale\.(?:[a-z_]+\.)*(\w+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    )
    assert set(memscale.__all__) - documented == set()
