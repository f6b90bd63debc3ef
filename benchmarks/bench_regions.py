"""Host time of a checkpointed region beyond a plain step: ours and PyTorch's non-reentrant checkpoint, as a ratio.

Every round runs each contender once, in random order; figures are medians, of the process's time on the processor
where that is all that a step takes. On a CPU five tiny blocks and three real
ones; with `--ghost` (or on a card, `--device cuda`) blocks of a GPT-2 and a Llama of transformers in bfloat16, which on
the fake CUDA libraries of tests/ghost take their host time and no more, also with `dots_saveable` beside PyTorch's
selective checkpoint. Last the time of `transform` for a Llama of 80 layers on the meta device.

    python benchmarks/bench_regions.py [--rounds 400] [--ghost .ghost/bin/python] [--json results/regions.json]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from _blocks import REAL, TINY
from _environment import environment
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import memscale as ms

HERE = Path(__file__).resolve().parent
Step = Callable[[], None]
Row = dict[str, float]


def tiny(name: str) -> tuple[nn.Module, list[torch.Tensor], dict[str, Any]]:
    """A block of `_blocks`, its arguments, and its keywords."""
    make, shape = ({**TINY, **{f"real {key}": case for key, case in REAL.items()}})[name]
    return make(), [torch.randn(*shape, requires_grad=True)], {}


def transformers_block(name: str, device: str) -> tuple[nn.Module, list[torch.Tensor], dict[str, Any]]:
    """A decoder block of transformers in bfloat16, its hidden states, and its keywords."""
    import transformers

    hidden = torch.randn(2, 16, 64, device=device, dtype=torch.bfloat16).requires_grad_()
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=128, n_positions=32)
        model = transformers.GPT2LMHeadModel(config)
        block, keywords = model.transformer.h[0], {}
    else:
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=1,
            vocab_size=128,
            max_position_embeddings=32,
        )
        model = transformers.LlamaForCausalLM(config)
        block = model.model.layers[0]
        turns = torch.ones(1, 16, 16, device=device, dtype=torch.bfloat16)
        keywords = {"position_embeddings": (turns, turns.clone())}
    return block.to(device, torch.bfloat16).train(), [hidden], keywords


def dots(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """What `dots_saveable` keeps, in the words of PyTorch's selective checkpoint."""
    from torch.utils.checkpoint import CheckpointPolicy

    aten = torch.ops.aten
    kept = op in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def contenders(
    block: nn.Module, args: list[torch.Tensor], keywords: dict[str, Any], *, policy: bool
) -> dict[str, Step]:
    """A forward and backward of `block`: plain, under PyTorch's checkpoint, and under ours."""
    how = ms.checkpoint(policy=ms.policies.dots_saveable if policy else None)
    ours = ms.transform(block, {"": how})
    contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, dots)} if policy else {}

    def theirs(*values: Any, **named: Any) -> Any:
        return torch_checkpoint(block, *values, use_reentrant=False, **contexts, **named)

    def step_of(forward: Callable[..., Any]) -> Step:
        def step() -> None:
            # The input is an activation, as inside a model: both checkpoints then keep it, and free it.
            output = forward(*[value * 1.0 for value in args], **keywords)
            (output if isinstance(output, torch.Tensor) else output[0]).sum().backward()
            for tensor in (*args, *block.parameters()):
                tensor.grad = None

        return step

    return {"plain": step_of(block), "torch": step_of(theirs), "memscale": step_of(ours)}


def measured(steps: dict[str, Step], rounds: int, clock: Callable[[], float]) -> Row:
    """Median microseconds of each, and what ours takes beyond plain over what theirs takes."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for turn in range(rounds + 20):
        random.shuffle(order)
        for name in order:
            start = clock()
            steps[name]()
            if turn >= 20:
                taken[name].append(clock() - start)
    found = {name: 1e6 * statistics.median(times) for name, times in taken.items()}
    beyond = found["torch"] - found["plain"]
    return {**found, "ratio": (found["memscale"] - found["plain"]) / beyond}


def on_card() -> float:
    """The time when the card is done with what it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


def of_blocks(device: str, rounds: int, clock: Callable[[], float]) -> dict[str, Row]:
    """The rows of the blocks of transformers."""
    found = {}
    for name in ("gpt2", "llama"):
        for policy in (False, True):
            torch.manual_seed(0)
            steps = contenders(*transformers_block(name, device), policy=policy)
            found[f"{name}{' dots_saveable' if policy else ''}"] = measured(steps, rounds, clock)
    return found


def transform_milliseconds(rounds: int) -> float:
    """Of a Llama with 80 layers on meta, each of them a region."""
    import transformers

    config = transformers.LlamaConfig(num_hidden_layers=80, hidden_size=64, intermediate_size=128, vocab_size=128)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    plan = {"model.layers.*": ms.checkpoint()}
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        ms.transform(model, plan)
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken)


def in_ghost(python: str, rounds: int) -> dict[str, Row]:
    """`of_blocks` in the CUDA build on the fake libraries, whose Python is `python`."""
    fakes = HERE.parent / "tests" / "ghost"
    paths = (fakes / "fake_cupy", fakes, HERE, HERE.parent)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "GHOST_COPY": "65536"}
    command = [python, __file__, "--device", "cuda", "--rounds", str(rounds), "--only-rows"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the process on the fake libraries failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def show(rows: dict[str, Row]) -> None:
    for name, row in rows.items():
        print(
            f"  {name:22} plain {row['plain']:8.0f} us   torch +{row['torch'] - row['plain']:7.0f}   "
            f"memscale +{row['memscale'] - row['plain']:7.0f}   ratio {row['ratio']:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--ghost", help="Python of the CUDA build on the fake libraries (make ghost)")
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--only-rows", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.only_rows:
        print(json.dumps(of_blocks(options.device, options.rounds, time.process_time)))
        return
    results: dict[str, dict[str, Row]] = {}
    if options.device == "cpu":
        rows = {}
        for name in (*TINY, *(f"real {key}" for key in REAL)):
            torch.manual_seed(0)
            rounds = max(options.rounds // 10, 20) if name.startswith("real") else options.rounds
            rows[name] = measured(contenders(*tiny(name), policy=False), rounds, time.process_time)
        results["cpu"] = rows
    else:
        results["cuda"] = of_blocks("cuda", options.rounds, on_card)
    if options.ghost:
        results["fake CUDA libraries"] = in_ghost(options.ghost, options.rounds)
    for where, rows in results.items():
        print(f"\n{where}: beyond a plain step, medians of {options.rounds} rounds (a tenth for real blocks)")
        show(rows)
    milliseconds = transform_milliseconds(10)
    print(f"\ntransform of a Llama with 80 layers on meta: {milliseconds:.1f} ms")
    if options.json:
        document = {**environment(options.device), "transform_milliseconds": milliseconds, "results": results}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
