"""`limit_peak`: a test of a user's, whose body is one training step."""

import pytest
import torch

import memscale as ms
from memscale.testing import limit_peak


def trained(model, optimizer, rows=16):
    model(torch.ones(rows, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_what_fits_passes_and_what_does_not_fails_with_the_table():
    def body():
        model = torch.nn.Linear(1 << 14, 1 << 16)  # 4 GiB of weights, which are never there
        model(torch.ones(4, 1 << 14)).sum().backward()

    limit_peak("22GiB", hardware="rtx-4090")(body)()
    with pytest.raises(AssertionError, match=r"(?s)body takes 8\.\d\d GiB of NVIDIA .* limit of 5.00 GiB.*by module"):
        limit_peak("5GiB", hardware="rtx-4090")(body)()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(512, 512)


@limit_peak("8MiB")  # weights, gradients and two states of 1 MiB each, a temporary, and a step's activations
def test_fixtures_reach_the_body(model):
    trained(model, torch.optim.AdamW(model.parameters(), foreach=False))


def test_what_comes_from_outside_has_states_and_stays_as_it_is(model):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    before = [parameter.clone() for parameter in model.parameters()]
    exact = ms.profile(lambda: trained(model, optimizer)).peak_bytes
    limit_peak(exact)(trained)(model, optimizer)
    with pytest.raises(AssertionError, match="over its limit"):
        limit_peak(exact - 1)(trained)(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    assert model.weight.grad is None


def test_a_body_that_needs_values_is_not_run(model):
    ran = []

    @limit_peak("1GiB")
    def body():
        if model(torch.ones(16, 512)).tolist():
            ran.append("for real")

    with pytest.raises(ms.ConfigError, match="cannot be simulated"):
        body()
    assert not ran


def test_limits_that_are_none():
    with pytest.raises(ms.ConfigError, match="limit='22 apples'"):
        limit_peak("22 apples")
    with pytest.raises(ms.ConfigError, match="no card is called"):
        limit_peak("1GiB", hardware="rtx-9999")
