"""Two-dimensional meshes: weights split over some processes, shards over the others, asked about and as their owner has
them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memscale as ms
from tests.support.models import Block
from tests.support.whole_run import true_peaks

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),  # whose output nobody changes here
]

WIDTH, VOCABULARY = 64, 301  # rows that no two processes divide
FEW = ms.Config(mode="conservative")
TOKENS = torch.arange(4 * 40).view(4, 40) % VOCABULARY


class Model(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Block(WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.tp_plan = {
            "embed": "embedding_rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "head": "colwise_gather_output",
        }

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(output, _):
    return output.float().logsumexp(-1).mean()


def split(plan=None):
    """As its owner would write it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = Model() if plan is None else ms.transform(Model(), plan)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
    styles = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    for number in range(2):
        styles |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], styles)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(model, mesh=mesh["data"])


def trained(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        loss(model(TOKENS), TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return optimizer, step


ASKED = {"parallel": "fsdp2", "world": 8, "tensor": 2}


def test_a_plain_model_is_asked_about_as_the_split_one_whose_peak_is_the_allocators(group):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    asked = ms.profile(model, TOKENS, optimizer=optimizer, loss=loss, **ASKED)
    assert not dist.is_initialized()
    group(8)
    part = split()
    own = ms.profile(part, TOKENS, optimizer=trained(part)[0], loss=loss)
    truth = true_peaks(lambda: trained(split())[1])[-1]
    assert asked.peak_bytes == own.peak_bytes == pytest.approx(truth, rel=1e-3)


def test_a_plan_for_a_mesh():
    model = Model()
    card = ms.Hardware.named("h100")
    step = {"loss": loss, "hardware": card, **ASKED}
    profile = ms.profile(model, TOKENS, **step)
    # Weights that are split add their results up at every block; shards are gathered by the others.
    assert {(each.kind, each.size) for each in profile.schedule.collectives} >= {("all-reduce", 2), ("all-gather", 4)}
    with pytest.raises(ms.TransformError, match="whose weight is split over processes"):
        ms.profile(model, TOKENS, plan={"head": ms.tile(chunks=2)}, **step)


def test_tied_weights_stay_one():
    model, step = Model(tied=True), {"loss": loss, **ASKED}
    untied = ms.profile(Model(), TOKENS, **step).by_category["parameter"]
    assert ms.profile(model, TOKENS, **step).by_category["parameter"] < untied


def unsplittable(style="colwise"):
    model = Model()
    model.tp_plan = {"blocks": style} if style == "colwise" else {"blocks.*.up": style}
    return model


class WithHeads(Model):
    class config:
        num_attention_heads = 3


MISTAKES = {
    "no divisor": (Model, {"world": 9, "tensor": 2}, "9 processes do not divide into groups of 2"),
    "no number": (Model, {"world": 8, "tensor": 0}, "an int above 0"),
    "replicas": (Model, {"parallel": "ddp", "world": 8, "tensor": 2}, "say parallel='fsdp2'"),
    "no plan": (lambda: Model().blocks[0], {"world": 8, "tensor": 2}, "has none that names its modules; split it with"),
    "no style": (lambda: unsplittable("moe_tp_experts"), {"world": 8, "tensor": 2}, "not DTensor's, moe_tp_experts"),
    "no layer": (unsplittable, {"world": 8, "tensor": 2}, "blocks is a ModuleList"),
    "heads": (WithHeads, {"world": 8, "tensor": 2}, "num_attention_heads = 3 cannot be split over 2"),
}


@pytest.mark.parametrize(("make", "options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_be_split_is_told_before_anything_is_made(make, options, message):
    with pytest.raises(ms.ConfigError, match=message):
        ms.profile(make(), TOKENS, loss=loss, **{"parallel": "fsdp2", **options})
    assert not dist.is_initialized()
