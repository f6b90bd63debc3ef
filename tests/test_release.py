"""What a release says of itself is the same everywhere, and what its files name is there."""

import re
from pathlib import Path

import memscale as ms

ROOT = Path(__file__).resolve().parent.parent


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere():
    assert re.search(r'^version = "(.*)"$', text("pyproject.toml"), re.MULTILINE)[1] == ms.__version__
    assert re.search(r"^version: (.*)$", text("CITATION.cff"), re.MULTILINE)[1] == ms.__version__
    sections = re.findall(r"^## \[(.*)\](?: - (\d{4}-\d\d-\d\d))?$", text("CHANGELOG.md"), re.MULTILINE)
    assert sections[0] == ("Unreleased", "")
    released = re.search(r"^date-released: (.*)$", text("CITATION.cff"), re.MULTILINE)[1]
    assert sections[1] == (ms.__version__, released)


def test_every_target_that_is_named_is_one():
    targets = set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))
    for name in (".ci/run", ".github/workflows/ci.yml", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:^|run: |`)make ([a-z-]+)", text(name), re.MULTILINE))
        assert named, name
        assert named <= targets, name


def test_the_workflow_does_what_ci_does():
    commands = re.findall(r"^make .*$", text(".ci/run"), re.MULTILINE)
    assert set(commands) <= set(re.findall(r"run: (.*)$", text(".github/workflows/ci.yml"), re.MULTILINE))
