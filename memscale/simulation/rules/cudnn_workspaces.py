"""The workspace bytes of cuDNN's convolutions: copies of the tensors in the layout that tensor cores read.

No source states these. The rules follow 297 convolutions on an H100 (cuDNN 9.19, torch 2.11, heuristics, without
``torch.backends.cudnn.benchmark``): `benchmarks/results/convolutions-h100.json`, by `benchmarks/bench_operators.py`.
Where cuDNN's heuristics choose between kernels with and without copies, the rules assume copies, so that a plan keeps
its budget in either case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from memscale.simulation.rules.rule import Capability

# The weight's gradient is cut into tiles of so many channels each way, at each place of the kernel. Where they leave
# multiprocessors idle, several share the positions of one, and each keeps its own sum in float32; two waves of
# thread blocks of which the second fills less than so much of the card are cut as well.
_TILE, _SMALL_TILE, _FILLED = 128, 64, 0.58
_MOST_SHARES = 16
# The positions that a share has at least, with the channels last; in half precision, so few are not shared.
_SHARE, _TOO_FEW = 1024, 16_384
_PRODUCT_SPLITS, _MOST_PRODUCT_BYTES = 128, 32 * 1024**2
# With the channels last, where sums take the place of copies: fewer in half precision, whose cores are faster.
_WAVES, _MOST_WAVES_BYTES = {4: 1.0, 2: 0.5}, {4: 17_301_504, 2: 8 * 1024**2}
# Sums of kernels whose channels are padded; of few channels, as of four: where windows overlap, and with stride 1.
_PADDED_SPLITS, _WINDOW_SPLITS, _DENSE_SPLITS = 4, 122, 32
# Channel by channel with the channels last, as ConvNeXt has it. In float32, of wider images, each channel is padded to
# what tensor cores read at once, as if it were a group; in 16 bits there are so many partial sums of each image.
_WIDE_PLACES, _DEPTH_SUMS_BYTES, _DEPTH_SPLITS = 400, 10 * 1024**2, 8
# Colours, say: in float32 cuDNN has kernels for so few channels that read the image as it lies, with stride 1.
_FEW_CHANNELS = 4


@dataclass(frozen=True)
class Convolution:
    """A convolution, by its tensors; for a transposed convolution, the larger `image` is its result.

    Args:
        image, kernel, result: the tensors of the convolution.
        stride, padding: one number for each dimension, or one for all.
        groups: the number of groups of channels.
        channels_last: whether image and result are in the channels-last format.
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
        if not self._has_few_channels:
            return self._of_copies(capability)
        if not self._on_tensor_cores(capability) or self._is_dense:
            return 0
        copied = (self.image, self.kernel) if self.channels_last else (self.image, self.kernel, self.result)
        return sum(_padded(each) if self._is_of_patches else each.nbytes for each in copied)

    def image_bytes(self, capability: Capability) -> int:
        """The workspace of the image's gradient."""
        if not self._has_few_channels:
            return self._of_copies(capability)
        if not self.channels_last or not self._on_tensor_cores(capability):
            return 0
        if self._is_dense:
            return _padded(self.image) + _padded(self.kernel)
        return self._images_bytes + self.kernel.nbytes

    def _of_copies(self, capability: Capability) -> int:
        if not self._on_tensor_cores(capability):
            return 0
        if self._is_product and not self.channels_last:
            # A product of matrices, in place, unless rows begin where the cores cannot read them.
            return 0 if self._places % 4 == 0 else self._images_bytes
        return self._copies_bytes

    def weight_bytes(self, capability: Capability, multiprocessors: int = 132) -> int:
        """The workspace of the weight's gradient."""
        if self._is_of_depths and self.channels_last:
            return self._of_depths(capability)
        if not self._on_tensor_cores(capability):
            return 0
        if not self._is_product:
            return self._copies_bytes + self._sums_bytes(multiprocessors)
        one = 4 * self.kernel.numel()
        if self.channels_last:
            itemsize = self.image.itemsize
            return min(int(multiprocessors * _WAVES[itemsize]) * one, _MOST_WAVES_BYTES[itemsize])
        if self._places % (32 // self.image.itemsize) == 0:
            return min(_PRODUCT_SPLITS * one, _MOST_PRODUCT_BYTES)
        return self._images_bytes + self._sums_bytes(multiprocessors)

    def _of_depths(self, capability: Capability) -> int:
        if self.image.itemsize == 2 and capability >= (7, 0):
            return _DEPTH_SPLITS * self.image.size(0) * 4 * self.kernel.numel()
        if not self._multiplies_32(capability) or self._places < _WIDE_PLACES:
            return 0
        return 16 // self.image.itemsize * self._images_bytes + _DEPTH_SUMS_BYTES

    def _sums_bytes(self, multiprocessors: int) -> int:
        """Returns the bytes of the partial sums of the weight's gradient, one for each thread block."""
        one, padded = 4 * self.kernel.numel(), _padded(self.kernel) * 4 // self.kernel.itemsize
        if self.image.size(1) <= _FEW_CHANNELS:
            return self._sums_of_few_channels(padded)
        return max(self._sums_of_tiles(multiprocessors), _PADDED_SPLITS * padded if padded > one else 0)

    def _sums_of_tiles(self, multiprocessors: int) -> int:
        positions = self.result.size(0) * math.prod(self.result.shape[2:])
        if self.image.itemsize == 2 and positions <= _TOO_FEW:
            return 0
        sides = [_SMALL_TILE if channels <= _SMALL_TILE else _TILE for channels in self.kernel.shape[:2]]
        places = math.prod(self.kernel.shape[2:])
        tiles = places * math.prod(-(-size // side) for size, side in zip(self.kernel.shape[:2], sides, strict=True))
        shares = min(multiprocessors // tiles, _MOST_SHARES)
        if self.channels_last:
            shares = min(shares, positions // _SHARE)
        if 2 * tiles <= multiprocessors:
            return shares * tiles * 4 * math.prod(sides) if shares > 1 else 0
        waves = -(-tiles // multiprocessors)
        return multiprocessors * 4 * math.prod(sides) if tiles < _FILLED * waves * multiprocessors else 0

    def _sums_of_few_channels(self, padded_bytes: int) -> int:
        if self._is_of_patches:
            return 0 if self.image.itemsize == 4 else _PADDED_SPLITS * padded_bytes
        of_four = 4 * self.kernel.numel() // self.kernel.size(1) * _FEW_CHANNELS
        return (_DENSE_SPLITS if self._is_dense else _WINDOW_SPLITS) * of_four

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
    def _is_dense(self) -> bool:
        """Whether there is a result for each position."""
        return max(self.stride) == 1

    @property
    def _is_of_patches(self) -> bool:
        """Whether its windows lie side by side."""
        return not self._is_dense and all(map(int.__le__, self.kernel.shape[2:], self._strides))

    @property
    def _strides(self) -> tuple[int, ...]:
        dims = self.kernel.dim() - 2
        return self.stride * dims if len(self.stride) == 1 else self.stride

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
        is_point = all(size == 1 for size in self.kernel.shape[2:])  # which lies in both layouts at once
        sizes = [(each.nbytes, _padded(each), lies_so) for each in (self.image, self.result)]
        sizes.append((self.kernel.nbytes, _padded(self.kernel), lies_so or is_point))
        return sum(padded for nbytes, padded, lies in sizes if not lies or padded != nbytes)


def _padded(tensor: torch.Tensor) -> int:
    """Its bytes with as many channels as tensor cores read at once, or a multiple."""
    at_once = 16 // tensor.itemsize
    channels = tensor.size(1)
    return tensor.nbytes // channels * (-(-channels // at_once) * at_once)
