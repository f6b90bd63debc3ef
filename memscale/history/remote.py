"""`Remote`: the client of a team's server: sends runs, and fetches baselines and plans. It contacts no other host."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from memscale.algebra import Plan
from memscale.core import ConfigError, MemscaleError, PlanError, RuntimeUnavailable
from memscale.history.document import document_of, run_of
from memscale.history.run import Run

_SECONDS = 10.0
_MOST_BYTES = 2 << 20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SECRET = "MEMSCALE_TOKEN"


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
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        encrypted = parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
        place = [part for part in parts.path.split("/") if part]
        if not encrypted or not parts.hostname or "@" in parts.netloc or place[:1] != ["t"] or len(place) not in (2, 3):
            raise ConfigError(
                f"the server {url!r} must be the https address of a team's or project's page, such as "
                "https://memory.example.org/t/team/project/ (http on this machine only)"
            )
        self.url = f"{parts.scheme}://{parts.netloc}/{'/'.join(place)}/"
        self._encrypted, self._host, self._port = parts.scheme == "https", parts.hostname, port
        self._team = f"/api/v1/teams/{place[1]}"
        self._project = f"{self._team}/projects/{place[2]}" if len(place) == 3 else None

    def send(self, run: Run) -> bool:
        """Sends a run and returns whether the server did not have it yet; sending a run twice stores it once.

        Raises:
            Refused: the server answered with an error.
            ConfigError: there is no token, or the address is a team's.
            RuntimeUnavailable: the server cannot be reached.
        """
        return bool(self._asked("POST", f"{self._in_project}/runs", document_of(run))["new"])

    def baseline(self, label: str, like: Run) -> Run | None:
        """Returns the baseline run for the name and device of `like` under a label, or None.

        Raises:
            Refused: the server answered with an error.
            ConfigError: there is no token, or the address is a team's.
            RuntimeUnavailable: the server cannot be reached.
        """
        query = urlencode({"name": like.name, "card": like.hardware})
        found = self._asked("GET", f"{self._in_project}/baselines/{quote(label, safe='')}?{query}")
        if not found:
            return None
        return run_of(self._asked("GET", f"{self._in_project}/runs/{found[0]['run']}"), like)

    def set_baseline(self, label: str, run: Run) -> None:
        """Sends a run and makes it the baseline of its name and device under a label.

        Raises:
            Refused: the server answered with an error.
            ConfigError: there is no token, or the address is a team's.
            RuntimeUnavailable: the server cannot be reached.
        """
        self.send(run)
        self._asked("PUT", f"{self._in_project}/baselines/{quote(label, safe='')}", {"run": run.id})

    def plan(self, name: str) -> Plan:
        """Returns the plan with a hash such as ``"plan:9f3c..."``, given by at least eight digits.

        Raises:
            PlanError: the server sent a plan with another hash, or no plan.
            Refused: the server answered with an error.
            ConfigError: `name` is not such a hash, or there is no token.
            RuntimeUnavailable: the server cannot be reached.
        """
        digits = name.removeprefix("plan:")
        if not 8 <= len(digits) <= 64 or set(digits) - set("0123456789abcdef"):
            raise ConfigError(f"the plan {name!r} must be plan: and 8 to 64 hexadecimal digits of its hash")
        found = self._asked("GET", f"{self._team}/plans/{digits}")
        plan = Plan.from_json(json.dumps(found.get("plan")))
        if not plan.hash.startswith(digits):
            raise PlanError(f"the server sent a plan of the hash {plan.hash} for {name!r}; it is not to be trusted")
        return plan

    @property
    def _in_project(self) -> str:
        if self._project is None:
            raise ConfigError(f"{self.url} is a team's page; pass a project's, such as {self.url}project/")
        return self._project

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        headers = {"Authorization": f"Bearer {token()}", "User-Agent": "memscale", "Content-Type": "application/json"}
        connection: http.client.HTTPConnection
        if self._encrypted:
            context = ssl.create_default_context()
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=_SECONDS, context=context)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=_SECONDS)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read(_MOST_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeUnavailable(
                f"{self.url} cannot be reached: {str(error) or repr(error)}; check the address and the server"
            ) from error
        finally:
            connection.close()
        try:
            data = json.loads(text) if text else {}
        except ValueError:
            data = {}
        if not 200 <= answer.status < 300:
            parts = [str(data[key]) for key in ("value", "rule", "remedy") if isinstance(data, dict) and key in data]
            raise Refused(answer.status, f"{self.url} answered {answer.status}: {'; '.join(parts) or answer.reason}")
        return data


def token() -> str:
    """Returns the token from ``$MEMSCALE_TOKEN``, or from a file that only this user can read.

    Raises:
        ConfigError: there is no token, or others can read the file.
    """
    if given := os.environ.get(_SECRET):
        return _checked(given.strip())
    path = Path(os.environ.get(f"{_SECRET}_FILE") or _usual_file())
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"there is no token: set ${_SECRET}, or write it into {path}; a team's page “Tokens” makes one"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"the token in {path} can be read by others; chmod 600 {path}")
    return _checked(text)


def _checked(text: str) -> str:
    if not text.isascii() or not text.isprintable() or " " in text or not text:
        raise ConfigError(f"the token in ${_SECRET} or its file is not one word; copy it again")
    return text


def _usual_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "memscale" / "token"
