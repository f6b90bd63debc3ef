"""Devices as data: cards, measured speeds, and the seconds of an operator from its FLOPs and memory traffic."""

from memscale.hardware.cards import CARDS, card_name, card_names
from memscale.hardware.copies import (
    COLLECTIVES,
    DIRECTIONS,
    Direction,
    Span,
    assumed_links,
    assumed_speeds,
    collective_seconds,
    copy_seconds,
    host_seconds,
    knows_copies,
    new_memory_seconds,
    span,
)
from memscale.hardware.device import Hardware, cpu_name
from memscale.hardware.host_calls import HostSeconds, host_calls
from memscale.hardware.nominal import nominal
from memscale.hardware.roofline import Seconds, has_rate, narrow_dtype, seconds
from memscale.hardware.work import Work, tfloat32, work_of

__all__ = [
    "CARDS",
    "COLLECTIVES",
    "DIRECTIONS",
    "Direction",
    "Hardware",
    "HostSeconds",
    "Seconds",
    "Span",
    "Work",
    "assumed_links",
    "assumed_speeds",
    "card_name",
    "card_names",
    "collective_seconds",
    "copy_seconds",
    "cpu_name",
    "has_rate",
    "host_calls",
    "host_seconds",
    "knows_copies",
    "narrow_dtype",
    "new_memory_seconds",
    "nominal",
    "seconds",
    "span",
    "tfloat32",
    "work_of",
]
