"""One process's step of FSDP2 and of DDP, simulated: as the allocator has it, and without a trace."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import memscale as ms
from memscale.core import fsdp_groups
from tests.support.checks import bits
from tests.support.models import Block
from tests.support.whole_run import true_peaks, with_own_buckets

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed"),
    # Of a matrix product, that its output is a view: nobody changes it here.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]

WIDTH = 96


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(301, WIDTH)  # rows that no number of processes divides
        self.blocks = nn.ModuleList([Block(WIDTH, norm=True) for _ in range(2)])
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        self.calls += 1
        return x @ self.embed.weight.T


TOKENS = torch.arange(8 * 40).view(8, 40) % 301


def sharded(*, plan=None, device="cpu", half=False, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # One for all: a mesh has a tensor, which the model keeps before torch 2.12.
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device(device):
        model = Model()
    if plan:
        model = ms.transform(model, plan)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def replicated(**options):
    return nn.parallel.DistributedDataParallel(Model(), **options)


def trained(model, count=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        model(TOKENS).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return optimizer, step


def loss(output, _):
    return output.float().logsumexp(-1).mean()


HALF = {"half": True}
CHECKPOINT = {"plan": {"blocks.*": ms.checkpoint()}}
QUICK = ("8, the last rank has less",)
SHARDED = {
    "2": (2, 0, {}),
    "8": (8, 0, {}),
    "8, the last rank has less": (8, 7, {}),
    "64, bf16": (64, 0, HALF),
    "8, kept gathered": (8, 0, {"reshard_after_forward": False}),
    "8, checkpoint": (8, 0, CHECKPOINT),
}


@pytest.mark.parametrize(
    ("world", "rank", "options"),
    [pytest.param(*case, id=name, marks=[pytest.mark.deep] * (name not in QUICK)) for name, case in SHARDED.items()],
)
def test_sharded_peaks_are_those_of_the_allocator(group, world, rank, options):
    group(world, rank)
    truth = true_peaks(lambda: trained(sharded(**options))[1])
    model = sharded(**options)
    optimizer, _ = trained(model)
    profile = ms.profile(model, TOKENS, keeps_output=False, optimizer=optimizer, loss=loss)
    assert profile.method == "static"
    assert profile.peak_bytes == pytest.approx(truth[-1], rel=1e-3)
    assert profile.first_step_peak_bytes == pytest.approx(truth[0], rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.deep),
        pytest.param({"gradient_as_bucket_view": True}, marks=pytest.mark.deep),
        pytest.param({"static_graph": True}, marks=pytest.mark.deep),
        {"find_unused_parameters": True},
    ],
    ids=["plain", "views", "static", "unused"],
)
def test_replicated_peaks_are_those_of_the_allocator(group, options):
    group(8)  # threads of gloo free tensors that no recording sees freed

    def made():
        return with_own_buckets(replicated(bucket_cap_mb=1, **options))

    truth = true_peaks(lambda: trained(made())[1])
    model = made()
    optimizer, _ = trained(model)
    profile = ms.profile(model, TOKENS, keeps_output=False, optimizer=optimizer, loss=loss)
    assert profile.method == "static"
    assert profile.peak_bytes == pytest.approx(truth[-1], rel=1e-3)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend of torch.distributed")
def test_a_communication_hook_has_the_result_of_its_collective(group):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    group(1, backend="gloo")  # the fake one has no results for it

    def made():
        replica = replicated(bucket_cap_mb=1)
        replica.register_comm_hook(None, fp16_compress_hook)
        return replica

    truth = true_peaks(lambda: trained(made())[1])
    model = made()
    profile = ms.profile(model, TOKENS, keeps_output=False, optimizer=trained(model)[0], loss=loss)
    assert profile.method == "static"
    assert profile.peak_bytes == pytest.approx(truth[-1], rel=1e-3)


def test_what_a_communication_hook_remembers_is_refused(group):
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    group(2)
    for state in (PowerSGDState(None), {"calls": 0}):
        model = replicated()
        model.register_comm_hook(state, powerSGD_hook)
        with pytest.raises(ms.ConfigError, match="profile before register_comm_hook"):
            ms.profile(model, TOKENS, loss=loss)


def test_a_step_of_several_is_not_run_by_one_to_be_measured(group):
    class Deciding(Model):
        def forward(self, tokens):
            output = super().forward(tokens)
            return output if output.sum() > 0 else output * 2

    group(2)
    from torch.distributed.fsdp import fully_shard

    for model in (fully_shard(Deciding()), nn.parallel.DistributedDataParallel(Deciding())):
        with pytest.raises(
            ms.ConfigError, match=r"cannot be simulated \(.*\), and its collectives would wait for .* \(.* over 2"
        ):
            ms.profile(model, TOKENS, loss=loss)


def test_a_model_on_meta_is_simulated_as_one_with_numbers(group):
    group(8)
    found = []
    for device in ("cpu", "meta"):
        model = sharded(device=device)
        found.append(ms.profile(model, TOKENS, optimizer=trained(model)[0], loss=loss).peak_bytes)
        assert all(parameter.device.type == device for parameter in model.parameters())
    assert found[0] == found[1]


def state_of(model):
    """All that FSDP2 and the model keep, by identity."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state

    found = {}
    for path, module in model.named_modules():
        found[path, "parameters"] = {name: id(value) for name, value in module._parameters.items()}
        found[path, "hooks"] = [len(value) for value in module.__dict__.values() if isinstance(value, dict)]
        state = _get_module_fsdp_state(module)
        if state is None:
            continue
        found[path, "state"] = {name: id(value) for name, value in vars(state).items()}
        for number, group in enumerate(fsdp_groups(state)):
            found[path, "group", number] = {name: id(value) for name, value in vars(group).items()}
            for parameter in group.fsdp_params:
                kept = {name: id(value) for name, value in vars(parameter).items()}
                found[path, parameter._module_info.param_name] = kept
                found[path, parameter._module_info.param_name, "local"] = id(parameter._sharded_local_tensor)
                sizes = [output.untyped_storage().size() for output in parameter.all_gather_outputs]
                found[path, parameter._module_info.param_name, "sizes"] = sizes
    return found


@pytest.mark.parametrize("warm", [0, 1], ids=["new", "trained"])
def test_a_profile_leaves_a_sharded_model_as_it_was(group, warm):
    group(4, 3)
    model = sharded()
    optimizer, step = trained(model)
    for _ in range(warm):
        step()
    before, numbers = state_of(model), bits([parameter._local_tensor for parameter in model.parameters()])
    ms.profile(model, TOKENS, optimizer=optimizer, loss=loss)
    assert state_of(model) == before
    assert bits([parameter._local_tensor for parameter in model.parameters()]) == numbers
    step()  # it still can


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend of torch.distributed")
@pytest.mark.parametrize("warm", [0, 2], ids=["new", "trained"])
def test_a_profile_leaves_a_replicated_model_as_it_was(group, warm):
    group(1, backend="gloo")
    found = []
    for profiled in (False, True):
        model = replicated()
        optimizer, step = trained(model)
        for _ in range(warm):
            step()
        reducer = model.reducer
        if profiled:
            ms.profile(model, TOKENS, optimizer=optimizer, loss=loss)
        assert model.reducer is reducer
        for _ in range(2):
            step()
        found.append(bits(list(model.parameters())))
    assert found[0] == found[1]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend of torch.distributed")
def test_every_process_is_taken_to_do_what_this_one_does(group):
    group(4)
    model = Model()

    def step():
        rows = torch.tensor([3, 5])
        gathered = torch.empty(8, dtype=torch.long)
        dist.all_gather(list(gathered.chunk(4)), rows)
        assert gathered.tolist() == [3, 5] * 4
        dist.all_reduce(rows)
        assert rows.tolist() == [12, 20]
        dist.all_reduce(rows, op=dist.ReduceOp.MAX)
        assert rows.tolist() == [12, 20]
        dist.barrier()
        model(TOKENS).mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        model.zero_grad()

    assert ms.profile(step).method == "static"


def test_what_one_process_cannot_know_is_told(group):
    group(2)
    model = nn.Linear(4, 4)

    def stage():
        received = torch.empty(2, 4)
        dist.recv(received, src=1)
        model(received).sum().backward()

    with pytest.raises(ms.ConfigError, match="profile the module of one stage alone"):
        ms.profile(stage)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.deep), 8])
def test_a_plain_model_is_asked_about_as_the_sharded_one(group, world):
    model = Model()
    optimizer = trained(model)[0]
    before, on_error = bits(model.state_dict()), sys.excepthook
    asked = ms.profile(model, TOKENS, optimizer=optimizer, loss=loss, parallel="fsdp2", world=world)
    assert not dist.is_initialized()
    assert sys.excepthook is on_error
    assert bits(model.state_dict()) == before
    assert type(model) is Model
    group(world)
    part = sharded()
    assert asked.peak_bytes == ms.profile(part, TOKENS, optimizer=trained(part)[0], loss=loss).peak_bytes


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend of torch.distributed")
def test_a_plain_model_is_asked_about_as_the_replicated_one(group):
    model = Model()
    asked = ms.profile(model, TOKENS, optimizer=trained(model)[0], loss=loss, parallel="ddp", world=8)
    assert asked.method == "static"
    group(1, backend="gloo")
    part = replicated()
    assert asked.peak_bytes == ms.profile(part, TOKENS, optimizer=trained(part)[0], loss=loss).peak_bytes


def test_a_plan_under_sharding(group):
    asked = {"loss": loss, "parallel": "fsdp2", "world": 8}
    model = Model()
    plain = ms.profile(model, TOKENS, **asked)
    planned = ms.profile(model, TOKENS, plan={"blocks.*": ms.checkpoint()}, **asked)
    group(8)
    # Which lets the whole parameters go, too, that it was made from.
    assert planned.peak_bytes == ms.profile(sharded(**CHECKPOINT), TOKENS, loss=loss).peak_bytes < plain.peak_bytes


MISTAKES = {
    "no such way": ({"parallel": "fsdp", "world": 2}, r"none of \['ddp', 'fsdp2'\]"),
    "no world": ({"parallel": "ddp"}, r"needs world=\.\.\., the number of processes"),
    "no way": ({"world": 2}, "add parallel='ddp' or parallel='fsdp2'"),
    "nobody": ({"parallel": "fsdp2", "world": 0}, "an int above 0"),
}


@pytest.mark.parametrize(("options", "message"), MISTAKES.values(), ids=MISTAKES)
def test_what_is_asked_about_wrongly_is_told(options, message):
    with pytest.raises(ms.ConfigError, match=message):
        ms.profile(Model(), TOKENS, loss=loss, **options)


def test_a_sharded_model_is_not_transformed_but_wrapped(group):
    group(2)
    model = sharded()
    with pytest.raises(ms.TransformError, match=r"was sharded by fully_shard, .*; call transform\(\) before"):
        ms.transform(model, CHECKPOINT["plan"])


def test_parameters_that_fsdp_has_are_not_placed_by_a_plan_for_them(group):
    group(2)
    model = sharded()
    before = state_of(model)
    with pytest.raises(ms.TransformError, match=r"'blocks.0' with offload\(what='params'\)"):
        ms.profile(model, TOKENS, loss=loss, plan={"blocks.*": ms.offload(what="params", min_bytes=0)})
    with pytest.raises(ms.PlanError, match="matches no module"):
        ms.profile(model, TOKENS, loss=loss, plan={"block.*": ms.checkpoint()})
    assert state_of(model) == before


def test_a_distributed_model_is_not_distributed_again(group):
    group(2)
    with pytest.raises(ms.ConfigError, match="distributed already; leave parallel out"):
        ms.profile(sharded(), TOKENS, loss=loss, parallel="fsdp2", world=2)
    with pytest.raises(ms.RuntimeUnavailable, match="this process has one already"):
        ms.profile(Model(), TOKENS, loss=loss, parallel="fsdp2", world=2)
    assert dist.get_world_size() == 2


def test_a_plan_made_for_other_ranks_says_so(group):
    from memscale.planning import DecisionEngine

    blocks = [nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(3)]
    model, x = nn.Sequential(*blocks), torch.ones(512, 8)
    step = {"loss": lambda y, _: y.sum(), "parallel": "fsdp2"}
    plan = DecisionEngine(model, x, world=8, **step).smallest()
    assert plan
    with pytest.warns(RuntimeWarning, match="made for fsdp2 over 8 processes, and this is one process"):
        ms.transform(model, plan)(x)
    assert not any("made for" in note for note in ms.profile(model, x, plan=plan, world=8, **step).notes)
    notes = ms.profile(model, x, plan=plan, world=2, **step).notes
    assert any("the plan was made for fsdp2 over 8 processes, and this step is fsdp2 over 2" in note for note in notes)


def test_no_memory_is_written_for_what_is_gathered(group):
    import resource

    group(8)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 15, 1 << 15), nn.Linear(1 << 15, 8))  # 4 GiB, a shard 512 MiB
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = ms.profile(model, torch.empty(4, 1 << 15, device="meta"), loss=lambda y, _: y.sum(), hardware="h100")
    assert profile.peak_bytes > 1 << 32
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 18  # KiB


def test_parameters_that_two_would_place_are_refused_before_anything_moves(group):
    group(2)
    how = {"blocks.*": ms.offload(what="params", min_bytes=0)}
    model = sharded(plan=how)
    for step in (lambda: model(TOKENS), lambda: ms.profile(model, TOKENS, loss=loss)):
        with pytest.raises(ms.TransformError, match=r"'blocks.0' on another tier, .* shard with CPUOffloadPolicy"):
            step()
    dist.destroy_process_group()
    with pytest.raises(ms.TransformError, match="CPUOffloadPolicy"):
        ms.profile(Model(), TOKENS, loss=loss, plan=how, parallel="fsdp2", world=2)


def test_what_cannot_be_followed_is_named(group):
    group(2)
    model = Model()
    model.blocks[0].up.weight.ds_id = 3  # as ZeRO-3 has it
    for ranks in ({}, {"parallel": "fsdp2", "world": 2}):
        with pytest.raises(ms.ConfigError, match=r"DeepSpeed's \(ZeRO\), .* parallel='fsdp2'"):
            ms.profile(model, TOKENS, loss=loss, **ranks)
