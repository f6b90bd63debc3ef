"""A CUDA backend, or a region on several streams, with one thing left out or done wrong, which a record must show."""

from memscale.regions import Streams
from memscale.runtime.backends.cuda import CudaBackend, CudaEvent


def no_wait(self, event, stream=None):
    """The compute stream does not wait for a copy."""
    if not isinstance(event, CudaEvent):
        event.wait()


def no_order(self, stream, after):
    """A copy does not wait for what computes its source, nor for who had its target before."""
    for event in after:
        if not isinstance(event, CudaEvent):
            event.wait()


def end_elsewhere(self, stream, pairs, *, out):
    """The event that ends a copy is recorded on the stream of the caller."""
    moved = _MOVE(self, stream, pairs, out=out)
    return CudaEvent(self, moved._begin, self._recorded(self.compute_stream()))


def end_too_early(self, stream, pairs, *, out):
    """The event that ends a copy is recorded in front of it."""
    moved = _MOVE(self, stream, pairs, out=out)
    return CudaEvent(self, moved._begin, moved._begin)


def not_lent(self, tensor):
    """The allocator does not hear that another stream uses memory: no `record_stream`."""


def not_synchronized(self, event):
    """The CPU goes on before a copy is done."""
    if not isinstance(event, CudaEvent):
        event.wait()


def not_met(self):
    """A recompute that stops early leaves its streams as they are."""


def not_lent_inside(self, tensors):
    """Parameters leave the device while a stream of the region's own may read them."""


_MOVE = CudaBackend._move
MUTANTS = {
    no_wait: (CudaBackend, "wait"),
    no_order: (CudaBackend, "_order"),
    end_elsewhere: (CudaBackend, "_move"),
    end_too_early: (CudaBackend, "_move"),
    not_lent: (CudaBackend, "lend"),
    not_synchronized: (CudaBackend, "synchronize"),
    not_met: (Streams, "meet"),
    not_lent_inside: (Streams, "lend"),
}
