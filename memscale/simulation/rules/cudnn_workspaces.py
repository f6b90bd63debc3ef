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

# The weight's gradient is cut into tiles of `_TILE` x `_TILE` channels at each position of the kernel. Where the tiles
# leave multiprocessors idle, several blocks share the positions of one tile, each with its own float32 sum. Two waves
# of thread blocks are also cut where the second wave fills less than `_FILLED` of the card.
_TILE, _SMALL_TILE, _FILLED = 128, 64, 0.58
_MOST_SHARES = 16
# `_SHARE`: the fewest positions of a share in channels last. Half precision shares only above `_TOO_FEW` positions.
_SHARE, _TOO_FEW = 1024, 16_384
_PRODUCT_SPLITS, _MOST_PRODUCT_BYTES = 128, 32 * 1024**2
# In channels last sums take the place of copies; half precision, with faster cores, has fewer of them. By itemsize.
_WAVES, _MOST_WAVES_BYTES = {4: 1.0, 2: 0.5}, {4: 17_301_504, 2: 8 * 1024**2}
# Numbers of partial sums: for padded channels; for four channels with overlapping windows; the same with stride 1.
_PADDED_SPLITS, _WINDOW_SPLITS, _DENSE_SPLITS = 4, 122, 32
# Depthwise convolutions in channels last (ConvNeXt). In float32, above `_WIDE_PLACES` positions, each channel is padded
# to the number that tensor cores read at once. In 16 bits each image has `_DEPTH_SPLITS` partial sums.
_WIDE_PLACES, _DEPTH_SUMS_BYTES, _DEPTH_SPLITS = 400, 10 * 1024**2, 8
# RGB images: in float32 cuDNN has kernels for up to four channels that read the image in place, with stride 1.
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
        """Returns the workspace bytes of the result."""
        if not self._has_few_channels:
            return self._of_copies(capability)
        if not self._on_tensor_cores(capability) or self._is_dense:
            return 0
        copied = (self.image, self.kernel) if self.channels_last else (self.image, self.kernel, self.result)
        return sum(_padded(each) if self._is_of_patches else each.nbytes for each in copied)

    def image_bytes(self, capability: Capability) -> int:
        """Returns the workspace bytes of the image's gradient."""
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
            # A matrix product runs in place, unless its rows are unaligned for the cores.
            return 0 if self._places % 4 == 0 else self._images_bytes
        return self._copies_bytes

    def weight_bytes(self, capability: Capability, multiprocessors: int = 132) -> int:
        """Returns the workspace bytes of the weight's gradient."""
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
        if self._is_of_depths:  # PyTorch's own kernel, or a kernel without copies
            return False
        if self.image.dtype is torch.float32:
            return self._multiplies_32(capability) and self.image.size(1) > 1
        return self.image.itemsize == 2 and capability >= (7, 0)

    def _multiplies_32(self, capability: Capability) -> bool:
        allowed = torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
        return self.image.dtype is torch.float32 and capability >= (8, 0) and bool(allowed)

    @property
    def _is_of_depths(self) -> bool:
        """Whether the convolution is depthwise."""
        return self.groups == self.image.size(1) > 1

    @property
    def _has_few_channels(self) -> bool:
        return self.image.dtype is torch.float32 and self.image.size(1) <= _FEW_CHANNELS

    @property
    def _is_dense(self) -> bool:
        """Whether the stride is 1, so that every position has a result."""
        return max(self.stride) == 1

    @property
    def _is_of_patches(self) -> bool:
        """Whether the windows lie side by side without overlap."""
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
        """Returns the bytes of channels-last copies, padded to what the cores read at once; matching tensors stay."""
        lies_so = self.channels_last and not self._has_few_channels
        is_point = all(size == 1 for size in self.kernel.shape[2:])  # a 1x1 kernel has the same bytes in both layouts
        sizes = [(each.nbytes, _padded(each), lies_so) for each in (self.image, self.result)]
        sizes.append((self.kernel.nbytes, _padded(self.kernel), lies_so or is_point))
        return sum(padded for nbytes, padded, lies in sizes if not lies or padded != nbytes)


def _padded(tensor: torch.Tensor) -> int:
    """Returns the tensor's bytes with its channels padded to a multiple of what tensor cores read at once."""
    at_once = 16 // tensor.itemsize
    channels = tensor.size(1)
    return tensor.nbytes // channels * (-(-channels // at_once) * at_once)
