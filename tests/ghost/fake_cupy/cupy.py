"""As much of CuPy as offloading uses, over the fake libcudart; the README says why not CuPy itself."""

import ctypes
import types

import torch  # loads the library

__version__ = "0.ghost"
_lib = ctypes.CDLL("libcudart.so.13")


_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class CUDARuntimeError(RuntimeError):
    pass


def _checked(status):
    if status:
        raise CUDARuntimeError(f"ghost error {status}")


def _function(name, *types, status=_checked):
    """Returns a function of the library. Its arguments are converted in C, as CuPy's own calls are."""
    function = getattr(_lib, name)
    function.argtypes, function.restype = types, status
    return function


def _maker(name):
    function = _function(name, ctypes.POINTER(_POINTER))

    def make():
        out = _POINTER()
        function(ctypes.byref(out))
        return out.value or 0

    return make


_new_stream, _new_event = _maker("cudaStreamCreate"), _maker("cudaEventCreate")
_synchronize_stream = _function("cudaStreamSynchronize", _POINTER)
_synchronize_event = _function("cudaEventSynchronize", _POINTER)
_destroy_event = _function("cudaEventDestroy", _POINTER)
_query = _function("cudaEventQuery", _POINTER, status=ctypes.c_int)
_forget_error = _function("cudaGetLastError", status=ctypes.c_int)
_set_device = _function("cudaSetDevice", ctypes.c_int)
_wait = _function("cudaStreamWaitEvent", _POINTER, _POINTER, ctypes.c_uint)
_elapsed = _function("cudaEventElapsedTime", ctypes.POINTER(ctypes.c_float), _POINTER, _POINTER)


class Stream:
    def __init__(self, non_blocking=False):
        self.ptr = _new_stream()

    def synchronize(self):
        _synchronize_stream(self.ptr)


class Event:
    def __init__(self, block=False):
        self.ptr = _new_event()

    @property
    def done(self):
        found = _query(self.ptr)
        _forget_error()  # CuPy's wheels have a runtime of their own, whose last error PyTorch does not see
        return not found

    def synchronize(self):
        _synchronize_event(self.ptr)

    def __del__(self):
        _destroy_event(self.ptr)


class Device:
    def __init__(self, index=0):
        self.index = index

    def __enter__(self):
        self.before = torch.cuda.current_device()
        _set_device(self.index)
        return self

    def __exit__(self, *error):
        _set_device(self.before)


def get_elapsed_time(begin, end):
    out = ctypes.c_float()
    _elapsed(ctypes.byref(out), begin.ptr, end.ptr)
    return out.value


runtime = types.SimpleNamespace(
    CUDARuntimeError=CUDARuntimeError,
    memcpyHostToDevice=1,
    memcpyDeviceToHost=2,
    streamWaitEvent=lambda stream, event, flags=0: _wait(stream, event, flags),
    eventRecord=_function("cudaEventRecord", _POINTER, _POINTER),
    memcpyAsync=_function("cudaMemcpyAsync", _POINTER, _POINTER, _SIZE, ctypes.c_int, _POINTER),
    hostRegister=_function("cudaHostRegister", _POINTER, _SIZE, ctypes.c_uint),
    hostUnregister=_function("cudaHostUnregister", _POINTER),
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
