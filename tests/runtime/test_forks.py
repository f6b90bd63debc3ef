"""A fork of a process that offloads: told that it cannot, whatever its parent was doing, and never left waiting."""

import os

import pytest

from tests.support import processes

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

BEGIN = """
import gc, os, threading
import torch
import memscale as ms
from memscale.runtime import Runtime
from memscale.runtime.storage.slab_file import FileIO

torch.set_num_threads(1)
forked, write = threading.Event(), FileIO.write

def late(self, *arguments):
    if threading.current_thread() is not threading.main_thread():
        forked.wait(30)
    return write(self, *arguments)

runtime = Runtime(ms.AsyncOffloadConfig(min_bytes=0, prefetch_depth=2), disk_bytes=1 << 20)
f = ms.offload().on(runtime)(lambda x: (x * 2).sin().exp().sin())
longer = ms.offload().on(runtime)(lambda x: x.sin().cos().exp().sin().cos().exp().sin().cos())
x = torch.ones(4096, requires_grad=True)

def refused(fn):
    try:
        fn()
    except ms.TransformError as error:
        assert "of which it is a fork" in str(error), error
    else:
        raise AssertionError("not refused")
"""

# Copies under way, then a lock that another thread holds.
FORKED = """
FileIO.write = late
out = f(x)
child = os.fork()
if child == 0:
    refused(lambda: longer(x))
    del out
    gc.collect()
    refused(lambda: longer(x))
    refused(runtime.settle)
    os._exit(0)
forked.set()
assert os.waitpid(child, 0)[1] == 0
out.sum().backward()

engine = runtime.engine(x)
f(x)
held, done = threading.Event(), threading.Event()

def hold():
    with engine.lock, runtime._lock:
        held.set()
        done.wait(30)

thread = threading.Thread(target=hold)
thread.start()
held.wait(60)
child = os.fork()
if child == 0:
    refused(lambda: longer(x))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
done.set()
thread.join()
"""


def test_a_fork_is_refused_and_does_not_wait():
    run = processes.run("import warnings\nwarnings.simplefilter('ignore', DeprecationWarning)\n" + BEGIN + FORKED)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_process_ends_with_copies_under_way_and_says_nothing():
    end = "FileIO.write = late\nout = f(x)\ncycle = [out, f, runtime]\ncycle.append(cycle)\nforked.set()\n"
    run = processes.run(BEGIN + end)
    assert (run.returncode, run.stderr) == (0, "")
