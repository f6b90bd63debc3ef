"""offload() on a CUDA device: what neither a fake CuPy nor the simulated device can settle."""

import threading

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.runtime import Runtime

pytestmark = pytest.mark.cuda
MIB = 1024**2
BLOCKS, ROWS, WIDTH = 8, 2048, 512
INPUT_BYTES = ROWS * WIDTH * 4
# A block saves its input and, four times as wide, the input and the output of the GELU. We hold the first one's input.
SAVED_BYTES = BLOCKS * 9 * INPUT_BYTES - INPUT_BYTES
HOW = {
    "offload": ms.offload(),
    "offload, checkpoint": ms.compose(ms.offload(), ms.checkpoint()),
    "pageable": ms.offload(tier="pageable"),
    "disk": ms.offload(tier="disk"),
}
# Long enough for a copy that does not wait for what the stream computes to read memory of another tensor, or of none.
CYCLES = 50_000_000


def new_model():
    torch.manual_seed(0)
    block = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)]
    return nn.Sequential(*block).cuda()


def new_runtime(tmp_path, **options):
    return Runtime(
        ms.AsyncOffloadConfig(**{"min_bytes": MIB, "pool_bytes": 512 * MIB, **options}), disk_directory=tmp_path
    )


def batch(seed):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()


def loss_of(model, x):
    return model(x).square().mean()


def gradients(model, x):
    model.zero_grad()
    loss = loss_of(model, x)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def live_bytes(runtime):
    return sum(sum(stats.live_bytes.values()) for stats in runtime.stats().values())


def growth_bytes(model, x):
    """How far a step drives the allocator above what it held before, gradients included."""
    loss_of(model, x).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss_of(model, x).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.values
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("how", HOW)
def test_steps_have_the_same_bits(tmp_path, how, depth):
    model, runtime = new_model(), new_runtime(tmp_path, prefetch_depth=depth)
    fit = ms.transform(model, {"*": HOW[how]}, runtime=runtime)
    for seed in range(3):
        assert same(gradients(fit, batch(seed)), gradients(model, batch(seed)))
        assert live_bytes(runtime) == 0
    (stats,) = runtime.stats().values()
    assert set(stats.in_bytes) == {how if how in ("pageable", "disk") else "pinned"}


def test_all_that_is_saved_leaves_the_device(tmp_path):
    runtime = new_runtime(tmp_path, prefetch_depth=0)
    x = batch(0)
    loss = loss_of(ms.transform(new_model(), {"*": ms.offload()}, runtime=runtime), x)
    runtime.settle()
    assert live_bytes(runtime) == SAVED_BYTES
    loss.backward()
    assert live_bytes(runtime) == 0


@pytest.mark.parametrize("depth", [0, 2])
def test_a_step_needs_less_of_the_device(tmp_path, depth):
    model, x = new_model(), batch(0)
    plain = growth_bytes(model, x)
    assert plain >= SAVED_BYTES
    for how in ("offload", "offload, checkpoint"):
        fit = ms.transform(model, {"*": HOW[how]}, runtime=new_runtime(tmp_path, prefetch_depth=depth))
        assert growth_bytes(fit, x) < 0.4 * plain


@pytest.mark.values
@pytest.mark.parametrize("how", ["offload", "offload, checkpoint"])
def test_a_step_on_a_stream_of_the_callers(tmp_path, how):
    """What moves is computed late, on a stream that nothing else waits for."""
    model = new_model()
    fit = ms.transform(model, {"*": HOW[how]}, runtime=new_runtime(tmp_path))
    for seed in range(3):
        x = batch(seed)
        expected = gradients(model, x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            found = gradients(fit, x)
        torch.cuda.current_stream().wait_stream(side)
        assert same(found, expected)


@pytest.mark.values
# The gradients of parameters at home: on the caller's stream, as the test has it.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("what", ["activations", "params"])
def test_backward_called_from_another_stream_than_forward(tmp_path, what):
    """Autograd's nodes run on the stream of their forward, which is late; the end of backward, and what receives the
    gradients of parameters at home, on the caller's, which is not."""
    plain, model = new_model(), new_model()
    fit = ms.transform(model, {"*": ms.offload(what=what)}, runtime=new_runtime(tmp_path))
    for seed in range(3):
        x = batch(seed)
        expected = [value.cpu() for value in gradients(plain, x)]
        model.zero_grad()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            loss = loss_of(fit, x)
        loss.register_hook(lambda _: torch.cuda._sleep(CYCLES))
        torch.cuda.current_stream().wait_stream(side)
        loss.backward()
        assert same([loss.detach().cpu(), *(parameter.grad.cpu() for parameter in model.parameters())], expected)


@pytest.mark.values
def test_threads_with_streams_of_their_own_share_a_runtime(tmp_path):
    """Each moves what the other has saved, on a stream that is not that one's."""
    runtime = new_runtime(tmp_path)
    models = [new_model() for _ in range(2)]
    fits = [ms.transform(model, {"*": ms.offload()}, runtime=runtime) for model in models]
    expected = [[gradients(model, batch(10 * index + seed)) for seed in range(3)] for index, model in enumerate(models)]
    batches = [[batch(10 * index + seed) for seed in range(3)] for index in range(2)]
    torch.cuda.synchronize()
    together = threading.Barrier(2, timeout=60)
    found = {}

    def train(index):
        with torch.cuda.stream(torch.cuda.Stream()):
            for x in batches[index]:
                together.wait()
                torch.cuda._sleep(CYCLES)
                found.setdefault(index, []).append(gradients(fits[index], x))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        assert len(found[index]) == 3
        assert all(same(*pair) for pair in zip(found[index], expected[index], strict=True))
    assert live_bytes(runtime) == 0
