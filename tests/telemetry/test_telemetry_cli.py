"""``memscale telemetry``: what it says, what it sends and to whom, and that a week is sent once."""

import json
import os
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from memscale.cli import main, telemetry
from memscale.telemetry import State, consent, counting
from tests.telemetry.test_counting import chosen, lines, place

__all__ = ["place"]  # a fixture

WEEK = "2020-W01"


def counted_in(place, week=WEEK, state="on"):
    (place / state).mkdir(parents=True, exist_ok=True)
    (place / state / f"{week}.txt").write_text("plan_called outcome:fits\nplan_called\n")


@contextmanager
def server(answer):
    """A server on this machine that gives each connection to `answer`; yields its address, and what it received."""
    listening = socket.create_server(("127.0.0.1", 0))
    listening.settimeout(0.02)  # to see that it is over
    received, done = [], threading.Event()

    def serve():
        while not done.is_set():
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(5)
                text = b""
                while b"\r\n\r\n" not in text or len(text.partition(b"\r\n\r\n")[2]) < length_in(text):
                    text += connection.recv(65536)
                received.append(text)
                with suppress(OSError):
                    answer(connection, done)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/telemetry/v2", received
    finally:
        done.set()
        thread.join()
        listening.close()


def length_in(text):
    return int(text.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)


def ok(connection, done):
    connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")


def trickle(connection, done):
    for letter in b"HTTP/1.1 200 OK\r\n" * 100:
        connection.sendall(bytes([letter]))
        if done.wait(0.05):
            return


BAD = {
    "stalls": lambda connection, done: done.wait(10),
    "trickles": trickle,
    "resets": lambda connection, done: connection.close(),
    "redirects": lambda connection, done: connection.sendall(
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\n\r\n"
    ),
    "fails": lambda connection, done: connection.sendall(b"HTTP/1.1 500 No\r\nContent-Length: 10000000\r\n\r\nx"),
    "speaks otherwise": lambda connection, done: connection.sendall(b"SSH-2.0-OpenSSH\r\n"),
}


def test_show_prints_what_the_server_then_receives_once(place, capsys):
    with server(ok) as (address, received):
        assert main(["telemetry", "on", "--endpoint", address]) == 0
        counted_in(place)
        counting.count("plan_called")  # in the week that is not over
        capsys.readouterr()
        assert main(["telemetry", "show"]) == 0
        shown = capsys.readouterr().out.rstrip("\n").encode()
        assert main(["telemetry", "send", "--dry-run"]) == 0
        assert not received
        assert main(["telemetry", "send"]) == main(["telemetry", "send"]) == 0
    (request,) = received
    head, _, body = request.partition(b"\r\n\r\n")
    assert body == shown == (place / "sent" / f"{WEEK}.json").read_bytes()
    assert json.loads(body)["counters"] == {"plan_called": 2, "plan_called/outcome:fits": 1}
    names = {line.partition(b":")[0].lower() for line in head.splitlines()[1:]}
    assert names <= {b"host", b"accept-encoding", b"content-length", b"content-type", b"user-agent"}
    assert head.endswith(b"User-Agent: memscale")
    assert len(lines(place, "on")) == 1  # the week that is not over


@pytest.mark.parametrize("how", BAD)
def test_a_server_that_does_not_take_it_leaves_the_week(place, capsys, monkeypatch, how):
    monkeypatch.setattr(telemetry, "_SECONDS", 0.4)
    with server(BAD[how]) as (address, received):
        chosen(State.ON, address)
        counted_in(place)
        begun = time.perf_counter()
        assert main(["telemetry", "send"]) == 1
        assert time.perf_counter() - begun < 1.5
    assert f"{WEEK} is not sent, and stays" in capsys.readouterr().err
    assert len(lines(place, "on")) == 2
    assert len(received) == 1  # no other try, no redirect followed


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "example.org",
        "http://example.org/x",
        "ftp://a",
        "https://",
        "https://u:p@a.org",
        "https://a:x/",
        "https://ä.org",
    ],
)
def test_an_endpoint_that_is_none_is_refused(place, capsys, endpoint):
    assert main(["telemetry", "on", "--endpoint", endpoint]) == 2
    assert f"--endpoint {endpoint!r} must be an https:// address" in capsys.readouterr().err
    assert not place.exists()


def test_what_was_counted_before_on_is_not_sent(place, capsys):
    main(["telemetry", "local"])
    counted_in(place, state="local")
    assert main(["telemetry", "show"]) == 0
    assert f"`--week {WEEK}` shows what was counted" in capsys.readouterr().err
    with server(ok) as (address, received):
        main(["telemetry", "on", "--endpoint", address])
        assert main(["telemetry", "send"]) == 0
    assert not received
    capsys.readouterr()
    assert main(["telemetry", "show", "--week", WEEK]) == 0
    assert '"plan_called":2' in capsys.readouterr().out
    assert main(["telemetry", "show", "--week", "2019-W01"]) == 2
    assert "nothing was counted in the week '2019-W01'" in capsys.readouterr().err


def test_status_says_what_holds_and_what_decided_it(place, capsys, monkeypatch):
    for command in (["telemetry"], ["telemetry", "status"]):
        assert main(command) == 0
        assert capsys.readouterr().out.startswith("telemetry is off: the default: nobody has switched it on\n")
    main(["telemetry", "on", "--endpoint", "https://example.org"])
    assert "telemetry is on: memscale telemetry on, of 20" in capsys.readouterr().out
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    counted_in(place)
    main(["telemetry", "status"])
    assert "telemetry is off: $DO_NOT_TRACK is set\n" in capsys.readouterr().out
    assert main(["telemetry", "send"]) == 0  # a scheduler's, where it is off for now
    assert "nothing is sent: telemetry is off, for $DO_NOT_TRACK is set" in capsys.readouterr().out
    monkeypatch.delenv("DO_NOT_TRACK")
    assert main(["telemetry", "off"]) == 0
    assert len(lines(place, "on")) == 2
    assert main(["telemetry", "send"]) == 2
    assert "`memscale telemetry on --endpoint URL`" in capsys.readouterr().err
    assert main(["telemetry", "clean"]) == 0
    assert consent().state is State.OFF
    assert not place.exists()


def test_a_folder_that_cannot_be_written_is_one_clear_line(place, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/none")
    assert main(["telemetry", "local"]) == 2
    assert "/proc/none/memscale/telemetry cannot be written: " in capsys.readouterr().err
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "")
    monkeypatch.delenv("APPDATA", raising=False)
    assert main(["telemetry", "local"]) == 2
    assert "set $HOME or $XDG_CONFIG_HOME" in capsys.readouterr().err


def test_a_command_that_keeps_itself_offline_is_no_opt_out(place, tmp_path, capsys, monkeypatch):
    chosen(State.LOCAL)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 32}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}))
    assert main(["predict", "--hf", str(config), "--gpu", "t4", "--batch", "1", "--seq", "8"]) == 0
    assert [line.split()[0] for line in lines(place)] == ["command:predict", "predict_called"]
    assert "HF_HUB_OFFLINE" not in os.environ
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["predict", "--hf", str(config), "--gpu", "t4", "--batch", "1", "--seq", "8"]) == 0
    assert len(lines(place)) == 2
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_commands_are_counted_by_our_names_for_them(place, capsys):
    chosen(State.LOCAL)
    main(["predict", "--hf", "no/such/model"])
    main(["no-such-command", "x"])
    main(["telemetry", "status"])
    assert lines(place) == ["command:predict"]
    assert "http.client" in sys.modules  # of the command, and of nothing in the library
