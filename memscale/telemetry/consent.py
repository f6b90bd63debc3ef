"""`consent`: whether anything is counted: off unless the user has turned it on; variables can only lower that."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import shutil
from pathlib import Path

from memscale.core import ConfigError
from memscale.telemetry.counters import SCHEMA

_FILE = "consent.json"

# Variables of people, build machines and tests that turn counting off with any value but "", "0" and "false".
_NAMES = (
    "DO_NOT_TRACK HF_HUB_OFFLINE CI GITHUB_ACTIONS GITLAB_CI BUILDKITE CIRCLECI TF_BUILD JENKINS_URL TRAVIS "
    "CODEBUILD_BUILD_ID TEAMCITY_VERSION PYTEST_CURRENT_TEST"
)
_REFUSALS = tuple(_NAMES.split())


class State(enum.Enum):
    """The extent of counting and sending; each state includes the previous one."""

    OFF = "off"  # nothing is counted
    LOCAL = "local"  # calls are counted in files that are never sent
    ON = "on"  # ``memscale telemetry send`` also posts what was counted since


@dataclasses.dataclass(frozen=True)
class Consent:
    """The state in force, and its reason.

    Attributes:
        state: what is counted and sent.
        because: the reason, in words.
        endpoint: the address that ``send`` posts to; ``""`` unless the state is ON.
    """

    state: State
    because: str
    endpoint: str = ""


def folder() -> str | None:
    """Returns the folder of all telemetry files, which may not exist; None if the user has no place for settings."""
    for name, below in (("XDG_CONFIG_HOME", ""), ("HOME", "/.config"), ("APPDATA", "")):
        if os.path.isabs(home := os.environ.get(name, "")):  # the XDG specification ignores relative paths
            return f"{home}{below}/memscale/telemetry"
    return None


def is_off() -> bool:
    """Whether there is no consent file; this check is the whole cost while telemetry is off."""
    place = folder()
    return place is None or not os.access(f"{place}/{_FILE}", os.F_OK)


def consent() -> Consent:
    """Returns the state in force in this process. Environment variables can lower the user's choice, never raise it."""
    path = Path(folder() or os.devnull, _FILE)
    if is_off():
        return Consent(State.OFF, "the default: nobody has switched it on")
    try:
        if not path.is_file():  # reading a pipe would wait for its other end
            raise ValueError
        chosen = json.loads(path.read_bytes())
        state, endpoint = State(chosen["state"]), str(chosen["endpoint"])
        because = f"memscale telemetry {state.value}, of {chosen['since']}"
        if state is State.ON and chosen["schema"] != SCHEMA:
            state, because = State.LOCAL, f"schema {SCHEMA} is new since {because}; `telemetry on` agrees to it"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return Consent(State.OFF, f"{path} cannot be read; say `memscale telemetry local` or `on` again")
    for name in _REFUSALS:
        if os.environ.get(name, "").strip().lower() not in ("", "0", "false"):
            return Consent(State.OFF, f"${name} is set")
    own = os.environ.get("MEMSCALE_TELEMETRY", "").strip().lower()
    if own not in ("", "on"):
        return Consent(State.LOCAL if own == "local" else State.OFF, f"$MEMSCALE_TELEMETRY={own}")
    return Consent(state, because, endpoint if state is State.ON else "")


def give_consent(state: State, *, since: str, endpoint: str = "") -> None:
    """Writes the user's choice to the consent file.

    Raises:
        ConfigError: there is no folder to write it to.
    """
    place = folder()
    if place is None:
        raise ConfigError("there is no folder for settings: set $HOME or $XDG_CONFIG_HOME to an absolute path")
    chosen = {"state": state.value, "endpoint": endpoint, "since": since, "schema": SCHEMA}
    try:
        os.makedirs(place, mode=0o700, exist_ok=True)
        Path(place, _FILE).write_text(json.dumps(chosen), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{place} cannot be written: {error.strerror}; set $XDG_CONFIG_HOME to a folder that can"
        ) from error


def take_consent_back(*, clean: bool = False) -> None:
    """Turns telemetry off; `clean` also deletes everything that was counted and sent.

    Raises:
        ConfigError: a file cannot be removed.
    """
    place = Path(folder() or os.devnull)
    try:
        if clean and place.is_dir():
            shutil.rmtree(place)
        elif not is_off():
            (place / _FILE).unlink()
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be removed: {error.strerror}; remove it by hand") from error
