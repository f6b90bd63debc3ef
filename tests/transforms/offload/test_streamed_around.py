"""offload(what="params") with torch.func, torch.compile, DistributedDataParallel and threads around and inside it."""

import sys
import threading
import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

import memscale as ms
from memscale import checkpoint, compose, offload
from tests.support.checking.checked_engine import CheckedRuntime
from tests.support.checks import bits
from tests.support.coverings import in_turn
from tests.support.layers import (
    HOWS,
    LAYERS,
    PARAMS,
    WIDTH,
    gradients,
    layers,
    loss_of,
    moved,
    names_on_host,
    rows,
    runtime_of,
    same,
    streamed,
    trained,
)

# ----------------------------------------------------------------------------------------------------- around it


def functional(model):
    weights = dict(model.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    return [torch.func.grad(loss)(weights, rows()), torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, rows())]


def of_the_input(model):
    x = rows()
    return [
        torch.func.grad(lambda x: model(x).square().sum())(x),
        torch.func.jacrev(model)(x[0]),
        torch.func.vmap(model)(x),
        torch.autograd.functional.jacobian(model, x[0], vectorize=True),
    ]


def forward_mode(model):
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(model(forward_ad.make_dual(rows(), torch.ones_like(rows())))))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", [functional, of_the_input, forward_mode])
def test_torch_func_and_forward_mode_find_the_same(way):
    same(way)


TRACES = {
    "make_fx": lambda model: make_fx(model)(rows()),
    "jit": lambda model: torch.jit.trace(model, (rows(),)),
    "linearize": lambda model: torch.func.linearize(model, rows())[1],
}


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.:DeprecationWarning", "ignore:Attempted to insert a get_attr:UserWarning"
)
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
@pytest.mark.parametrize("placed", [False, True], ids=["first", "later"])
def test_a_trace_holds_parameters_and_no_device_tensors(trace, placed):
    plain, (model, _) = layers(), streamed()
    if placed:
        model(rows())
    with torch.no_grad():
        found = trace(model)
        assert bits([model(rows()), found(rows())]) == bits([plain(rows()), trace(plain)(rows())])
    assert bits(list(model.parameters())) == bits(list(plain.parameters()))


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script:DeprecationWarning",
    "ignore:The .grad attribute:UserWarning",
    "ignore:Dynamo:UserWarning",
)
# Dynamo takes a second for each.
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.deep if at % 4 else ()) for at, how in enumerate(HOWS.values())]
)
def test_torch_compile_around_it_leaves_it_as_it_is(how):
    try:
        fit, runtime = streamed(how)
        plain = streamed(how)
        run = torch.compile(lambda x: fit(x * 1.0) + 1, backend="aot_eager")
        for _ in range(2):
            run(rows()).square().sum().backward()
            (plain[0](rows() * 1.0) + 1).square().sum().backward()
        assert bits(gradients(fit)) == bits(gradients(plain[0]))
        assert moved(runtime) == moved(plain[1])
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"offload\(.* (brings|decides)"):
            torch.compile(fit, backend="aot_eager", fullgraph=True)(rows())
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("bucket_view", [True, False])
def test_distributed_data_parallel_trains_the_same(tmp_path, bucket_view):
    def train(model):
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        optimizer = torch.optim.SGD(parallel.parameters(), 0.01)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(parallel).backward()
            optimizer.step()

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert len(names_on_host(same(train))) == 2 * LAYERS
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------- threads


def in_threads(count, work):
    failures = []

    def run(index):
        try:
            work(index)
        except BaseException:
            failures.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failures, failures[0]


@pytest.mark.parametrize(
    ("how", "depth"), in_turn([PARAMS, compose(PARAMS, offload()), compose(checkpoint(), PARAMS)], [0, 2])
)
def test_threads_share_a_runtime(how, depth):
    runtime = runtime_of(depth, CheckedRuntime)
    models = [ms.transform(layers(), {"*": how}, runtime=runtime) for _ in range(3)]
    expected = trained(layers(), 5)

    def work(index):
        assert trained(models[index], 5) == expected

    in_threads(len(models), work)


def test_threads_share_a_model():
    """From its very first call on, at which one of them gives the parameters their homes."""
    expected = bits(torch.autograd.grad(loss_of(plain := layers()), list(plain.parameters())))
    for _ in range(3):
        fit, _ = streamed()
        parameters = list(fit.parameters())

        def work(_, fit=fit, parameters=parameters):
            for _ in range(5):
                assert bits(torch.autograd.grad(loss_of(fit), parameters)) == expected

        in_threads(3, work)


class UsesFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x * torch.func.grad(lambda scale: (self.linear(x) * scale).sum())(torch.ones(()))


def test_a_region_that_uses_a_transform_of_torch_func_is_refused_by_name():
    fit = ms.transform(UsesFunc(), {"": PARAMS}, runtime=runtime_of())
    with pytest.raises(ms.TransformError, match=r"offload\(what='params'\) uses a transform of torch\.func"):
        fit(rows())


def test_the_parameters_of_a_region_of_the_whole_model_are_on_the_host_when_a_profile_begins():
    found = []
    for path in ("0", ""):
        fit = ms.transform(nn.Sequential(nn.Linear(WIDTH, WIDTH)), {path: PARAMS}, runtime=runtime_of())
        found.append(ms.profile(fit, rows(), loss=lambda out, _: out.sum(), hardware="h100").first_step_peak_bytes)
    assert found[0] == found[1]
