"""Opt-in counters of how memscale is used: off by default, and nothing in this package opens a connection."""

from memscale.telemetry.consent import Consent, State, consent, folder, give_consent, take_consent_back
from memscale.telemetry.counting import count, counted, uncounted, week_of
from memscale.telemetry.report import Weeks
