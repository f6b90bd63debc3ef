"""`limit_peak`, for users' own test suites: a test fails if a training step would take more memory than a limit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from memscale.config import Config
from memscale.core import budget_bytes, format_unlike
from memscale.hardware import Hardware
from memscale.simulation import MemoryProfiler, Profile, as_hardware

Test = TypeVar("Test", bound=Callable[..., object])


def limit_peak(limit: int | float | str, *, hardware: Hardware | str | None = None) -> Callable[[Test], Test]:
    """Decorates a test whose body is one training step: the test fails if the step would take more than `limit`.

    The body is simulated twice in a row, and never run. This takes about a second and almost no memory for a model of
    any size, and needs no card. Models and optimizers may be made in the body, or come from outside, such as fixtures,
    which do not change. In the second simulation an optimizer from outside has its states; both simulations count.

    >>> import torch, memscale as ms
    >>> from memscale.testing import limit_peak
    >>> @limit_peak("1GiB", hardware="rtx-4090")
    ... def test_a_step_of_the_large_model():
    ...     model = torch.nn.Sequential(*[torch.nn.Linear(8192, 8192) for _ in range(4)])
    ...     model(torch.ones(16, 8192)).square().mean().backward()
    >>> test_a_step_of_the_large_model()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    AssertionError: test_a_step_of_the_large_model takes 2.03 GiB of NVIDIA GeForce RTX 4090, over its limit of 1.00 GiB
    ...

    Args:
        limit: bytes, ``"22GiB"``, or a share of the device's memory, ``"90%"``. Compared with the peak that the caching
            allocator reserves; on a CPU, with the peak of live bytes.
        hardware: as in `memscale.profile`; `None` is this machine's CPU.

    Raises:
        AssertionError: in the test, if the step takes more; the message has the table of the profile.
        ConfigError: the limit or the hardware is wrong; in the test, if its body reads values that only a real run
            computes.
    """
    device = as_hardware(hardware, "cpu")
    limit_bytes = budget_bytes(limit, device.usable_bytes, argument="limit")

    def limited(test: Test) -> Test:
        @functools.wraps(test)
        def simulated(*args: Any, **kwargs: Any) -> None:
            body = functools.partial(test, *args, **kwargs)
            config = Config(use_empirical_fallback=False)
            profile = MemoryProfiler(body, hardware=device, config=config).profile()
            taken = profile.taken_bytes
            assert taken <= limit_bytes, _too_much(test.__name__, taken, limit_bytes, profile)

        return simulated  # type: ignore[return-value]

    return limited


def _too_much(name: str, taken: int, limit_bytes: int, profile: Profile) -> str:
    takes, limit = format_unlike(taken, limit_bytes)
    return f"{name} takes {takes} of {profile.hardware.name}, over its limit of {limit}\n{profile}"
