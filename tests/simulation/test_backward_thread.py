"""In which order backward goes through the graph that a backward made, beside a card."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from memscale.simulation.sandbox.interceptions import BackwardThread


def penalised(order):
    """A step with a gradient penalty and a term whose last node the forward made; `order` is told how they run."""
    x = torch.ones(3, requires_grad=True)
    x.tan().tanh().cosh().atan()
    y = x.sin()
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    for name, node in (("penalty", gradient.grad_fn), ("forward", y.grad_fn)):
        node.register_prehook(lambda gradients, name=name: order.append(name))
    torch.autograd.grad(gradient.sum() + y.sum(), x)


def test_what_a_backward_made_comes_after_what_the_forward_made_as_the_thread_of_a_card_has_made_fewer():
    recorder = SimpleNamespace(made_as={}, settled=True)
    thread = BackwardThread(recorder)
    with thread.installed():
        for _ in range(3):
            thread.begin_step()
            penalised(order := [])
            assert not recorder.settled, "another step may go another way"
    assert order[0] == "forward"
    assert set(recorder.made_as.values()).isdisjoint(recorder.made_as)
    penalised(order := [])
    assert order[0] == "penalty", "as one thread does, which is put back"


def test_where_a_backward_makes_more_than_the_forward_it_comes_first():
    def step(order):
        x = torch.ones(3, requires_grad=True)
        y = x.sin()
        gradient = y
        for _ in range(3):
            (gradient,) = torch.autograd.grad(gradient.sum(), x, create_graph=True)
        for name, node in (("penalty", gradient.grad_fn), ("forward", y.grad_fn)):
            node.register_prehook(lambda gradients, name=name: order.append(name))
        torch.autograd.grad(gradient.sum() + y.sum(), x)

    thread = BackwardThread(SimpleNamespace(made_as={}, settled=True))
    with thread.installed():
        for _ in range(3):
            thread.begin_step()
            step(order := [])
    assert order[0] == "penalty"


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_of_leaves_are_followed_too():
    recorder = SimpleNamespace(made_as={}, settled=True)
    thread = BackwardThread(recorder)
    with thread.installed():
        thread.begin_step()
        x = torch.ones(3, requires_grad=True)
        x.sin().exp().sum().backward(create_graph=True)
    assert x.grad.grad_fn._sequence_nr() in recorder.made_as
    x.grad = None
