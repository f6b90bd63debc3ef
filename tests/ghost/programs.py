"""Random training programs on a CUDA device whose regions move tensors and parameters. A case is a number.

Where it has several threads, which of them comes first is left to the system.
"""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

import memscale as ms
from memscale.runtime import Runtime

MOVED, PARAMS = ms.offload(min_bytes=0), ms.offload(what="params", min_bytes=0)
HOWS = (
    MOVED,
    MOVED,
    PARAMS,
    ms.compose(PARAMS, MOVED),
    ms.compose(MOVED, PARAMS),
    ms.compose(MOVED, ms.checkpoint()),
    ms.compose(PARAMS, ms.checkpoint()),
    ms.compose(ms.checkpoint(), PARAMS),
    ms.offload(min_bytes=0, tier="pageable"),
    ms.offload(min_bytes=0, tier="disk"),
)
# How the optimizer steps; None is SGD as it is.
STEPPED = (
    None,
    None,
    ms.offload_states(),
    ms.step_in_backward(),
    ms.compose(ms.step_in_backward(), ms.offload_states()),
    ms.compose(ms.step_in_backward(), ms.offload_states(tier="disk")),
    ms.step_in_groups(group_bytes=1 << 14),
    ms.quantize_states(),
)


class Failure(Exception):
    """What a program raises itself."""


class Layer(nn.Module):
    """May fail."""

    def __init__(self, width, kind):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.kind = kind
        self.fails = False

    def forward(self, x):
        if self.fails:
            raise Failure
        y = self.linear(x)
        return x + (torch.nn.functional.gelu(y) * y.sigmoid() if self.kind else y.tanh())


class Pair(nn.Module):
    """Two layers next to each other, each on a stream of its own, whose second may fail before they meet."""

    def __init__(self, width, streams):
        super().__init__()
        self.left, self.right = Layer(width, 0), Layer(width, 1)
        self.streams = streams
        self.fails = False

    def forward(self, x):
        self.right.fails = self.fails
        outside = torch.cuda.current_stream()
        found = []
        for layer, stream in zip((self.left, self.right), self.streams, strict=True):
            stream.wait_stream(outside)
            x.record_stream(stream)
            with torch.cuda.stream(stream):
                found.append(layer(x))
        for y, stream in zip(found, self.streams, strict=True):
            outside.wait_stream(stream)
            y.record_stream(outside)
        return found[0] + found[1]


class Late(Layer):
    """A layer on a stream of its own, for whose result the caller waits."""

    def __init__(self, width, stream):
        super().__init__(width, 1)
        self.stream = stream

    def forward(self, x):
        self.stream.wait_stream(torch.cuda.current_stream())
        x.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            return super().forward(x)


class Chain:
    """A model that is trained, on a stream that nothing else of the program waits for."""

    def __init__(self, choose, runtime):
        self.choose = choose
        width, depth = choose.choice([16, 64, 200]), choose.randint(2, 5)
        self.stream = torch.cuda.Stream()
        self.sides = [torch.cuda.Stream() for _ in range(2)]
        self.shape = choose.choice([4, 32, 300]), width
        kinds = [choose.random() for _ in range(depth)]
        parts = [
            Pair(width, self.sides) if kind < 0.3 else Late(width, self.sides[0]) if kind < 0.4 else Layer(width, 0)
            for kind in kinds
        ]
        model = nn.Sequential(*parts).cuda()
        plan = {}
        for index, part in enumerate(model):
            whole = not isinstance(part, Pair) or choose.random() < 0.3
            for path in [f"{index}"] if whole else [f"{index}.left", f"{index}.right"]:
                plan |= {path: choose.choice(HOWS)} if choose.random() < 0.9 else {}
        self.fit = ms.transform(model, plan, runtime=runtime)
        self.parameters = list(model.parameters())  # while a region runs, another thread finds what stands for them
        # Of numbers of its own, so that a case stays the program that it was.
        stepped = random.Random(repr(kinds)).choice(STEPPED)
        self.steps_in_backward = "step_in_backward" in repr(stepped)
        if stepped is None:
            self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        else:
            self.optimizer = stepped.on(runtime)(torch.optim.AdamW(self.parameters, fused=True))
        self.kept = []

    def step(self):
        """One step, or what is left of one that fails."""
        with contextlib.suppress(Failure), torch.cuda.stream(self.stream):
            self._step(torch.ones(self.shape, device="cuda"))
        for part in self.fit:
            part.fails = False

    def _step(self, x):
        choose, fit = self.choose, self.fit
        if choose.random() < 0.15:
            fit[choose.randrange(len(fit))].fails = True
        for part in fit:
            if choose.random() < 0.7:
                x = _met(part, x)
                continue
            with _on(choose.choice(self.sides), x) as outside:
                x = _met(part, x)
            x.record_stream(outside)
        loss = x.square().mean()
        how = choose.random()
        if how < 0.1:
            return  # the graph is dropped
        if how < 0.2:
            self.kept.append(loss)  # and this one is not
            return
        if how < 0.3:
            wanted = [p for p in self.parameters if choose.random() < 0.5] or self.parameters[:1]
            torch.autograd.grad(loss, wanted)
            return
        if how < 0.5 and not self.steps_in_backward:  # which changes what a second backward would need
            loss.backward(retain_graph=True)
        if choose.random() < 0.3:
            with _on(choose.choice(self.sides), loss):
                loss.backward()
        else:
            loss.backward()
        if choose.random() < 0.7 or self.steps_in_backward:  # whose gradients are gone by now
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=choose.random() < 0.5 or self.steps_in_backward)

    def gradients(self):
        """Those of every parameter; other threads may ask for them at the same time."""
        stream = torch.cuda.Stream()
        stream.wait_stream(self.stream)
        with torch.cuda.stream(stream):
            x = torch.ones(self.shape, device="cuda")
            for part in self.fit:
                x = _met(part, x)
            torch.autograd.grad(x.square().mean(), self.parameters)
        stream.synchronize()


def _met(part, x):
    """``part(x)``, after which the current stream comes."""
    y = part(x)
    if isinstance(part, Late):
        torch.cuda.current_stream().wait_stream(part.stream)
        y.record_stream(torch.cuda.current_stream())
    return y


@contextlib.contextmanager
def _on(stream, *tensors):
    """The body runs on `stream`, after what the caller's was given, and the caller's goes on after it."""
    outside = torch.cuda.current_stream()
    stream.wait_stream(outside)
    with torch.cuda.stream(stream):
        for tensor in tensors:
            tensor.record_stream(stream)
        yield outside
    outside.wait_stream(stream)


def run_two_regions(fails):
    """Two regions of parameters on two streams that meet after both, or do not because the first fails."""
    width, stream, grad = 256, torch.cuda.Stream(), not fails
    first = Pair(width, [stream] * 2) if fails else Late(width, stream)
    first.fails = fails
    model = nn.ModuleList([first, Layer(width, 0)]).cuda()
    runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=0))
    fit = ms.transform(model, {"*": PARAMS}, runtime=runtime)
    x = torch.ones(32, width, device="cuda")
    torch.cuda.synchronize()
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            found = []
            for part in fit:
                with contextlib.suppress(Failure):
                    found.append(part(x))
            torch.cuda.current_stream().wait_stream(stream)
            if grad:
                sum(y.sum() for y in found).backward()


def run(case, in_thread=contextlib.nullcontext):
    """Run it. The caller is careful: where its streams meet, they wait, and tell the allocator.

    `in_thread` makes what each further thread runs in.
    """
    choose = random.Random(case)
    config = ms.AsyncOffloadConfig(
        min_bytes=0, pool_bytes=choose.choice([1 << 16, 1 << 20, 1 << 24]), prefetch_depth=choose.choice([0, 1, 2, 3])
    )
    runtime = Runtime(config, host_bytes=choose.choice([None, None, 1 << 18]))
    chains = [Chain(random.Random(choose.random()), runtime) for _ in range(choose.choice([1, 2]))]
    torch.cuda.synchronize()  # they were made on another stream

    def each(tasks):
        def run_one(task):
            with in_thread():
                task()

        with ThreadPoolExecutor(len(tasks)) as threads:
            list(threads.map(run_one, tasks))

    for _ in range(choose.randint(1, 3)):
        how = choose.random()
        if how < 0.3:
            each([chain.step for chain in chains])
        elif how < 0.4:
            each([chains[0].gradients] * 2)
        else:
            for chain in chains:
                chain.step()
        if choose.random() < 0.2:
            torch.cuda.empty_cache()
        if choose.random() < 0.2:
            runtime.settle()
