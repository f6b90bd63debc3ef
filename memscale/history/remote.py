"""`Remote`: the client of a team's server: sends runs, and fetches baselines and plans. It contacts no other host."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from memscale.algebra import Plan
from memscale.core import SITE, ConfigError, MemscaleError, PlanError, http_request
from memscale.history.database import History
from memscale.history.run import Run

_SECONDS = 10.0
_OF_THE_RUN = (400, 409, 413, 422)  # statuses of an answer that rejects one run, so that another attempt is useless
_PAGE = re.compile(rf"({SITE})/t/([\w-]+)(?:/([\w-]+))?/?(?:[?#].*)?", re.ASCII | re.IGNORECASE)
_SECRET = "MEMSCALE_TOKEN"

# The document of a run: the limits of the server, and the fields that it shares with a run and with a run's profile.
_MOST_BYTES = 256 << 10
_MOST_MODULES = 1000
_OF_RUN = (
    *("id", "name", "made", "commit", "versions", "simulator", "decision_source", "measured", "model", "config"),
    *("budget_bytes", "timeline", "shapes"),
)
_OF_PROFILE = (
    *("peak_bytes", "first_step_peak_bytes", "reserved_peak_bytes", "step_seconds", "flops", "by_category", "by_tier"),
    *("exposed_seconds", "notes"),
)


class Refused(MemscaleError):
    """A server answered with an error.

    Attributes:
        status: the HTTP status of the answer.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Remote:
    """A team or a project on a server, by the address of its page in a browser.

    Args:
        url: for example ``"https://memory.example.org/t/vision/llama/"``.

    Raises:
        ConfigError: the address is not the page of a team or project, or is unencrypted and not on this machine.
    """

    def __init__(self, url: str) -> None:
        found = _PAGE.fullmatch(url)
        if found is None:
            raise ConfigError(
                f"the server {url!r} must be the https address of a team's or project's page, such as "
                "https://memory.example.org/t/team/project/ (http on this machine only)"
            )
        self._site, team, project = found.groups()
        self.url = "/".join([self._site, "t", team, *([project] if project else []), ""])
        self._team = f"/api/v1/teams/{team}"
        self._project = f"{self._team}/projects/{project}" if project else None

    def send(self, run: Run) -> bool:
        """Sends a run and returns whether the server did not have it yet; sending a run twice stores it once.

        Raises:
            Refused: the server answered with an error.
            ConfigError: there is no token, or the address is a team's.
            RuntimeUnavailable: the server cannot be reached.
        """
        return bool(self._request("POST", f"{self._in_project}/runs", document_of(run))["new"])

    def baseline(self, label: str, like: Run) -> Run | None:
        """Returns the baseline run for the name and device of `like` under a label, or None.

        Raises:
            Refused: the server answered with an error.
            ConfigError: there is no token, or the address is a team's.
            RuntimeUnavailable: the server cannot be reached.
        """
        query = urlencode({"name": like.name, "card": like.hardware})
        found = self._request("GET", f"{self._in_project}/baselines/{quote(label, safe='')}?{query}")
        return run_of(self._request("GET", f"{self._in_project}/runs/{found[0]['run']}"), like) if found else None

    def set_baseline(self, label: str, run: Run) -> None:
        """Sends a run and makes it the baseline of its name and device under a label.

        Raises:
            Refused: the server answered with an error.
            ConfigError: there is no token, or the address is a team's.
            RuntimeUnavailable: the server cannot be reached.
        """
        self.send(run)
        self._request("PUT", f"{self._in_project}/baselines/{quote(label, safe='')}", {"run": run.id})

    def plan(self, name: str) -> Plan:
        """Returns the plan with a hash such as ``"plan:9f3c..."``, given by at least eight digits.

        Raises:
            PlanError: the server sent a plan with another hash, or no plan.
            Refused: the server answered with an error.
            ConfigError: `name` is not such a hash, or there is no token.
            RuntimeUnavailable: the server cannot be reached.
        """
        digits = name.removeprefix("plan:")
        if not re.fullmatch("[0-9a-f]{8,64}", digits):
            raise ConfigError(f"the plan {name!r} must be plan: and 8 to 64 hexadecimal digits of its hash")
        plan = Plan.from_json(json.dumps(self._request("GET", f"{self._team}/plans/{digits}").get("plan")))
        if not plan.hash.startswith(digits):
            raise PlanError(f"the server sent a plan of the hash {plan.hash} for {name!r}; it is not to be trusted")
        return plan

    @property
    def _in_project(self) -> str:
        if self._project is None:
            raise ConfigError(f"{self.url} is a team's page; pass a project's, such as {self.url}project/")
        return self._project

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token()}"}
        status, answer = http_request(method, f"{self._site}{path}", headers, sent, seconds=_SECONDS)
        is_answered = 200 <= status < 300
        try:
            data = json.loads(answer)
        except ValueError:  # the page of a proxy or of another server
            is_answered, data = False, {}
        if not is_answered:
            parts = [str(data[key]) for key in ("value", "rule", "remedy") if isinstance(data, dict) and key in data]
            raise Refused(status, f"{self.url} answered {status}: {'; '.join(parts) or 'no JSON of this API'}")
        return data


def send(history: History) -> Iterator[tuple[Run, str]]:
    """Sends every waiting run, and yields each with the outcome: ``"new"``, ``"was there"``, or why it is refused.

    Raises:
        ConfigError: there is no token.
        RuntimeUnavailable: a server cannot be reached; runs that were not acknowledged stay in the queue.
        Refused: a server is in trouble, or does not know the token or the project; the queue stays likewise.
    """
    for run, url, stamp in history.waiting():
        try:
            said = "new" if Remote(url).send(run) else "was there"
        except Refused as refused:
            if refused.status not in _OF_THE_RUN:
                raise
            said = str(refused)
        history.delivered(run, url, stamp)
        yield run, said


def document_of(run: Run) -> dict[str, Any]:
    """Returns the JSON that is sent of a run: a fixed list of fields. No other data leaves the machine.

    docs/server-data.md lists the fields; a server checks documents by the schema in `memscale.server.schema`. Of a
    very large model, the smallest modules are summed up as ``"(others)"``.
    """
    data = json.loads(run.to_json())
    profile, hardware = data["profile"], run.profile.hardware
    modules = sorted(profile["categories_by_module"].items(), key=lambda each: -sum(each[1].values()))
    predicted = {
        **{name: profile[name] for name in _OF_PROFILE},
        "moment": [profile["moment"][name] for name in ("op", "path", "phase")],
        "by_module": {},
        "holdings": profile["holdings"],
        "notes": [note[:2000] for note in profile["notes"][:50]],
    }
    document = {
        "memscale_run_document": 1,
        **{name: data[name] for name in _OF_RUN},
        "name": run.name[:200],
        "config": run.config[:2000],
        "hardware": {name: getattr(hardware, name) for name in ("name", "device_type", "memory_bytes", "usable_bytes")},
        "predicted": predicted,
        "plan": json.loads(run.plan)["rules"] if run.plan else None,
    }
    most = _MOST_MODULES
    while True:
        predicted["by_module"] = _largest(modules, most)
        if most == 1 or len(json.dumps(document)) <= _MOST_BYTES:
            return document
        most //= 2


def run_of(document: Mapping[str, Any], like: Run) -> Run:
    """Returns the run in a document from a server, for a comparison with `like`, a run of the same step and device.

    Raises:
        ConfigError: the document lacks a field.
    """
    data = json.loads(like.to_json())
    try:
        predicted, rules = document["predicted"], document["plan"]
        data["profile"] |= {
            **{name: predicted[name] for name in _OF_PROFILE},
            "moment": dict(zip(("op", "path", "phase"), predicted["moment"], strict=True)),
            "categories_by_module": predicted["by_module"],
            "holdings": [],
            "seconds_by_module": {},
        }
        data |= {name: document[name] for name in _OF_RUN}
        data["plan"] = "" if rules is None else json.dumps({"memscale_plan": 1, "rules": rules})
        return Run.from_json(json.dumps(data))
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise ConfigError(f"the server's answer is no run: {error!r}; check the address") from error


def _largest(modules: list[tuple[str, dict[str, int]]], most: int) -> dict[str, dict[str, int]]:
    if len(modules) <= most:
        return dict(modules)
    others = Counter[str]()
    for _, categories in modules[most - 1 :]:
        others.update(categories)
    return {**dict(modules[: most - 1]), "(others)": dict(others)}


def token() -> str:
    """Returns the token from ``$MEMSCALE_TOKEN``, or from a file that only this user can read.

    Raises:
        ConfigError: there is no token, or others can read the file.
    """
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = Path(os.environ.get(f"{_SECRET}_FILE") or settings / "memscale" / "token")
    text = os.environ.get(_SECRET)
    if not text:
        try:
            mode, text = path.stat().st_mode, path.read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise ConfigError(
                f"there is no token: set ${_SECRET}, or write it into {path}; a team's page “Tokens” makes one"
            ) from error
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError(f"the token in {path} can be read by others; chmod 600 {path}")
    if not re.fullmatch("[!-~]+", text.strip()):
        raise ConfigError(f"the token in ${_SECRET} or its file is not one word; copy it again")
    return text.strip()
