"""A CuPy without a GPU: CPU tensors are the device, and a stream does nothing until something makes it.

That is the least that CUDA promises. Work of PyTorch itself happens at once, on streams that are only numbers; making
one of those wait is what lets a copy happen, and so is waiting on the host. A copy that nothing waits for never comes.
Number 0 is the default stream of whichever device is current.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import types

import torch


class CUDARuntimeError(RuntimeError):
    pass


class Point:
    """A place in a stream that an event was recorded at."""

    def __init__(self):
        self.seconds = None


class FakeCupy(types.ModuleType):
    """Stands for ``cupy`` in `sys.modules`. What is called is noted in `log`; the other attributes are the machine."""

    def __init__(self, devices=2):
        super().__init__("cupy")
        self.__version__ = "14.0"
        self.available = True
        self.pin_limit_bytes = 1 << 62
        self.compute_stream = 7
        self.capturing = None  # the device that does
        self.log = []
        self.queues = {}
        self.registered = {}
        self.lock = threading.RLock()
        self.current = threading.local()
        self.numbers = itertools.count(1000)
        self.points = {}
        self.devices = {}  # of streams and events
        fake = self

        class Device:
            def __init__(self, index):
                assert 0 <= index < devices
                self.index = index

            def __enter__(self):
                self.before = fake.device()
                fake.current.device = self.index

            def __exit__(self, *_):
                fake.current.device = self.before

        class Stream:
            def __init__(self, *, non_blocking=False):
                assert fake.available, "a CuPy stream without a device prints from its destructor"
                assert non_blocking, "a blocking stream waits for the default stream, where PyTorch computes"
                self.ptr = next(fake.numbers)
                self.device = fake.devices[self.ptr] = fake.device()
                with fake.lock:
                    fake.queues[self.ptr] = []

            def synchronize(self):
                with fake.lock:
                    fake.log.append(("stream synchronize", self.ptr))
                    fake.drain(self.ptr)

        class Event:
            def __init__(self, *, block=False, disable_timing=False):
                self.ptr = next(fake.numbers)
                self.device = fake.devices[self.ptr] = fake.device()
                fake.points[self.ptr] = None

            @property
            def done(self):
                return fake.points[self.ptr].seconds is not None

            def synchronize(self):
                with fake.lock:
                    fake.force(fake.points[self.ptr])

        def get_elapsed_time(begin, end):
            return 1e3 * (fake.points[end.ptr].seconds - fake.points[begin.ptr].seconds)

        self.cuda = types.SimpleNamespace(
            Device=Device,
            Event=Event,
            Stream=Stream,
            get_elapsed_time=get_elapsed_time,
            is_available=lambda: self.available,
            runtime=types.SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                memcpyHostToDevice=1,
                memcpyDeviceToHost=2,
                **{name: getattr(self, name) for name in CALLS},
            ),
        )

    def install(self, monkeypatch):
        """Make PyTorch say that it has the devices, and be in `compute_stream`."""
        monkeypatch.setitem(__import__("sys").modules, "cupy", self)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.device() == self.capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.compute_stream)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.compute_stream, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", self.device, raising=False)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: self.record_stream(tensor, stream))

    def device(self):
        """The one that is current in this thread."""
        return getattr(self.current, "device", 0)

    def record_stream(self, tensor, stream):
        self.log.append(("record_stream", tensor.data_ptr(), stream))

    # ------------------------------------------------------------------------------------- cupy.cuda.runtime

    def hostRegister(self, pointer, nbytes, flags):
        with self.lock:
            assert pointer % 4096 == 0
            assert pointer not in self.registered
            if sum(self.registered.values()) + nbytes > self.pin_limit_bytes:
                raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
            self.log.append(("register", nbytes, flags))
            self.registered[pointer] = nbytes

    def hostUnregister(self, pointer):
        with self.lock:
            nbytes = self.registered.pop(pointer)
            for kind, *rest in itertools.chain(*self.queues.copy().values()):
                under = kind == "copy" and any(pointer <= side < pointer + nbytes for side in rest[:2])
                assert not under, "unregistered under a copy"
            self.log.append(("unregister", nbytes))

    def memcpyAsync(self, target, source, nbytes, kind, stream):
        with self.lock:
            assert stream in self.queues, "copies run on streams of their own"
            host = target if kind == 2 else source
            pinned = any(
                start <= host and host + nbytes <= start + size for start, size in self.registered.copy().items()
            )
            self.log.append(("copy", "out" if kind == 2 else "in", nbytes, stream))
            self.queues[stream].append(("copy", target, source, nbytes))
            if not pinned:  # CUDA stages such a copy itself, and waits for it
                self.drain(stream)

    def eventRecord(self, event, stream):
        with self.lock:
            point = self.points[event] = Point()
            on = self.device() if stream == 0 else self.devices.get(stream, self.devices[event])
            assert on == self.devices[event], "an event of one device is recorded on a stream of another"
            if stream in self.queues:
                self.queues[stream].append(("record", point))
            else:
                self.log.append(("record", self.named(stream)))
                point.seconds = time.perf_counter()

    def streamWaitEvent(self, stream, event):
        with self.lock:
            point = self.points[event]
            if stream in self.queues:
                self.queues[stream].append(("wait", point))
            else:
                self.log.append(("wait", self.named(stream)))
                self.force(point)

    def named(self, stream):
        return stream or f"the default of {self.device()}"

    # ---------------------------------------------------------------------------------------------- the device

    def force(self, point):
        """Let happen what must have happened before `point`, and nothing else."""
        while point.seconds is None:
            stream = next(stream for stream, queue in self.queues.copy().items() if ("record", point) in queue)
            self.step(stream)

    def drain(self, stream):
        while self.queues[stream]:
            self.step(stream)

    def step(self, stream):
        kind, *rest = self.queues[stream].pop(0)
        if kind == "wait":
            self.force(rest[0])
        elif kind == "record":
            rest[0].seconds = time.perf_counter()
        else:
            ctypes.memmove(*rest)


CALLS = ("hostRegister", "hostUnregister", "memcpyAsync", "eventRecord", "streamWaitEvent")
