"""wrap asks profile what the step takes, and leaves a model alone whose step fits."""

import logging

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.hardware.device import Hardware
from tests.legacy.test_legacy import conv_batch, convnet

MIB = 2**20
QUIET = {"enable_logging": False}


def test_the_skip_is_decided_by_the_profile_of_the_step_with_adamw(device):
    model, batch = convnet(), conv_batch()
    step = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": lambda output, _: output.sum()}
    step_bytes = ms.profile(model, batch, hardware=Hardware("box", "cpu", 1), **step).taken_bytes
    for nbytes, skips in [(2 * step_bytes, True), (2 * step_bytes - 2, False)]:
        device(nbytes / MIB)
        executor = ms.wrap(convnet(), ms.Config(target_gpu_utilization=0.5, **QUIET), batch)._memscale_executor
        assert (executor.skipped is not None and executor.skipped.startswith("the step fits")) is skips
        assert executor.step_bytes == executor.profile.taken_bytes == pytest.approx(step_bytes, rel=1e-3)


def test_without_a_batch_what_stays_from_step_to_step_counts(device):
    model = convnet()
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    resident = 4 * parameters + sum(buffer.nbytes for buffer in model.buffers())
    for nbytes, skips in [(resident, True), (resident - 1, False)]:
        device(nbytes / MIB)
        executor = ms.wrap(convnet(), ms.Config(target_gpu_utilization=1, **QUIET))._memscale_executor
        assert (executor.skipped is not None, executor.step_bytes, executor.profile) == (skips, resident, None)


def test_states_that_an_optimizer_holds_are_those_that_count(device):
    device(1 << 20)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).bfloat16()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    with ms.optimize(model, optimizer, ms.Config(**QUIET)) as executor:
        assert executor.step_bytes == 64 + 32 + 32
    with ms.optimize(model, None, ms.Config(**QUIET)) as executor:
        assert executor.step_bytes == 64 + 32 + 64


def test_a_policy_leaves_a_model_on_a_cpu_to_its_config():
    model = ms.wrap(convnet(), ms.Config(auto_policy=True, **QUIET))  # and warns of nothing
    ms.detach(model)


class Table(nn.Module):
    """A large table with sparse gradients before layers worth a checkpoint."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20_000, 32, sparse=True)
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
        )

    def forward(self, tokens):
        return self.layers(self.table(tokens))


def test_a_model_with_sparse_gradients_is_planned_as_with_dense_ones(caplog):
    """AdamW takes no sparse gradients, so that the simulation failed, and a wrapped model's second step with it."""
    caplog.set_level(logging.INFO)

    def trained(wrapped):
        torch.manual_seed(0)
        model, tokens = Table(), torch.randint(0, 20_000, (32, 64))
        if wrapped:
            ms.wrap(model, ms.Config(), tokens, budget="16MiB")
        optimizers = torch.optim.SparseAdam(model.table.parameters()), torch.optim.AdamW(model.layers.parameters())
        for _ in range(3):
            model.zero_grad()
            model(tokens).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        return model

    plain, model = trained(False), trained(True)
    executor = ms.Executor.of(model)
    assert executor.plan
    assert executor.skipped is None
    assert executor.predicted_bytes <= 16 * 2**20 < executor.step_bytes
    assert model.table.sparse
    assert model.table.weight.grad.is_sparse
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
    assert "sparse gradients count as dense ones, of AdamW: 'table'" in caplog.text
    assert "the real step's bytes (parameter, buffer, optimizer state) are within" in str(executor)
    ms.detach(model)
    model.table = nn.Embedding(100, 32, sparse=True)  # a sparse gradient of more rows than the table has
    with pytest.warns(RuntimeWarning, match="no plan could be made"):
        ms.wrap(model, ms.Config(**QUIET), torch.zeros(32, 64, dtype=torch.long), budget="100KiB")
    ms.detach(model)
    model = Table()
    seen = set()  # the tables that planning assigns to
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            nn.Embedding, "__setattr__", lambda *assigned: (seen.add(assigned[0]), nn.Module.__setattr__(*assigned))[1]
        )
        ms.wrap(model, ms.Config(**QUIET), torch.zeros(32, 64, dtype=torch.long), budget="16MiB")
    assert seen
    assert model.table not in seen  # another thread may be training it
    ms.detach(model)
    dense = Table()
    with ms.optimize(dense, torch.optim.SGD(dense.parameters(), lr=0.1), ms.Config(**QUIET)):
        assert dense.table.sparse  # an optimizer that is known says itself what it takes
