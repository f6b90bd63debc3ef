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
    span,
)
from memscale.hardware.device import Hardware, cpu_name
from memscale.hardware.host_calls import HostSeconds, host_calls
from memscale.hardware.roofline import Work, has_rate, narrow_dtype, nominal, seconds
