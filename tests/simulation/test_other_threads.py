"""Others train while a step is simulated: each gets what it gets in a quiet process, bit for bit, and so does it.

Each program runs in a process of its own, for it counts what the whole process has.
"""

import re
import textwrap

from tests.support import processes
from tests.support.coverings import DEEP

LOOPS = '''
import random, threading, time, warnings
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
import memscale as ms

class Block(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.p = p
    def forward(self, x):
        q = self.norm(x)
        x = x + F.scaled_dot_product_attention(q, q, q)
        return x + F.dropout(self.down(F.gelu(self.up(q))), self.p, self.training)

def made(seed, plan=None, p=0.0, width=64, optimizer=torch.optim.AdamW):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*[Block(width, p) for _ in range(3)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    if plan is not None:
        model = ms.transform(model, plan)
    return model, optimizer(model.parameters(), lr=1e-3), generator

def trained(seed, plan, p, steps, started=None):
    """The losses, and the weights and the states of the optimizer at the end."""
    model, optimizer, generator = made(seed, plan, p)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 128, 64, generator=generator)
        loss = model(x).square().mean()
        loss.backward()
        assert not x.is_cuda and x.device.type == "cpu" and not torch.cuda.is_available()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if started is not None:
            started.set()
    state = optimizer.state_dict()["state"]
    found = [torch.tensor(losses), *(each.detach().clone() for each in model.parameters())]
    return found + [torch.as_tensor(each) for values in state.values() for each in values.values()]

PLANS = {
    "plain": (None, 0.0),
    "offload": ({"*": ms.offload(min_bytes=0)}, 0.0),
    "streamed": ({"*": ms.offload(what="params", min_bytes=0)}, 0.0),
}

def simulated(plans=False):
    """Profiles, on a CPU and for a card, and a plan; what they say."""
    with torch.device("meta"):
        model = nn.Sequential(*[Block(64, 0.1) for _ in range(2)])
        batch = torch.empty(32, 256, 64)
    said = []
    for hardware in (None, "h100"):
        optimizer = torch.optim.AdamW(model.parameters())
        profile = ms.profile(model, batch, optimizer=optimizer, loss=mean, hardware=hardware)
        said.append((profile.peak_bytes, profile.reserved_peak_bytes, profile.by_category))
    if not plans:
        return said
    optimizer, few = torch.optim.AdamW(model.parameters()), ms.Config(mode="conservative")
    budget = int(0.9 * said[-1][1])
    planned = ms.plan(model, batch, optimizer=optimizer, loss=mean, hardware="h100", budget=budget, config=few)
    return [*said, planned.to_json()]

def mean(y, _):
    return y.float().mean()
'''


def run(program):
    source = textwrap.dedent(LOOPS) + f"\nROUNDS = {3 if DEEP else 1}\n" + textwrap.dedent(program)
    # A plan that is known from before would simulate nothing.
    found = processes.run(source, stops_at_warnings=True, MEMSCALE_CACHE="")
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-6000:]


def test_loops_of_other_threads_train_as_in_a_quiet_process():
    run(
        """
        torch.set_num_threads(1)
        quiet = {name: trained(7, *PLANS[name], steps=3) for name in PLANS}
        said = simulated(plans=True)
        wrong, stop = [], threading.Event()

        def loop(name):
            while not stop.is_set():
                try:
                    found = trained(7, *PLANS[name], steps=3, started=started)
                    if not all(map(torch.equal, found, quiet[name])):
                        wrong.append(name)
                except BaseException as error:
                    wrong.append((name, repr(error)))
                    raise

        started = threading.Event()
        threads = [threading.Thread(target=loop, args=(name,)) for name in PLANS]
        for thread in threads:
            thread.start()
        started.wait()
        again = [simulated(plans=True) for _ in range(ROUNDS)]
        stop.set()
        for thread in threads:
            thread.join()
        assert not wrong, wrong
        assert again == [said] * ROUNDS
        """
    )


# Functions of one process: the start of a process takes as long as one of them.
TOGETHER = """
SAID = simulated()  # which also loads what is loaded when it is needed

def a_loop_that_draws_goes_on_drawing_as_if_nobody_simulated():
    def drawn(count):
        return [(torch.rand(3).tolist(), random.random(), float(np.random.rand()), random.randint(0, 9),
                 random.gauss(0, 1), np.random.permutation(5).tolist()) for _ in range(count)]

    def seeded():
        torch.manual_seed(3), random.seed(3), np.random.seed(3)

    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
        def forward(self, x):
            torch.manual_seed(random.randrange(5))
            return self.layer(x * torch.rand(()) * random.random() * float(np.random.uniform(1, 2)))

    model = Draws()
    seeded()
    quiet = drawn(1000)
    seeded()
    found, go, done = [], threading.Event(), threading.Event()

    def draw():
        go.wait()
        while not done.is_set() and len(found) < 900:
            found.extend(drawn(1))
            time.sleep(0.001)
        found.extend(drawn(1000 - len(found)))

    thread = threading.Thread(target=draw)
    thread.start()
    go.set()
    for hardware in (None, "h100"):
        ms.profile(model, torch.ones(2, 8), loss=mean, hardware=hardware)
    done.set()
    thread.join()
    assert found == quiet

def nobody_else_sees_the_card():
    import gc, os, sys
    import torch.distributed as dist
    hooks = sys.modules["torch.optim.optimizer"]
    seen, done = set(), threading.Event()
    here = torch.ones(2)
    filters = list(warnings.filters)

    def look():
        while not done.is_set():
            time.sleep(0.0002)  # or the simulations take most of their time waiting for the interpreter
            seen.add((
                torch.cuda.is_available(), torch.ones(1).device.type, here.is_cuda, here.device.type,
                here.to("cpu").device.type, torch.cuda.device_count(), gc.isenabled(), gc.get_threshold(),
                gc.get_freeze_count(), dist.is_initialized(), len(hooks._global_optimizer_pre_hooks),
                torch.get_default_device().type, torch.is_autocast_enabled("cuda"), torch.is_grad_enabled(),
                torch._C._only_lift_cpu_tensors(), warnings.filters == filters, len(os.environ),
                torch._dynamo.eval_frame._stance.stance,
                torch.get_rng_state().sum().item(), random.getstate()[1][-1],
            ))

    torch.manual_seed(5), random.seed(5)
    filters = list(warnings.filters)
    count = gc.get_freeze_count()
    thread = threading.Thread(target=look, daemon=True)  # ends with the program where that fails
    thread.start()
    for _ in range(ROUNDS):
        simulated()
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.empty(2, 8)
    ms.profile(model, batch, loss=mean, parallel="fsdp2", world=4, hardware="h100")
    ms.profile(model, batch, loss=mean, parallel="ddp", world=4)
    done.set()
    thread.join()
    assert len(seen) == 1, seen

def two_threads_simulate_at_once():
    call, patches = nn.Module.__call__, [(torch.cuda, "is_available"), (torch.Tensor, "device"), (F, "linear")]
    before = [getattr(*patch) for patch in patches]
    found, errors = [], []

    def fail(y, _):
        raise ArithmeticError("on purpose")

    def both():
        try:
            try:
                ms.profile(nn.Linear(4, 4), torch.ones(2, 4), loss=fail, hardware="h100")
            except ms.MemscaleError:
                pass
            found.append(simulated())
        except BaseException as error:
            errors.append(repr(error))
            raise

    threads = [threading.Thread(target=both) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert found == [SAID] * 2
    import gc
    assert not torch.cuda.is_available() and nn.Module.__call__ is call and gc.isenabled()
    assert before == [getattr(*patch) for patch in patches]

def threads_that_a_step_starts_are_the_simulations():
    from concurrent.futures import ThreadPoolExecutor

    class Parts(nn.Module):
        def __init__(self, way):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
            self.way = way
        def forward(self, x):
            found = [None, None]
            def run(at):
                found[at] = self.parts[at](x) * 2
            if self.way == "in turn":
                run(0), run(1)
            elif self.way == "threads":
                threads = [threading.Thread(target=run, args=(at,)) for at in range(2)]
                for thread in threads:
                    thread.start()
                    thread.join()
            else:
                with ThreadPoolExecutor(1) as pool:
                    list(pool.map(run, range(2)))
            return found[0] + found[1]

    for hardware in (None, "h100"):
        peaks = [ms.profile(Parts(way), torch.ones(64, 256), loss=mean, hardware=hardware).peak_bytes
                 for way in ("in turn", "threads", "pool")]
        assert len(set(peaks)) == 1, peaks
"""


def test_a_loop_that_draws_one_that_looks_and_another_simulation_see_nothing_of_a_simulation():
    run(TOGETHER + "\n".join(f"{name}()" for name in re.findall(r"^def (\w+)", TOGETHER, re.MULTILINE)))
