"""Default speeds for a CPU that was not measured, so that plans for it are chosen by likely times.

Rounded results of `Hardware.measure` on one thread of an AMD EPYC with AVX-512 (torch 2.13). Other processors are
faster or slower by about the same factor for every operator, and a choice between plans depends only on ratios.
"""

from __future__ import annotations

import dataclasses

import torch

from memscale.hardware.device import Hardware

# FLOPs a second by dtype, bytes a second, seconds of a call: `print(memscale.Hardware.measure())` of that processor.
_FLOPS = {"float64": 45e9, "float32": 100e9, "bfloat16": 190e9, "float16": 2.7e9}
_BANDWIDTH = 24e9
_CALLS = {"operator": 13e-6, "backward": 11e-6, "view": 2e-6, "module": 7e-6}
# FLOPs (the first five) or bytes a second, in float32 and in bfloat16, of operators slower than the rates above.
_RATES = {
    "_scaled_dot_product_flash_attention_for_cpu": (28e9, 23e9),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (37e9, 18e9),
    "bmm": (55e9, 110e9),
    "convolution": (67e9, 120e9),
    "convolution_backward": (75e9, 100e9),
    "_log_softmax": (7.7e9, 4e9),
    "_log_softmax_backward_data": (12e9, 10e9),
    "_safe_softmax": (2.4e9, 2e9),
    "_softmax": (9.2e9, 4.1e9),
    "_softmax_backward_data": (15e9, 13e9),
    "add": (12e9, 13e9),
    "avg_pool2d": (2.4e9, 1.1e9),
    "avg_pool2d_backward": (4.9e9, 1.5e9),
    "bernoulli_": (0.48e9, 0.24e9),
    "clone": (8e9, 6.5e9),
    "div": (13e9, 16e9),
    "embedding": (5.2e9, 3.6e9),
    "exp": (6.6e9, 6.7e9),
    "gelu": (5e9, 2.7e9),
    "gelu_backward": (7.1e9, 3.2e9),
    "masked_fill": (5e9, 3.1e9),
    "max_pool2d_with_indices": (0.9e9, 0.54e9),
    "mean": (16e9, 1.7e9),
    "mul": (14e9, 16e9),
    "native_batch_norm": (3.3e9, 9.1e9),
    "native_batch_norm_backward": (10e9, 8.6e9),
    "native_group_norm": (11e9, 8.5e9),
    "native_layer_norm": (9.7e9, 3e9),
    "native_layer_norm_backward": (14e9, 3.6e9),
    "sigmoid": (12e9, 5.5e9),
    "silu": (15e9, 6.3e9),
    "silu_backward": (18e9, 7.9e9),
    "sqrt": (7.9e9, 15e9),
    "stack": (13e9, 7.2e9),
    "sum": (9.6e9, 5.4e9),
    "tanh": (2.2e9, 2.1e9),
    "upsample_nearest2d": (1e9, 0.83e9),
    "upsample_nearest2d_backward": (6.4e9, 3.1e9),
}


def nominal(hardware: Hardware) -> Hardware:
    """Returns `hardware`, a CPU without speeds, with the default speeds times the number of PyTorch's threads.

    >>> round(nominal(Hardware("box", "cpu", 2**34)).flops_per_second["float32"] / torch.get_num_threads() / 1e9)
    100
    """
    threads = torch.get_num_threads()
    rates = {
        f"{name} {dtype}": rate * threads
        for name, both in _RATES.items()
        for dtype, rate in zip(("float32", "bfloat16"), both, strict=True)
    }
    return dataclasses.replace(
        hardware,
        measured=True,  # the speeds are no peaks of a data sheet
        flops_per_second={dtype: rate * threads for dtype, rate in _FLOPS.items()},
        bandwidth_bytes_per_second=_BANDWIDTH * threads,
        operator_rates=rates,
        call_seconds=_CALLS,
    )
