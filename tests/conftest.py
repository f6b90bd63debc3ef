"""The settings of the suite, in each process that runs tests."""

import pytest

pytest.register_assert_rewrite("tests.support")


def pytest_configure(config):
    # A process that only hands tests out to others imports neither PyTorch nor memscale, while these wait for it.
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.support.settings")
