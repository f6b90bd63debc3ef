"""Names in bytecode: those that the standard library's disassembler finds, in a fraction of its time."""

import argparse
import dis
import tarfile
import types
import typing

from memscale.regions import assigned_globals, global_names

READ = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_NAME", "STORE_NAME")


def disassembled(code, operations):
    found = {each.argval: None for each in dis.get_instructions(code) if each.opname in operations}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(dict.fromkeys(disassembled(constant, operations)))
    return tuple(found)


def codes():
    for module in (argparse, tarfile, typing):
        for thing in vars(module).values():
            for each in vars(thing).values() if isinstance(thing, type) else [thing]:
                if isinstance(each, types.FunctionType):
                    yield each.__code__
    # More than 256 names, so that the later ones have an extended argument; and a class in a function.
    names = "; ".join(f"x = name{number}" for number in range(300))
    yield compile(f"def f():\n  global assigned\n  {names}\n  assigned = 1\n  class C:\n    y = outer", "<f>", "exec")


def test_names_are_those_of_the_disassembler():
    found = list(codes())
    assert len(found) > 200
    for code in found:
        assert global_names(code) == disassembled(code, READ), code
        assert assigned_globals(code) == disassembled(code, ("STORE_GLOBAL",)), code
    assert "name299" in global_names(found[-1])
    assert assigned_globals(found[-1]) == ("assigned",)
