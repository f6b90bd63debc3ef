"""Backends: the interface between the offload engine and a kind of device, and its implementations."""

from memscale.runtime.backends.protocol import TOGETHER_BYTES, Backend, Buffer, Event, Stream, one_behind_the_other
from memscale.runtime.backends.trace_backend import CountedBuffer, TraceBackend
from memscale.runtime.backends.trims import Trims
