"""What is known of operators stands in `memscale/simulation/rules`, and no other table has operators for keys."""

import ast
from pathlib import Path

import torch

import memscale

ROOT = Path(memscale.__file__).parent

# Of devices and of networks, which some operators are called like.
NO_OPERATORS = {"cpu", "cuda", "lstm"}


def _is_operator(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.isidentifier() and hasattr(torch.ops.aten, node.value) and node.value not in NO_OPERATORS
    return ast.unparse(node).startswith(("aten.", "torch.ops.aten."))


def _keys(node):
    """The keys of a table, or the members of a set, as far as they are written out."""
    match node:
        case ast.Dict():
            yield from (key for key in node.keys if key is not None)
        case ast.Set() | ast.Tuple():
            yield from node.elts
        case ast.Call(args=[first, *_]):
            yield from _keys(first)


def tables():
    """By file, the names of the tables of which all keys are operators of ATen, or their names."""
    found = {}
    for path in sorted([*(ROOT / "simulation").rglob("*.py"), *(ROOT / "hardware").rglob("*.py")]):
        for node in ast.parse(path.read_text()).body if path.parent.name != "rules" else ():
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                keys = list(_keys(node.value))
                if keys and all(map(_is_operator, keys)):
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    found.setdefault(str(path.relative_to(ROOT)), set()).add(ast.unparse(target))
    return found


def test_no_other_table_has_operators_for_keys():
    assert tables() == {}
