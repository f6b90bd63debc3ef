"""Opt-in counters of how memscale is used: off by default, and nothing in this package opens a connection."""

from memscale.telemetry.consent import Consent, State, consent, folder, give_consent, take_consent_back
from memscale.telemetry.counters import COMMANDS, SCHEMA
from memscale.telemetry.counting import count, counted, uncounted, week_of
from memscale.telemetry.report import Machine, Weeks, canonical

__all__ = [
    "COMMANDS",
    "SCHEMA",
    "Consent",
    "Machine",
    "State",
    "Weeks",
    "canonical",
    "consent",
    "count",
    "counted",
    "folder",
    "give_consent",
    "take_consent_back",
    "uncounted",
    "week_of",
]
