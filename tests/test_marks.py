"""How many lines of code each folder has, and the mark that none may grow past.

`python -m tests.test_marks` prints the table. A mark falls with each reduction, and rises only in a commit that says
what for.
"""

import ast
import collections
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKS = Path(__file__).with_name("marks.txt")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BESIDES = {".css", ".csv", ".html", ".js", ".json", ".sql", ".toml", ".txt"}  # templates, scripts, tables of data


def lines_of_python(text):
    """How many lines of `text` hold code: no blanks, comments or docstrings."""
    docstrings, strings = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        elif isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno > node.lineno:
            strings.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(map(str.strip, text.splitlines()), start=1)
    return len(({number for number, line in lines if line and line[0] != "#"} | strings) - docstrings)


@functools.cache
def lines_by_folder():
    """Of each folder of the package, the files beside the folders as ``(top)``."""
    found = collections.Counter()
    for path in (ROOT / "memscale").rglob("*"):
        parts = path.relative_to(ROOT / "memscale").parts
        folder = parts[0] if len(parts) > 1 else "(top)"
        if path.suffix == ".py":
            found[folder] += lines_of_python(path.read_text(encoding="utf-8"))
        elif path.suffix in BESIDES:
            found[folder] += sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(found.items()))


def marks():
    lines = [line.split() for line in MARKS.read_text(encoding="utf-8").splitlines() if line and line[0] != "#"]
    return {folder: int(mark.replace(",", "")) for folder, mark in lines}


def table():
    found, known = lines_by_folder(), marks()
    rows = [f"{folder:14} {lines:6,} of {known.get(folder, 0):6,}" for folder, lines in found.items()]
    return "\n".join([*rows, f"{'all':14} {sum(found.values()):6,} of {sum(known.values()):6,}"])


def test_no_folder_grows_past_its_mark():
    print(table())
    found, known = lines_by_folder(), marks()
    assert found.keys() == known.keys(), "each folder has a mark in tests/marks.txt"
    grown = {folder: f"{lines:,} of {known[folder]:,}" for folder, lines in found.items() if lines > known[folder]}
    assert grown == {}, "make it smaller, or raise its mark in tests/marks.txt in a commit that says what for"


def test_a_mark_falls_with_its_folder():
    """A tenth above what is there is room for something that nobody has said."""
    found, known = lines_by_folder(), marks()
    loose = {
        folder: f"{lines:,} of {known[folder]:,}" for folder, lines in found.items() if 1.1 * lines < known[folder]
    }
    assert loose == {}, "lower these marks in tests/marks.txt"


def test_only_lines_of_code_count():
    assert (
        lines_of_python(
            '"""A file."""\n\nimport a  # why\n\n# a comment\ndef f():\n    """Do."""\n    return (\n        1\n    )\n'
        )
        == 5
    )
    assert lines_of_python('text = """\none\n"""\n') == 3, "a string that documents nothing is code"


if __name__ == "__main__":
    print(table())
