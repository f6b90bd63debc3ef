"""Plans against their budgets on the real CPU allocator, and against what else one would do to use less memory.

    python benchmarks/bench_plan.py                  # realised peak over budget: eight architectures, ten budgets each
    python benchmarks/bench_plan.py --peers          # step times beside torch.utils.checkpoint on blocks, interleaved
    python benchmarks/bench_plan.py --only gpt2,unet --budgets 4
    python benchmarks/bench_plan.py --peers --only vit --against "torch checkpoint, every block"
    python benchmarks/bench_plan.py --smallest       # smallest peaks beside plans by hand: twelve small models
    python benchmarks/bench_plan.py --smallest --random 1000 --only clip
    python benchmarks/bench_plan.py --slower --budgets 16   # larger budgets with slower plans: 34 architectures

A budget is met if neither the first step nor a later one takes more, by `torch.profiler`'s allocation events. The table
says how much of each budget is used, and what a step takes beside the step as it is by the simulation's clock. After
what uses less than 97 % comes the next plan of the curve that is faster, which takes more than the budget.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import bench_tile
import torch
from _environment import environment
from _small_models import SMALL, Small
from _zoo import ZOO, Case
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import memscale as ms
from memscale.algebra import chain
from memscale.core import MemscaleError, call, matches, scalar_loss, template
from memscale.planning import Point, repeated_blocks
from memscale.simulation.dispatch.trace_builder import StorageRecord, TraceBuilder
from memscale.simulation.measured import training_roles

MODELS = ("gpt2", "mixtral", "bert", "t5", "vit", "resnet", "unet", "lstm")
PEERS = ("bert", "vit", "convnet", "gpt2-tile")
# Names of the zoo. The two cards take turns, and every third plan may have tiles.
# fmt: off
SLOWER = (
    "gpt2", "llama", "llama-tied", "gemma2", "phi3", "qwen3", "mixtral", "qwen2-moe", "granite-moe", "patchtst",
    "bert", "distilbert", "t5", "bart", "vit", "swin", "convnext", "resnet", "whisper", "wav2vec2", "convnet", "unet",
    "depthwise", "conv3d", "groupnorm", "diffusion", "autoencoder", "gru", "rms-norm", "transformer", "gpt-sdpa",
    "mlp", "llama-lora", "gpt2-accumulate",
)
# fmt: on
_USED = 0.97
_MARGIN = 1e-3  # of a budget, that plans leave free where they can
# A random composition is stopped at this multiple of the smallest peak, by choice: while a step is simulated, sums of
# gradients count beside what they are added to, as they do not in its trace.
_SURELY_LARGER = 1.1
_HALVINGS = 5  # in the search for our smallest plan that is as fast as a peer


def _with_tokens(model: torch.nn.Module) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    tokens = torch.randint(0, model.config.vocab_size, (4, 512), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": tokens, "labels": tokens}


# The step of bench_tile.py, which takes long: 8 layers, width 512, 16 000 words, 4 x 512 tokens.
CASES = {**ZOO, "gpt2-tile": Case("gpt2-tile", lambda: _with_tokens(bench_tile.gpt2("cpu")), head="lm_head")}


def steps_of(case: Case, model: torch.nn.Module, batch: object) -> tuple[Callable[[], None], torch.optim.Optimizer]:
    optimizer = case.make_optimizer(model.parameters())

    def step() -> None:
        scalar_loss(call(model, batch), batch, case.loss).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, optimizer


def realised_bytes(case: Case, model: torch.nn.Module, batch: object) -> int:
    """The peak of the first step and of the third, whichever is larger."""
    step, optimizer = steps_of(case, model, batch)
    roles = training_roles(model, optimizer, batch)
    first = ms.measure(step, roles=roles).peak_bytes
    step()
    return max(first, ms.measure(step, roles=roles).peak_bytes)


def kept_budgets(name: str, budgets: int) -> list[dict[str, float]]:
    case = CASES[name]
    model, batch = case.make("fp32")
    began = time.perf_counter()
    engine = ms.DecisionEngine(
        model, batch, keeps_output=False, optimizer=case.make_optimizer(model.parameters()), loss=case.loss
    )
    curve = engine.frontier(2)
    least, most = curve[0].peak_bytes, engine.plain.taken_bytes
    print(f"{name}: {most / 1e6:.1f} MB as it is, {least / 1e6:.1f} MB at least ({time.perf_counter() - began:.1f} s)")
    least = int(least / (1 - _MARGIN)) + 1  # where doing nothing is the smallest, that is all the budgets
    limits = [int(least + max(0, most - least) * (at + 0.5) / budgets) for at in range(budgets)]
    plans = [engine.plan(limit) for limit in limits]
    points = [*curve, *engine.frontier(budgets), *map(Point.of, plans)]
    rows = []
    for budget, plan in zip(limits, plans, strict=True):
        realised = realised_bytes(case, ms.transform(model, plan), batch)
        seconds = plan.evidence.planned.step_seconds
        pace = seconds / plan.evidence.plain.step_seconds
        faster = min((point.peak_bytes for point in points if point.step_seconds < seconds), default=most)
        row = {"budget_bytes": budget, "realised_bytes": realised, "pace": pace, "rules": len(plan)}
        rows.append({**row, "next_bytes": faster, "simulations": plan.evidence.simulations})
        verdict = (
            "  OVER" if realised > budget else "" if realised >= _USED * budget else f"  next {faster / 1e6:.1f} MB"
        )
        print(f"  {budget / 1e6:8.1f} MB  used {realised / budget:7.2%}  step x {pace:.3f}{verdict}", flush=True)
    return rows


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    patterns = repeated_blocks(model)
    return [each for path, each in model.named_modules() if any(matches(pattern, path) for pattern in patterns)]


def checkpointed(model: torch.nn.Module, every: int, **options: Any) -> torch.nn.Module:
    """Each `every`-th block under `torch.utils.checkpoint`."""
    for block in blocks_of(model)[::every]:
        block.forward = lambda *args, _own=block.forward, **kwargs: torch_checkpoint(
            _own, *args, use_reentrant=False, **options, **kwargs
        )
    return model


def keeping_products(model: torch.nn.Module) -> torch.nn.Module:
    """PyTorch's selective checkpointing: the results of matrix products, convolutions and attention are kept."""
    aten = torch.ops.aten
    kept = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default]
    kept.append(aten._scaled_dot_product_flash_attention_for_cpu.default)
    return checkpointed(model, 1, context_fn=partial(create_selective_checkpoint_contexts, kept))


def switched(model: torch.nn.Module) -> torch.nn.Module:
    """The model's own switch, as Hugging Face's have one."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def budgeted(model: torch.nn.Module, share: float, backend: str) -> torch.nn.Module:
    """AOTAutograd's memory budget, with a compiler behind it or without."""
    torch._dynamo.reset()  # what was compiled for another budget would be taken again
    torch._functorch.config.activation_memory_budget = share
    return torch.compile(model, backend=backend)


OTHERS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "torch checkpoint, every block": partial(checkpointed, every=1),
    "torch checkpoint, every 2nd block": partial(checkpointed, every=2),
    "torch checkpoint, products kept": keeping_products,
    "the model's own switch": switched,
    "AOTAutograd, budget 0.3": partial(budgeted, share=0.3, backend="aot_eager"),
    "AOTAutograd, budget 0.6": partial(budgeted, share=0.6, backend="aot_eager"),
    "inductor, budget 0.3": partial(budgeted, share=0.3, backend="inductor"),
    "inductor, budget 0.6": partial(budgeted, share=0.6, backend="inductor"),
}


def interleaved(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, tuple[float, float]]:
    """The median seconds of each step: of the clock, and of the processor, which other programs disturb less."""
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in steps}
    for at in range(rounds + 1):
        for key, step in steps.items():
            began, used = time.perf_counter(), time.process_time()
            step()
            if at:
                times[key].append((time.perf_counter() - began, time.process_time() - used))
    return {key: tuple(statistics.median(column) for column in zip(*rows, strict=True)) for key, rows in times.items()}


def smallest_as_fast(engine: ms.DecisionEngine, curve: ms.Frontier, pace: float) -> Point:
    """Our smallest plan whose step takes at most `pace` times that of the step as it is, by the simulation."""
    limit = pace * curve[-1].step_seconds
    at = next((at for at, point in enumerate(curve) if point.step_seconds <= limit), len(curve) - 1)
    found, low = curve[at], curve[max(0, at - 1)].peak_bytes
    for _ in range(_HALVINGS if at else 0):
        middle = Point.of(engine.plan((low + found.peak_bytes) // 2))
        if middle.step_seconds <= limit:
            found = middle
        else:
            low = middle.peak_bytes
    return found


def against_peers(name: str, rounds: int, against: str, exact: bool) -> dict[str, Any]:
    """Each peer, our fastest plan that takes no more than it does, and our smallest that is no slower."""
    case = CASES[name]
    model, batch = case.make("fp32")
    optimizer = case.make_optimizer(model.parameters())
    engine = ms.DecisionEngine(
        model,
        batch,
        keeps_output=False,
        optimizer=optimizer,
        loss=case.loss,
        hardware=ms.Hardware.measure("cpu"),
        config=ms.Config(mode="aggressive", enable_tiling=not exact),
    )
    resident = sum(each.nbytes for each in model.parameters()) * 3  # with AdamW's states
    curve = engine.frontier(16)
    plain = steps_of(case, case.make("fp32")[0], batch)[0]
    found: dict[str, Any] = {}
    for label, make in OTHERS.items():
        if against not in label:
            continue
        try:
            peer = make(case.make("fp32")[0])
            peak = realised_bytes(case, peer, batch)
        except Exception as error:
            print(f"  {label}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        try:
            same = ms.transform(model, engine.plan(peak))
        except ms.BudgetError as error:
            print(f"  {label}: {peak / 1e6:.1f} MB, below the {error.peak_bytes / 1e6:.1f} MB of our smallest")
            found[label] = {"peak_bytes": peak, "our_smallest_bytes": error.peak_bytes}
            continue
        steps = {"plain": plain, "peer": steps_of(case, peer, batch)[0], "ours": steps_of(case, same, batch)[0]}
        took = interleaved(steps, rounds)
        wall, processor = (took["ours"][at] / took["peer"][at] for at in (0, 1))
        pace = took["peer"][1] / took["plain"][1]
        as_fast = smallest_as_fast(engine, curve, pace)
        fit = ms.transform(model, as_fast.plan)
        ours = realised_bytes(case, fit, batch)
        both = interleaved({"peer": steps["peer"], "ours": steps_of(case, fit, batch)[0]}, rounds)
        found[label] = {
            "peak_bytes": peak,
            "pace": pace,
            "time_ratio_at_its_peak": wall,
            "processor_time_ratio_at_its_peak": processor,
            "peak_bytes_at_its_time": ours,
            "processor_time_ratio_there": both["ours"][1] / both["peer"][1],
            "transient_ratio_at_its_time": (ours - resident) / (peak - resident),
        }
        print(
            f"  {label}: {peak / 1e6:.1f} MB, step x {pace:.3f}; ours in as much takes {processor:.3f} of its time "
            f"(clock {wall:.3f}); ours as fast takes {ours / 1e6:.1f} MB, "
            f"{found[label]['transient_ratio_at_its_time']:.2f} of its transient bytes, in "
            f"{found[label]['processor_time_ratio_there']:.3f} of its time",
            flush=True,
        )
    return found


def compositions(model: torch.nn.Module, draw: random.Random) -> ms.Plan:
    """A random plan of two transforms on some modules and one on their children, alike modules alike."""
    transforms = [ms.checkpoint(), *(ms.tile(chunks=chunks) for chunks in (2, 4, 8, 16))]
    alike: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if any(True for _ in module.children()) and type(module).forward is not torch.nn.Module.forward:
            alike.setdefault(template(path), []).append(path)
    rules: dict[str, ms.Transform] = {}
    for paths in draw.sample(list(alike.values()), draw.randint(1, min(3, len(alike)))):
        outer = ms.compose(*draw.sample(transforms, draw.randint(1, 2)))
        names = [name for name, _ in model.get_submodule(paths[0]).named_children()]
        inner = [(name, draw.choice(transforms)) for name in names if draw.random() < 1 / 2]
        for path in paths:
            rules[path] = outer
            for name, how in inner:
                if name in dict(model.get_submodule(path).named_children()):
                    rules.setdefault(f"{path}.{name}".lstrip("."), how)
    return ms.Plan(rules)


@contextlib.contextmanager
def stopped_above(most_bytes: int) -> Iterator[list[int]]:
    """Stops a simulated step whose tensors hold more than `most_bytes`, and yields a list that then has the bytes.

    Of a thousand compositions only the smallest counts, and most take too much early in their first step.
    """
    stopped, held, now = list[int](), dict[int, int](), 0
    birth, death = TraceBuilder.birth, TraceBuilder.death

    class Stopped(Exception):
        pass

    def born(builder: TraceBuilder, record: StorageRecord) -> int:
        nonlocal now
        number = birth(builder, record)
        held[number] = record.nbytes
        now += record.nbytes
        if stopped or now > most_bytes:
            stopped.append(now)
            raise Stopped
        return number

    def died(builder: TraceBuilder, number: int) -> None:
        nonlocal now
        now -= held.pop(number, 0)
        death(builder, number)

    with mock.patch.multiple(TraceBuilder, birth=born, death=died):
        yield stopped


def smallest(small: Small, count: int) -> dict[str, Any]:
    """The planner's smallest peak beside those of plans by hand and of `count` random compositions, simulated."""
    torch.manual_seed(0)
    model, batch = small.make()
    device = ms.Hardware(name="box", device_type="cpu", memory_bytes=2**34)
    began, used = time.perf_counter(), time.process_time()
    engine = ms.DecisionEngine(
        model,
        batch,
        loss=small.loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        hardware=device,
        keeps_output=False,
        config=ms.Config(mode="aggressive"),
    )
    ours = engine.smallest()
    took = {"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - used}
    plain, planned = engine.plain, ours.evidence.planned
    hands = {label: engine.steps.profile(ms.Plan(rules)) for label, rules in small.hands.items()}
    label, best = min(hands.items(), key=lambda each: each[1].taken_bytes)
    draw, drawn, larger = random.Random(0), list[tuple[int, str]](), 0
    for _ in range(count):
        plan = compositions(model, draw)
        least = min([planned.taken_bytes, *(nbytes for nbytes, _ in drawn)])
        with stopped_above(int(_SURELY_LARGER * least)) as stopped:
            try:
                drawn.append((engine.steps.profile(plan).taken_bytes, repr(plan)))
            except (MemscaleError, RuntimeError, TypeError, ValueError):
                larger += bool(stopped)  # many compositions are refused, as a tile of what couples its rows
    found: dict[str, Any] = {
        "plain_bytes": plain.taken_bytes,
        "smallest_bytes": planned.taken_bytes,
        "pace": planned.step_seconds / plain.step_seconds,
        "plan": ours.to_python(),
        "simulations": ours.evidence.simulations,
        **took,
        "hands": {key: (each.taken_bytes, each.step_seconds / plain.step_seconds) for key, each in hands.items()},
        "ratio": planned.taken_bytes / min([best.taken_bytes, *(nbytes for nbytes, _ in drawn)]),
    }
    if count:
        found["random"] = {"drawn": count, "ran": len(drawn) + larger, "stopped": larger}
    if drawn:
        found["random"] |= {"bytes": min(drawn)[0], "plan": min(drawn)[1]}
    print(
        f"  {plain.taken_bytes / 1e6:6.2f} MB  planned {planned.taken_bytes / 1e6:6.2f} (x {found['pace']:.2f}, "
        f"{took['processor_seconds']:5.1f} s)  by hand {best.taken_bytes / 1e6:6.2f} (x {found['hands'][label][1]:.2f})"
        + (f"  random {min(drawn)[0] / 1e6:6.2f}" if drawn else "")
        + f"  ratio {found['ratio']:.3f}  {label}",
        flush=True,
    )
    return found


def slower_with_more(name: str, count: int) -> dict[str, Any]:
    """The plans for `count` budgets on a card, and how much slower a larger budget's plan is than a smaller one's."""
    case, number = ZOO[name], SLOWER.index(name)
    with torch.device("meta"):
        model, batch = case.build()
    engine = ms.DecisionEngine(
        model,
        batch,
        loss=case.loss,
        optimizer=case.make_optimizer([each for each in model.parameters() if each.requires_grad]),
        hardware=("rtx-4090", "h100")[number % 2],
        accumulate=case.accumulate,
        keeps_output=False,
        config=ms.Config(mode="aggressive", enable_tiling=number % 3 == 0),
    )
    least, most = engine.smallest().evidence.planned.taken_bytes, engine.plain.taken_bytes
    budgets = [least + (most - least) * at // (count - 1) for at in range(count)]
    plans = [engine.plan(budget) for budget in budgets]
    seconds = [plan.evidence.planned.step_seconds for plan in plans]
    worst = max(later / min(seconds[: at + 1]) for at, later in enumerate(seconds))
    over = sum(plan.evidence.planned.taken_bytes > budget for plan, budget in zip(plans, budgets, strict=True))
    used = (how for plan in plans for rule in plan for how in chain(rule.transform))
    streams = any(how.spelling == "offload" and how.what == "params" for how in used)
    print(f"  {engine.hardware.name:30} slower by at most {worst - 1:.2%}  over {over}  streams {streams}", flush=True)
    rows = [(budget, plan.evidence.planned.taken_bytes) for budget, plan in zip(budgets, plans, strict=True)]
    return {
        "card": engine.hardware.name,
        "slower": worst - 1,
        "over": over,
        "streams": streams,
        "bytes": rows,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of the zoo, with commas between")
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--slower", action="store_true", help="larger budgets whose plan is slower")
    parser.add_argument("--smallest", action="store_true", help="smallest peaks beside plans by hand")
    parser.add_argument("--random", type=int, default=0, help="with --smallest: so many random compositions as well")
    parser.add_argument("--against", default="", help="only peers whose names contain this")
    parser.add_argument("--exact", action="store_true", help="with --peers: plans that keep every bit, without tiles")
    parser.add_argument("--rounds", type=int, default=5, help="of steps that are timed beside each other")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    usual = PEERS if options.peers else tuple(SMALL) if options.smallest else SLOWER if options.slower else MODELS
    names = [name for name in options.only.split(",") if name] or usual
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["MEMSCALE_CACHE"] = cache  # what was planned on another day says nothing about today's planner
        for name in names:
            print(name, flush=True)
            if options.smallest:
                found[name] = smallest(SMALL[name], options.random)
            elif options.slower:
                found[name] = slower_with_more(name, options.budgets)
            elif options.peers:
                found[name] = against_peers(name, options.rounds, options.against, options.exact)
            else:
                found[name] = kept_budgets(name, options.budgets)
            if options.output:  # after each, for whoever has no time for all
                data = {"environment": environment("cpu"), "load": os.getloadavg(), "results": found}
                options.output.write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
