"""Mistakes that are easily made, as a newcomer makes them: each is refused with what to write instead."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import memscale as ms
from memscale.cli.adapters import settings_of
from memscale.cli.subject import read_subject
from tests.support import processes

LABELS_TOO = (torch.ones(2, 4), torch.ones(2))


def profile(model, batch, **options):
    return ms.profile(model, batch, loss=lambda y, _: y.mean(), **options)


ISLAND = ms.Hardware(name="island", device_type="cuda", memory_bytes=2**34)


def plan(budget, model=None, batch=None, config=None, hardware="t4"):
    model, batch = model or layer(), torch.ones(2, 4) if batch is None else batch
    return ms.plan(model, batch, budget=budget, loss=lambda y, _: y.mean(), hardware=hardware, config=config)


def layer(device="cpu"):
    return nn.Linear(4, 4, device=device)


def rows(batch, device="cpu"):
    return profile(nn.Sequential(nn.Embedding(8, 4, device=device)), batch)


class Speaker(nn.Module):
    def forward(self, x):
        return x


class Flexible(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.layer = layer(device)

    def forward(self, x):
        heads = self.layer(x).repeat(64, 4)[None, None]
        return flex_attention(heads, heads, heads)


class Training(nn.Sequential):
    def forward(self, *args):
        return nn.Module.forward(self, *args)


def optimize(**options):
    with ms.optimize(layer(), **options):
        pass


def in_fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = nn.Module.__new__(FullyShardedDataParallel)  # its own init needs a process group
    nn.Module.__init__(wrapped)
    wrapped.training_state, wrapped._fsdp_wrapped_module = None, layer()
    return wrapped


REMEDIES = {
    "torch's checkpoint": (lambda: ms.checkpoint(layer()), r"no Linear; write checkpoint\(\)\(function\)"),
    "offload of a model": (lambda: ms.offload(layer()), r"no Linear; write offload\(\)\(function\)"),
    "an option without its name": (lambda: ms.cast("bf16"), r"write cast\(compute='bf16'\)"),
    "chunks without their name": (lambda: ms.tile(4), r"write tile\(chunks=4\)"),
    "compose of a model": (lambda: ms.compose(nn.Sequential(layer())), r"got a Sequential at position 0$"),
    "a module as a key": (lambda: ms.Plan({nn.Sequential(layer()): ms.checkpoint()}), r"got a Sequential$"),
    "a module as a rule": (lambda: ms.Plan({"*": nn.Sequential(layer())}), r"got a Sequential$"),
    "wrap(mode=)": (lambda: ms.wrap(layer(), mode="aggressive"), r"write wrap\(\.\.\., Config\(mode='aggressive'\)\)"),
    "a mode as a config": (lambda: ms.wrap(layer(), "aggressive"), r"write Config\(mode='aggressive'\)"),
    "a dict as a config": (lambda: ms.wrap(layer(), {"auto_policy": True}), r"write Config\(auto_policy=True\)"),
    "a field that is misspelled": (lambda: ms.Config(warm_steps=3), r"write warmup_steps=3$"),
    "a field of something else": (
        lambda: ms.Config(budget=3),
        r"Config\(budget=3\) is no field of it; its fields are mode,",
    ),
    "a mode": (lambda: plan(1.0, config=ms.OptimizationMode.AGGRESSIVE), r"write Config\(mode='aggressive'\)"),
    "offloading over no link": (
        lambda: plan(10**6, config=ms.Config(enable_offloading=True), hardware=ISLAND),
        r"island does not say how fast its link is; give Hardware\(\.\.\.\) host_to_device_bytes_per_second",
    ),
    "a batch as a config": (lambda: ms.wrap(layer(), torch.ones(2, 4)), r"a memscale\.Config or None; .*sample_input="),
    "a result as a step": (lambda: ms.measure(3), r"write measure\(lambda: "),
    "wrap(optimizer=)": (lambda: ms.wrap(layer(), optimizer=1), r"write with optimize\(model, optimizer\)"),
    "optimize(mode=)": (
        lambda: optimize(mode="balanced", auto_policy=True),
        r"\(mode='balanced', auto_policy=True\)\)",
    ),
    "a class of modules": (lambda: ms.checkpoint()(nn.Linear), "got the class Linear; pass a module of it"),
    "a list to compose": (
        lambda: ms.compose([ms.checkpoint(), ms.cast()]),
        r"; write compose\(checkpoint\(\), cast\(\)\)$",
    ),
    "an option of torch's": (
        lambda: ms.checkpoint(preserve_rng_state=False),
        r"checkpoint\(\) has no option preserve_rng_state; it takes policy, cuts$",
    ),
    "an optimizer without a call": (
        lambda: ms.quantize_states(torch.optim.SGD([torch.ones(1)])),
        r"takes no SGD; write quantize_states\(\)\(optimizer\)$",
    ),
    "what has no options": (lambda: ms.compensate_rounding(3), r"takes no options; write compensate_rounding\(\)$"),
    "cuts of another module": (
        lambda: ms.transform(Speaker(), {"": ms.checkpoint(cuts=(1,))}),
        "this is a Speaker; name its children",
    ),
    "another model's optimizer": (
        lambda: ms.transform(layer(), {"": ms.checkpoint()}, optimizer=torch.optim.SGD(layer().parameters())),
        "has none of the parameters of the Linear; build it on this model's",
    ),
    "a plan's JSON": (lambda: ms.transform(layer(), ms.Plan().to_json()), r"got JSON; .* Plan\.from_json\(text\)$"),
    "a number as a plan": (lambda: ms.transform(layer(), 3), "a mapping from paths to transforms, got 3$"),
    "a number beside a plan": (lambda: plan("1GiB").diff(3), "a mapping from paths to transforms, got 3$"),
    "a word as a switch": (
        lambda: ms.plan(layer(), torch.ones(2, 4), budget="1GiB", loss=lambda y, _: y.mean(), exact="no"),
        r"^plan\(exact='no'\) must be True or False$",
    ),
    "another switch": (
        lambda: profile(layer(), torch.ones(2, 4), keeps_output="no"),
        r"^profile\(keeps_output='no'\) must be True or False$",
    ),
    "a probe": (lambda: profile(layer(), torch.ones(2, 4), probe=2), r"^profile\(probe=2\) must be True or False$"),
    "seconds": (
        lambda: ms.plan(layer(), torch.ones(2, 4), budget="1GiB", loss=lambda y, _: y.mean(), seconds="5"),
        r"^seconds must be at least 0, got '5'; leave it out",
    ),
    "a plan's path": (lambda: ms.transform(layer(), Path("a.json")), r"Plan\.from_json\(Path\('a\.json'\)\.read_text"),
    "a path as JSON": (lambda: ms.Plan.from_json(__file__), r"is a file; pass its read_text\(\)$"),
    "no state": (lambda: ms.functional(layer())[0](torch.ones(2, 4)), "takes the state first, a mapping .* got Tensor"),
    "a class as a loss": (
        lambda: ms.profile(layer(), torch.ones(2, 4), loss=nn.MSELoss),
        r"write loss=lambda output, _: MSELoss\(\)\(output, y\)",
    ),
    "a container": (lambda: plan(1.0, nn.ModuleList([layer()])), "ModuleList has no forward of its own"),
    "a module of Lightning": (
        lambda: plan(1.0, Training(layer())),
        "this Training has no forward of its own, .* a training_step does not count$",
    ),
    "no parameters": (lambda: plan(1.0, nn.ReLU()), "this ReLU has no parameters, .* pass what trains$"),
    "a plan for verify": (lambda: ms.verify(layer(), ms.Plan(), torch.ones(1, 4)), r"write transform\(model, plan\)$"),
    "one batch as several": (
        lambda: ms.OOMPredictor(layer()).predict_steps(torch.ones(2, 4)),
        r"takes a list of batches, got a Tensor; write \[batch, \.\.\.\]$",
    ),
    "a device of no type": (
        lambda: ms.Hardware(name="a", device_type="gpu", memory_bytes=1),
        "device_type='gpu'.* pass 'cuda' or 'cpu'",
    ),
    "labels in a tuple": (lambda: profile(layer(), LABELS_TOO), "belong to the loss"),
    "labels for wrap": (lambda: ms.wrap(layer(), sample_input=LABELS_TOO), "belong to the loss: leave them out"),
    "floats as rows": (lambda: rows(torch.randn(2, 3)), r"float32 numbers as rows.*batch\.long\(\)"),
    "a model without numbers": (lambda: ms.verify(layer("meta"), layer(), torch.ones(1, 4)), "has no numbers"),
    "a loader for plan": (lambda: plan(80, batch=[[1]].__iter__()), "mapping of keyword arguments, got list_iterator"),
    "nothing to train": (lambda: plan(80, model=layer().requires_grad_(False)), r"call requires_grad_\(\)"),
    "sparse gradients in a plan": (
        lambda: plan(1.0, nn.Embedding(8, 4, sparse=True), torch.ones(2, dtype=torch.long)),
        r"cannot be planned: .*sparse_coo.*sparse=True of an",
    ),
    "losses by name": (
        lambda: ms.profile(layer(), torch.ones(2, 4), loss=lambda y, _: {"mse": y.mean(), "l1": y.mean()}),
        "got dict with 'mse', 'l1'; return the one that backward begins from",
    ),
    "transform(budget=)": (
        lambda: ms.transform(layer(), budget="8GiB", batch=torch.ones(2, 4)),
        r"takes no budget, batch; write transform\(model, plan\(model, batch, budget='8GiB'\)\)$",
    ),
    "transform(hardware=)": (
        lambda: ms.transform(layer(), hardware="t4"),
        r"batch, budget=\.\.\., hardware=\.\.\.\)\)$",
    ),
    "a budget as a plan": (lambda: ms.transform(layer(), "8GiB"), r"for a budget write plan\(model, batch, budget="),
    "a file as a plan": (lambda: ms.transform(layer(), "a.json"), r"Plan\.from_json\(Path\('a\.json'\)\.read_text"),
    "an optimizer as a budget": (
        lambda: plan(torch.optim.SGD([torch.ones(1)])),
        "^budget=a SGD must be bytes as an int",
    ),
    "a budget of NumPy": (lambda: plan(np.int64(80)), "write budget='80GiB'"),
    "budget=inf": (lambda: plan(float("inf")), r"a float in \(0, 1\]$"),
    "budget=80": (lambda: plan(80), "write budget='80GiB'"),
    "budget='8P'": (lambda: plan("8P"), "a string such as '6GiB' or '6GB'"),
    "budget='0'": (lambda: plan("0"), r"budget=0 is 0 bytes"),
    "hardware='cuda'": (
        lambda: profile(layer(), torch.ones(1, 4), hardware="cuda"),
        r"leave hardware=\.\.\. out for the device",
    ),
    "a model in FSDP1": (lambda: profile(in_fsdp1(), torch.ones(1, 4)), r"FSDP2: fully_shard\(block\) for each block"),
    "a name on the hub": (
        lambda: read_subject("some/model", None),
        r"from_pretrained\('some/model'\)\.save_pretrained",
    ),
    "a folder without a config": (lambda: read_subject(os.sep, None), r"no config\.json in this folder"),
    "the executor of a number": (
        lambda: ms.Executor.of(3),
        r"^Executor\.of\(3\) takes a model; pass the model that wrap",
    ),
    "a number as an optimizer": (lambda: ms.LossScale().step(3), r"got 3; write scale\.step\(optimizer\)$"),
    "a number as roles": (
        lambda: ms.measure(layer, roles=3),
        r"^measure\(roles=3\) .*; write roles=training_roles\(model",
    ),
    "a number as a runtime": (
        lambda: ms.offload().on(3),
        r"^offload\(\)\.on\(3\) takes a Runtime or None; write \.on\(",
    ),
    "flex_attention without a card": (
        lambda: profile(Flexible("meta"), torch.ones(2, 4)),
        "FlexAttention does not support backward on CPU.* attn_implementation='sdpa'",
    ),
    "an adapter's rank twice": (lambda: settings_of("r=16,r=8"), r"'r=16,r=8': r is given twice; name it once$"),
}


@pytest.mark.parametrize(("mistake", "remedy"), REMEDIES.values(), ids=REMEDIES)
def test_a_mistake_is_told_what_to_write(mistake, remedy):
    with pytest.raises((ms.ConfigError, ms.PlanError, ms.TransformError), match=remedy):
        mistake()


def test_a_transformed_model_is_a_function_and_says_so():
    fit = ms.checkpoint()(layer())
    remedy = (
        r"^checkpoint\(\)\(model\) is a function.* no 'parameters'; write transform\(model, \{'': checkpoint\(\)\}\)"
    )
    with pytest.raises(AttributeError, match=remedy):
        fit.parameters()
    assert not hasattr(ms.checkpoint()(torch.sin), "parameters")
    assert torch.equal(copy.deepcopy(fit)(torch.ones(1, 4)), fit(torch.ones(1, 4)))


def test_what_is_meant_is_taken():
    assert ms.cast(compute="bf16") == ms.cast(compute=torch.bfloat16)
    assert plan("90%") == plan(0.9) == plan(np.float32(0.5))
    assert plan(np.int64(1 << 30)) == plan(1 << 30)
    unnamed = ms.plan(layer(), torch.ones(2, 4), "1GiB", loss=lambda y, _: y.mean(), hardware="t4")
    assert unnamed == plan("1GiB")


def test_a_model_that_is_partly_on_meta_is_simulated():
    def model(device):
        return nn.Sequential(nn.Linear(8, 8, device=device), nn.Linear(8, 8))

    mixed, real = (profile(model(device), torch.ones(64, 8)) for device in ("meta", "cpu"))
    assert mixed.peak_bytes == real.peak_bytes


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_take_their_memory(device, kind):
    model = layer(device)
    getattr(model.weight, kind)(lambda _: [torch.empty(1 << 20, dtype=torch.uint8).add_(1), None][1])
    assert 0 < profile(model, torch.ones(2, 4)).peak_bytes - (1 << 20) < 4096


REPORTS_TO_NOBODY = """
import torch, torch.distributed as dist, memscale as ms
from torch import nn
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = nn.Linear(4, 4)
ddp = nn.parallel.DistributedDataParallel(model)
output = ddp(torch.ones(2, 4))  # its reducer waits for gradients from here on
ms.profile(model, torch.ones(2, 4), loss=lambda y, _: y.mean())
output.sum().backward()
assert torch.equal(model.weight.grad, torch.full((4, 4), 2.0)), model.weight.grad
model.weight.register_post_accumulate_grad_hook(lambda weight: dist.all_reduce(weight.grad))
numbers = dist.group.WORLD._get_sequence_number_for_group()  # of collectives so far
print(ms.profile(model, torch.ones(2, 4), loss=lambda y, _: y.mean()).method)
assert dist.group.WORLD._get_sequence_number_for_group() == numbers
output = ddp(torch.ones(2, 4)).sum().backward()
assert dist.group.WORLD._get_sequence_number_for_group() > numbers
"""


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend of torch.distributed")
def test_a_simulated_step_sends_no_gradient_to_other_processes_and_one_that_has_to_run_logs_nothing():
    code = REPORTS_TO_NOBODY + "ms.measure(lambda: torch.ones(9))"
    ran = processes.run(code)
    # Gloo said what it is connected to, until torch 2.12.
    assert [line for line in ran.stdout.splitlines() if not line.startswith("[Gloo]")] == ["static"], ran.stderr
    assert ran.returncode == 0, ran.stderr
    assert "profiler_start" not in ran.stderr
