"""``memscale plan`` and ``memscale frontier``: what the library plans, as text and files; exit codes for scripts."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.algebra import is_transformed
from memscale.cli import main
from memscale.planning import ProvenPlan

FACTORIES = """
import torch
from torch import nn

def mlps():
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)]
    return nn.Sequential(*blocks), lambda batch, seq: torch.ones(batch, seq, 32), lambda y, _: y.square().mean()

def frozen():
    return nn.Linear(8, 8).requires_grad_(False), lambda batch, seq: torch.ones(batch, 8), lambda y, _: y.sum()

def picky():
    return nn.Linear(8, 8), lambda batch, seq: torch.ones(batch, 9), lambda y, _: y.sum()
"""
VERDICT = r"as written: [\d.]+ [mµ]s and 1\.71 MiB, 417 KiB above the budget of 1\.30 MiB"
STEP = ("--hf", "factories:mlps", "--batch", 8, "--seq", 64, "--gpu", "cpu")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def command(*arguments):
    return main([str(each) for each in arguments])


def engine(**config):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)])
    return ms.DecisionEngine(
        model,
        torch.ones(8, 64, 32),
        optimizer=torch.optim.AdamW(model.parameters()),
        loss=lambda y, _: y.square().mean(),
        config=ms.Config(mode="aggressive", **{"enable_tiling": False, **config}),
        hardware="cpu",
    )


def test_the_plan_is_that_of_the_library(folder, capsys):
    expected = engine().plan("1.3MiB")
    files = ("--json", "plan.json", "--html", "plan.html", "--plot", "plan.svg", "--python", "script.py")
    assert command("plan", *STEP, "--budget", "1.3MiB", *files) == 0
    shown = capsys.readouterr()
    found = ProvenPlan.from_json(Path("plan.json").read_text())
    assert found == expected
    assert len(found) > 0
    assert found.evidence.planned.taken_bytes == expected.evidence.planned.taken_bytes <= 1.3 * 2**20
    verdict, _, rest = shown.out.partition("\n")
    assert re.fullmatch(VERDICT, verdict)
    assert rest == f"{expected.explain()}\n\n{expected}\n"
    assert Path("plan.svg").read_text().startswith("<?xml")
    page = Path("plan.html").read_text()
    assert page.count('<section class="plan">') == 2, "the plan, and the step as written"
    scope = {}
    exec(Path("script.py").read_text(), scope)
    assert is_transformed(scope["fit"])
    assert scope["plan"] == expected
    x = torch.ones(2, 32)
    assert torch.equal(scope["fit"](x), scope["model"](x))


@pytest.mark.deep
def test_the_frontier_is_that_of_the_library(folder, capsys):
    expected = engine().frontier(3)
    files = ("--json", "curve.json", "--html", "curve.html", "--plot", "curve.png")
    assert command("frontier", *STEP, "--points", 3, *files) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{expected}\n"
    found = ms.Frontier.from_json(Path("curve.json").read_text())
    assert [(point.peak_bytes, point.plan) for point in found] == [(point.peak_bytes, point.plan) for point in expected]
    assert Path("curve.png").read_bytes().startswith(b"\x89PNG")
    assert Path("curve.html").read_text().count('<section class="plan">') == len(expected) > 2


def test_a_frontier_with_a_price_has_dollars_on_its_page(folder, capsys):
    priced = ("--price", "3.60", "--tokens", "2K", "--html", "curve.html")
    assert command("frontier", *STEP, "--points", 2, *priced) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"smallest, cost: at most .* for a dollar, at least .* hours and \$", out)
    assert "fastest, cost: at most" in out
    assert re.search(r"dollars for \d[\d,]* steps", Path("curve.html").read_text())
    assert command("frontier", *STEP, "--price", "0") == 2


def test_a_plan_may_change_how_the_optimizer_steps(folder, capsys):
    step = (*STEP, "--mode", "conservative", "--budget", "1.11MiB", "--no-keeps-output")
    assert command("plan", *step, "--stepping", "step_in_backward", "--python", "script.py") == 0
    scope = {}
    exec(Path("script.py").read_text(), scope)
    assert "step_in_backward" in repr(scope["plan"])
    scope["fit"](torch.ones(2, 32)).sum().backward()
    assert isinstance(scope["optimizer"], torch.optim.AdamW)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--amp", "fp16"), id="float16", marks=pytest.mark.deep),
        pytest.param(
            ("--no-keeps-output", "--accumulate", 2, "--stepping", "step_in_backward"),
            id="accumulated, in backward",
            marks=pytest.mark.deep,
        ),
    ],
)
def test_a_script_trains_on_the_weights_that_are_there(folder, capsys, options):
    """From the weights beside the config, which it changes; with a scaled loss in float16."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, n_positions=64, vocab_size=99, bos_token_id=0, eos_token_id=0
    )
    trained = transformers.GPT2LMHeadModel(config)
    trained.save_pretrained("weights")
    step = ("--hf", "weights", "--batch", 8, "--gpu", "cpu", "--budget", "7.5MiB", "--mode", "conservative")
    assert command("plan", *step, *options, "--python", "fit.py") == 0
    capsys.readouterr()
    text = Path("fit.py").read_text()
    scope = {}
    exec(text.partition("for batch in batches()")[0].partition("for number, batch in")[0], scope)
    before = scope["fit"].state_dict()
    assert is_transformed(scope["fit"])
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in before.items())
    exec(text, scope)
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert ("LossScale()" in text) == ("fp16" in options)


def test_what_a_plan_may_use(folder, capsys):
    assert command("plan", *STEP, "--budget", "1.3MiB", "--forbid", "checkpoint", "--forbid", "tile") == 3
    shown = capsys.readouterr()
    assert re.fullmatch(VERDICT, shown.out.rstrip("\n"))
    assert "the smallest peak within reach is" in shown.err
    assert "\n  --allow checkpoint would lower the peak" in shown.err, "as it is typed"
    assert command("plan", *STEP, "--budget", "1.1MiB", "--allow", "cast", "--json", "plan.json") == 0
    assert "cast" in repr(ms.Plan.from_json(Path("plan.json").read_text()))
    assert "cast" in capsys.readouterr().out
    assert command("plan", *STEP, "--budget", "1GiB", "--gpu", "t4", "--auto", "--json", "auto.json") == 0
    assert ProvenPlan.from_json(Path("auto.json").read_text()).decision.reason == "the step fits"


def test_what_fits_needs_no_plan(folder, capsys):
    assert command("plan", *STEP, "--budget", "1GiB", "--html", "plan.html") == 0
    assert capsys.readouterr().out.startswith("no plan needed: ")
    assert Path("plan.html").read_text().count('<section class="plan">') == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["plan", "--budget", "-5"], "'--budget': must be 6GiB, 6GB, bytes, or a share: 0.9 or 90%, got '-5'"),
        (["plan", "--budget", "80"], "or a share: 0.9 or 90%, got '80'"),
        (["plan"], "Missing option '--budget'; memscale plan --help shows what it takes"),
        (["plan", "--mode", "brave"], "'--mode': must be one of conservative, balanced, aggressive, got 'brave'"),
        (["plan", "--allow", "magic"], "'--allow': must be one of checkpoint, offload, tile, cast, got 'magic'"),
        (["plan", "--allow", "tile", "--forbid", "tile"], "--allow tile and --forbid tile contradict each other"),
        (
            ["plan", "--stepping", "late"],
            "'--stepping': must be one of step_in_groups, step_in_backward, offload_states",
        ),
        (["plan", "--host", "some"], "'--host': must be 6GiB, 6GB or bytes, got 'some'"),
        (["plan", "--seconds", "-1"], "'--seconds': must be at least 0, got -1"),
        (["plan", "--html", "plan.pdf"], "'--html': must end in .html or .htm, got 'plan.pdf'"),
        (
            ["plan", "--json", "no/such/plan.json"],
            "'--json': 'no/such/plan.json' must be a file in a folder that exists",
        ),
        (["plan", "--python", "."], "'--python': '.' must be a file in a folder"),
        (["frontier", "--points", "1"], "'--points': must be at least 2, got 1"),
        (["plan", "--batch", "0"], "'--batch': must be at least 1, got 0"),
        (["plan", "--hf", "factories:picky"], "the step fails: RuntimeError: "),
        (
            ["plan", "--hf", "factories:frozen"],
            "no parameter of this Linear requires a gradient; call requires_grad_() on what trains, or add --lora r=16",
        ),
        (["plan", "--wings", "2"], "No such option: --wings"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_options_get_one_line(folder, capsys, options, message):
    name, *rest = options
    subject = [] if "--hf" in rest else ["--hf", "factories:mlps"]
    budget = ["--budget", "1MiB"] if name == "plan" and len(options) > 1 and "--budget" not in rest else []
    assert command(name, *subject, "--gpu", "cpu", *budget, *rest) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = [line for line in shown.err.splitlines() if not line.startswith("simulated ")]
    assert len(lines) == 1
    assert lines[0].startswith("memscale: ")
    assert message in lines[0]
    assert sorted(path.name for path in Path.cwd().iterdir() if path.name != "__pycache__") == ["factories.py"]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of a product's output, changed by nobody
def test_the_step_can_be_one_processs_of_several(folder, capsys):
    ranks = ("--parallel", "fsdp2", "--world", 8, "--shard", "*")
    assert command("plan", *STEP, *ranks, "--budget", "1GiB", "--json", "plan.json") == 0
    assert str(ProvenPlan.from_json(Path("plan.json").read_text()).parallel) == "fsdp2 over 8 processes, sharding *"
    capsys.readouterr()
    peaks = []
    for more in ((), ranks):
        assert command("predict", *STEP, *more, "--json", "--no-recommend") == 0
        peaks.append(json.loads(capsys.readouterr().out)["profile"]["peak_bytes"])
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("--world", 8), "--world 8 is about several processes; add --parallel ddp or --parallel fsdp2"),
        (("--parallel", "fsdp2", "--world", 8, "--tensor", 2), "splits weights as the model's tp_plan says, and this"),
        (("--parallel", "ddp"), "--parallel ddp needs --world, the number of processes"),
        (("--parallel", "fsdp", "--world", 8), "'--parallel': must be one of fsdp2, ddp, got 'fsdp'"),
        (("--parallel", "fsdp2", "--world", 8, "--shard", "blocks"), "'blocks' matches no module"),
    ],
)
def test_ranks_that_are_none(folder, capsys, ranks, message):
    assert command("predict", *STEP, *ranks) == 2
    assert message in capsys.readouterr().err
