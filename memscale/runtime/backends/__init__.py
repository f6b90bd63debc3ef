"""Backends: the interface between the offload engine and a kind of device, and its implementations."""

from memscale.runtime.backends.protocol import Backend, Buffer, Event, Stream
from memscale.runtime.backends.trace import CountedBuffer, TraceBackend
from memscale.runtime.backends.trims import Trims

__all__ = ["Backend", "Buffer", "CountedBuffer", "Event", "Stream", "TraceBackend", "Trims"]
