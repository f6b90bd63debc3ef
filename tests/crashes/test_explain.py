"""A crash explained: what a snapshot says of the moment of failure, and that a file is read as data only."""

from __future__ import annotations

import dataclasses
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.cli import app
from tests.support.models import Block

# Of a training loop under a limit of 200 MiB, with the CUDA build of PyTorch 2.13 on fake libraries (tests/ghost):
# three blocks of width 256, AdamW, 8,192 rows, stacks="python". The error said 146.29 MiB allocated, 31.71 MiB free.
SNAPSHOT = Path(__file__).parent / "out-of-memory.pickle"


def snapshot() -> Any:
    return pickle.loads(SNAPSHOT.read_bytes())


def test_the_moment_of_the_failure_is_put_together_again() -> None:
    found = ms.explain(SNAPSHOT)
    assert found.requested_bytes == 32 * 2**20
    assert round(found.allocated_bytes / 2**20, 2) == 146.29  # as the error said, though much was freed since
    assert found.reserved_bytes is not None
    assert round((found.reserved_bytes - found.allocated_bytes) / 2**20, 2) == 31.71
    assert found.failed_at == "/home/user/train.py:16 in forward"
    assert found.holders[0].where == found.failed_at
    assert found.holders[0].nbytes == found.by_category["activation"]
    assert 112 <= found.by_category["activation"] / 2**20 < 112.2  # of up, gelu and down, and what cuBLAS took
    parameters = sum(each.numel() for each in nn.Sequential(*[Block(256) for _ in range(3)]).parameters())
    # Blocks of the allocator are multiples of 512 bytes.
    assert 0 <= found.by_category["parameter"] - 4 * parameters < 12 * 512
    assert 0 <= found.by_category["optimizer state"] - 8 * parameters < 24 * 512
    assert sum(found.by_category.values()) == found.allocated_bytes
    # The limit is not in a snapshot, and the fake card had much left.
    assert "which is enough: the process had a limit below the device" in found.message


@pytest.mark.parametrize(
    ("requested", "left", "said"),
    [
        (20, 0, "enough together but in pieces: the largest free block has 8.00 MiB"),
        (
            40,
            10,
            "and the device had 10.0 MiB left, enough together but in pieces: the largest free block has 8.00 MiB",
        ),
        (40, 5, "and the device had 5.00 MiB left, together less than the allocation"),
        (40, 50, "and the device had 50.0 MiB left, which is enough: the process had a limit below the device"),
    ],
)
def test_what_is_free_in_pieces_is_called_so(requested: int, left: int, said: str) -> None:
    data = snapshot()
    (failure,) = [event for event in data["device_traces"][0] if event["action"] == "oom"]
    failure |= {"size": requested * 2**20, "device_free": left * 2**20}
    found = ms.explain(data)
    assert said in found.message
    assert found.largest_free_bytes == 8 * 2**20
    assert bool(found.fragmentation_bytes) == ("in pieces" in said)
    assert ("expandable_segments:True" in str(found)) == ("in pieces" in said)


@pytest.mark.deep
def test_the_plan_that_would_have_fitted() -> None:
    model = nn.Sequential(*[Block(256) for _ in range(3)])
    step = {"optimizer": torch.optim.AdamW(model.parameters()), "loss": lambda y, _: y.square().mean()}
    found = ms.explain(SNAPSHOT, model=model, batch=torch.ones(8192, 256), hardware="t4", budget="200MiB", **step)
    assert found.plan is not None
    profile = ms.profile(model, torch.ones(8192, 256), plan=found.plan, hardware="t4", **step)
    assert profile.reserved_peak_bytes is not None
    assert profile.reserved_peak_bytes <= 200 * 2**20


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    found = ms.explain(SNAPSHOT)
    path = tmp_path / "crash.html"
    found.html(path)
    page = path.read_text()
    assert "/home/user/train.py:16 in forward" in page
    assert "<script" not in page
    evil = "<script>alert(1)</script>"
    holders = tuple(dataclasses.replace(each, where=evil, stack=(evil,)) for each in found.holders)
    dataclasses.replace(found, notes=(evil,), holders=holders, device=evil).html(path)
    assert "<script" not in path.read_text(encoding="utf-8")
    with pytest.raises(ms.ConfigError, match=r"must end in \.html"):
        found.html(tmp_path / "crash.txt")


def test_a_snapshot_without_history_says_what_it_lacks() -> None:
    data = snapshot()
    data["device_traces"] = [[]]
    for segment in data["segments"]:
        for block in segment["blocks"]:
            block.pop("frames", None)
    found = ms.explain(data)
    assert found.requested_bytes is None
    assert set(found.by_category) == {"other"}
    assert any("_record_memory_history" in note for note in found.notes)
    assert found.message.startswith("cuda:0: no allocation failed")


def test_an_error_alone_tells_its_numbers() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 32.00 MiB. GPU 1 has a total capacity of 14.56 GiB of which 13.89 GiB "
        "is free. 200.00 MiB allowed; Of the allocated memory 146.29 MiB is allocated by PyTorch, and 31.71 MiB is "
        "reserved by PyTorch but unallocated."
    )
    found = ms.explain(torch.OutOfMemoryError(text))
    assert (found.device, found.requested_bytes, found.available_bytes) == ("cuda:1", 32 * 2**20, 200 * 2**20)
    # 146.29 and 32 are less than the 200 MiB that are allowed: 31.71 lie in pieces, and 22 more could be had.
    assert found.fragmentation_bytes == found.free_bytes
    assert "22.0 MiB left, enough together but in pieces" in found.message
    with pytest.raises(ms.ConfigError, match="this one says: something else"):
        ms.explain(torch.OutOfMemoryError("something else"))
    with pytest.raises(ms.ConfigError, match=r"takes a torch\.OutOfMemoryError"):
        ms.explain(3)


LOG = """\
Epoch 0: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0, and the batch was made smaller
Traceback (most recent call last):
  File "/home/user/train.py", line 31, in <module>
    main()
  File "/home/user/model.py", line 7, in forward
    return self.head(x)
  File "/opt/lib/torch/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 15.00 GiB of \
which 1.00 GiB is free. Of the allocated memory 12.00 GiB is allocated by PyTorch, and 1.50 GiB is reserved by \
PyTorch but unallocated.
"""


def test_where_it_failed_names_the_package_and_the_own_line_that_called_it() -> None:
    log = LOG.replace("/home/user/model.py", "/opt/site-packages/transformers/models/gpt2/modeling_gpt2.py")
    assert ms.explain(log).failed_at == (
        "/opt/site-packages/transformers/models/gpt2/modeling_gpt2.py:7 in forward, "
        "called from /home/user/train.py:31 in <module>"
    )


def test_a_log_tells_what_its_last_error_did(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(LOG)
    from_file, from_text = ms.explain(tmp_path / "run.log"), ms.explain(LOG)
    assert from_file == from_text
    assert (from_file.requested_bytes, from_file.device) == (2 * 2**30, "cuda:1")
    assert from_file.failed_at == "/home/user/model.py:7 in forward"
    assert (from_file.allocated_bytes, from_file.reserved_bytes) == (12 * 2**30, 27 * 2**29)
    assert from_file.available_bytes == 29 * 2**29
    with pytest.raises(ms.ConfigError, match=r"pass explain\(\) the whole error .*; this one says: out of memory"):
        ms.explain("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 1; 15.00 GiB total capacity)")


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.deep), torch.bfloat16])
def test_a_run_that_held_more_than_the_step_takes_was_another_step(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)
    batch = torch.empty(8, 64, device="meta", dtype=dtype)
    found = ms.explain(LOG, model=model, batch=batch, loss=lambda y, _: y.square().mean(), hardware="t4")
    note = "contradiction: the run had 12.0 GiB in tensors and asked for 2.00 GiB more, and this step takes "
    assert found.notes[0].startswith(note)
    assert ("float32 weights under autocast (--amp)" in found.notes[0]) == (dtype is torch.bfloat16)


def test_a_run_that_the_step_explains_is_not_contradicted() -> None:
    model, batch = nn.Linear(256, 256), torch.empty(1 << 18, 256, device="meta")
    found = ms.explain(SNAPSHOT, model=model, batch=batch, loss=lambda y, _: y.square().mean(), hardware="t4")
    assert found.prediction is not None
    assert found.prediction.profile.peak_bytes > found.allocated_bytes + 32 * 2**20
    assert not any("contradiction" in note for note in found.notes)


def test_no_plan_is_made_for_another_device_than_the_one_that_ran_out() -> None:
    with pytest.raises(ms.ConfigError, match=r"plan would be for .+: name the card, as hardware='t4', or with --gpu"):
        ms.explain(LOG, model=nn.Linear(2, 2), batch=torch.ones(1, 2))


class Runs:
    def __init__(self, how: Any, *arguments: Any) -> None:
        self.how, self.arguments = how, arguments

    def __reduce__(self) -> Any:
        return self.how, self.arguments


class Reduced:
    """Plain in itself, with a state that is set."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("was run")


RAN: list[int] = []


def attack_by_name(protocol: int) -> bytes:
    return pickle.dumps({"segments": [Runs(RAN.append, 1)], "device_traces": []}, protocol)


def global_opcode(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n(S'x'\ntR.".encode()


ATTACKS: dict[str, bytes] = {
    **{f"a call, protocol {each}": attack_by_name(each) for each in range(6)},
    "os.system": global_opcode("os", "system"),
    "builtins.eval": global_opcode("builtins", "eval"),
    "a dotted name": b"\x80\x04\x8c\x08builtins\x8c\x0fgetattr.__call__\x93.",
    "INST": b"(S'x'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'x'\no.",
    "NEWOBJ": b"cbuiltins\nlist\n)\x81.",
    "a persistent name": b"Pos.system\n.",
    "an instance": pickle.dumps(Reduced()),
    "a tensor": pickle.dumps(torch.ones(1)),
    "an out-of-band buffer": b"\x80\x05\x97.",
    "a registered number": b"\x80\x02\x82\xf0.",
    "nothing": b"",
    "a cut file": SNAPSHOT.read_bytes()[:5000],
    "a huge frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b".",
    "segments of another kind": pickle.dumps({"segments": {}, "device_traces": []}),
    "a size that is text": pickle.dumps(
        {"segments": [{"device": 0, "address": 0, "total_size": "x", "blocks": []}], "device_traces": [[]]}
    ),
    "a line that is text": pickle.dumps(
        {
            "segments": [
                {"device": 0, "address": 0, "total_size": 1, "blocks": [{"size": 1, "frames": [{"line": "x"}]}]}
            ],
            "device_traces": [[]],
        }
    ),
}


@pytest.mark.parametrize("content", ATTACKS.values(), ids=ATTACKS)
def test_a_file_that_is_not_plain_data_is_refused_and_nothing_of_it_runs(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RAN.clear()
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("was run"))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with pytest.raises(ms.ConfigError, match="snapshot"):
        ms.explain(path)
    assert RAN == []


def test_the_command_prints_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["explain", str(SNAPSHOT), "--html", str(tmp_path / "crash.html")]) == 0
    assert "an allocation of 32.0 MiB failed at /home/user/train.py:16 in forward" in capsys.readouterr().out
    assert (tmp_path / "crash.html").exists()
    assert app.run(["explain", str(tmp_path / "none.pickle")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["some words\n", "\n", "Step 3: loss 0.25\n"])
def test_the_command_says_which_files_it_reads(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text)
    assert app.run(["explain", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"memscale: '{path}' is neither a memory snapshot nor a log with the error; "
        "torch.cuda.memory._dump_snapshot(path) writes a snapshot, and a log must have the line "
        "'... out of memory. Tried to allocate ...' of the error\n"
    )
