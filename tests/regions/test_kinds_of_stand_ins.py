"""A region in which two transforms have put tensors of their own in place of values that live elsewhere."""

from contextlib import contextmanager

import torch
from torch import nn

import memscale as ms
from memscale.regions import Note, Origin, stand_for


class ScaledNote(Note):
    def __init__(self, value):
        self.value = value

    @contextmanager
    def bring_back(self, notes):
        assert all(type(note) is type(self) for note in notes)
        yield {note: note.value * self.factor for note in notes}


class HalvedNote(ScaledNote):
    factor = 2


class NegatedNote(ScaledNote):
    factor = -1


class Halved(Origin):
    def note(self, stand_in):
        return HalvedNote(stand_in / 2)


class Negated(Origin):
    def note(self, stand_in):
        return NegatedNote(-stand_in)


def test_a_recompute_brings_back_each_value_by_a_note_of_its_own_kind():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.ones(3), torch.ones(3)

        def forward(self, x):
            return (x * self.first).sin() * self.second

    scale = Scale()
    region = ms.checkpoint()(scale)
    x = torch.ones(3, requires_grad=True)
    for name, origin, value in (("first", Halved(), 2.0), ("second", Negated(), 3.0)):
        setattr(scale, name, torch.full((3,), value))
        stand_for(origin, getattr(scale, name))
    output = region(x)
    scale.first = scale.second = None
    output.sum().backward()
    assert torch.equal(x.grad, 6.0 * torch.full((3,), 2.0).cos())
    assert scale.first is scale.second is None
