"""``--lora`` and ``--quant``: the numbers of PEFT's and bitsandbytes' own models, and one line for each mistake."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import memscale as ms
from memscale.cli import main
from memscale.cli.adapters import AdapterOptions, adapted, compute_dtype, settings_of
from memscale.cli.subject import read_subject

bnb = pytest.importorskip("bitsandbytes", reason="the weights in few bits are of bitsandbytes")
transformers = pytest.importorskip("transformers", reason="the models are of transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    peft = pytest.importorskip("peft", reason="LoRA is of PEFT")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
LAYERS = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 192)  # numbers in linear layers but for the head


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def predict(*options):
    return main(["predict", "--hf", "config.json", "--gpu", "t4", "--seq", "32", *options])


def model_of(**options):
    subject = read_subject("config.json", torch.float16)
    return adapted(subject, AdapterOptions(**options), "config.json", torch.float16, torch.float16).model


@pytest.mark.parametrize(
    ("quant", "layer", "packed_bytes", "kbit"),
    [
        (["--quant", "nf4"], bnb.nn.Linear4bit, LAYERS // 2, True),
        pytest.param(
            ["--quant", "fp4", "--double-quant"], bnb.nn.Linear4bit, LAYERS // 2, False, marks=pytest.mark.deep
        ),
        pytest.param(["--quant", "int8"], bnb.nn.Linear8bitLt, LAYERS, True, marks=pytest.mark.deep),
        pytest.param([], nn.Linear, 2 * LAYERS, True, marks=pytest.mark.deep),
    ],
)
def test_the_prediction_is_of_the_model_that_peft_makes(folder, capsys, quant, layer, packed_bytes, kbit):
    words = [] if kbit or not quant else ["--no-kbit"]
    options = ["--lora", "r=4", *(word if word[0] == "-" else word.upper() for word in quant), *words]
    assert predict(*options, *([] if quant else ["--dtype", "fp16"]), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    rest = 4 if quant and kbit else 2
    whole = 2 * 61 * 64 + 5 * 64  # embedding, head, norms
    found = data["profile"]["by_category"]["parameter"]
    model = model_of(lora="r=4", quant=quant[1] if quant else None, kbit=kbit, double_quant="--double-quant" in quant)
    trained = [each for each in model.parameters() if each.requires_grad]
    assert found == sum(each.nbytes for each in model.parameters())
    assert found == packed_bytes + rest * whole + sum(each.nbytes for each in trained)
    assert {each.dtype for each in trained} == {torch.float32}
    shapes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 192), (64, 192), (192, 64)]
    assert sum(each.numel() for each in trained) == 2 * 4 * sum(map(sum, shapes))
    assert type(model.base_model.model.model.layers[0].mlp.up_proj.base_layer) is layer
    assert type(model.base_model.model.lm_head) is nn.Linear


def test_what_is_trained_and_packed_is_told(folder, capsys):
    assert predict("--lora", "r=4,alpha=8,targets=q_proj+v_proj", "--quant", "nf4", "--amp", "fp16") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert (
        "note: --lora trains 1,792 numbers; --quant nf4 packs linear layers into 48.0 KiB, multiplied in float16"
        in output
    )
    assert (
        "the other weights take 38.8 KiB (in float32 by prepare_model_for_kbit_training, which --no-kbit leaves out)"
        in output
    )


@pytest.mark.parametrize(
    ("said", "gpu", "expected"),
    [(None, "t4", torch.float16), (None, "l4", torch.bfloat16), ("fp16", "l4", torch.float16)],
)
def test_layers_multiply_in_what_is_said_and_else_in_what_the_card_has(said, gpu, expected):
    assert compute_dtype(said, ms.Hardware.named(gpu)) is expected


def test_a_plan_and_its_script_are_of_the_packed_model(folder, capsys):
    options = ["--gpu", "t4", "--seq", "64", "--batch", "16", "--lora", "r=4", "--quant", "nf4", "--python", "fit.py"]
    assert main(["plan", "--hf", "config.json", "--budget", "1GiB", *options]) == 0
    script = Path("fit.py").read_text()
    compile(script, "fit.py", "exec")
    assert "packing = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'" in script
    assert "from_pretrained(\n    '.', config=config, dtype=torch.float16, quantization_config=packing\n)" in script
    assert "model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)\n" in script
    assert "peft.LoraConfig(r=4, target_modules='all-linear')).train()" in script


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--quant", "nf4"],
            "--quant nf4 freezes the weights; name what is trained, as --lora r=16,targets=all-linear",
        ),
        (["--quant", "nf5", "--lora", "r=4"], "'--quant': must be one of nf4, fp4, int8, got 'nf5'"),
        (
            ["--lora", "rank=4"],
            "'rank=4' is none of r=..., alpha=..., dropout=..., targets=..., save=..., dora=...; write",
        ),
        (["--lora", "r"], "--lora 'r': 'r' is none of"),
        (["--lora", "r=0"], "--lora 'r=0': r must be a whole number of at least 1, got '0'"),
        (["--lora", "r=x"], "r must be a whole number of at least 1, got 'x'"),
        (["--lora", "dora=maybe"], "dora must be yes or no, got 'maybe'"),
        (["--lora", "targets=a+"], "targets must be all-linear, or names of modules joined by +, got 'a+'"),
        (["--lora", "targets=nowhere"], "--lora 'targets=nowhere': PEFT refuses it: Target modules"),
        (["--lora", "dropout=2"], "PEFT refuses it"),
        (["--lora", "r=4", "--double-quant"], "--double-quant is about weights in 4 bits; add --quant nf4 or fp4"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, options, said):
    assert predict(*options) == 2
    assert said in capsys.readouterr().err


def test_settings_of_adapters_have_defaults():
    assert settings_of("alpha=32") == {"r": 16, "target_modules": "all-linear", "lora_alpha": 32.0}
    assert settings_of("r=8,targets=a+b,save=c,dora=yes") == {
        "r": 8,
        "target_modules": ["a", "b"],
        "modules_to_save": ["c"],
        "use_dora": True,
    }
