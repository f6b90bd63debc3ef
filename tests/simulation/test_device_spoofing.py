"""What a model's own code is told of its device while a CUDA device is simulated, and what autocast does there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memscale as ms
from memscale.simulation.kernels import cuda_fused
from tests.support.profiled import Forward
from tests.support.steps import mean


def simulated(forward, x=None, hardware="h100", **options):
    """A profile of a step whose model calls `forward`, a function of (module, x)."""
    model = Forward(forward, first=nn.Linear(64, 64), second=nn.Linear(64, 64))
    return ms.profile(model, torch.randn(256, 64) if x is None else x, loss=mean, hardware=hardware, **options)


def check_answer(forward):
    found = []

    def run(m, x):
        answer = forward(m, x)
        if answer is not True:
            raise RuntimeError(f"not so: {answer}")
        return m.first(x)

    profile = simulated(run)
    assert profile.notes == (), profile.notes
    return found


QUESTIONS = {
    "is_cuda": lambda m, x: x.is_cuda and m.first.weight.is_cuda and not x.is_cpu,
    "device": lambda m, x: x.device.type == "cuda" and x.device == m.first.weight.device == (x * 2).device,
    "available": lambda m, x: torch.cuda.is_available() and torch.cuda.device_count() == 1,
    "capability": lambda m, x: torch.cuda.get_device_capability(x.device) == (9, 0),
    "zeros": lambda m, x: torch.zeros(3, device=x.device).is_cuda,
    "tensor": lambda m, x: torch.tensor([1, 2], device="cuda").sum().item() == 3,
    "arange": lambda m, x: torch.arange(5, device="cuda:0").tolist() == [0, 1, 2, 3, 4],
    "to": lambda m, x: x.to("cuda").data_ptr() == x.data_ptr() == x.cuda().data_ptr(),
    "dtype": lambda m, x: x.to(x.device, torch.float16).dtype == torch.float16,
    "context": lambda m, x: _under(torch.device("cuda")).is_cuda,
    "autocast": lambda m, x: _narrowed(m, x, x.device.type) == torch.bfloat16,
    "what autocast hands to a function of its own": lambda m, x: _given(x) == torch.bfloat16,
    "autocast inside of torch.func": lambda m, x: _within(m, x) == torch.bfloat16,
    "autocast begun without a graph": lambda m, x: _narrowed_twice(m, x).requires_grad,
    "histogram": lambda m, x: torch.histc(x.argmax(-1).int(), 4, 0, 3).dtype == torch.int32,
    "off": lambda m, x: not torch.is_autocast_enabled("cuda"),
}


def _under(context):
    with context:
        return torch.ones(3)


def test_what_attention_does_itself_is_not_cast_by_autocast():
    """Where no fused kernel takes 16 bits it computes in float32, and autocast has had its say by then."""

    def forward(m, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            heads = m.first(x).view(1, 4, 256, 16)
            return F.scaled_dot_product_attention(heads, heads, heads)

    holdings = simulated(forward, hardware="t4").holdings
    assert {h.dtype for h in holdings if h.shape[-2:] == (256, 256)} == {"float32"}


def _narrowed(m, x, kind):
    with torch.autocast(kind, dtype=torch.bfloat16):
        return m.first(x).dtype


def _within(m, x):
    dtypes = []

    def mean(x):
        dtypes.append(_narrowed(m, x, x.device.type))
        return x.square().mean()

    torch.func.grad(mean)(x)
    return dtypes[0]


def _given(x):
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.bfloat16)
    def dtype(ctx, x):
        return x.dtype

    with torch.autocast("cuda", dtype=torch.bfloat16):
        return dtype(SimpleNamespace(), x)


def _narrowed_twice(m, x):
    """The cast of a weight is kept with its graph, whoever comes first."""
    with torch.autocast("cuda", dtype=torch.bfloat16):
        with torch.no_grad():
            m.first(x)
        return m.first(x)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_the_step_is_told_that_it_is_on_the_device(question):
    check_answer(question)


def test_nothing_is_left_of_it():
    kept = []
    simulated(lambda m, x: kept.append(x) or m.first(x) if _narrowed(m, x, "cuda") else None)
    x = torch.ones(2, 2)
    assert not x.is_cuda
    assert x.device == torch.device("cpu")
    assert not {"is_cuda", "is_cpu", "device", "to", "cuda"} & set(vars(torch.Tensor))
    assert torch.cuda.is_available() == bool(torch._C._cuda_getDeviceCount() if torch.backends.cuda.is_built() else 0)
    assert not torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.AutocastCUDA)
    with pytest.raises((RuntimeError, AssertionError)) if not torch.cuda.is_available() else torch.no_grad():
        x.to("cuda")


def test_on_a_simulated_cpu_nothing_is_answered():
    simulated(lambda m, x: m.first(x) if not x.is_cuda and x.device.type == "cpu" else None, hardware="cpu")


def test_a_way_that_cannot_be_followed_is_noted_and_the_cpu_s_taken():
    def forward(m, x):
        if x.is_cuda:
            raise RuntimeError("no Triton here\nand more")
        return m.second(m.first(x))

    profile = simulated(forward)
    (note,) = profile.notes
    assert "Tensor.is_cuda" in note
    assert "no Triton here" in note
    assert "and more" not in note
    assert profile.flops == simulated(lambda m, x: m.second(m.first(x))).flops


def _by_value(m, x):
    return m.second(x) if m.first(x).sum() > 0 else m.first(x)


NEEDS = {
    "a library": (lambda m, x: __import__("a_library_for_cuda"), "ModuleNotFoundError"),
    "a kernel": (lambda m, x: torch.ops.aten.cudnn_grid_sampler(x, x), "NotImplementedError"),
    "a card": (lambda m, x: torch.cuda.get_rng_state(), "AssertionError"),
    "values": (_by_value, "NeedsValues"),
}


@pytest.mark.parametrize(("branch", "error"), NEEDS.values(), ids=NEEDS)
def test_a_branch_that_needs_a_card_or_values_is_noted_and_the_cpu_s_taken(branch, error):
    notes = simulated(lambda m, x: branch(m, x) if x.is_cuda else m.first(x)).notes
    assert any("its branch for a CUDA device cannot be simulated" in note and f"({error}:" in note for note in notes)


def test_any_other_error_of_a_branch_is_its_own():
    def forward(m, x):
        if x.is_cuda:
            raise ValueError("a mistake")
        return m.first(x)

    profiler = ms.MemoryProfiler(Forward(forward, first=nn.Linear(64, 64)), loss=mean, hardware="h100")
    with pytest.raises(ValueError, match="a mistake"):
        profiler.simulated(torch.randn(256, 64))


def test_an_error_names_the_operator_and_its_module():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(64, 32))
    with pytest.raises(ms.MemscaleError, match=r"RuntimeError: mat1 and mat2 .*\(in aten::addmm of 1\)"):
        ms.profile(model, torch.randn(256, 64), loss=mean, hardware="h100")


# ------------------------------------------------------------------------------------------------------------ autocast


def test_the_lists_are_those_of_this_pytorch():
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    for macro, names in (
        ("LOWER_PRECISION_FP", cuda_fused.LOWER),
        ("FP32", cuda_fused.FLOAT32),
        ("FP32_SET_OPT_DTYPE", cuda_fused.FLOAT32_RESULT),
        ("PROMOTE", cuda_fused.WIDEST),
    ):
        body = re.search(rf"define AT_FORALL_{macro}\(_\)(.*?)\n\n", header, re.DOTALL).group(1)
        known = {name for name in names.split() if cuda_fused._overload(name)}
        assert {".".join(re.split(r",\s*", entry)) for entry in re.findall(r"_\(([^)]*)\)", body)} == known


DTYPES = {
    "linear": (lambda m, x: m.first(x), torch.float16),
    "attention": (lambda m, x: F.scaled_dot_product_attention(*[x.view(1, 4, 64, 64)] * 3), torch.float16),
    "layer norm": (lambda m, x: F.layer_norm(m.first(x), (64,)), torch.float32),
    "softmax": (lambda m, x: m.first(x).softmax(-1), torch.float32),
    "loss": (lambda m, x: F.mse_loss(m.first(x), x.half(), reduction="none"), torch.float32),
    "widest": (lambda m, x: torch.cross(m.first(x)[:, :3], x[:, :3], dim=-1), torch.float32),
    "as written": (lambda m, x: m.first(x) + m.first(x), torch.float16),
    "float64": (lambda m, x: x.double() @ x.double().t(), torch.float64),
}


@pytest.mark.parametrize(("run", "dtype"), DTYPES.values(), ids=DTYPES)
def test_autocast_casts_by_the_lists_of_cuda(run, dtype):
    def forward(m, x):
        with torch.autocast("cuda"):
            found = run(m, x).dtype
        if found != dtype:
            raise RuntimeError(f"it is {found}")
        return m.first(x)

    assert simulated(forward).notes == ()


@pytest.mark.parametrize("plan", [None, {"": ms.checkpoint()}], ids=["plain", "checkpoint"])
def test_weights_are_narrowed_once_until_autocast_ends(plan):
    def forward(m, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return sum(m.first(x).float() for _ in range(3))

    holdings = simulated(forward, plan=plan).holdings
    narrowed = [one for one in holdings if one.shape == (64, 64) and one.dtype == "bfloat16"]
    flops = simulated(forward, plan=plan).flops
    assert flops == simulated(lambda m, x: sum(m.first(x) for _ in range(3)), plan=plan).flops
    assert len(narrowed) <= 2  # the copy, and its gradient


def test_autocast_saves_what_it_saves_on_the_device():
    """What sixteen layers keep for backward is in 16 bits; weights stay in 32."""

    def forward(m, x):
        for _ in range(16):
            x = m.first(x).relu()
        return x.float()

    def narrow(m, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return forward(m, x)

    x = torch.randn(1 << 14, 64)
    plain, fit = simulated(forward, x).by_category, simulated(narrow, x).by_category
    assert fit["activation"] < 0.65 * plain["activation"]
    assert fit["parameter"] == plain["parameter"]


def test_autocast_of_the_cpu_is_noted():
    def forward(m, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m.first(x).float()

    (note,) = simulated(forward).notes
    assert 'torch.autocast("cuda")' in note
    assert simulated(forward, hardware="cpu").notes == ()


def test_lazy_logits_stay_lazy_when_their_device_is_read_and_they_are_cast():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 5000, bias=False)

        def forward(self, x):
            logits = self.head(self.body(x))
            return logits.to("cuda" if logits.is_cuda else "cpu") if logits.device.type == "cuda" else None

    x, y = torch.zeros(4096, 64), torch.zeros(4096, dtype=torch.long)
    plan = {"head": ms.tile(chunks=8), "": ms.cast()}
    profile = ms.profile(
        Model(), x, loss=lambda logits, _: F.cross_entropy(logits.float(), y), hardware="h100", plan=plan
    )
    assert profile.notes == ()
    assert not [one for one in profile.holdings if one.shape == (4096, 5000)]
    assert profile.by_category["temporary"] < 4096 * 5000 * 2


def test_what_pytorch_keeps_of_its_constructors_is_not_kept_from_a_simulation():
    """The first `with torch.device(...)` of a process, in a simulated step, made a later one miss `torch.tensor`."""
    torch.utils._device._device_constructors.cache_clear()
    check_answer(QUESTIONS["context"])
    with torch.device("meta"):
        assert torch.tensor(0).is_meta


def test_a_profile_says_that_compiled_modules_are_simulated_as_written():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(8, 64)
    model[0].compile(backend="eager")
    model[1] = torch.compile(model[1], backend="eager")
    (note,) = ms.profile(model, x, loss=mean, hardware="h100").notes
    assert note.startswith("2 modules are compiled, and simulated as written")
