"""Finalizers: they run in any thread, inside whatever it does, and wait for nothing."""

import gc
import threading

import torch

import memscale as ms
from memscale import offload
from memscale.runtime import Runtime
from memscale.runtime.engine.offload_engine import Engine
from memscale.runtime.storage.slab_file import FileIO
from tests.support.adversarial_device import AdversarialDevice

NBYTES = 1 << 16


class Cycle:
    """Something that only the garbage collector ends."""

    def __init__(self, content):
        self.content = content
        self.me = self


def two_sines(runtime):
    f = offload(min_bytes=0).on(runtime)(lambda x: (x * 2).sin().exp().sin())
    return f(torch.ones(NBYTES // 4, requires_grad=True))


def test_the_collector_may_end_a_graph_in_the_thread_that_copies_for_it(monkeypatch, no_collection):
    under_way, dropped, collected = threading.Event(), threading.Event(), threading.Event()
    write = FileIO.write

    def write_and_collect(self, *arguments):
        if threading.current_thread() is not threading.main_thread() and not collected.is_set():
            under_way.set()
            assert dropped.wait(60)
            gc.collect()
            collected.set()
        return write(self, *arguments)

    monkeypatch.setattr(FileIO, "write", write_and_collect)
    runtime = Runtime(ms.AsyncOffloadConfig(prefetch_depth=2, streams=1), disk_bytes=1 << 20)
    cycle = Cycle(two_sines(runtime))
    assert under_way.wait(60)
    del cycle
    dropped.set()
    assert collected.wait(60), "the thread waits for itself"
    assert runtime.stats()["cpu"].live_bytes == {"disk": 0}


def test_what_is_under_way_when_its_graph_ends_is_let_go_by_the_next_call():
    queue = AdversarialDevice(lambda n: n - 1, {"pinned": 1 << 20})  # nothing happens before somebody waits for it
    engine = Engine(queue, depth=2)
    handle = engine.stash(torch.ones(NBYTES // 4))
    engine.look_again()
    assert engine._leaving
    queue.wait = queue.synchronize = None  # a finalizer that waits fails
    del handle
    del queue.wait, queue.synchronize
    assert engine.stats().live_bytes == {"pinned": 0}
    assert engine._moved == {}
