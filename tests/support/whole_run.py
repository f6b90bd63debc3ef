"""The truth of a step's peak that needs to be told nothing: a whole run, from before the model is made."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile, record_function


def true_peaks(make_step: Callable[[], Callable[[], object]], *, steps: int = 3) -> list[int]:
    """The most bytes that PyTorch's CPU allocator had out in each of `steps` calls of what `make_step` returns.

    It counts from before `make_step` is called, which makes the model and all that goes with it: buckets, shards.
    """
    gc.collect()
    settings = {"activities": [ProfilerActivity.CPU], "profile_memory": True, "acc_events": True}
    with _all_threads_counted(), profile(**settings) as recording:
        step = make_step()
        gc.collect()
        for number in range(steps):
            with record_function(f"whole run {number}"):
                step()
    assert recording.profiler is not None
    spans, totals = {}, []
    pending = list(recording.profiler.kineto_results.experimental_event_tree())
    while pending:
        node = pending.pop()
        if isinstance(node.extra_fields, _ExtraFields_Allocation):
            if node.extra_fields.device == torch.device("cpu"):
                fields = node.extra_fields
                totals.append((node.start_time_ns, fields.total_allocated, fields.alloc_size))
        elif node.name.startswith("whole run "):
            spans[node.name] = (node.start_time_ns, node.end_time_ns)
        pending.extend(node.children)
    totals.sort()
    before = totals[0][1] - totals[0][2]  # what an earlier recording saw allocated and not freed
    steps_bytes = [
        max(total for at, total, _ in totals if begin <= at <= end) for _, (begin, end) in sorted(spans.items())
    ]
    return [nbytes - before for nbytes in steps_bytes]


@contextmanager
def _all_threads_counted() -> Iterator[None]:
    """Let the allocator's total know what threads free that no recording watches.

    Those of gloo do, a step after another: the total of a Llama in two processes grew by 8 % of its peak in three.
    """
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    flag = ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage")
    flag.value = True
    try:
        yield
    finally:
        flag.value = False


def with_own_buckets(replica: nn.parallel.DistributedDataParallel) -> nn.parallel.DistributedDataParallel:
    """`replica`, which takes its own gradients for those of all: a fake process group has no results to give it."""

    def own(_, bucket):  # PyTorch looks at annotations, and takes no strings
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    replica.register_comm_hook(None, own)
    return replica
