"""The kernel of bitsandbytes that steps quantized moments on a card: numbers on a CPU's kernel, bytes on a card."""

import copy
import gc
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memscale as ms
from memscale.optimizers import kernel_step
from memscale.optimizers.kernel_step import KernelStep
from tests.ghost.record import tried_on_the_cpu  # noqa: F401
from tests.support.checks import bits

HOW = ms.quantize_states()
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
MAKERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, betas=(0.5, 0.9), eps=1e-3),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, alpha=0.9),
    "RMSprop, decay in the gradient": lambda p: torch.optim.RMSprop(p, lr=1e-3, weight_decay=0.1),
    "Adagrad": torch.optim.Adagrad,
    "Adagrad, both decays": lambda p: torch.optim.Adagrad(p, lr_decay=0.5, weight_decay=0.1),
}
NUMBERS = 20 * 256 + 17


@pytest.fixture
def on_a_card(monkeypatch):
    """CPU tensors count as a card's; bitsandbytes has the kernel for CPUs as well. Returns the runs of the kernel."""
    runs = []
    own = KernelStep.run
    monkeypatch.setattr(kernel_step, "device_type", lambda _: "cuda")
    monkeypatch.setattr(KernelStep, "run", lambda step, *args: (runs.append(step), own(step, *args))[1])
    return runs


def gradient(seed, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(NUMBERS, generator=random) * torch.logspace(-4, 0, NUMBERS)).to(dtype)


def stepped(weight, optimizer, seeds):
    for seed in seeds:
        weight.grad = gradient(seed, weight.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_each_step_is_that_of_the_optimizer_over_what_the_codes_say(make, dtype, tolerance, on_a_card):
    weight = nn.Parameter(torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0)).to(dtype))
    optimizer = stepped(weight, HOW(make([weight])), [0])
    first = len(on_a_card)  # the class makes the states, in its own first step; Adagrad does when it is made
    assert first == isinstance(optimizer, torch.optim.Adagrad)
    for seed in range(1, 5):
        other = nn.Parameter(weight.detach().clone())
        reference = make([other])
        reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        version = weight._version
        stepped(weight, optimizer, [seed])
        stepped(other, reference, [seed])
        assert weight._version > version
        assert torch.allclose(weight, other, rtol=tolerance, atol=tolerance * 1e-2)
        states, expected = optimizer.state_dict()["state"][0], reference.state_dict()["state"][0]
        assert states.keys() == expected.keys()
        for name, value in expected.items():
            if name == "step":
                assert states[name] == value
                continue
            blocks = torch.cat([value.float(), torch.zeros(-NUMBERS % 256)]).view(-1, 256).abs().amax(1)
            room = (0.006 if name in SECOND_MOMENTS else 0.012) * blocks.repeat_interleave(256)[:NUMBERS]
            room += 2 * torch.finfo(dtype).eps * value.float().abs() + torch.finfo(dtype).tiny
            assert ((states[name].float() - value.float()).abs() <= room).all()
            if name in SECOND_MOMENTS:
                assert (optimizer.state[weight][name][weight.grad != 0] != 0).all()  # codes
    assert len(on_a_card) == first + 4


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_training_goes_on_from_a_state_dict_bit_for_bit_in_float32(make, on_a_card):
    weight = nn.Parameter(torch.ones(NUMBERS))
    optimizer = stepped(weight, HOW(make([weight])), range(3))
    first = len(on_a_card)
    other = nn.Parameter(weight.detach().clone())
    resumed = HOW(make([other]))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert bits(dict(optimizer.state[weight])) == bits(dict(resumed.state[other]))
    stepped(weight, optimizer, range(3, 6))
    stepped(other, resumed, range(3, 6))
    assert bits(weight.detach()) == bits(other.detach())
    assert len(on_a_card) == first + 3 + 3
    assert "a state_dict has" not in optimizer.report()
    half = nn.Parameter(torch.ones(NUMBERS, dtype=torch.bfloat16))
    assert "a state_dict has moments in bfloat16, and the kernel" in stepped(half, HOW(make([half])), [0, 1]).report()


class Reads(TorchDispatchMode):
    """Counts the numbers that Python reads from tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_count_of_steps_is_read_once_and_again_after_others_changed_it(on_a_card):
    weight = nn.Parameter(torch.ones(NUMBERS))
    optimizer = stepped(weight, HOW(torch.optim.AdamW([weight], lr=1e-2, fused=True)), [0, 1])
    with Reads() as reads:
        stepped(weight, optimizer, [2, 3])
    assert reads.count == 0  # each would wait for a card
    optimizer.state[weight]["step"].fill_(500)
    other = nn.Parameter(weight.detach().clone())
    reference = torch.optim.AdamW([other], lr=1e-2, fused=True)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(weight, optimizer, [4])
    stepped(other, reference, [4])
    assert torch.allclose(weight, other, rtol=1e-6, atol=1e-8)
    assert on_a_card
    assert optimizer.state[weight]["step"] == reference.state[other]["step"] == 501


class Own(torch.optim.AdamW):
    pass


OTHERS = {
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "maximize": lambda p: torch.optim.AdamW(p, maximize=True),
    "a rate on the device": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3), foreach=False),
    "decay in the gradient": lambda p: torch.optim.Adam(p, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "dampening": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.5),
    "no momentum": lambda p: torch.optim.SGD(p, lr=1e-2),
    "a class of users": Own,
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, centered=True),
    "RMSprop with momentum": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "Adagrad whose sum starts above zero": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "Adagrad, maximize": lambda p: torch.optim.Adagrad(p, maximize=True),
    "Adadelta": torch.optim.Adadelta,
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_steps_are_the_class_s_own(make, on_a_card):
    weight = nn.Parameter(torch.ones(NUMBERS))
    stepped(weight, HOW(make([weight])), [0, 1])
    assert not on_a_card


def test_types_blocks_gradients_and_scales_that_the_kernel_does_not_know_are_left_to_the_class(on_a_card):
    half = nn.Parameter(torch.ones(NUMBERS, dtype=torch.float16))
    stepped(half, HOW(torch.optim.AdamW([half])), [0, 1])
    weight = nn.Parameter(torch.ones(NUMBERS))
    stepped(weight, ms.quantize_states(block=128)(torch.optim.AdamW([weight])), [0, 1])
    optimizer = stepped(weight, HOW(torch.optim.AdamW([weight], fused=True)), [0])
    weight.grad = torch.ones(2 * NUMBERS)[::2]
    optimizer.step()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(0.0)
    stepped(weight, optimizer, [1])
    assert not on_a_card
    optimizer.grad_scale = optimizer.found_inf = None
    stepped(weight, optimizer, [1])
    assert len(on_a_card) == 1


def test_the_decay_in_the_gradient_is_both_in_what_is_squared_and_in_what_is_divided(on_a_card, monkeypatch):
    """The kernel for CUDA (0.50.2) divides the gradient without its decay, the kernel for CPUs the one with it."""
    given = []
    own = torch.ops.bitsandbytes.optimizer_update_8bit_blockwise
    spy = types.SimpleNamespace(optimizer_update_8bit_blockwise=lambda *args: (given.append(args), own(*args)))
    monkeypatch.setattr(kernel_step, "kernels", lambda: spy)
    weight = nn.Parameter(torch.ones(NUMBERS))
    optimizer = HOW(torch.optim.RMSprop([weight], weight_decay=0.5))
    for _ in range(2):
        before = weight.detach().clone()
        stepped(weight, optimizer, [0])
    assert all(args[-3] == 0.0 for args in given)  # the kernel's own decay
    assert torch.equal(torch.cat([args[1] for args in given]), gradient(0) + 0.5 * before)
    assert torch.equal(weight.grad, gradient(0))


@pytest.mark.parametrize(
    ("make", "moments"),
    [
        (torch.optim.AdamW, 2),
        (torch.optim.RMSprop, 1),
        (lambda p, **options: torch.optim.RMSprop(p, weight_decay=0.1, **options), 1),
        (torch.optim.Adagrad, 1),
    ],
    ids=["AdamW", "RMSprop", "RMSprop, decay in the gradient", "Adagrad"],
)
def test_a_simulated_card_keeps_no_moment_in_full(make, moments):
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(2)])
    optimizer = HOW(make(model.parameters(), foreach=False))
    found = ms.profile(model, torch.ones(1, 1024), loss=lambda y, _: y.sum(), hardware="h100", optimizer=optimizer)
    assert 0.25 <= found.by_category["optimizer state"] / (moments * 2 * 2**22) <= 0.255
    assert found.by_category["temporary"] <= 2**20  # a flag for each number of a weight, or a slice of a gradient


@pytest.mark.cuda
@pytest.mark.usefixtures("tried_on_the_cpu")
def test_on_a_card_a_step_takes_what_is_predicted_and_no_moment_in_full():
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
    optimizer = HOW(torch.optim.AdamW(model.parameters(), foreach=False))
    x, loss = torch.ones(1, 1024, device="cuda"), lambda y, _: y.sum()
    predicted = ms.profile(model, x, loss=loss, optimizer=optimizer)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        output = model(x)
        loss(output, None).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(predicted.peak_bytes, rel=1e-3)


@pytest.mark.cuda
@pytest.mark.values
def test_on_another_stream_the_kernels_of_the_default_stream_come_in_order():
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.ones(2**20, device="cuda")) for _ in range(2)]
    gradients = [torch.randn(2**20, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    for weight, stream in zip(weights, (torch.cuda.current_stream(), torch.cuda.Stream()), strict=True):
        optimizer = HOW(torch.optim.AdamW([weight]))
        with torch.cuda.stream(stream):
            for each in gradients:
                weight.grad = each.clone()
                optimizer.step()
        stream.synchronize()
    assert torch.equal(*weights)
