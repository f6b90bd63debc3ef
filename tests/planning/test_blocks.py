"""repeated_blocks: hand-written shapes; those of real architectures are in the golden rows."""

import pytest
import torch
from torch import nn

from memscale.planning.parts.blocks import repeated_blocks


def test_the_layers_of_pytorch_transformers_are_blocks():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert repeated_blocks(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)) == ("layers.*",)
    assert repeated_blocks(nn.Transformer(8, 2, 2, 2, 16, batch_first=True)) == (
        "encoder.layers.*",
        "decoder.layers.*",
    )


class Part(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        return x


class Attention(Part):
    pass


def feed_forward():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def block():
    return Part(norm=nn.LayerNorm(8), inner=feed_forward())


def attention():
    return Attention(query=nn.Linear(8, 8), key=nn.Linear(8, 8))


class DoubleConv(nn.Sequential):
    def __init__(self, width_in, width):
        super().__init__(nn.Conv2d(width_in, width, 3), nn.BatchNorm2d(width), nn.ReLU())


SHARED = block()
EMBEDDING = nn.Embedding(4, 8)


@pytest.mark.parametrize(
    ("model", "patterns"),
    [
        pytest.param(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()), [], id="single operations"),
        pytest.param(nn.Sequential(EMBEDDING, block(), block(), nn.Linear(8, 4)), ["1", "2"], id="blocks among others"),
        pytest.param(
            Part(layers=nn.ModuleList([nn.ModuleList([attention(), block()]) for _ in range(3)])),
            ["layers.*.*"],
            id="pairs in lists",
        ),
        pytest.param(
            Part(t=nn.ModuleDict({"wte": EMBEDDING, "h": nn.ModuleList([block(), block()])})),
            ["t.h.*"],
            id="module dict of parts",
        ),
        pytest.param(
            nn.ModuleDict({name: nn.Sequential(EMBEDDING, block(), block()) for name in ("enc", "dec")}),
            ["enc.1", "enc.2", "dec.1", "dec.2"],
            id="towers",
        ),
        pytest.param(
            nn.Sequential(
                *[
                    Part(attention=attention(), experts=nn.ModuleList([feed_forward() for _ in "abcd"]))
                    for _ in range(2)
                ]
            ),
            ["*"],
            id="blocks, not experts",
        ),
        pytest.param(Part(layers=nn.ModuleList([block(), block(), attention(), block()])), ["layers.*"], id="odd one"),
        pytest.param(nn.Sequential(EMBEDDING, SHARED, SHARED), ["1"], id="one module twice"),
        pytest.param(
            Part(down1=DoubleConv(3, 8), down2=DoubleConv(8, 16), up1=DoubleConv(16, 8), out=nn.Conv2d(8, 1, 1)),
            ["down1", "down2"],
            id="u-net",
        ),
        pytest.param(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)),
            [],
            id="vgg",
        ),
        pytest.param(Part(drops=nn.ModuleList([nn.Sequential(nn.ReLU(), nn.Dropout())] * 2)), [], id="no parameters"),
    ],
)
def test_modules_of_equal_structure_are_blocks(model, patterns):
    assert repeated_blocks(model) == tuple(patterns)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
def test_torchscript_is_no_block():
    scripted = torch.jit.script(nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]))
    assert repeated_blocks(scripted) == ()
