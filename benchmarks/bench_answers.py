"""How long a newcomer waits for an answer: ten questions as typed, each in a process of its own, and how it begins.

Configs are written by transformers, nothing is downloaded, and no card is needed. A question whose search is cut short
by its own `--seconds` says so in its answer.

    python benchmarks/bench_answers.py [--only REGEX] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import transformers
from _environment import environment

CONFIGS: dict[str, Any] = {
    "gpt2-medium": transformers.GPT2Config(n_layer=24, n_embd=1024, n_head=16, architectures=["GPT2LMHeadModel"]),
    "llama-8b": transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
    ),
    "llama-70b": transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
    ),
    "resnet-50": transformers.ResNetConfig(architectures=["ResNetForImageClassification"]),
}
LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.53 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 1.10 GiB is free. Of the allocated memory 21.30 GiB is allocated by PyTorch, and 0.80 GiB is reserved by "
    "PyTorch but unallocated."
)
QUESTIONS = {
    "does GPT-2 medium fit on an RTX 4090?": "predict --hf gpt2-medium --gpu rtx-4090 --batch 8",
    "the same under a Trainer's bf16=True": "predict --hf gpt2-medium --gpu rtx-4090 --batch 8 --amp bf16",
    "Llama 8B with LoRA and 4 bits on a T4?": "predict --hf llama-8b --gpu t4 --lora r=16,targets=all-linear "
    "--quant nf4 --batch 1 --seq 2048 --amp bf16",
    "Llama 70B over eight H100s?": "predict --hf llama-70b --gpu h100 --parallel fsdp2 --world 8 --seq 4096 "
    "--dtype bf16",
    "a plan for GPT-2 medium in 16 GiB": "plan --hf gpt2-medium --gpu rtx-4090 --batch 8 --budget 16GiB",
    "which batch size is fastest?": "tune --hf gpt2-medium --gpu rtx-4090 --amp bf16",
    "a ResNet-50 with 256 images?": "predict --hf resnet-50 --gpu rtx-3090 --batch 256",
    "why did my run die?": "explain train.log --hf gpt2-medium --gpu rtx-4090 --batch 8 --amp bf16",
    "what does memory cost in time?": "frontier --hf gpt2-medium --gpu rtx-4090 --batch 8",
    "which cards are known?": "cards",
}


def ask(words: str, folder: Path) -> dict[str, Any]:
    """The answer's first line, its exit status, and the seconds that it took."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "memscale", *shlex.split(words)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")]))
    # Nothing is kept from one question for the next.
    environ = {**os.environ, "PYTHONPATH": path, "MEMSCALE_CACHE": ""}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environ)
    seconds = time.perf_counter() - began
    first = (done.stdout.strip() or done.stderr.strip()).split("\n")[0]
    return {"command": f"memscale {words}", "seconds": seconds, "status": done.returncode, "answer": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression that the question has to match")
    parser.add_argument("--json", type=Path, help="where the rows go")
    options = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, config in CONFIGS.items():
            config.save_pretrained(folder / model)
        (folder / "train.log").write_text(LOG, encoding="utf-8")
        for question, words in QUESTIONS.items():
            if re.search(options.only, question):
                row = rows[question] = ask(words, folder)
                print(f"{question:42} {row['seconds']:6.1f} s  exit {row['status']}  {row['answer']}", flush=True)
    if options.json:
        document = {**environment("cpu", "transformers"), "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
