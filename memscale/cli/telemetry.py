"""``memscale telemetry``: what is counted, whether it is, and the one place that sends it."""

from __future__ import annotations

import http.client
import json
import platform
import ssl
import sys
import threading
from datetime import date, datetime, timezone
from typing import Any
from urllib.parse import SplitResult, urlsplit

import torch

from memscale.core import ConfigError
from memscale.hardware import card_name, card_names
from memscale.telemetry import (
    Consent,
    Machine,
    State,
    Weeks,
    consent,
    folder,
    give_consent,
    page,
    take_consent_back,
    week_of,
)

_SECONDS = 3.0  # for all of a post: looking the name up, connecting, sending, waiting
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SYSTEMS = ("darwin", "linux", "windows")


def status() -> int:
    """Print what holds, what decided it, and where the files are."""
    now = consent()
    print(f"telemetry is {now.state.value}: {now.because}")
    print(f"files: {folder() or 'none'}")
    if now.endpoint:
        print(f"endpoint: {now.endpoint}")
    for state in (State.LOCAL, State.ON):
        if names := Weeks(state).names():
            print(f"counted while {state.value}: {', '.join(names)}")
    return 0


def switch(state: State, endpoint: str = "") -> int:
    """Write down what the user wants, and print what then holds.

    Raises:
        ConfigError: there is no endpoint, or it is none; or nothing can be written.
    """
    if state is State.ON:
        _checked(endpoint)
    if state is State.OFF:
        take_consent_back()
    else:
        give_consent(state, since=date.today().isoformat(), endpoint=endpoint)
    return status()


def show(week: str | None, as_json: bool) -> int:
    """Print the bytes that `send` would send, or those of one week.

    Raises:
        ConfigError: nothing was counted in that week.
    """
    now = consent()
    on = Weeks(State.ON)
    if week is not None:
        weeks = on if week in on.names() else Weeks(State.LOCAL)
        reports = [weeks.report(week, machine())]
    else:
        reports = [on.report(name, machine()) for name in on.unsent(_this_week())]
    for report in reports:
        print(json.dumps(json.loads(report), indent=1) if as_json else report.decode())
    if not reports:
        said = "that is over" if on.names() else "since it was switched on"
        counted = [*on.names(), *Weeks(State.LOCAL).names()]
        more = f"; `--week {counted[-1]}` shows what was counted in that one" if counted else ""
        why = f"no week {said} was counted, and telemetry is {now.state.value}{more}"
        print(f"nothing would be sent: {why}", file=sys.stderr)
    return 0


def send(dry_run: bool) -> int:
    """Post the weeks that are over, each once; return 1 if one could not be sent, which then stays.

    Raises:
        ConfigError: the user has not switched it on.
    """
    now = consent()
    if now.state is not State.ON:
        return _not_on(now)
    weeks = Weeks(State.ON)
    unsent = weeks.unsent(_this_week())
    if not unsent:
        print("nothing to send: no week that is over has been counted")
    for week in unsent:
        report = weeks.report(week, machine())
        if dry_run:
            print(f"would post {len(report)} bytes of {week} to {now.endpoint}:\n{report.decode()}")
            continue
        fault = _posted(_checked(now.endpoint), report, _SECONDS)
        if fault is not None:
            print(f"memscale: {week} is not sent, and stays: {now.endpoint} {fault}", file=sys.stderr)
            return 1
        weeks.keep_sent(week, report)
        print(f"sent {len(report)} bytes of {week} to {now.endpoint}")
    return 0


def clean() -> int:
    """Remove every file of this, consent too."""
    take_consent_back(clean=True)
    return status()


def machine() -> Machine:
    """What a report says of this machine."""
    version = ".".join(torch.__version__.split(".")[:2])
    own = sys.modules["memscale"].__version__
    system = platform.system().lower()
    accelerator, card = "none", "none"
    if torch.cuda.is_available():
        accelerator = "rocm" if torch.version.hip else "cuda"
        card = card_name(torch.cuda.get_device_name()) or "other"
    elif torch.backends.mps.is_available():
        accelerator, card = "mps", "other"
    elif torch.xpu.is_available():
        accelerator, card = "xpu", "other"
    return Machine(
        memscale=".".join(own.split(".")[:2]),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        torch=version,
        os=system if system in _SYSTEMS else "other",
        accelerator=accelerator,
        card=card,
    )


def documentation() -> str:
    """What ``docs/telemetry.md`` says."""
    return page(card_names())


def _not_on(now: Consent) -> int:
    if now.because.startswith("$"):  # a scheduled send where it is off for now: no fault of anybody's
        print(f"nothing is sent: telemetry is {now.state.value}, for {now.because}")
        return 0
    raise ConfigError(
        f"telemetry is {now.state.value} ({now.because}); `memscale telemetry on --endpoint URL` lets it be sent"
    )


def _checked(endpoint: str) -> SplitResult:
    try:
        url = urlsplit(endpoint)
        port_is_sound = url.port is None or url.port > 0
    except ValueError:
        url, port_is_sound = urlsplit(""), False
    encrypted = url.scheme == "https" or (url.scheme == "http" and url.hostname in _LOOPBACK)
    if not encrypted or not url.hostname or not port_is_sound or "@" in url.netloc or not endpoint.isascii():
        raise ConfigError(
            f"--endpoint {endpoint!r} must be an https:// address without a user's name (http:// on this machine "
            "only); there is none that is built in"
        )
    return url


def _posted(url: SplitResult, report: bytes, seconds: float) -> str | None:
    """Post, and return what went wrong. The thread bounds what no timeout of a socket does, as looking a name up."""
    answer: list[str | None] = []
    posting = threading.Thread(target=lambda: answer.append(_answer(url, report, seconds)), daemon=True)
    posting.start()
    posting.join(seconds)
    return answer[0] if answer else f"gave no answer in {seconds:g} s"


def _answer(url: SplitResult, report: bytes, seconds: float) -> str | None:
    connection: Any
    if url.scheme == "https":
        connection = http.client.HTTPSConnection(url.netloc, timeout=seconds, context=ssl.create_default_context())
    else:
        connection = http.client.HTTPConnection(url.netloc, timeout=seconds)
    headers = {"Content-Type": "application/json", "User-Agent": "memscale"}
    try:
        connection.request("POST", f"{url.path or '/'}{'?' * bool(url.query)}{url.query}", report, headers)
        answer = connection.getresponse()
        return None if 200 <= answer.status < 300 else f"answered {answer.status}"
    except Exception as error:  # of a server, of a network
        return f"failed: {type(error).__name__}: {error}"
    finally:
        connection.close()


def _this_week() -> str:
    return week_of(datetime.now(timezone.utc))
