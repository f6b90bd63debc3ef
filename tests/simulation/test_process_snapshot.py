"""What a process has is equal before and after simulations, also after one that ended in an error at any point."""

import textwrap

from tests.support import processes

PROGRAM = """
import contextvars, gc, os, random, sys, threading, warnings
from types import BuiltinFunctionType, FunctionType, GetSetDescriptorType, MethodDescriptorType, ModuleType
import numpy as np
import torch, torch._dynamo, torch.distributed as dist
from torch import nn
import memscale as ms

KINDS = (FunctionType, BuiltinFunctionType, MethodDescriptorType, GetSetDescriptorType, property, bool, str, int)
VARIABLE = contextvars.ContextVar("of the step", default=None)

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "random", "numpy", "warnings", "threading", "concurrent"):
            continue
        if not isinstance(module, ModuleType):
            continue
        found[name, "class"] = type(module)
        for owner in [module, *(each for each in vars(module).values() if isinstance(each, type))]:
            for attribute, value in list(vars(owner).items()):
                if isinstance(value, KINDS) and attribute != "next_id":  # which counts handles
                    found[name, getattr(owner, "__qualname__", ""), attribute] = id(value)
    return found

def snapshot(with_attributes=True):
    optimizers = sys.modules["torch.optim.optimizer"]
    hooks = [dict(each) for name, each in vars(nn.modules.module).items() if name.startswith("_global_") and
             isinstance(each, dict)]
    keys = ["", "CPU", "CUDA", "IPU", "AutogradIPU", "AutocastIPU", "AutocastCUDA", "AutocastCPU", "Meta"]
    return {
        "registrations": [sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in keys],
        "fallbacks": [torch._C._dispatch_has_backend_fallback(each) for each in (
            torch._C.DispatchKey.AutocastIPU, torch._C.DispatchKey.AutocastCUDA, torch._C.DispatchKey.AutocastCPU)],
        "norm": torch._C._dispatch_dump_table("aten::_fused_rms_norm"),
        "libraries": len(torch.library._impls),
        "attributes": attributes() if with_attributes else {},
        "hooks": [hooks, dict(optimizers._global_optimizer_pre_hooks), dict(optimizers._global_optimizer_post_hooks)],
        "random": [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()),
                   sorted(vars(random._inst))],
        "warnings": [list(warnings.filters), dict(warnings.onceregistry), warnings.showwarning],
        "environment": dict(os.environ),
        "collector": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), list(gc.callbacks), gc.get_debug()],
        "threads": threading.enumerate(),
        "interpreter": [sys.excepthook, sys.getprofile(), sys.gettrace(), sys.getrecursionlimit(), sys.path[:]],
        "group": [dist.is_initialized(), dict(dist.distributed_c10d._world.pg_map)],
        "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(),
                  torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(),
                  torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
                  torch.is_warn_always_enabled(), torch._C._only_lift_cpu_tensors(),
                  [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
                  torch.is_autocast_cache_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(False),
                  torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set(),
                  torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled(),
                  torch.get_float32_matmul_precision(), torch._dynamo.eval_frame._stance],
        "variables": VARIABLE.get(),
        "of memscale": [ms.core.simulating(), ms.core.is_own_thread(), torch._C._is_key_in_tls("memscale")],
    }

def text(found):
    return {name: repr(value) if name == "modes" else value for name, value in found.items()}

def differing(before, after):
    found = []
    last = text(after)
    for name, value in text(before).items():
        now = last[name]
        if value == now or not now and name == "attributes":
            continue
        if name == "attributes":
            found += [key for key in value.keys() | now.keys() if value.get(key) != now.get(key)]
        else:
            found.append((name, value, now) if len(repr(now)) < 2000 else name)
    return found

class Interrupted(BaseException):
    pass

class Model(nn.Module):
    def __init__(self, fail_in=None, failure=None):
        super().__init__()
        self.norm, self.layer, self.dropout = nn.RMSNorm(16), nn.Linear(16, 16), nn.Dropout(0.1)
        self.fail_in, self.failure = fail_in, failure

    def reach(self, point):
        if point == self.fail_in:
            raise self.failure(point)

    def forward(self, x):
        VARIABLE.set(x)
        with torch.autocast(x.device.type, torch.bfloat16):
            x = self.layer(self.norm(x))
            self.reach("autocast")
        x = self.dropout(x) * random.random() * float(np.random.rand())
        torch.manual_seed(4)
        x = torch.rms_norm(x.float() * torch.rand(()), (16,))
        x.register_hook(lambda gradient: self.reach("backward"))
        thread = threading.Thread(target=lambda: self.layer(x.detach()))
        thread.start()
        thread.join()
        self.reach("forward")
        return nn.functional.scaled_dot_product_attention(x, x, x)

class Optimizer(torch.optim.AdamW):
    def step(self, closure=None):
        super().step()
        self.model.reach("optimizer")

def simulate(way, fail_in=None, failure=None):
    with torch.random.fork_rng(devices=[]):
        model = Model(fail_in, failure)
    optimizer = Optimizer(model.parameters())
    optimizer.model = model
    options = {"cpu": {}, "card": {"hardware": "h100"}, "fsdp2": {"parallel": "fsdp2", "world": 4, "hardware": "h100"},
               "offload": {"hardware": "h100", "plan": {"": ms.offload(what="params", min_bytes=0)}},
               "checkpoint": {"plan": {"": ms.checkpoint()}}}[way]
    def loss(y, batch):
        model.reach("loss")
        return y.float().square().mean()
    if way == "fsdp2":
        model.fail_in, optimizer = None, torch.optim.AdamW(model.parameters())
    batch = torch.ones(2, 4, 16)
    try:
        ms.MemoryProfiler(model, optimizer, loss=loss, config=CONFIG, **options).profile(batch)
        if way == "card" and fail_in is None:
            ms.plan(model, batch, optimizer=optimizer, loss=loss, hardware="h100", budget="40GiB")
    except (Interrupted, ms.MemscaleError):
        assert fail_in is not None

CONFIG = ms.Config(use_empirical_fallback=False)
"""


def run(program):
    found = processes.run(PROGRAM + textwrap.dedent(program), MEMSCALE_CACHE="")
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-5000:]


def test_a_process_is_as_before_alone_and_beside_another_thread():
    run(
        """
        WAYS = ["cpu", "card", "offload", "checkpoint", "fsdp2"]
        for way in WAYS:
            simulate(way)  # loads what is loaded when it is needed
        warnings.filterwarnings("ignore", message="of the caller")
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        before = snapshot()

        def leaves_nothing(*step, with_attributes=False):
            simulate(*step)
            found = differing(before, snapshot(with_attributes))
            assert not found, (step, found)

        for way in WAYS:
            leaves_nothing(way, with_attributes=way == "fsdp2")  # which shows what those before it have left
        for at, point in enumerate(("autocast", "forward", "loss", "backward", "optimizer")):
            leaves_nothing(("cpu", "card")[at % 2], point, Interrupted, with_attributes=point == "optimizer")
        done = threading.Event()
        threading.Thread(target=done.wait, daemon=True).start()
        before = snapshot()
        leaves_nothing("card")
        for at, point in enumerate(("backward", "optimizer")):
            leaves_nothing(("cpu", "card")[at], point, ZeroDivisionError, with_attributes=point == "optimizer")
        done.set()
        """
    )
