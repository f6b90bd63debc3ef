"""``memscale predict``: the numbers of `OOMPredictor`, exit codes that scripts can use, one line for each mistake."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.cli import main
from memscale.cli.predict import read_plan
from memscale.core import wrapped
from memscale.planning.prediction import predicted_step
from memscale.planning.prediction.prediction import OOMPrediction

transformers = pytest.importorskip("transformers")

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "n_positions": 256,
    "vocab_size": 999,
}
FACTORIES = """
import torch
from torch import nn

def square(output, _):
    return output.square().mean()

def rows(batch, seq):
    return torch.ones(batch, seq, 8)

def plain():
    return nn.Linear(8, 8), rows, square

def blocks():
    layers = [nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)]
    return nn.Sequential(*layers), rows, square

def scalar():
    class Mean(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()
    return Mean(8, 8), rows

def picky():
    def few(batch, seq):
        if batch > 3:
            raise IndexError("only 3 rows")
        return rows(batch, seq)
    return nn.Linear(8, 8), few, square

def deaf():
    return nn.Linear(8, 8), lambda batch, seq: rows(2, 3), square

def lossless():
    return nn.Linear(8, 8), rows

def unknown():
    return nn.Linear(8, 8)

def hf():
    import transformers
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=50))

def wrong():
    return 3, rows

def broken():
    raise KeyError("nothing")

class Of:
    plain = staticmethod(plain)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a config and a module of factories."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    Path("gpt2.json").write_text(json.dumps(GPT2))
    Path("factories.py").write_text(FACTORIES)
    Path("weights.pt").write_bytes(bytes(range(128, 256)))
    return tmp_path


def predict(*options):
    return main(["predict", *map(str, options)])


def gpt2(**changes):
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, "use_cache": False, **changes}))


def tokens(batch, seq):
    ids = torch.zeros(batch, seq, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def printed(capsys):
    return json.loads(capsys.readouterr().out)


# -- the same numbers --------------------------------------------------------------------------------------------------


def test_json_is_the_prediction_of_the_library(folder, capsys):
    options = ("--hf", "factories:blocks", "--batch", 30, "--seq", 100, "--gpu", "l4", "--json", "--recommend")
    assert predict(*options) == 0
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())
    predictor = ms.OOMPredictor(model, optimizer, loss=lambda y, _: y.square().mean(), hardware="l4")
    expected = predictor.predict(torch.ones(30, 100, 8), recommend=True)
    text = capsys.readouterr().out
    assert OOMPrediction.from_json(text) == expected
    assert expected.recommendations
    assert "largest" not in json.loads(text)


@pytest.mark.parametrize(
    ("options", "make_optimizer", "changes"),
    [
        (["--optimizer", "none"], None, {}),
        (
            ["--plan", "checkpoint+offload+cast+tile"],
            torch.optim.AdamW,
            {
                "plan": {
                    "transformer.h.*": ms.compose(ms.offload(), ms.checkpoint(), ms.cast()),
                    "lm_head": ms.tile(chunks=8),
                    "": ms.cast(),
                }
            },
        ),
        (
            ["--dtype", "BF16", "--accumulate", "2", "--plan", "plan.json"],
            torch.optim.AdamW,
            {"dtype": torch.bfloat16, "accumulate": 2, "plan": {"transformer.h.0": ms.checkpoint()}},
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_options_mean_what_they_say(folder, capsys, options, make_optimizer, changes):
    Path("plan.json").write_text(ms.Plan({"transformer.h.0": ms.checkpoint()}).to_json())
    assert predict("--hf", "gpt2.json", "--batch", 4, "--seq", 128, "--gpu", "cpu", "--json", *options) == 0
    model = gpt2().to(changes.pop("dtype", torch.float32))
    optimizer = None if make_optimizer is None else make_optimizer(model.parameters())
    expected = ms.OOMPredictor(model, optimizer, hardware="cpu", **changes).predict(tokens(4, 128), recommend=False)
    assert printed(capsys)["peak_bytes"] == expected.peak_bytes


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        ({"model_type": "gpt2", **{key: GPT2[key] for key in ("n_layer", "n_embd", "n_head")}}, None),
        (
            {
                "model_type": "bert",
                "architectures": ["BertForSequenceClassification"],
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 16,
            },
            None,
        ),
        (
            {
                "model_type": "vit",
                "architectures": ["ViTForImageClassification"],
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 16,
                "image_size": 32,
                "patch_size": 8,
            },
            3 * 32 * 32 * 4 + 8,  # one picture and its label
        ),
    ],
    ids=["without architectures", "classes of rows", "pictures"],
)
def test_configs_of_many_kinds(folder, capsys, config, batch):
    Path("any.json").write_text(json.dumps(config))
    assert predict("--hf", "any.json", "--batch", 3, "--seq", 32, "--gpu", "cpu", "--json") == 0
    per_row = batch or {"bert": 32 * 8 + 8}.get(config["model_type"], 2 * 32 * 8)
    assert printed(capsys)["profile"]["by_category"]["input"] == 3 * per_row


def test_an_encoder_decoder_without_a_first_token_gets_its_tokens(folder, capsys):
    named = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "decoder_start_token_id": None}
    sizes = {"vocab_size": 50, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2, "d_model": 16}
    Path("any.json").write_text(json.dumps({**named, **sizes}))
    assert predict("--hf", "any.json", "--batch", 2, "--seq", 32, "--gpu", "cpu", "--json") == 0
    assert printed(capsys)["profile"]["by_category"]["input"] == 3 * 2 * 32 * 8


@pytest.mark.parametrize("name", ["plain", "scalar", "Of.plain"])
def test_a_factory_of_the_users(folder, capsys, name):
    assert predict("--hf", f"factories:{name}", "--batch", 5, "--seq", 7, "--gpu", "cpu", "--json") == 0
    model = nn.Linear(8, 8)
    expected = ms.OOMPredictor(
        model, torch.optim.AdamW(model.parameters()), loss=lambda y, _: y.mean(), hardware="cpu"
    ).predict(torch.ones(5, 7, 8))
    found = OOMPrediction.from_json(capsys.readouterr().out)
    assert found.profile.by_category["input"] == expected.profile.by_category["input"] == 5 * 7 * 8 * 4
    assert found.profile.by_category["parameter"] == 72 * 4


def test_a_factory_that_returns_a_model_of_transformers_needs_no_batches(folder, capsys):
    assert predict("--hf", "factories:hf", "--batch", 2, "--seq", 16, "--gpu", "cpu", "--dtype", "bf16", "--json") == 0
    profile = printed(capsys)["profile"]
    assert profile["by_category"]["input"] == 2 * 2 * 16 * 8
    assert {each["dtype"] for each in profile["holdings"] if each["category"] == "parameter"} == {"bfloat16"}


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_the_exit_code_is_the_verdict_at_the_exact_byte(folder, capsys):
    step = ("--hf", "factories:plain", "--batch", 64, "--seq", 8, "--gpu", "cpu", "--no-recommend")
    assert predict(*step, "--json") == 0
    peak = printed(capsys)["peak_bytes"]
    assert predict(*step, "--budget", peak) == 0
    assert capsys.readouterr().out.startswith("HIGH: the step fits")
    assert predict(*step, "--budget", peak - 1) == 3
    assert capsys.readouterr().out.startswith("CRITICAL: the step does not fit")
    assert predict(*step, "--budget", "1GiB", "--json") == 0
    assert printed(capsys)["capacity_bytes"] == 2**30
    assert predict(*step, "--budget", "0.5", "--json") == 0
    assert printed(capsys)["capacity_bytes"] == ms.Hardware.detect("cpu").memory_bytes // 2


@pytest.mark.parametrize("size", ["batch", pytest.param("seq", marks=pytest.mark.deep)])
def test_the_largest_is_that_of_the_library(folder, capsys, size):
    step = ("--hf", "factories:plain", "--batch", 4, "--seq", 6, "--gpu", "cpu")
    options = (*step, "--budget", "100KiB", "--no-recommend")
    assert predict(*options, "--largest", size, "--json") == 0
    found = printed(capsys)["largest"]
    model = nn.Linear(8, 8)
    predictor = ms.OOMPredictor(
        model, torch.optim.AdamW(model.parameters()), loss=lambda y, _: y.square().mean(), hardware="cpu"
    )
    batches = {"batch": lambda n: torch.ones(n, 6, 8), "seq": lambda n: torch.ones(4, n, 8)}
    expected = predictor.largest(batches[size], budget="100KiB")
    assert found == vars(expected)
    if size == "batch":
        assert predict(*options, "--largest", size) == 0
        assert capsys.readouterr().out.endswith(f"\n{wrapped(f'largest {size}: {expected}')}\n")


def test_if_nothing_fits_the_largest_says_so(folder, capsys):
    step = ("--hf", "factories:plain", "--gpu", "cpu", "--budget", "10B", "--no-recommend", "--largest", "batch")
    assert predict(*step) == 3
    assert "largest batch: not even batch_fn(1) fits" in capsys.readouterr().out
    assert predict(*step, "--json") == 3
    assert printed(capsys)["largest"] is None


def test_a_prediction_is_written_as_a_page_and_as_a_picture(folder, capsys):
    step = ("--hf", "factories:plain", "--gpu", "cpu", "--no-recommend")
    assert predict(*step, "--html", "step.html", "--plot", "step.png") == 0
    assert "<html" in Path("step.html").read_text().lower()
    assert Path("step.png").read_bytes().startswith(b"\x89PNG")


# -- where things are printed ------------------------------------------------------------------------------------------


def test_a_terminal_gets_a_bar_on_stderr_and_nothing_else_does(folder, capsys, monkeypatch):
    step = ("--hf", "factories:plain", "--gpu", "l4", "--json", "--recommend")
    assert predict(*step) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert predict(*step) == 0
    loud = capsys.readouterr()
    assert loud.out == quiet.out
    assert "simulating" in loud.err
    assert "/" in loud.err


def test_the_network_is_not_asked(folder, capsys, monkeypatch):
    def refused(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr("socket.socket.connect", refused)
    assert predict("--hf", "gpt2.json", "--gpu", "cpu") == 0


def test_a_missing_transformers_gets_one_line(folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert predict("--hf", "gpt2.json", "--gpu", "cpu") == 2
    assert capsys.readouterr().err.endswith("config.json needs transformers: pip install 'memscale-transforms[hf]'\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hf", "none.json"], "--hf 'none.json' must be a transformers config.json that exists, or module:factory"),
        (["--hf", "blank.json"], "--hf 'blank.json' is not a config of transformers: ValueError: Unrecognized model"),
        (["--hf", "odd.json"], "--hf 'odd.json': transformers cannot build the model on meta: "),
        (["--hf", "clip.json"], "--hf 'clip.json': transformers has no model with a loss for 'clip_text_model'"),
        (["--hf", "no_such_module:f"], "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        (["--hf", "factories:broken"], "--hf 'factories:broken' fails: KeyError: 'nothing'"),
        (["--hf", "factories:wrong"], "(model, batch_fn) or (model, batch_fn, loss), got (int, function)"),
        (["--hf", "factories:unknown"], "returns a Linear whose batches are not known; return (model, batch_fn)"),
        (["--hf", "factories:picky", "--batch", "9"], "batch_fn(9, 1024) fails: IndexError: only 3 rows"),
        (
            ["--hf", "factories:picky", "--largest", "batch"],
            "batch_fn(32) raises IndexError: only 3 rows; give --at-most below 32 if that is beyond",
        ),
        (["--seq", "257"], "--seq 257 is longer than the 256 positions that the model has"),
        (["--optimizer", "adanw"], "--optimizer must be none or one of "),
        (["--optimizer", "muon"], "--optimizer muon: "),
        (["--gpu", "h10"], "no card is called 'h10'; the nearest are 'h100'"),
        (["--dtype", "fp8"], "'--dtype': must be one of fp32, float32, bf16, bfloat16, fp16, float16, got 'fp8'"),
        (["--plan", "ofload"], "'ofload' is no file, and no transform of this model on"),
        (["--plan", "weights.pt"], "load('weights.pt'): 'utf-8' codec can't decode byte"),
        (["--hf", "factories:lossless"], "pass loss in the (model, batch_fn, loss) of --hf and take its mean"),
        (["--largest", "width"], "'--largest': must be one of batch, seq, grid, got 'width'"),
        (
            ["--hf", "vit.json", "--largest", "seq"],
            "--largest seq: the batches of this model are the same for any seq; use --largest batch",
        ),
        (["--hf", "factories:deaf", "--largest", "seq"], "the same for any seq; let its batch_fn use its arguments"),
    ],
    ids=lambda value: "-".join(value[-2:]) if isinstance(value, list) else "",
)
def test_bad_options_get_one_line(folder, capsys, options, message):
    Path("blank.json").write_text("{}")
    Path("odd.json").write_text(json.dumps({**GPT2, "n_head": 5}))
    Path("clip.json").write_text(json.dumps({"model_type": "clip_text_model"}))
    vit = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_hidden_layers": 1}
    Path("vit.json").write_text(json.dumps(vit))
    subject = [] if "--hf" in options else ["--hf", "gpt2.json"]
    device = [] if "--gpu" in options else ["--gpu", "cpu"]
    assert predict(*subject, *device, *options) == 2
    shown = capsys.readouterr()
    assert not shown.out or "--largest" in options, "the verdict of the step comes before a search for sizes"
    assert shown.err.startswith("memscale: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


def test_a_model_is_needed(capsys):
    assert predict("--batch", "2") == 2
    assert capsys.readouterr().err == "memscale: Missing option '--hf'; memscale predict --help shows what it takes\n"


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_no_size_beyond_at_most_is_looked_at(folder, capsys):
    step = ("--hf", "factories:blocks", "--gpu", "h100", "--no-recommend", "--at-most", "17")
    assert predict(*step, "--largest", "seq", "--json") == 0
    largest = json.loads(capsys.readouterr().out)["largest"]
    assert (largest["n"], largest["next_peak_bytes"], largest["interrupted"]) == (17, None, False)
    assert predict(*step) == 2
    assert "--largest" in capsys.readouterr().err


def test_a_search_that_is_stopped_tells_what_it_has(folder, capsys, monkeypatch):
    peaks = []
    before = predicted_step.profile_of

    def profile(step, *options):
        if len(peaks) == 4:
            raise KeyboardInterrupt
        peaks.append(len(step.batch["input_ids"]))
        return before(step, *options)

    monkeypatch.setattr(predicted_step, "profile_of", profile)
    assert predict("--hf", "gpt2.json", "--gpu", "h100", "--largest", "batch", "--no-recommend") == 130
    assert f"largest batch: {max(peaks)} fits" in capsys.readouterr().out


def test_cast_computes_in_what_the_card_has(folder):
    model = nn.Sequential(nn.Linear(8, 8))
    for gpu, dtype in (("t4", torch.float16), ("h100", torch.bfloat16)):
        assert read_plan("cast", model, ms.Hardware.named(gpu)) == ms.Plan({"": ms.cast(compute=dtype)})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_full_disk_behind_stdout_is_one_line():
    command = [sys.executable, "-m", "memscale.cli", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=_environment())
    assert done.returncode == 2
    assert done.stderr == "memscale: the output cannot be written: No space left on device\n"


def _environment():
    return {**os.environ, "PYTHONPATH": str(Path(ms.__file__).parents[1])}


def test_python_runs_the_command_too(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["memscale", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("memscale", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"memscale {ms.__version__}\n"


AUTOCAST = """
import torch, types
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.layers = nn.Sequential(*(block() for _ in range(3)))

    def forward(self, x):
        return self.layers(x)

class Autocast(Net):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()

def plain():
    return Net(), lambda batch, seq: torch.ones(batch * seq, 64), lambda y, _: y.square().mean()

def by_hand():
    return Autocast(), *plain()[1:]
"""


def test_amp_is_autocast_around_float32_weights(folder, capsys):
    """The same step as of a model that does it by hand, and another one than with weights in bfloat16."""
    Path("autocast.py").write_text(AUTOCAST)
    box = ("--gpu", "cpu", "--batch", 4, "--seq", 64, "--optimizer", "sgd", "--json")
    peaks = {}
    for name, options in {
        "plain": ("plain",),
        "by hand": ("by_hand",),
        "amp": ("plain", "--amp", "bf16"),
    }.items():
        assert predict("--hf", f"autocast:{options[0]}", *options[1:], *box) == 0
        peaks[name] = printed(capsys)["profile"]["by_category"]
    assert peaks["amp"] == peaks["by hand"] != peaks["plain"]
    assert peaks["amp"]["parameter"] == peaks["plain"]["parameter"]


def test_the_verdict_comes_first_then_what_would_free_memory_and_last_the_command_that_makes_it_fit(folder, capsys):
    step = ("--hf", "factories:blocks", "--batch", 64, "--seq", 64, "--gpu", "cpu", "--budget", "3MiB")
    assert predict(*step) == 3
    shown = capsys.readouterr().out
    assert "what would free memory" in shown
    assert "apply the plan: " in shown
    lines = shown.splitlines()
    assert lines[0].startswith("CRITICAL: the step does not fit")
    assert lines[-1] == "next: memscale plan --hf factories:blocks --batch 64 --seq 64 --gpu cpu --budget 3MiB"
    assert main(lines[-1].split()[2:]) == 0, "the command that is told plans it"
    capsys.readouterr()
    assert predict(*step, "--no-recommend") == 3
    assert "what would free memory" not in capsys.readouterr().out


def test_a_limit_of_seconds_keeps_what_was_found(folder, capsys):
    step = ("--hf", "factories:blocks", "--batch", 64, "--seq", 64, "--gpu", "cpu", "--budget", "3MiB")
    assert predict(*step, "--seconds", 0) == 3
    shown = capsys.readouterr().out
    assert shown.startswith("CRITICAL: the step does not fit")
    stopped = "note: stopped after 0 s (seconds= or --seconds allows more), while simulating: checkpointed blocks"
    assert stopped in " ".join(shown.split())
    assert "what would free memory" not in shown
    assert predict(*step, "--seconds", -1) == 2
    assert "'--seconds': must be at least 0, got -1" in capsys.readouterr().err
