"""The step of Adam, AdamW, SGD with momentum, RMSprop and Adagrad on quantized moments, in one kernel of bitsandbytes.

The kernel restores the moments of a block, steps its numbers and quantizes the moments again, so that no moment is ever
in full. It checks neither shapes nor dtypes; `KernelStep.takes` does. Where the kernel differs from PyTorch's step,
`KernelStep.run` makes up for it:

- The kernel leaves out numbers with a gradient that is NaN or infinite. These numbers become NaN, as in PyTorch.
- The kernel decays weights after the update. AdamW's decay comes before it.
- The kernel may give a small second moment the code of zero, so that the next update would divide by `eps`. A moment
  that has seen a gradient other than zero gets the next code.
- The kernel of RMSprop and Adagrad squares the gradient with its weight decay, and divides the one without (on CUDA;
  the kernel for CPUs divides the one with). `KernelStep.run` adds the weight decay to the gradient beforehand.

Source: bitsandbytes 0.50.2, ``csrc/kernels.cu``, `kOptimizerStatic8bit2StateBlockwise` and
`kOptimizerStatic8bit1StateBlockwise`; ``bitsandbytes/optim/optimizer.py`` for the arguments. The second one quantizes
with `quantize_2D<1>`, a search for moments with a sign. Given numbers that are at least zero and the map of moments
without a sign, `quantize_2D<1>` finds the codes that `quantize_2D<0>` finds: the two differ in a bound below the first
code, and such numbers are nearer to that code. What is said here of CUDA was read there; the tests run the kernel for
CPUs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from memscale.core import device_type
from memscale.optimizers.blockwise import LARGEST, codes_in, codes_of, in_stream_order, kernels

_BLOCK = 256  # the kernel's only block
_MOST_NUMBERS = 2**31 - 1  # it counts them in 32 bits
_DTYPES = (torch.float32, torch.bfloat16)  # in a `state_dict`, float16 would make small moments zero
_ADAM = (torch.optim.Adam, torch.optim.AdamW)
_CLASSES = (*_ADAM, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad)  # a subclass may step otherwise
_OTHER_STEPS = ("amsgrad", "maximize", "differentiable", "capturable", "nesterov", "dampening", "centered")
_SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")  # the divisors, which have no sign


class KernelStep(NamedTuple):
    """A step with the options of a group.

    Attributes:
        name: bitsandbytes' name of the optimizer.
        moments: the names of its moments.
        betas: how much of each moment stays.
        eps: what is added to the divisor.
        rate: the learning rate of the first step.
        rate_decay: the learning rate of step n is `rate / (1 + (n - 1) * rate_decay)`.
        decay: the factor of the weights before the update.
        penalty: the factor of the weights in the gradient.
        is_fused: whether PyTorch's step would be its fused kernel.
    """

    name: str
    moments: tuple[str, ...]
    betas: tuple[float, float]
    eps: float
    rate: float
    rate_decay: float = 0.0
    decay: float = 1.0
    penalty: float = 0.0
    is_fused: bool = False

    @classmethod
    def of(cls, own_class: type[torch.optim.Optimizer], group: dict[str, Any], block: int) -> KernelStep | None:
        """Returns the step of `own_class` with the options of `group`; `None` if the kernel has no such step."""
        if own_class not in _CLASSES or block != _BLOCK or any(group.get(name) for name in _OTHER_STEPS):
            return None
        rate, decay, eps, is_fused = group["lr"], group["weight_decay"], group.get("eps", 0.0), bool(group.get("fused"))
        betas = group.get("betas", (group.get("alpha", group.get("momentum", 0.0)), 0.0))
        if not all(isinstance(number, (int, float)) for number in (rate, decay, *betas)):  # but tensors on the device
            return None
        if own_class in _ADAM:
            if decay and not group["decoupled_weight_decay"]:  # Adam adds the decay to the gradient
                return None
            share = 1.0 - rate * decay
            return cls("adam", ("exp_avg", "exp_avg_sq"), betas, eps, rate, decay=share, is_fused=is_fused)
        if own_class is torch.optim.SGD and group["momentum"]:
            return cls("momentum", ("momentum_buffer",), betas, eps, rate, penalty=decay)
        if own_class is torch.optim.RMSprop and not group["momentum"]:
            return cls("rmsprop", ("square_avg",), betas, eps, rate, penalty=decay)
        if own_class is torch.optim.Adagrad and not is_fused:
            return cls("adagrad", ("sum",), betas, eps, rate, group["lr_decay"], penalty=decay)
        return None

    def takes(self, parameter: torch.Tensor, states: dict[str, Any]) -> bool:
        """Whether the kernel can step `parameter`, whose moments `states` has quantized by an earlier step."""
        gradient, codes = parameter.grad, [states.get(name) for name in self.moments]
        if gradient is None or not codes_in(states).keys() >= set(self.moments):
            return False
        if ("step" in states) == (self.name == "momentum"):
            return False
        return (
            device_type(parameter) == "cuda"
            and parameter.dtype in _DTYPES
            and (gradient.dtype, gradient.shape) == (parameter.dtype, parameter.shape)
            and parameter.numel() <= _MOST_NUMBERS
            and all(
                each is not None and each.layout is torch.strided and each.is_contiguous()
                for each in (parameter, gradient, *codes)
            )
            and hasattr(kernels(), "optimizer_update_8bit_blockwise")
        )

    def run(self, parameter: torch.Tensor, states: dict[str, Any], count: int, at_once: int) -> None:
        """Makes step number `count` of `parameter`; changes the moments in `states` in place.

        The step goes over slices with temporaries of at most `at_once` bytes.
        """
        gradient = parameter.grad
        assert gradient is not None, "`takes` was true"
        codes = [states[name].view(-1) for name in self.moments]
        largest = [states[f"{name}{LARGEST}"] for name in self.moments]
        numbers, gradients = parameter.detach().view(-1), gradient.detach().view(-1)
        # PyTorch's fused step rounds half precision once, at its end.
        in_float32 = self.is_fused and self.decay != 1.0 and parameter.dtype != torch.float32
        # Bytes of temporaries for each number: a flag, and the copies in float32 or the gradient with its penalty.
        of_one = 1 + (8 if in_float32 else parameter.itemsize if self._adds_penalty else 0)
        width = max(1, at_once // of_one // _BLOCK) * _BLOCK
        with torch.no_grad():
            for start in range(0, numbers.numel(), width):
                part, blocks = slice(start, start + width), slice(start // _BLOCK, (start + width) // _BLOCK)
                given = numbers[part], gradients[part]
                now = (given[0].float(), given[1].float()) if in_float32 else given
                self._run(*now, [code[part] for code in codes], [one[blocks] for one in largest], count)
                if in_float32:
                    given[0].copy_(now[0])
            numbers.add_(gradients, alpha=0)  # NaN where a gradient is NaN or infinite
        # A kernel from outside of PyTorch changes no version.
        torch.autograd.graph.increment_version([parameter, *codes, *largest])

    @property
    def _adds_penalty(self) -> bool:
        """Whether the penalty is added to the gradient before the kernel runs."""
        return self.penalty != 0 and self.moments[0] in _SECOND_MOMENTS

    def _run(
        self,
        numbers: torch.Tensor,
        gradients: torch.Tensor,
        codes: list[torch.Tensor],
        largest: list[torch.Tensor],
        count: int,
    ) -> None:
        shares = [codes_of(numbers.device, name not in _SECOND_MOMENTS) for name in self.moments]
        second: tuple[Any, ...] = (codes[1], shares[1], largest[1]) if len(codes) == 2 else (None, None, None)
        rate, penalty = self.rate / (1 + (count - 1) * self.rate_decay), self.penalty
        if self._adds_penalty:
            gradients, penalty = gradients.add(numbers, alpha=penalty), 0.0
        has_divisor = self.moments[-1] in _SECOND_MOMENTS
        alive = codes[-1].bool().logical_or_(gradients) if has_divisor else None
        if self.decay != 1.0:
            numbers.mul_(self.decay)
        with in_stream_order(numbers):
            kernels().optimizer_update_8bit_blockwise(
                self.name, gradients, numbers, codes[0], second[0], *self.betas, 0.0, 0.0, self.eps, count, rate,
                shares[0], second[1], largest[0], second[2], penalty, 1.0, False,
            )  # fmt: skip
        if alive is not None:
            torch.maximum(codes[-1], alive.view(torch.uint8), out=codes[-1])
