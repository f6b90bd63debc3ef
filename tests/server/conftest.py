"""The team server's tests: Django is set up once a process, and each test makes teams of its own."""

import os
import sys

import pytest

pytest.importorskip("django", reason="the extra `server` is not installed; it needs Python 3.11")
if sys.version_info < (3, 11):
    pytest.skip("the server needs Python 3.11", allow_module_level=True)

from tests.support.team_server import set_up


@pytest.fixture(scope="session", autouse=True)
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    set_up(folder, os.environ.get("MEMSCALE_TEST_DATABASE_URL"))
    return folder
