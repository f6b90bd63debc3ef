"""Plans of these tests are searched for, where those of other tests may be known from an earlier one."""

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _no_known_plans():
    shutil.rmtree(Path(os.environ["MEMSCALE_CACHE"]) / "plans", ignore_errors=True)
