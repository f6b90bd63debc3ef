"""The list of PyTorch's private names: held against the source, and what happens when one of them is missing."""

import ast
import itertools
import re
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.testing._internal.distributed.fake_pg

import memscale as ms
from memscale.core import internals
from tests.support.sources import nodes_of, parsed

ROOT = Path(ms.__file__).parent
NAMES = {each.name: each for each in internals.INTERNALS}
# Of objects, by the name alone: private to somebody else, with what guards them where they are used.
OF_OTHERS = {
    "_inst": "Python's random; randomness.py falls back on whole states",
    "_rand": "NumPy's random; likewise",
    "_bit_generator": "NumPy's random; likewise",
    "_getframe": "CPython's, documented",
    "_current_frames": "CPython's, documented",
    "_replace": "namedtuple's, documented",
    "_is_owned": "Python's threading.Condition",
    "_Hash": "Python's hashlib, for type checkers",
    "_model_mapping": "transformers' Auto classes; the command line says so without it",
    "_keep_in_fp32_modules": "transformers' models; nothing is kept without it",
    "_quantize": "bitsandbytes' 4-bit weights; the version is checked where models are packed",
    "_dataloaders": "Lightning's loops",
    "_backward_cls": "of an autograd.Function of ours",
    "_destroy": "of a torch.library.Library of ours",
    "_type": "of a ScriptObject that a collective was given",
    **dict.fromkeys(
        (
            "_comm_hooks",
            "_build_params_for_reducer",
            "_build_debug_param_to_name_mapping",
            "_ddp_init_helper",
            "_set_static_graph",
            "_module_info",
            "_orig_size",
            "_sharded_local_tensor",
            "_setattr_on_modules",
            "_get_module_fsdp_state",
            "_fsdp_param_group",
            "_fsdp_param_groups",
        ),
        "of a DDP or FSDP2 module: asked for with parallel=... only",
    ),
    "_sequence_nr": "of a node of autograd, which has no class of its own in Python",
    "_set_sequence_nr": "likewise",
    "_i_will_not_complain_if_bc_breaks_InstructionTranslator": "of a context of torch._dynamo.comptime",
    "_i_will_not_complain_if_bc_breaks_VariableTracker": "likewise",
    "_input_versions_at_beginning": "of a graph that torch._dynamo makes; without it a region runs uncompiled",
}


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def file_of(module):
    path = ROOT.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def is_private(part):
    return part.startswith("_") and not part.startswith("__")


def folder(path):
    first, *rest = path.relative_to(ROOT).with_suffix("").parts
    return f"{first}/{rest[0]}" if first == "transforms" and len(rest) > 1 else first


def aliases(nodes):
    """What the names of a file are in PyTorch."""
    found = {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.asname: name.name for name in node.names if name.asname and name.name.startswith("torch.")}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Attribute):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            path = dotted(node.value)
            if isinstance(target, ast.Name) and path and path[0] in ("torch", "internals"):
                found[target.id] = ".".join(path)
    return found


# What `internals` itself names: by the attribute that files use.
OF_INTERNALS = {
    "autograd": "torch._C._autograd",
    "functorch": "torch._C._functorch",
    "pytree": "torch.utils._pytree",
    "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
    "NormBase": "torch.nn.modules.batchnorm._NormBase",
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "disable_current_modes": "torch.utils._python_dispatch._disable_current_modes",
}


FILES = [path for path in ROOT.rglob("*.py") if path.name != "internals.py"]


@pytest.fixture(scope="module")
def used():
    """Every private name of PyTorch in the source, with the folders that use it."""
    found, own = {}, set()
    for node in itertools.chain.from_iterable(map(nodes_of, FILES)):
        if hasattr(node, "name"):
            own.add(node.name)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            own.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    for path in FILES:
        nodes = nodes_of(path)
        known = aliases(nodes)
        whole = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        reached = [name for name in known.values() if not name.startswith("internals")]
        for node in nodes:
            if isinstance(node, ast.Call) and dotted(node.func) in (["internals", "named"], ["internals", "has"]):
                reached += [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if (
                isinstance(node, ast.Call)
                and dotted(node.func) == ["getattr"]
                and isinstance(node.args[1], ast.Constant)
            ):
                holder = dotted(node.args[0]) or ["?"]
                if holder[0] in known:
                    reached.append(".".join([known[holder[0]], *holder[1:], node.args[1].value]))
                elif node.args[1].value not in own | OF_OTHERS.keys() | {"_memscale_views"}:
                    reached.append(f"?.{node.args[1].value}")
            if not isinstance(node, ast.Attribute):
                continue
            parts = dotted(node)
            if parts and (parts[0] in known or parts[0] == "internals"):
                if id(node) in whole:
                    continue
                full = [*known.get(parts[0], parts[0]).split("."), *parts[1:]]
                if full[0] == "internals":
                    full = [*OF_INTERNALS.get(full[1], full[1]).split("."), *full[2:]]
                reached.append(".".join(full).removesuffix(".__name__"))
            elif is_private(node.attr) and node.attr not in own and node.attr not in OF_OTHERS:
                reached.append(f"?.{node.attr}")
        for name in reached:
            if name.startswith(("torch.", "?._")) and any(map(is_private, name.split("."))):
                found.setdefault(name, set()).add(folder(path))
    return found


def listed(name):
    """The entry for a name of the source: of itself, of what it is an attribute of, or by the attribute alone."""
    if name.startswith("?."):
        return [each for each in NAMES if each.rpartition(".")[2] == name[2:]]
    return [each for each in NAMES if name == each or name.startswith(f"{each}.")]


def test_every_private_name_of_the_source_is_listed_with_the_folders_that_use_it(used):
    # A module on the way to a listed name is no name of its own.
    missing = {
        name: sorted(folders)
        for name, folders in used.items()
        if not listed(name) and not any(each.startswith(f"{name}.") for each in (*NAMES, *used))
    }
    assert missing == {}
    folders = {name: set() for name in NAMES}
    for name, where in used.items():
        for each in listed(name):
            folders[each] |= where
    assert {name: set(NAMES[name].folders.split()) for name in NAMES} == folders


def test_each_says_what_it_is_for_and_is_there():
    built = {
        "torch._C._distributed_c10d",
        "torch._C._cuda_getCurrentRawStream",
        "torch._C._ensureCUDADeviceGuardSet",
    }  # in some builds only
    # These take seconds to load; their own tests do.
    loaded_fast = [
        name
        for name in NAMES
        if not name.startswith(("torch._dynamo", "torch._functorch", "torch._inductor", "torch.testing"))
    ]
    assert [name for name in loaded_fast if not internals.has(name) and name not in built] == []
    assert all(each.purpose and re.fullmatch(r"2\.\d+", each.since) for each in internals.INTERNALS)


def test_the_documentation_says_how_many_there_are():
    said = (Path(__file__).parents[2] / "docs/compatibility.md").read_text()
    assert f"memscale uses {len(NAMES)} private names of PyTorch." in said
    assert len(NAMES) == len(internals.INTERNALS) <= 120  # the list only shrinks


def test_only_the_parts_that_need_a_name_are_refused(monkeypatch):
    for name in ("_storage_Use_Count", "_swap_tensor_impl"):
        monkeypatch.delattr(torch._C, name)
    monkeypatch.setattr(internals, "needs", internals.needs.__wrapped__)  # which has asked before
    ms.cast()
    with pytest.raises(ms.RuntimeUnavailable) as refused:
        ms.offload()
    assert "torch._C._storage_Use_Count (the number of references to a storage)" in str(refused.value)
    assert "_swap_tensor_impl" not in str(refused.value)
    with pytest.raises(ms.RuntimeUnavailable, match=r"\(inspection\).*torch\._C\._swap_tensor_impl"):
        internals.needs("inspection")


def test_a_missing_name_refuses_every_use():
    missing = internals.named("torch._C._nothing_of_that_name")
    kind = type("Kind", (missing,), {})  # files make such when they load
    for use in (missing, kind, lambda: isinstance(1, missing), lambda: missing.attribute):
        with pytest.raises(ms.RuntimeUnavailable, match=r"needs torch\._C\._nothing_of_that_name, which torch "):
            use()


def test_a_part_stands_on_every_folder_that_its_files_import():
    """What a part loads at once, its own files and theirs, is no more than `PARTS` says."""
    for part, folders in internals.PARTS.items():
        start = f"memscale.transforms.{part}" if (ROOT / "transforms" / part).is_dir() else f"memscale.{part}"
        seen, todo = set(), [start]
        while todo:
            module = todo.pop()
            file = file_of(module)
            if module in seen or file == ROOT / "__init__.py":
                continue
            seen.add(module)
            todo += [
                node.module
                for node in (parsed(file).body if file in FILES else ())
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("memscale.")
            ]
        used_in = {folder(file_of(module)) for module in seen}
        privately = {each for entry in NAMES.values() for each in entry.folders.split()}
        assert (used_in & privately) <= set(folders.split()), part


IN_PARALLEL = (
    (torch.testing._internal.distributed, "fake_pg"),
    (torch.distributed, "_register_comm_hook"),
    (torch.distributed.distributed_c10d, "_world"),
    (torch.distributed.distributed_c10d, "_resolve_process_group"),
)


@pytest.mark.parametrize(("holder", "name"), IN_PARALLEL, ids=[name for _, name in IN_PARALLEL])
def test_a_name_of_process_groups_is_missed_with_parallel_only(holder, name, monkeypatch):
    model, batch = torch.nn.Linear(2, 2), torch.ones(2, 2)
    has = internals.has
    monkeypatch.setattr(internals, "has", lambda each: each != f"{holder.__name__}.{name}" and has(each))
    loss = {"loss": lambda y, _: y.sum()}
    ms.profile(model, batch, **loss)
    with pytest.raises(ms.RuntimeUnavailable, match=rf"\(parallel=\.\.\.\): this torch has no .*\.{name} \("):
        ms.profile(model, batch, parallel="ddp", world=2, hardware="h100", **loss)
