"""``memscale telemetry``: shows, switches and sends the counts of calls. No other code sends them."""

from __future__ import annotations

import platform
import re
import sys
from datetime import date, datetime, timezone
from typing import Annotated

import torch
import typer
from typer import Option

from memscale.core import SITE, ConfigError, RuntimeUnavailable, http_request
from memscale.telemetry import State, Weeks, consent, folder, give_consent, take_consent_back, week_of

TELEMETRY = typer.Typer()

_SECONDS = 3.0  # the limit for a whole post: name lookup, connection, sending and the answer
_SYSTEMS = ("darwin", "linux", "windows")


@TELEMETRY.callback(invoke_without_command=True)
def telemetry(context: typer.Context) -> None:
    """Counts of calls: off by default, and sent only by `send`. Without a command: show the present setting."""
    if context.invoked_subcommand is None:
        status()


@TELEMETRY.command("status")
def status() -> None:
    """Show the present setting, what decided it, and the files."""
    now = consent()
    print(f"telemetry is {now.state.value}: {now.because}")
    print(f"files: {folder() or 'none'}")
    if now.endpoint:
        print(f"endpoint: {now.endpoint}")
    for state in (State.LOCAL, State.ON):
        if names := Weeks(state).names():
            print(f"counted while {state.value}: {', '.join(names)}")


@TELEMETRY.command("on")
def switch_on(endpoint: Annotated[str, Option(metavar="URL", help="Where `send` posts to; none is built in.")]) -> None:
    """Count calls from now on, and let `send` post the counts."""
    _check(endpoint)
    give_consent(State.ON, since=date.today().isoformat(), endpoint=endpoint)
    status()


@TELEMETRY.command("local")
def switch_local() -> None:
    """Count calls on this machine from now on, and send nothing."""
    give_consent(State.LOCAL, since=date.today().isoformat())
    status()


@TELEMETRY.command("off")
def switch_off() -> None:
    """Count nothing from now on; `clean` removes the present counts."""
    take_consent_back()
    status()


@TELEMETRY.command("show")
def show(
    week: Annotated[str | None, Option(metavar="YYYY-Www", help="One week, also the present one.")] = None,
) -> None:
    """Print the exact bytes that `send` would send."""
    on = Weeks(State.ON)
    weeks = on if week is None or week in on.names() else Weeks(State.LOCAL)
    names = on.unsent(_this_week()) if week is None else [week]
    for name in names:
        print(weeks.report(name, machine()).decode())
    if not names:
        counted = [*on.names(), *Weeks(State.LOCAL).names()]
        more = f"; `--week {counted[-1]}` shows what was counted in that one" if counted else ""
        why = f"no finished week was counted while it was on, and telemetry is {consent().state.value}{more}"
        print(f"nothing would be sent: {why}", file=sys.stderr)


@TELEMETRY.command("send")
def send(
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
) -> int:
    """Post each finished week once. Exits with 1 if a week could not be sent; it stays for the next time."""
    now = consent()
    if now.state is not State.ON and now.because.startswith("$"):  # a scheduled send, while a variable turns it off
        print(f"nothing is sent: telemetry is {now.state.value}, for {now.because}")
        return 0
    if now.state is not State.ON:
        raise ConfigError(
            f"telemetry is {now.state.value} ({now.because}); `memscale telemetry on --endpoint URL` lets it be sent"
        )
    weeks = Weeks(State.ON)
    unsent = weeks.unsent(_this_week())
    if not unsent:
        print("nothing to send: no finished week has counts")
    for week in unsent:
        report = weeks.report(week, machine())
        if dry_run:
            print(f"would post {len(report)} bytes of {week} to {now.endpoint}:\n{report.decode()}")
            continue
        _check(now.endpoint)
        try:
            answered, _ = http_request("POST", now.endpoint, {}, report, seconds=_SECONDS)
            if not 200 <= answered < 300:
                raise RuntimeUnavailable(f"{now.endpoint} answered {answered}")
        except RuntimeUnavailable as error:
            print(f"memscale: {week} is not sent, and stays: {error}", file=sys.stderr)
            return 1
        weeks.keep_sent(week, report)
        print(f"sent {len(report)} bytes of {week} to {now.endpoint}")
    return 0


@TELEMETRY.command("clean")
def clean() -> None:
    """Switch it off, and remove everything that was counted or sent."""
    take_consent_back(clean=True)
    status()


def machine() -> dict[str, str]:
    """Returns the fields of a report about this machine: entries of closed lists, and two-number versions."""
    version = ".".join(torch.__version__.split(".")[:2])
    own = sys.modules["memscale"].__version__
    system = platform.system().lower()
    accelerator, card = "none", "none"
    if torch.cuda.is_available():
        from memscale.hardware import card_name

        accelerator = "rocm" if torch.version.hip else "cuda"
        card = card_name(torch.cuda.get_device_name()) or "other"
    elif torch.backends.mps.is_available():
        accelerator, card = "mps", "other"
    elif torch.xpu.is_available():
        accelerator, card = "xpu", "other"
    return {
        "memscale": ".".join(own.split(".")[:2]),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": version,
        "os": system if system in _SYSTEMS else "other",
        "accelerator": accelerator,
        "card": card,
    }


def _check(endpoint: str) -> None:
    if not re.fullmatch(f"{SITE}([/?][!-~]*)?", endpoint, re.ASCII | re.IGNORECASE):
        raise ConfigError(
            f"--endpoint {endpoint!r} must be an https:// address without a user's name (http:// on this machine "
            "only); no address is built in"
        )


def _this_week() -> str:
    return week_of(datetime.now(timezone.utc))
