"""The programs of `test_findings` must fail without the fixes: each mutant here takes one fix away again."""

import functools
from contextlib import nullcontext

import pytest
import torch

import memscale as ms
from memscale.algebra import apply as _apply
from memscale.algebra import region
from memscale.regions import (
    alias_groups,
    captures,
    environment,
    functorch_state,
    hidden_changes,
    modes,
    replay,
    snapshot,
)
from memscale.transforms.cast import containers
from memscale.transforms.cast.precision import cast_floating
from memscale.transforms.checkpoint import recompute, selective
from memscale.transforms.offload import streamed
from memscale.transforms.tile import cutting, rowwise
from memscale.transforms.tile import factory as tiling
from memscale.transforms.tile.head import lazy_logits, linear
from tests.laws.test_findings import FINDINGS


def hooks_are_those_of_backward(monkeypatch):
    monkeypatch.setattr(captures, "HOOKS", ())


def cast_makes_containers_again(monkeypatch):
    monkeypatch.setattr(containers.Containers, "lend", lambda self, tree: cast_floating(tree, self._convert))


def a_look_at_a_region_may_assign(monkeypatch):
    monkeypatch.setattr(linear, "_TOUCHING", frozenset())


def views_are_copied_apart(monkeypatch):
    monkeypatch.setattr(alias_groups, "_overlapping", lambda members: [[member] for member in members])


def memory_comes_back_under_one_name(monkeypatch):
    def apart(original):
        def again(self, *, last):
            (first, tensor), *others = original(self, last=last).items()
            return {first: tensor} | {name: other.clone() for name, other in others if isinstance(name, int)}

        return again

    for kind in (alias_groups.AliasGroup, alias_groups._Overlapping):
        monkeypatch.setattr(kind, "again", apart(kind.again))


def assignments_are_not_seen(monkeypatch):
    monkeypatch.setattr(snapshot.Snapshot, "find_reassigned", lambda *_: None)
    monkeypatch.setattr(hidden_changes, "assigned", lambda *_: [])


def first_runs_are_not_watched(monkeypatch):
    monkeypatch.setattr(snapshot.Snapshot, "watching", lambda _: nullcontext())


def pieces_may_write_to_what_they_share(monkeypatch):
    monkeypatch.setattr(rowwise.RowwiseWatch, "_refuse_shared", lambda *_: None)


def hidden_changes_are_allowed(monkeypatch):
    for module in (hidden_changes, streamed):
        monkeypatch.setattr(module, "refused", lambda *_, **__: nullcontext())


def parameters_train_as_they_do_now(monkeypatch):
    monkeypatch.setattr(replay.Replay, "_trained_as_then", lambda _, renewed: renewed)


def a_compiled_tile_refuses_nothing(monkeypatch):
    monkeypatch.setattr(tiling, "refuse_compiled", lambda *_: None)


def pieces_of_any_kind_are_joined(monkeypatch):
    monkeypatch.setattr(cutting.Joined, "_refuse_another_kind", lambda *_: None)


def parametrizations_are_those_of_backward(monkeypatch):
    monkeypatch.setattr(environment, "_set_parametrizations", lambda *_: None)


def modes_are_those_of_backward(monkeypatch):
    monkeypatch.setattr(modes.Modes, "enter", lambda *_: None)


def flags_are_those_of_backward(monkeypatch):
    monkeypatch.setattr(environment, "_set_flags", lambda *_: None)


def storages_may_be_exchanged(monkeypatch):
    def conclude(self):
        effects = original(self)
        self._storages = None
        return effects

    original = snapshot.Snapshot.conclude
    monkeypatch.setattr(snapshot.Snapshot, "conclude", conclude)


def a_factor_of_one_element_is_a_number(monkeypatch):
    def pointwise(source, func, args, kwargs):
        return original(source, func, [number(arg) for arg in args], kwargs)

    def number(arg):
        return arg.reshape(()) if type(arg) is torch.Tensor and arg.numel() == 1 else arg

    original = lazy_logits._pointwise
    for func, follow in list(lazy_logits._FOLLOW.items()):
        if follow is original:
            monkeypatch.setitem(lazy_logits._FOLLOW, func, pointwise)


def a_recompute_within_the_run_is_part_of_it(monkeypatch):
    monkeypatch.setattr(recompute, "unrecorded", nullcontext)
    monkeypatch.setattr(selective.Replayer, "check", lambda *_: None)


def a_backward_that_keeps_the_graph_forgets_what_it_was_given(monkeypatch):
    unpack = recompute._unpack

    @functools.wraps(unpack)
    def forget(placeholder):
        tensor = unpack(placeholder)
        if recompute._keeps_graph():
            placeholder.found = None
        return tensor

    monkeypatch.setattr(recompute, "_unpack", forget)


def a_recompute_is_not_watched_under_a_mode(monkeypatch):
    enter = environment.Environment.enter
    monkeypatch.setattr(environment.Environment, "enter", lambda self, undo: enter(self, undo) and False)


def a_forward_keeps_its_module(monkeypatch):
    def keep(self, module):
        self._module = lambda: module

    monkeypatch.setattr(region.OfModule, "__init__", keep)


def a_forward_is_a_function(monkeypatch):
    def attach(module, how):
        module.__dict__["forward"] = how(region.OwnForward(module, module.__dict__.get("forward")))

    monkeypatch.setattr(_apply, "attach", attach)


def regions_inside_a_recomputed_one_keep_theirs(monkeypatch):
    monkeypatch.setattr(functorch_state, "inside_region", lambda: False)


# What each takes away, by the programs that are to notice it: all that begin so.
MUTANTS = {
    hooks_are_those_of_backward: ["1:"],
    cast_makes_containers_again: ["2:"],
    a_look_at_a_region_may_assign: ["3:"],
    views_are_copied_apart: ["4: a view", "4: a closure"],
    memory_comes_back_under_one_name: ["4:"],
    assignments_are_not_seen: ["5: p.data = ... inside a checkpoint"],
    first_runs_are_not_watched: ["5: p.data.mul_() inside a checkpoint"],
    pieces_may_write_to_what_they_share: ["5: p.data.mul_() inside a tile"],
    hidden_changes_are_allowed: [
        "5: p.data = ... inside a tile",
        "5: p.data = ... inside streamed",
        "5: p.data.mul_() inside streamed",
        "5: p.data = ... inside a cast",
        "5: p.data.mul_() inside a cast",
    ],
    parameters_train_as_they_do_now: ["6:"],
    a_compiled_tile_refuses_nothing: ["7:"],
    pieces_of_any_kind_are_joined: ["9:"],
    parametrizations_are_those_of_backward: ["10: parametrize"],
    modes_are_those_of_backward: ["10: a TorchFunctionMode", "15: a dispatch mode in the forward"],
    flags_are_those_of_backward: ["10: another default dtype"],
    storages_may_be_exchanged: ["11:"],
    a_factor_of_one_element_is_a_number: ["12:"],
    a_recompute_within_the_run_is_part_of_it: ["13:"],
    a_backward_that_keeps_the_graph_forgets_what_it_was_given: ["14:"],
    a_recompute_is_not_watched_under_a_mode: ["15: a dispatch mode in the backward"],
    a_forward_keeps_its_module: ["16:"],
    a_forward_is_a_function: ["17:"],
    regions_inside_a_recomputed_one_keep_theirs: ["18: offload() under torch.func, inside"],
}


def programs(beginnings):
    return [name for name in FINDINGS if name.startswith(tuple(beginnings))]


CASES = [(mutate, name) for mutate, beginnings in MUTANTS.items() for name in programs(beginnings)]


@pytest.mark.parametrize(
    ("mutate", "name"), [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in CASES]
)
def test_the_program_fails_without_the_fix(mutate, name, monkeypatch):
    FINDINGS[name]()
    mutate(monkeypatch)
    # A wrong number, a wrong error (of PyTorch, at a model that was destroyed), or none where there should be one.
    with pytest.raises((AssertionError, ms.MemscaleError, RuntimeError, pytest.fail.Exception)):
        FINDINGS[name]()


def test_every_program_has_a_mutant():
    assert all(programs([beginning]) for beginnings in MUTANTS.values() for beginning in beginnings)
    without = set(FINDINGS) - {name for _, name in CASES}
    assert without == set()
