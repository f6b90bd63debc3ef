"""The team server's tests: Django is set up once a process, and each test makes teams of its own."""

import importlib.util
import os

import pytest

from tests.support.team_server import set_up


@pytest.fixture(scope="session", autouse=True)
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    if importlib.util.find_spec("django") is not None:
        set_up(folder, os.environ.get("MEMSCALE_TEST_DATABASE_URL"))
    return folder
