"""As much of CuPy as offloading uses, over the fake libcudart; the README says why not CuPy itself."""

import ctypes
import types

import torch  # loads the library

__version__ = "0.ghost"
_lib = ctypes.CDLL("libcudart.so.13")


def _handle(make, *args):
    out = ctypes.c_void_p()
    make(ctypes.byref(out), *args)
    return out.value or 0


class CUDARuntimeError(RuntimeError):
    pass


def _checked(status):
    if status:
        raise CUDARuntimeError(f"ghost error {status}")


def _p(pointer):
    return ctypes.c_void_p(pointer)


class Stream:
    def __init__(self, non_blocking=False):
        self.ptr = _handle(_lib.cudaStreamCreate)

    def synchronize(self):
        _checked(_lib.cudaStreamSynchronize(_p(self.ptr)))


class Event:
    def __init__(self, block=False):
        self.ptr = _handle(_lib.cudaEventCreate)

    @property
    def done(self):
        found = _lib.cudaEventQuery(_p(self.ptr))
        _lib.cudaGetLastError()  # CuPy's wheels have a runtime of their own, whose last error PyTorch does not see
        return not found

    def synchronize(self):
        _checked(_lib.cudaEventSynchronize(_p(self.ptr)))

    def __del__(self):
        _lib.cudaEventDestroy(_p(self.ptr))


class Device:
    def __init__(self, index=0):
        self.index = index

    def __enter__(self):
        self.before = torch.cuda.current_device()
        _lib.cudaSetDevice(self.index)
        return self

    def __exit__(self, *error):
        _lib.cudaSetDevice(self.before)


def get_elapsed_time(begin, end):
    out = ctypes.c_float()
    _checked(_lib.cudaEventElapsedTime(ctypes.byref(out), _p(begin.ptr), _p(end.ptr)))
    return out.value


runtime = types.SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError,
    memcpyHostToDevice=1,
    memcpyDeviceToHost=2,
    streamWaitEvent=lambda stream, event, flags=0: _checked(_lib.cudaStreamWaitEvent(_p(stream), _p(event), flags)),
    eventRecord=lambda event, stream: _checked(_lib.cudaEventRecord(_p(event), _p(stream))),
    memcpyAsync=lambda to, source, size, kind, stream: _checked(
        _lib.cudaMemcpyAsync(_p(to), _p(source), ctypes.c_size_t(size), kind, _p(stream))
    ),
    hostRegister=lambda at, size, flags: _checked(_lib.cudaHostRegister(_p(at), ctypes.c_size_t(size), flags)),
    hostUnregister=lambda at: _checked(_lib.cudaHostUnregister(_p(at))),
    getDeviceCount=torch.cuda.device_count,
)
cuda = types.SimpleNamespace(
    Stream=Stream,
    Event=Event,
    Device=Device,
    get_elapsed_time=get_elapsed_time,
    runtime=runtime,
    is_available=torch.cuda.is_available,
)
