"""The rules for cuDNN's workspaces against what convolutions took on an H100."""

import json
import statistics
from pathlib import Path

import pytest
import torch

import memscale as ms
from memscale.simulation.kernels.cudnn_workspaces import Convolution

MEASURED = json.loads((Path(__file__).parents[3] / "benchmarks/results/convolutions-h100.json").read_text())["rows"]


def convolution(row):
    def tensor(name):
        return torch.empty(row[name], dtype=getattr(torch, row["dtype"]), device="meta")

    image, result = ("result", "image") if row["transposed"] else ("image", "result")
    stride, padding = tuple(row["stride"]), tuple(row["padding"])
    return Convolution(
        tensor(image), tensor("kernel"), tensor(result), stride, padding, row["groups"], row["channels_last"]
    )


def errors(rows):
    """Each workspace by the rules, less what was measured, as a share of what the convolution's tensors take."""
    found = []
    for row in rows:
        one = convolution(row)
        size = one.image.nbytes + one.kernel.nbytes + one.result.nbytes
        forward, back = one.result_bytes((9, 0)), one.image_bytes((9, 0))
        if row["transposed"]:
            forward, back = back, forward
        for mine, name in ((forward, "result"), (back, "image"), (one.weight_bytes((9, 0)), "weight")):
            found.append((mine - row[f"{name}_bytes"]) / size)
    return found


@pytest.mark.parametrize(
    ("dtypes", "close", "below"), [(("bfloat16", "float16"), 0.70, 0.12), (("float32",), 0.58, 0.11)]
)
def test_rules_are_what_was_measured(dtypes, close, below):
    found = errors([row for row in MEASURED if row["dtype"] in dtypes])
    assert statistics.median(map(abs, found)) < 1e-3
    assert sum(abs(error) < 0.02 for error in found) / len(found) > close
    assert sum(error < -0.05 for error in found) / len(found) < below


def test_large_ones_are_close_which_is_where_the_bytes_are():
    large = [row for row in MEASURED if row["image_bytes"] + row["result_bytes"] + row["weight_bytes"] > 2e8]
    found = errors(large)
    assert sum(abs(error) < 0.1 for error in found) / len(found) > 0.8
    assert sum(error < -0.1 for error in found) / len(found) < 0.03


def test_half_precision_is_copied_with_its_channels_last_and_padded():
    image, kernel, result = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((4, 3, 32, 32), (16, 3, 3, 3), (4, 16, 30, 30))
    )
    one = Convolution(image, kernel, result, (1, 1), (0, 0), 1, channels_last=False)
    assert one.result_bytes((9, 0)) == (image.nbytes + kernel.nbytes) * 8 // 3 + result.nbytes
    assert one.result_bytes((6, 1)) == 0  # no tensor cores


@pytest.mark.parametrize(("card", "noted"), [("h100", 1), ("cpu", 0)])
def test_a_profile_says_where_workspaces_come_from(card, noted):
    hardware = ms.Hardware.detect("cpu") if card == "cpu" else card
    model, batch = torch.nn.Conv2d(3, 8, 3), torch.ones(2, 3, 8, 8)
    profile = ms.profile(model, batch, loss=lambda y, _: y.mean(), hardware=hardware)
    assert sum("cuDNN takes for convolutions" in note for note in profile.notes) == noted
