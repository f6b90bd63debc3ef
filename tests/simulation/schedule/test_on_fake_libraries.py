"""A step that streams its parameters, on the fake libraries as it runs there, where copies and operators take time."""

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.hardware import copy_seconds
from memscale.runtime import Runtime
from tests.ghost.record import fake_runtime
from tests.ghost.timed import timed

pytestmark = pytest.mark.cuda
WIDTH, TOKENS = 4096, 2048
STREAMED = ms.offload(what="params")


def loss(output, batch):
    return output.float().square().mean()


def block():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False))


@pytest.mark.parametrize("how", [STREAMED, ms.compose(STREAMED, ms.checkpoint())])
def test_copies_take_time_and_memory_is_at_most_that_of_the_profile(how):
    """A profile has as many layers loaded ahead as there may be; measured times have fewer, which is less memory."""
    if fake_runtime() is None:
        pytest.skip("a real CUDA runtime keeps its own time")
    card = ms.Hardware.named("h100")
    with torch.device("meta"):
        model, x = nn.Sequential(*[block() for _ in range(4)]).bfloat16(), torch.empty(TOKENS, WIDTH).bfloat16()
    said = ms.profile(
        model, x, loss=loss, plan={"*": how}, optimizer=torch.optim.SGD(model.parameters()), hardware=card
    )
    runtime = Runtime()
    fit = ms.transform(model.to_empty(device="cpu"), {"*": how}, runtime=runtime).to("cuda")
    optimizer = torch.optim.SGD(fit.parameters(), lr=0.1)
    x = torch.empty_like(x, device="cuda")
    ends = []
    with timed(card) as now:
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            loss(fit(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            ends.append(now())
    step_seconds = ends[2] - ends[1]
    moved = runtime.stats()["cuda:0"].in_bytes["pinned"] // 3
    assert step_seconds > moved / (1 << 30) * copy_seconds(1 << 30, "pinned", "in", card)
    assert torch.cuda.max_memory_allocated() <= 1.001 * said.peak_bytes


def test_a_copy_is_done_when_its_time_has_come():
    if fake_runtime() is None:
        pytest.skip("a real CUDA runtime keeps its own time")
    card = ms.Hardware.named("h100")
    host, device = torch.empty(1 << 28, dtype=torch.uint8).pin_memory(), torch.empty(1 << 28, dtype=torch.uint8).cuda()
    with timed(card) as now:
        begin, copied = now(), torch.cuda.Event()
        device.copy_(host, non_blocking=True)
        copied.record()
        assert not copied.query()
        copied.synchronize()
        assert now() - begin == pytest.approx(copy_seconds(1 << 28, "pinned", "in", card), rel=0.2)
        assert copied.query()
