"""Devices as data: cards, measured speeds, and how long an operator takes by its FLOPs and traffic."""

from memscale.hardware.device import Hardware
from memscale.hardware.roofline import Work, has_rate, seconds, work_of

__all__ = [
    "Hardware",
    "Work",
    "has_rate",
    "seconds",
    "work_of",
]
