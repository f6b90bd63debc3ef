"""What cuDNN takes for a convolution: copies of its tensors in the layout that tensor cores read.

No source says it. The rules below were read off 297 convolutions on an H100 (cuDNN 9.19, torch 2.11, heuristics, not
``torch.backends.cudnn.benchmark``): `benchmarks/results/convolutions-h100.json`, by `benchmarks/bench_operators.py`.
Where heuristics choose between kernels with and without copies, the rules say with: a plan that keeps to its budget
must not count on luck.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from memscale.simulation.kernels.programs import Capability

# In float32, what several thread blocks sum up of the weight's gradient: so many partial sums, and bytes.
_SPLITS, _FEWEST_BYTES, _MOST_BYTES = 14, 2 * 1024**2, 8_650_752
_PRODUCT_SPLITS, _MOST_PRODUCT_BYTES = 128, 32 * 1024**2
_PADDED_SPLITS = 4
# The positions that it takes until several blocks share the sum, in half precision.
_SHARED_POSITIONS = 16_384
# Channel by channel with the channels last, as ConvNeXt has it. In float32, of wider images, each channel is padded to
# what tensor cores read at once, as if it were a group; in 16 bits there are so many partial sums of each image.
_WIDE_PLACES, _DEPTH_SUMS_BYTES, _DEPTH_SPLITS = 400, 10 * 1024**2, 8
# Colours, say: in float32 cuDNN has kernels for so few channels that read the image as it lies.
_FEW_CHANNELS, _LARGE_KERNEL = 4, 7


@dataclass(frozen=True)
class Convolution:
    """One convolution, by its tensors; of a transposed one, the larger `image` is what it returns.

    Args:
        image, kernel, result: its tensors.
        stride, padding: of each dimension, or one for all.
        groups: of channels.
        channels_last: whether image and result lie so.
    """

    image: torch.Tensor
    kernel: torch.Tensor
    result: torch.Tensor
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int
    channels_last: bool

    def result_bytes(self, capability: Capability) -> int:
        """The workspace of the result."""
        if self._has_few_channels and max(self.kernel.shape[2:]) < _LARGE_KERNEL:
            return 0
        return self._of_copies(capability)

    def image_bytes(self, capability: Capability) -> int:
        """The workspace of the image's gradient."""
        return 0 if self._has_few_channels and not self.channels_last else self._of_copies(capability)

    def _of_copies(self, capability: Capability) -> int:
        if not self._on_tensor_cores(capability):
            return 0
        if self._is_product and not self.channels_last:
            # A product of matrices, in place, unless rows begin where the cores cannot read them.
            return 0 if self._places % 4 == 0 else self._images_bytes
        return self._copies_bytes

    def weight_bytes(self, capability: Capability) -> int:
        """The workspace of the weight's gradient."""
        if self._is_of_depths and self.channels_last:
            return self._of_depths(capability)
        if not self._on_tensor_cores(capability):
            return 0
        if not self._is_product:
            return self._copies_bytes + self._sums_bytes
        if self.channels_last or self._places % (32 // self.image.itemsize) == 0:
            return min(_PRODUCT_SPLITS * 4 * self.kernel.numel(), _MOST_PRODUCT_BYTES)
        return self._images_bytes + self._sums_bytes

    def _of_depths(self, capability: Capability) -> int:
        if self.image.itemsize == 2 and capability >= (7, 0):
            return _DEPTH_SPLITS * self.image.size(0) * 4 * self.kernel.numel()
        if not self._multiplies_32(capability) or self._places < _WIDE_PLACES:
            return 0
        return 16 // self.image.itemsize * self._images_bytes + _DEPTH_SUMS_BYTES

    @property
    def _sums_bytes(self) -> int:
        one = 4 * self.kernel.numel()
        padded = _padded(self.kernel) * 4 // self.kernel.itemsize
        few = min(max(_SPLITS * one, _FEWEST_BYTES), _MOST_BYTES)
        if padded > one:
            return max(few, _PADDED_SPLITS * padded)
        positions = self.result.size(0) * math.prod(self.result.shape[2:])
        return 0 if self.image.itemsize == 2 and positions <= _SHARED_POSITIONS else few

    def _on_tensor_cores(self, capability: Capability) -> bool:
        if self._is_of_depths:  # PyTorch's own kernel, or one without copies
            return False
        if self.image.dtype is torch.float32:
            return self._multiplies_32(capability) and self.image.size(1) > 1
        return self.image.itemsize == 2 and capability >= (7, 0)

    def _multiplies_32(self, capability: Capability) -> bool:
        allowed = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
        return self.image.dtype is torch.float32 and capability >= (8, 0) and bool(allowed)

    @property
    def _is_of_depths(self) -> bool:
        """Whether it goes channel by channel."""
        return self.groups == self.image.size(1) > 1

    @property
    def _has_few_channels(self) -> bool:
        return self.image.dtype is torch.float32 and self.image.size(1) <= _FEW_CHANNELS

    @property
    def _is_product(self) -> bool:
        one = all(size == 1 for size in (*self.kernel.shape[2:], *self.stride))
        return one and not any(self.padding)

    @property
    def _places(self) -> int:
        return math.prod(self.image.shape[2:])

    @property
    def _images_bytes(self) -> int:
        return self.image.nbytes + self.result.nbytes

    @property
    def _copies_bytes(self) -> int:
        """Each tensor with its channels last and a multiple of what the cores read at once, unless it is so already."""
        lies_so = self.channels_last and not self._has_few_channels
        sizes = [(tensor.nbytes, _padded(tensor)) for tensor in (self.image, self.result, self.kernel)]
        return sum(padded for nbytes, padded in sizes if not lies_so or padded != nbytes)


def _padded(tensor: torch.Tensor) -> int:
    """Its bytes with as many channels as tensor cores read at once, or a multiple."""
    at_once = 16 // tensor.itemsize
    channels = tensor.size(1)
    return tensor.nbytes // channels * (-(-channels // at_once) * at_once)
