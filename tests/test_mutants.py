"""The checks of the other suites must fail on a broken memscale: each mutant here is one way to break it."""

from contextlib import contextmanager

import pytest
import test_effects
from checks import check_argument_untouched, check_same, check_trees_independent
from models import CONVNET, MLP, TRANSFORMER, mlp
from patterns import backward_twice

import memscale as ms
from memscale import _apply, _functional, _transform, checkpoint
from memscale.transforms import _checkpoint, _environment, _snapshot

REGIONS = {"*": checkpoint()}


def checkpoint_is_the_identity(monkeypatch):
    monkeypatch.setattr(_checkpoint.Checkpoint, "apply", lambda self, fn: fn)


def composition_is_reversed(monkeypatch):
    def apply(self, fn):
        for transform in self.transforms:
            fn = transform(fn)
        return fn

    monkeypatch.setattr(_transform.Compose, "apply", apply)


def random_state_is_not_restored(monkeypatch):
    def settle(self):
        self._random = self._host = None

    monkeypatch.setattr(_environment.Environment, "settle", settle)


def batchnorm_is_updated_twice(monkeypatch):
    @contextmanager
    def reinstate(self, *, last):
        yield

    monkeypatch.setattr(_snapshot.Snapshot, "reinstate", reinstate)


def parameter_dictionaries_are_shared(monkeypatch):
    def copy_dict(source, target, memo):
        original(source, target, memo)
        target["_parameters"] = source["_parameters"]

    original = _functional._copy_dict
    monkeypatch.setattr(_functional, "_copy_dict", copy_dict)


def the_argument_is_transformed(monkeypatch):
    monkeypatch.setattr(_apply, "copy_tree", lambda root: (root, {id(module): module for module in root.modules()}))


MUTANTS = {
    checkpoint_is_the_identity: [
        lambda: test_effects.check_effects("identity", "nothing"),
        lambda: test_effects.check_effects("identity", "dots"),
    ],
    composition_is_reversed: [
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
    with pytest.raises((AssertionError, ms.TransformError)):
        check()
