"""What each transform, and each ordered pair of transforms, costs and saves: exact FLOPs and exact bytes."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

import memscale as ms
from memscale import checkpoint, compose, identity, policies
from tests.support.models import TransformerBlock, mlp, numbers

BATCH, LENGTH, WIDTH, INNER = 2, 3, 11, 7
PROJECTION = 2 * BATCH * LENGTH * WIDTH * INNER  # FLOPs of `x @ up`, and of the output
ATTENTION = 2 * BATCH * LENGTH * LENGTH * INNER  # FLOPs of the scores, and of the context
NBYTES = {
    "U": 4 * BATCH * LENGTH * INNER,  # labelled "up"
    "A": 4 * BATCH * LENGTH * INNER,  # labelled "act"
    "S": 4 * BATCH * LENGTH * LENGTH,  # labelled "scores"
    "T": 4 * BATCH * LENGTH * LENGTH,  # tanh of the scores
    "C": 4 * BATCH * LENGTH * INNER,  # context
    "O": 4 * BATCH * LENGTH * WIDTH,  # output
}


def block(x, up, down):
    act = ms.name(torch.sin(ms.name(x @ up, "up")), "act")
    scores = ms.name(act @ act.mT, "scores")
    context = torch.tanh(scores) @ act
    return context @ down


TRANSFORMS = {
    "identity": identity,
    "nothing": checkpoint(),
    "everything": checkpoint(policy=policies.everything_saveable),
    "dots": checkpoint(policy=policies.dots_saveable),
    "no batch": checkpoint(policy=policies.dots_with_no_batch_dims_saveable),
    "act": checkpoint(policy=policies.save_only_these_names("act")),
    "but act": checkpoint(policy=policies.save_any_names_but_these("act")),
    "both": checkpoint(
        policy=policies.save_from_both_policies(
            policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names("scores")
        )
    ),
}

# Row: the outer transform; column: the inner one, in the order of TRANSFORMS. A cell "pq:letters" says that backward
# recomputes p projections and q attention products, and which values are kept from forward to backward.
#
# An outer checkpoint around a plain one costs nothing more: its recompute stops at the inner one's input. Around one
# that keeps values it runs the whole region again, for the inner one hands over what it kept at its end. An outer
# policy's values do not spare an inner checkpoint its own recompute: that is why the order matters.
PAIRS = {
    "identity":   "00:UATC  12:  00:UATC  00:USC   02:U     12:A     01:US    01:US",
    "nothing":    "12:      12:  12:      22:      24:      34:      23:      23:",
    "everything": "00:UATC  12:  00:UATC  00:USC   02:U     12:A     01:US    01:US",
    "dots":       "00:USC   12:  00:USC   00:USCO  02:USCO  12:USCO  01:USCO  01:USCO",
    "no batch":   "02:U     12:  02:U     02:UO    04:UO    14:UO    03:UO    03:UO",
    "act":        "12:A     12:  12:A     22:A     24:A     34:A     23:A     23:A",
    "but act":    "01:US    12:  01:US    11:US    13:US    23:US    12:US    12:US",
    "both":       "01:US    12:  01:US    01:USO   03:USO   13:USO   02:USO   02:USO",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Effects:
    forward_flops: int
    backward_flops: int
    saved_bytes: int


def flops(step):
    with FlopCounterMode(display=False) as counter:
        result = step()
    return counter.get_total_flops(), result


def effects(transform):
    fn = transform(block)
    arguments = [
        torch.randn(*shape, requires_grad=True) for shape in [(BATCH, LENGTH, WIDTH), (WIDTH, INNER), (INNER, WIDTH)]
    ]
    forward_flops, out = flops(lambda: fn(*arguments))
    backward_flops, _ = flops(out.sum().backward)
    saved = [r.nbytes for r in ms.saved_residuals(fn, *arguments) if r.source == "intermediate"]
    return Effects(forward_flops, backward_flops, sum(saved))


def expected(outer, inner):
    cell = PAIRS[outer].split()[list(TRANSFORMS).index(inner)]
    again, kept = cell.split(":")
    step = 2 * PROJECTION + 2 * ATTENTION
    recomputed = int(again[0]) * PROJECTION + int(again[1]) * ATTENTION
    return Effects(step, 2 * step + recomputed, sum(NBYTES[letter] for letter in kept))


def check_effects(outer, inner):
    assert effects(compose(TRANSFORMS[outer], TRANSFORMS[inner])) == expected(outer, inner)


@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("outer", TRANSFORMS)
def test_effects_of_every_ordered_pair(outer, inner):
    check_effects(outer, inner)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_effects_of_a_transform_by_itself(name):
    assert effects(TRANSFORMS[name]) == expected("identity", name)
    assert compose(TRANSFORMS[name], identity) == compose(identity, TRANSFORMS[name]) == TRANSFORMS[name]


def stack_step(model, run, x):
    def step():
        # The input is an activation, as inside a model.
        run(x * 1.0).sum().backward()
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None

    for _ in range(2):  # a region's first call learns what it changes
        step()
    return step


class Labelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(64, 256)), nn.Parameter(torch.randn(256, 64))

    def forward(self, x):
        return block(x, self.up, self.down)


def test_the_allocator_agrees_on_the_order_of_the_peaks():
    model = nn.Sequential(*[Labelled() for _ in range(4)])
    x = torch.randn(4, 32, 64, requires_grad=True)
    peaks = {}
    for name, how in TRANSFORMS.items():
        step = stack_step(model, ms.transform(model, {"*": how}), x)
        peaks[name] = ms.measure(step).growth_bytes
    assert peaks["identity"] == peaks["everything"]
    assert peaks["identity"] > peaks["dots"] > peaks["both"] == peaks["but act"]
    assert peaks["both"] > peaks["act"] == peaks["no batch"] > peaks["nothing"]


def conv_block():
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
    )


BLOCKS = {
    "mlp": (lambda: mlp(64), (256, 64)),
    "conv": (conv_block, (4, 8, 16, 16)),
    "transformer": (lambda: TransformerBlock(64, 4, dropout=0.1), (4, 64, 64)),
}


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("name", BLOCKS)
def test_never_more_flops_or_bytes_than_the_checkpoint_of_pytorch(name, depth):
    make, shape = BLOCKS[name]
    model = nn.Sequential(*[make() for _ in range(depth)])
    x = numbers(*shape)

    def theirs(value):
        for part in model:
            value = torch_checkpoint(part, value, use_reentrant=False)
        return value

    ours = stack_step(model, ms.transform(model, {"*": checkpoint()}), x)
    theirs, plain = stack_step(model, theirs, x), stack_step(model, model, x)
    assert flops(plain)[0] < flops(ours)[0] <= flops(theirs)[0]
    peak = ms.measure(ours).growth_bytes
    assert peak <= ms.measure(theirs).growth_bytes
    assert depth == 1 or peak < ms.measure(plain).growth_bytes


def test_everything_saveable_and_an_empty_plan_cost_nothing():
    model = mlp()
    assert "forward" not in ms.transform(model, {}).__dict__
    assert "forward" not in ms.transform(model, {"*": identity}).__dict__
    assert identity(block) is block


def test_under_torch_func_a_region_is_recomputed_once():
    x, up, down = torch.randn(2, 3, 11), torch.randn(11, 7), torch.randn(7, 11)
    plain = flops(lambda: torch.func.grad(lambda w: block(x, w, down).sum())(up))[0]
    ours = flops(lambda: torch.func.grad(lambda w: checkpoint()(block)(x, w, down).sum())(up))[0]
    assert ours - plain == 2 * PROJECTION + 2 * ATTENTION
