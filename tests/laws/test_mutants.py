"""The checks of the other suites must fail on a broken memscale: each mutant here is one way to break it."""

import pytest

import memscale as ms
from memscale import checkpoint
from memscale.algebra import apply as _apply
from memscale.algebra import composition, functions
from memscale.regions import environment, replay
from memscale.runtime import saved_tensor_hooks
from memscale.runtime.engine import entry, offload_engine
from memscale.transforms.checkpoint import factory, saved
from memscale.transforms.tile import factory as tiling
from memscale.transforms.tile import rowwise
from tests.laws import test_effects
from tests.support.checks import check_argument_untouched, check_same, check_trees_independent
from tests.support.models import CONVNET, MLP, TRANSFORMER, mlp
from tests.support.patterns import backward_twice
from tests.transforms.offload import test_offload
from tests.transforms.tile import test_counts_again, test_whole_arguments

REGIONS = {"*": checkpoint()}


def checkpoint_is_the_identity(monkeypatch):
    monkeypatch.setattr(factory.Checkpoint, "apply", lambda self, fn: fn)


def composition_is_reversed(monkeypatch):
    def apply(self, fn):
        for transform in self.transforms:
            fn = transform(fn)
        return fn

    monkeypatch.setattr(composition.Compose, "apply", apply)


def random_state_is_not_restored(monkeypatch):
    def conclude(self):
        self._random, self._marks, self._host = [], [], None

    monkeypatch.setattr(environment.Environment, "conclude", conclude)


def batchnorm_is_updated_twice(monkeypatch):
    monkeypatch.setattr(replay.Replay, "__enter__", lambda _: {})
    monkeypatch.setattr(replay.Replay, "__exit__", lambda *_: None)


def parameter_dictionaries_are_shared(monkeypatch):
    def copy_tree(modules):
        memo = original(modules)
        for _, module in modules:
            memo[id(module)].__dict__["_parameters"] = module._parameters
        return memo

    original = functions.copy_tree
    monkeypatch.setattr(_apply, "copy_tree", copy_tree)


def the_argument_is_transformed(monkeypatch):
    monkeypatch.setattr(_apply, "copy_tree", lambda modules: {id(module): module for _, module in modules})


def offload_never_moves(monkeypatch):
    monkeypatch.setattr(offload_engine.Engine, "_look", lambda self, most=0: None)


def offload_moves_what_the_caller_holds(monkeypatch):
    monkeypatch.setattr(entry.Entry, "is_last_keeper", lambda self: True)


def offload_takes_what_a_checkpoint_would_recompute(monkeypatch):
    monkeypatch.setattr(saved_tensor_hooks, "recomputes", lambda unpack: False)


def checkpoint_keeps_its_input_to_itself(monkeypatch):
    monkeypatch.setattr(saved.torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def moved(name):
    how, values = test_offload.MOVES[name]
    return lambda: test_offload.check_moves(how, len(values.split()))


def what_pieces_share_may_change(monkeypatch):
    monkeypatch.setattr(rowwise.RowwiseWatch, "_refuse_shared", lambda *_: None)


def pieces_count_on_in_a_recompute(monkeypatch):
    monkeypatch.setattr(tiling.Captures, "restore", lambda _: None)


MUTANTS = {
    what_pieces_share_may_change: [
        lambda: test_whole_arguments.test_an_argument_passed_whole_is_not_changed_once_for_every_piece(
            test_whole_arguments.in_place, True
        )
    ],
    pieces_count_on_in_a_recompute: [
        lambda: test_counts_again.test_the_pieces_of_a_recompute_count_from_the_same_start(
            checkpoint(), ms.tile(chunks=2, recompute=False)
        )
    ],
    offload_never_moves: [moved("offload"), moved("offload, checkpoint"), moved("a policy that moves")],
    offload_moves_what_the_caller_holds: [test_offload.test_what_the_caller_holds_and_what_is_trained_does_not_move],
    offload_takes_what_a_checkpoint_would_recompute: [moved("checkpoint, offload")],
    checkpoint_keeps_its_input_to_itself: [moved("offload, checkpoint")],
    checkpoint_is_the_identity: [
        lambda: test_effects.check_effects("identity", "nothing"),
        lambda: test_effects.check_effects("identity", "dots"),
    ],
    composition_is_reversed: [
        moved("checkpoint, offload"),
        lambda: test_effects.check_effects("dots", "act"),
        lambda: test_effects.check_effects("nothing", "but act"),
    ],
    random_state_is_not_restored: [lambda: check_same(TRANSFORMER, backward_twice, REGIONS)],
    batchnorm_is_updated_twice: [lambda: check_same(CONVNET, backward_twice, REGIONS)],
    parameter_dictionaries_are_shared: [lambda: check_trees_independent(MLP, REGIONS)],
    the_argument_is_transformed: [lambda: check_argument_untouched(mlp(), REGIONS)],
}


@pytest.mark.parametrize(
    ("mutate", "check"),
    [
        pytest.param(mutate, check, id=f"{mutate.__name__}-{i}")
        for mutate, all_of_them in MUTANTS.items()
        for i, check in enumerate(all_of_them)
    ],
)
def test_the_mutant_is_caught(mutate, check, monkeypatch):
    check()
    mutate(monkeypatch)
    with pytest.raises((AssertionError, ms.TransformError, pytest.fail.Exception)):
        check()
