"""Batches and losses: the same mistake gets the same words in every verb that takes one."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.core import batches

NO_BATCH = (
    "a batch is a tensor, a tuple of arguments or a mapping of keyword arguments, got str; "
    "pass what the model is called with"
)
NO_LOSS = "a loss is a function loss(output, batch) that returns a scalar tensor, or None, got float 0.5; wrap it"
OF_ONE = "a loss is called as loss(output, batch), and this one takes (y): "
NO_SCALAR = "loss(output, batch) must be a tensor with one element, got a tensor of shape [2, 3]; pass loss="


def model():
    return nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])


VERBS = {
    "profile": lambda batch, loss: ms.profile(model(), batch, loss=loss),
    "MemoryProfiler": lambda batch, loss: ms.MemoryProfiler(model(), loss=loss).profile(batch),
    "OOMPredictor": lambda batch, loss: ms.OOMPredictor(model(), loss=loss).predict(batch),
    "verify": lambda batch, loss: ms.verify(model(), model(), batch, loss=loss),
}


def words(run):
    with pytest.raises(ms.ConfigError) as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_mistakes_get_the_same_words(verb):
    assert words(lambda: verb("text", None)) == NO_BATCH
    assert words(lambda: verb(torch.ones(2, 3), 0.5)).startswith(NO_LOSS)
    assert words(lambda: verb(torch.ones(2, 3), lambda y: y.sum())).startswith(OF_ONE)
    assert words(lambda: verb(torch.ones(2, 3), lambda y, _: y)).startswith(NO_SCALAR)
    cross_entropy = nn.functional.cross_entropy
    for loss, call in ((nn.MSELoss(), "nn.MSELoss()(output, y)"), (cross_entropy, "cross_entropy(output, y)")):
        found = words(lambda loss=loss: verb((torch.ones(2, 3),), loss))
        assert found.startswith(
            f"loss={call.split('(')[0].removeprefix('nn.')} compares an output with targets, and a loss"
        )
        assert found.endswith(f"the whole tuple; write loss=lambda output, _: {call}, with your labels for y")
    # The batch is no target that classes could be.
    found = words(lambda: verb(torch.ones(2, 2, 3), nn.CrossEntropyLoss(weight=torch.ones(5))))
    assert found.startswith("loss=CrossEntropyLoss compares an output with targets, and a loss is called as")


def test_an_autoencoder_has_its_batch_for_a_target():
    assert ms.profile(model(), torch.ones(2, 3), loss=nn.MSELoss(), hardware="cpu").peak_bytes > 0


@pytest.mark.parametrize("settings", [{}, {"verify_correctness": True}])
def test_wrap_says_the_same_of_its_sample(settings):
    config = ms.Config(force_optimize=True, enable_logging=False, **settings)
    assert words(lambda: ms.wrap(model(), config, sample_input="text")) == NO_BATCH


class Encoding(dict):
    """A mapping of a class that no pytree library knows."""


def test_three_kinds_of_batch_and_what_is_in_them():
    one, two = torch.ones(1), torch.ones(2)
    kinds = [(one, [one]), ((one, two), [one, two]), ([one], [one]), (Encoding(b=two, a=one), [one, two])]
    for batch, parts in kinds:
        batches.check_batch(batch)
        assert {id(tensor) for tensor in batches.tensors(batch)} == set(map(id, parts))
    assert batches.call(lambda a, *, b=0: (a, b), (one,)) == (one, 0)
    assert batches.call(lambda *, a, b: (a, b), Encoding(b=two, a=one)) == (one, two)
