"""What is kept on disk: whole or not at all, of this user alone, and never more than is allowed."""

import json
import multiprocessing
import os
import stat

import pytest

from memscale.core import DiskCache
from memscale.core.disk_cache import cache_folder


@pytest.fixture(autouse=True)
def _empty(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMSCALE_CACHE", str(tmp_path / "deep" / "cache"))


def test_the_folder_is_the_users_unless_the_variable_moves_it_or_switches_it_off(tmp_path, monkeypatch):
    assert cache_folder() == tmp_path / "deep" / "cache"
    monkeypatch.setenv("MEMSCALE_CACHE", "")
    assert cache_folder() is None
    off = DiskCache("things")
    off.write("a", 1)
    assert off.read("a") is None
    monkeypatch.delenv("MEMSCALE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    for shared, folder in (
        ("", ".cache/memscale"),
        ("relative", ".cache/memscale"),
        (str(tmp_path / "x"), "x/memscale"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", shared)
        assert cache_folder() == tmp_path / folder


def test_entries_are_for_their_owner_only():
    cache = DiskCache("things")
    cache.write("a", {"b": [1, 2.5, None]})
    assert DiskCache("things").read("a") == {"b": [1, 2.5, None]}
    assert DiskCache("others").read("a") is None
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (cache.folder.parent, cache.folder, *cache.folder.iterdir())]
    assert modes == [0o700, 0o700, 0o600]


def _other_value(path):
    entry = json.loads(path.read_text())
    path.write_text(json.dumps({**entry, "body": entry["body"].replace("1", "2")}))


def _other_version(path):
    path.write_text(path.read_text().replace('"memscale_cache_entry": 1', '"memscale_cache_entry": 0'))


def _link(path):
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


SPOILED = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": lambda path: path.write_text(""),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "another value": _other_value,
    "another version": _other_version,
    "another kind of JSON": lambda path: path.write_text("[" * 100_000),
    "the entry of another name": lambda path: path.write_text(path.read_text().replace('"name": "a"', '"name": "b"')),
    "writable by others": lambda path: path.chmod(0o666),
    "of another user": lambda path: os.chown(path, 12345, -1),
    "a link": _link,
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_what_was_spoiled_is_no_entry_and_is_replaced(spoil):
    cache = DiskCache("things")
    cache.write("a", 1)
    path = cache.folder / "a.json"
    try:
        spoil(path)
    except PermissionError:
        pytest.skip("only root can give files away")
    assert cache.read("a") is None
    cache.write("a", 3)
    assert cache.read("a") == 3


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEMSCALE_CACHE", str(tmp_path / "file"))
    cache = DiskCache("things")
    cache.write("a", 1)
    assert cache.read("a") is None


def test_the_ones_used_least_lately_make_room():
    cache = DiskCache("things", most_bytes=1200)  # three of these
    for at, name in enumerate("abc"):
        cache.write(name, "x" * 200)
        os.utime(cache.folder / f"{name}.json", (at, at))
    assert cache.read("a") is not None  # used last, now
    cache.write("d", "x" * 200)
    assert [name for name in "abcd" if cache.read(name)] == ["a", "c", "d"]
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= 1200
    cache.write("e", "x" * 2000)
    assert cache.read("e") is None, "larger than all may be"
    abandoned = cache.folder / ".part-of-a-process-that-was-killed"
    abandoned.write_text("x")
    os.utime(abandoned, (0, 0))
    cache.write("f", 1)
    assert not abandoned.exists()


def _many(at, wrong):
    cache = DiskCache("things", most_bytes=5000)
    for turn in range(60):
        name = f"{turn % 7}"
        cache.write(name, [name, at, "x" * (97 * turn % 800)])
        found = cache.read(name)
        if found is not None and found[0] != name:
            wrong.value += 1


def test_eight_processes_at_once_read_whole_entries_only():
    context = multiprocessing.get_context("fork")
    wrong = context.Value("i", 0)
    processes = [context.Process(target=_many, args=(at, wrong)) for at in range(8)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0] * 8
    assert wrong.value == 0
    folder = DiskCache("things").folder
    assert not list(folder.glob(".part-*"))
    assert all(DiskCache("things").read(path.stem) is not None for path in folder.iterdir())
